"""How much slower a training step is inside a virtual GPU.

`python benchmarks/ledger_overhead.py` trains a GPT with dim 384 and 6 layers (batch 2, sequence
128) with fused AdamW and one intra-op thread, as a rank of a lockstep run does. It prints the
time of a step plain, in a dispatch mode that does nothing (the floor of this technique), and in
a virtual GPU, with and without the timeline. The variants take turns, so that a slow spell of
the machine hits all of them; the time is that of the processor, which other processes do not
lengthen by much. With `--dim 48` the kernels are tiny and the cost an operation stands out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerolab.device import VirtualGPU, in_phase
from zerolab.gpt import GPT, GPTConfig


class EmptyMode(TorchDispatchMode):
    """Sees every operation and does nothing with it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation."""
        return func(*args, **(kwargs or {}))


def make_step(dim: int, layers: int) -> Callable[[], None]:
    """Build a model and give one training step of it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, seq_len=128, dim=dim, num_heads=6, num_layers=layers))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(256, (2, 129))

    def step() -> None:
        with in_phase("forward"):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        with in_phase("backward"):
            loss.backward()
        with in_phase("step"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def measure(
    scopes: dict[str, AbstractContextManager[Any]], steps: int, dim: int, layers: int
) -> None:
    """Time the variants in turn and print a table."""
    step = make_step(dim, layers)
    times: dict[str, list[float]] = {name: [] for name in scopes}
    for turn in range(steps + 2):
        for name, scope in scopes.items():
            with scope:
                start = time.process_time()
                step()
                elapsed = time.process_time() - start
            if turn >= 2:
                times[name].append(elapsed)
    plain_median, plain_min = (f(times["plain"]) for f in (statistics.median, min))
    for name, seconds in times.items():
        median, least = statistics.median(seconds), min(seconds)
        print(
            f"{name:24} median {1e3 * median:7.1f} ms ({median / plain_median:5.3f}x)"
            f"   min {1e3 * least:7.1f} ms ({least / plain_min:5.3f}x)"
        )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scopes = {
        "plain": nullcontext(),
        "empty mode": EmptyMode(),
        "virtual GPU": VirtualGPU("1GiB"),
        "virtual GPU, no timeline": VirtualGPU("1GiB", timeline=False),
    }
    measure(scopes, options.steps, options.dim, options.layers)


if __name__ == "__main__":
    main()
