"""A DeepSpeed script in the style of its tutorials: parser, ds_config.json, data by initialize."""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import zerolab as deepspeed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(6 * 3 * 3, 20)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.conv(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def make_dataset():
    numbers = torch.Generator().manual_seed(0)
    images = torch.randn(32, 1, 8, 8, generator=numbers)
    return TensorDataset(images, images.mean((1, 2, 3)).mul(20).long().clamp(0, 3))


def get_args():
    parser = argparse.ArgumentParser(description="classifier")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--output", type=str, required=True)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = get_args()
    deepspeed.init_distributed()
    torch.manual_seed(deepspeed.comm.get_rank())  # ranks differ: rank 0's weights must win
    if deepspeed.comm.get_rank() == 0:
        torch.manual_seed(42)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=make_dataset()
    )
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _epoch in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            mean = loss.detach().clone()
            deepspeed.comm.all_reduce(mean, op=deepspeed.comm.ReduceOp.AVG)
            losses.append(mean.item())
    deepspeed.comm.barrier()
    if model_engine.global_rank == 0:
        weights = {name: p.tolist() for name, p in model_engine.module.named_parameters()}
        with pathlib.Path(args.output).open("w") as file:
            json.dump({"losses": losses, "weights": weights, "lr": model_engine.get_lr()}, file)


if __name__ == "__main__":
    main()
