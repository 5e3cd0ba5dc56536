"""Chapter 1: numbers with units, as a learner types them: "31.4", "31.4 GB", "1.5e9 B".

Owns the units. Sizes and times convert into each other (111.8 GiB answers a question in GB);
anything else, such as "elements", is a count and only has its own name.
"""

import re

from ..errors import UsageError

BYTES = (
    {"B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGTP", 1)}
    | {f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)}
)
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400}
FAMILIES = (BYTES, SECONDS)
COUNTS = ("elements", "bytes", "ranks", "GPUs", "times", "parameters", "layers", "samples", "%")
NUMBER = r"[-+]?(?:\d{1,3}(?:[,_]\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
QUANTITY = re.compile(rf"\s*({NUMBER})\s*([a-zA-Z% ]*?)\s*")


def scale(unit: str) -> float:
    """Return how many bytes or seconds a unit is; 1 for a count.

    Raises:
        UsageError: the unit is unknown.
    """
    for family in FAMILIES:
        if unit in family:
            return family[unit]
    if unit in COUNTS:
        return 1
    known = ", ".join([*BYTES, *SECONDS, *COUNTS])
    raise UsageError(f"unit {unit!r} is unknown; known: {known}")


def parse(text: str, unit: str) -> float:
    """Return a typed quantity in `unit`.

    Args:
        text: a number, with or without a unit.
        unit: of the question; also that of a number without one.

    Raises:
        UsageError: it is no number, or its unit measures something else.
    """
    match = QUANTITY.fullmatch(text)
    if match is None:
        raise UsageError(f"{text.strip()!r} is no number; write it like 31.4 or 31.4 {unit}")
    number, typed = float(re.sub("[,_]", "", match[1])), match[2]
    if typed.lower() in ("", unit.lower()) and not _bits(typed):
        return number
    family = next((family for family in FAMILIES if unit in family), {})
    same = [known for known in family if typed in (known, known.lower(), known.upper())]
    if not same:
        bits = "; b is a bit and B a byte" if _bits(typed) else ""
        raise UsageError(f"unit {typed!r} does not fit; answer in {unit}{bits}")
    return number * family[same[0]] / family[unit]


def twin(unit: str) -> str:
    """Return GiB for GB and GB for GiB, "" for a unit without a twin."""
    other = unit.replace("iB", "B") if "iB" in unit else unit.replace("B", "iB")
    return other if unit in BYTES and other in BYTES and unit != other else ""


def pretty(value: float, unit: str) -> str:
    """Write a value for people: at most four digits that count, whole numbers in full."""
    text = f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
    return f"{text} {unit}"


def _bits(typed: str) -> bool:
    """Tell Gb from GB: a small b after a large letter means bits."""
    return bool(re.fullmatch(r"[KMGTP]i?b", typed))
