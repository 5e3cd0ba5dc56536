"""Stage 3 with zero.Init: the model is built in shards, initialised, and recomputed in backward."""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

import zerolab as deepspeed
from zerolab.utils import RepeatingLoader, log_dist, safe_get_full_fp32_param


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 3 * dim)
        self.narrow = nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocab=13, dim=10, layers=3, recompute=None):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.init_weights)

    def init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.recompute(layer, x) if self.recompute else layer(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_batches(rank, world_size, micro_batch_size, count):
    numbers = torch.Generator().manual_seed(5)
    tokens = torch.randint(13, (count, world_size * micro_batch_size, 7), generator=numbers)
    return [batch[rank * micro_batch_size : (rank + 1) * micro_batch_size] for batch in tokens]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    with pathlib.Path(args.deepspeed_config).open() as file:
        ds_config = json.load(file)
    deepspeed.checkpointing.configure(None, deepspeed_config=ds_config)
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = LanguageModel(recompute=deepspeed.checkpointing.checkpoint)
    with deepspeed.zero.GatheredParameters(model.layers[0].norm.weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            nn.init.constant_(model.layers[0].norm.weight, 1.5)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    micro = engine.train_micro_batch_size_per_gpu()
    loader = RepeatingLoader(make_batches(rank, size, micro, 3))
    losses = []
    for step in range(6):
        loss = engine(next(loader))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / size)
        log_dist(f"step {step}: loss {losses[-1]}", ranks=[0])
    weights = {name: safe_get_full_fp32_param(p).tolist() for name, p in model.named_parameters()}
    state = {name: value.tolist() for name, value in engine.module_state_dict().items()}
    if rank == 0:
        with pathlib.Path(args.output).open("w") as file:
            json.dump({"losses": losses, "weights": weights, "state": state}, file)


if __name__ == "__main__":
    main()
