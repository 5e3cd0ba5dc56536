"""An optimizer and a schedule made in the script, accumulation, evaluation between the steps."""

import argparse
import json
import pathlib

import torch
from torch import nn

import zerolab as deepspeed

ds_config = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 300},
    "steps_per_print": 100,
}


def make_model():
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
    )


def make_batches(rank, world_size, count):
    numbers = torch.Generator().manual_seed(9)
    x = torch.randn(count, world_size * 2, 6, generator=numbers)
    y = x.sum(-1, keepdim=True)
    mine = slice(rank * 2, rank * 2 + 2)
    return [(inputs[mine], targets[mine]) for inputs, targets in zip(x, y, strict=True)]


def make_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    engine, optimizer, _, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        lr_scheduler=make_scheduler(optimizer),
        config=ds_config,
        dist_init_required=True,
    )
    losses, evaluations, rates = [], [], []
    batches = make_batches(engine.global_rank, engine.world_size, 12)
    for micro_step, (x, y) in enumerate(batches):
        engine.train()
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(loss.item())
        assert engine.was_step_applied() == boundary == (micro_step % 3 == 2)
        if boundary:
            rates.append(scheduler.get_last_lr()[0])
            engine.eval()
            with torch.no_grad():
                evaluations.append(engine(torch.ones(1, 6)).item())
    if engine.local_rank == 0:
        found = {"losses": losses, "evaluations": evaluations, "rates": rates}
        with pathlib.Path(args.output).open("w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
