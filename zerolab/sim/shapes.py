"""Chapter 1: a shape for a number of parameters: who knows only Psi can still count activations.

Owns no data. Depth and width of a head are those of the preset next in size; as many heads as
come nearest to Psi with them.
"""

import math

from .. import gpt
from ..errors import UsageError
from ..gpt import GPTConfig

MOST_HEADS = 1024


def shape_for(num_params: int, seq_len: int = 2048) -> GPTConfig:
    """Return the shape of a GPT with about this many parameters.

    Args:
        num_params: Psi, a count.
        seq_len: tokens of a sequence.
    """
    if num_params < 1:
        raise UsageError(f"num_params {num_params} is below 1; give 1 or more")
    near = min(gpt.PRESETS.values(), key=lambda shape: _distance(shape, num_params))
    head = near.dim // near.num_heads
    shapes = (
        GPTConfig(near.vocab_size, seq_len, heads * head, heads, near.num_layers)
        for heads in range(1, MOST_HEADS + 1)
    )
    return min(shapes, key=lambda shape: abs(gpt.num_params(shape) - num_params))


def unit_numels(shape: GPTConfig) -> list[int]:
    """Return the elements of each unit that stage 3 gathers: the root, then the blocks."""
    block = 12 * shape.dim**2 + 13 * shape.dim
    blocks = [block] * shape.num_layers
    return [gpt.num_params(shape) - sum(blocks), *blocks]


def _distance(shape: GPTConfig, num_params: int) -> float:
    return abs(math.log(gpt.num_params(shape) / num_params))
