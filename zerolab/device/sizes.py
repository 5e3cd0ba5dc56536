"""Chapter 0: sizes in bytes, as people write and read them.

Owns no data. `parse_bytes` reads what a user types ("160MiB"), `format_bytes` writes what a
user reads ("157.96 MiB"). Units are powers of 1024 only: 1 MiB = 2**20 bytes.
"""

import re

from ..errors import UsageError

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BY_LOWER = {unit.lower(): factor for unit, factor in UNITS.items()}
_AMBIGUOUS = re.compile(r"([kmgt])b?", re.IGNORECASE)
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Read a size such as `"160MiB"`, `"1.5 GiB"` or a plain number of bytes.

    Args:
        size: an int of bytes, or a number with B, KiB, MiB, GiB or TiB behind it.

    Returns:
        The number of bytes, at least 1; fractions of a byte are dropped.

    Raises:
        UsageError: the text is no size, the unit is unknown or ambiguous (MB), or the size
            is not positive.
    """
    nbytes = _parse_text(size) if isinstance(size, str) else size
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise UsageError(f'size {size!r} is neither an int of bytes nor a text: write "160MiB"')
    if nbytes <= 0:
        raise UsageError(f'size {size!r} must be at least one byte: write for example "160MiB"')
    return nbytes


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f'size {text!r} is not a number with a unit: write for example "160MiB"')
    number, unit = match.groups()
    return (
        int(float(number) * _factor(text, unit))
        if "." in number
        else int(number) * _factor(text, unit)
    )


def _factor(text: str, unit: str) -> int:
    factor = _BY_LOWER.get(unit.lower(), 1 if not unit else None)
    if factor is not None:
        return factor
    ambiguous = _AMBIGUOUS.fullmatch(unit)
    if ambiguous is None:
        raise UsageError(f"size {text!r} has the unknown unit {unit!r}: use KiB, MiB, GiB or TiB")
    letter = ambiguous.group(1).upper()
    power = {"K": 1, "M": 2, "G": 3, "T": 4}[letter]
    raise UsageError(
        f"size {text!r}: {unit} is ambiguous, 10**{3 * power} or 2**{10 * power} bytes:"
        f" write {letter}iB (2**{10 * power})"
    )


def format_bytes(nbytes: int) -> str:
    """Write a size the way CUDA does: `"157.96 MiB"`, `"512 bytes"`."""
    size = abs(nbytes)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.2f} {unit}"
    return f"{nbytes} bytes"
