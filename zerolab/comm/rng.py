"""Chapter 2: every rank its own dice, although all ranks of a lockstep run share one process.

Owns nothing. `capture` and `restore` move the states of torch's, Python's and (where somebody
has imported it) numpy's global generators. Without this an extra collective would change which
rank draws next, and with it every dropout mask.
"""

import random
import sys
from typing import Any

import torch

State = tuple[torch.Tensor, Any, Any]


def capture() -> State:
    """Return the states of the global generators."""
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(legacy=False),
    )


def restore(state: State) -> None:
    """Continue all global generators where `capture` left them."""
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])
