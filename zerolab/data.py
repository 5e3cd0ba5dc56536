"""Chapter 1: a text, and the batches that the ranks train on.

Owns nothing but the bytes of a text. A token is a byte, so encoding is free and every file
is a corpus. Then one rule, on which every comparison between world sizes rests: training
samples are numbered 0, 1, 2, ... and the window of text that sample k shows depends on
(seed, k) alone. Every global batch takes the next samples in order and rank r takes the r-th
slice of them, so N ranks see together exactly what one rank with the whole batch sees.
"""

import hashlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from . import device
from .errors import UsageError

VOCAB_SIZE = 256  # a token is a byte
SHIPPED_TEXT = "persuasion.txt"  # where it is from: zerolab/texts/README.md


def encode(text: str | bytes) -> Tensor:
    """Turn text into tokens: int64 [num_bytes], the bytes of its UTF-8."""
    raw = text.encode() if isinstance(text, str) else text
    return torch.tensor(list(raw), dtype=torch.int64)


def decode(tokens: Tensor | list[int]) -> str:
    """Turn tokens back into text; bytes that are no UTF-8 become the replacement character."""
    values = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    return bytes(values).decode(errors="replace")


def load_text(path: str | Path | None = None) -> bytes:
    """Read a file whole; without a path, the novel that zerolab ships.

    Raises:
        UsageError: the file is missing, unreadable or empty.
    """
    if path is None:
        return resources.files(str(__package__)).joinpath("texts", SHIPPED_TEXT).read_bytes()
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(
            f"data file {str(path)!r} cannot be read: {reason}; "
            "give a readable text file, or leave it out for the text that zerolab ships"
        ) from None
    if not text:
        raise UsageError(f"data file {str(path)!r} is empty; give a file with text in it")
    return text


def window_start(seed: int, sample: int, num_starts: int) -> int:
    """Choose where in the text a sample begins: 0 <= start < num_starts.

    A hash and not a random generator: sample 10,000 needs no draws for the 9,999 before it.
    """
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % num_starts


def batches(
    text: bytes, rank: int, world_size: int, micro_batch_size: int, seq_len: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate without end over this rank's part of the global batches.

    Args:
        text: at least seq_len + 1 bytes.
        rank: which slice of every global batch, 0 <= rank < world_size.
        world_size: into how many slices a global batch is cut.
        micro_batch_size: samples a slice, so a global batch has world_size times as many.
        seq_len: tokens a sample.
        seed: another seed, other samples.

    Returns:
        An iterator of (tokens, targets), both int64 [micro_batch_size, seq_len]; targets are
        the tokens one further on in the text.

    Raises:
        UsageError: the text is too short, or a count is below 1.
    """
    for name, value in (("micro_batch_size", micro_batch_size), ("seq_len", seq_len)):
        if value < 1:
            raise UsageError(f"{name}={value} is below 1; give 1 or more")
    if len(text) < seq_len + 1:
        raise UsageError(
            f"the text has {len(text)} bytes, but one sample needs seq_len + 1 = {seq_len + 1}; "
            "give a longer text or a smaller seq_len"
        )
    first = rank * micro_batch_size
    return _slices(text, range(first, first + micro_batch_size), world_size, seq_len, seed)


def _slices(
    text: bytes, mine: range, world_size: int, seq_len: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples at positions `mine` of every global batch, in order."""
    global_batch_size = world_size * len(mine)
    step = 0
    while True:
        samples = [step * global_batch_size + position for position in mine]
        starts = [window_start(seed, sample, len(text) - seq_len) for sample in samples]
        with device.tag("input"):
            windows = torch.stack([encode(text[start : start + seq_len + 1]) for start in starts])
            batch = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        yield batch
        step += 1
