"""Run programs on a virtual GPU and under the oracle at once, and print both counts as JSON.

`python tests/oracle/compare.py FOLDER` compiles into FOLDER. The result maps the name of a
program to rows [moment, ledger bytes, oracle bytes, ledger peak, oracle peak].
"""

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from oracle import Oracle, build  # noqa: E402

from zerolab import comm, device  # noqa: E402
from zerolab.comm import rng  # noqa: E402
from zerolab.device import VirtualGPU, tensor_cores  # noqa: E402
from zerolab.device.scopes import PausedScope  # noqa: E402
from zerolab.gpt import GPT, GPTConfig  # noqa: E402

oracle: Oracle


class Rows:
    """The rows of one program on one device."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.rows = []
        gpu.reset_peak()
        oracle.reset_peak(gpu.index)

    def note(self, moment):
        """Write down what both hold now, and their peaks since the last row."""
        gc.collect()
        index = self.gpu.index
        held = [self.gpu.allocated_bytes, oracle.current(index)]
        self.rows.append([moment, *held, self.gpu.peak_bytes, oracle.peak(index)])
        self.gpu.reset_peak()
        oracle.reset_peak(index)


def both(program):
    """Run a program on device 0 of ledger and oracle."""
    with oracle.on(0), VirtualGPU() as gpu:
        rows = Rows(gpu)
        program(rows.note)
        gc.collect()
        rows.note("everything deleted")
    return rows.rows


def training(*, attention="fused", dtype=torch.float32, dropout=0.0, recompute=False, **options):
    """Two steps of a small GPT."""

    def program(note):
        config = GPTConfig(64, 32, 48, 4, 2, dropout=dropout, attention=attention)
        model = GPT(config).to(dtype)
        if recompute:
            for block in model.blocks:
                block.forward = recomputed(block.forward)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        tokens = torch.randint(64, (3, 33))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        note("built")
        for step in range(2):
            loss = model(inputs, targets)
            note(f"forward {step}")
            loss.backward()
            note(f"backward {step}")
            optimizer.step()
            note(f"step {step}")
            optimizer.zero_grad()
            del loss
            note(f"step end {step}")

    return program


def recomputed(forward):
    """Wrap a block's forward in activation checkpointing."""
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def small_things(note):
    """Views, scalars, in-place writes, resizes, sparse gradients, copies."""
    x = torch.randn(10, 30)
    x[3:] = 2
    x[0, 0] = 1.5
    note("written in place")
    y = (x * 3 + 1) / 7 - x.sum() * 0.5
    z = torch.where(x > 0, x, 0.0).masked_fill(x < 1, -1)
    note("scalars")
    values = torch.topk(x, 3)
    parts = x.t().contiguous().split(5)
    note("several results")
    x.untyped_storage().resize_(0)
    y.untyped_storage().resize_(80_000)
    z.resize_(77)
    note("resized")
    table = nn.Embedding(50, 6, sparse=True)
    table(torch.tensor([1, 1, 7])).pow(2).sum().backward()
    note("sparse gradient")
    away = device.to_host(z)
    note("copied to the host")
    del x, y, z, values, parts, table, away


def autograd_things(note):
    """Scalars inside autograd, and gradients that are added up."""
    x = torch.randn(20, 20, requires_grad=True)
    w = torch.randn(20, 20, requires_grad=True)
    out = F.dropout(((x @ w) * 0.125).softmax(-1), 0.2) / 3
    note("forward")
    for _ in range(2):
        out.sum().backward(retain_graph=True)
        note("backward")
    nn.utils.clip_grad_norm_([x, w], 0.1)
    note("clipped")
    del out, x, w


def engine(stage):
    """Two steps of a ZeRO stage on four lockstep ranks."""
    from zerolab.engine import initialize

    def rank(_):
        gpu = device.current()
        torch.manual_seed(0)
        with oracle.on(gpu.index):
            rows = Rows(gpu)
            tokens = torch.randint(64, (2, 33))
            inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            model = GPT(GPTConfig(64, 32, 48, 4, 2))
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }
            built = initialize(model=model, config=config)[0]
            rows.note("built")
            for step in range(2):
                built.backward(built(inputs, targets))
                built.step()
                rows.note(f"step end {step}")
            built.close()
        return rows.rows

    return [row for rows in comm.run(rank, 4, "lockstep", args=(0,)) for row in rows]


def exclude_random_states():
    """Exclude saved states of random numbers, which live on the host beside any GPU."""

    def unseen(function):
        def call(*args):
            with oracle.on(-1):
                return function(*args)

        return call

    torch.get_rng_state = torch.random.get_rng_state = unseen(torch.get_rng_state)
    rng.capture = unseen(rng.capture)


def exclude_paused_scopes():
    """Exclude from the oracle what the ledger excludes: the inside of `paused`."""
    enter, leave = PausedScope.__enter__, PausedScope.__exit__
    devices = {}

    def pause(scope):
        enter(scope)
        devices[id(scope)] = oracle.on(-1)
        devices[id(scope)].__enter__()

    def go_on(scope, *error):
        devices.pop(id(scope)).__exit__(*error)
        leave(scope, *error)

    PausedScope.__enter__, PausedScope.__exit__ = pause, go_on


def main(folder):
    """Run all programs."""
    global oracle
    torch.set_num_threads(1)  # threads of torch's own pool have no device
    oracle = Oracle(build(folder))
    tensor_cores.KERNELS = frozenset()  # its fp32 copies are workspace, which the oracle sees
    gc.freeze()  # what is there by now is not ours: the many collections need not visit it
    exclude_paused_scopes()
    exclude_random_states()
    programs = {
        "fused attention": training(fused=True),
        "manual attention": training(fused=True, attention="manual"),
        "dropout": training(fused=True, dropout=0.1),
        "bf16": training(fused=True, dtype=torch.bfloat16),
        "recomputation": training(fused=True, recompute=True),
        "foreach optimizer": training(foreach=True),
        "loop optimizer": training(foreach=False),
        "small things": small_things,
        "autograd": autograd_things,
    }
    results = {name: both(program) for name, program in programs.items()}
    for stage in range(4):
        results[f"stage {stage}"] = engine(stage)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
