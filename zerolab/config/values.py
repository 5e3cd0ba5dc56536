"""Chapter 12: the kinds of values a key may have, each with its own refusal.

Data: pydantic types built from one small check each. A check returns the clean value or raises an
`Unfit` that reads `rule; remedy`, and the reader puts the key and the value in front of it. Where
the value says what was meant ("three", 2.5, "true"), `Unfit` carries the nearest valid one.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator

LARGEST_POWER = 127  # 2**128 is infinite in fp32
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


NUMBERS = ("zero", "one", "two", "three")


class Unfit(ValueError):  # noqa: N818 - said of a value, not of the program
    """A value that is refused.

    Attributes:
        nearest: the valid value that it comes closest to, None where it says nothing.
    """

    def __init__(self, text: str, nearest: Any = None) -> None:
        """Read `rule; remedy`."""
        super().__init__(text)
        self.nearest = nearest


def number_in(text: object) -> float | None:
    """The finite number that a text consists of, None for any other value."""
    try:
        number = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        return None
    if not math.isfinite(number) or abs(number) >= 2**63:
        return None
    return int(number) if number == int(number) and "e" not in str(text).lower() else number


def is_finite(number: float) -> bool:
    """Whether a number is finite as a float; a whole number of 400 digits is not."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that this one most likely means, or ""."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else ""


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        text = f"must be true or false, not a text; write {value.lower()}, no quotes"
        raise Unfit(text, value.lower() == "true")
    meant = bool(value) if value in (0, 1) else None
    raise Unfit("must be true or false; write one of the two", meant)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        meant = number_in(value)
        hint = "for example 1" if meant is None else "no quotes"
        raise Unfit(f"must be a number; write it as a number, {hint}", meant)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be finite; write an ordinary number")
    return value if abs(value) < 2**63 else _too_large()


def _too_large() -> float:
    raise ValueError("must be below 2**63; write a smaller number")


def _integer(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        near = f"{math.floor(number)} or {math.ceil(number)}"
        raise Unfit(f"must be a whole number; write {near}", round(number))
    return int(number)


def _at_least(check: Callable[[Any], Any], low: float) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        number = check(value)
        if number < low:
            raise Unfit(f"must be at least {low}; write {low} or more", low)
        return number

    return checked


def _power_of_two(value: Any) -> int:
    power = _integer(value)
    if not 0 <= power <= LARGEST_POWER:
        text = f"must lie between 0 and {LARGEST_POWER}, fp32's largest; write 16"
        raise Unfit(text, min(max(power, 0), LARGEST_POWER))
    return power


def _share(value: Any) -> float:
    number = _number(value)
    if not 0 <= number <= 1:
        near = min(max(number, 0.0), 1.0)
        raise Unfit("must lie between 0 and 1; write a share such as 0.5", near)
    return number


def _stage(value: Any) -> int:
    if value in ("0", "1", "2", "3"):
        return int(value)
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise Unfit("is not a ZeRO stage; write 0, 1, 2 or 3", _stage_in(value))
    return int(value)


def _stage_in(value: Any) -> int | None:
    """The stage that "three", "stage 3", 2.5 or 4 comes closest to."""
    if isinstance(value, str):
        digits = re.findall(r"\d", value)
        words = [word for word in re.findall(r"[a-z]+", value.lower()) if word in NUMBERS]
        number = int(digits[-1]) if digits else NUMBERS.index(words[-1]) if words else None
    else:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        number = value if real and math.isfinite(value) else None
    return None if number is None else round(min(max(number, 0), 3))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        raise Unfit("must be a text; put it in quotes", str(value) if plain else None)
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        meant = [value] if isinstance(value, str) else None
        raise Unfit('must be a list of texts; write ["one", "two"]', meant)
    return list(value)


def _counts(value: Any) -> int | list[int]:
    if not isinstance(value, list):
        return _integer(value)
    try:
        return [_integer(item) for item in value]
    except Unfit as refused:
        raise Unfit(str(refused)) from None  # the nearest of one is not that of the list


def _params(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a block of name: value; write {}")
    return value


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return value
    if not isinstance(value, str) or value.lower() not in DTYPES:
        near = closest(value, DTYPES) or None if isinstance(value, str) else None
        raise Unfit('is not a known type of number; write "fp32", "bf16" or "fp16"', near)
    return DTYPES[value.lower()]


def one_of(*words: str) -> BeforeValidator:
    """The check of a text that must be one of some words; case does not matter."""

    def check(value: Any) -> str:
        asked = value if isinstance(value, str) else ""
        found = {word.lower(): word for word in words}.get(asked.lower())
        if found is None:
            meant = closest(asked, words)
            remedy = f"did you mean {meant!r}?" if meant else "write one of them, in quotes"
            raise Unfit(f"is not one of {', '.join(words)}; {remedy}", meant or None)
        return found

    return BeforeValidator(check)


Flag = Annotated[bool, BeforeValidator(_flag)]
Real = Annotated[float, BeforeValidator(_number)]
NonNegativeReal = Annotated[float, BeforeValidator(_at_least(_number, 0))]
Share = Annotated[float, BeforeValidator(_share)]
Integer = Annotated[int, BeforeValidator(_integer)]
Count = Annotated[int, BeforeValidator(_at_least(_integer, 0))]
PositiveCount = Annotated[int, BeforeValidator(_at_least(_integer, 1))]
PowerOfTwo = Annotated[int, BeforeValidator(_power_of_two)]
Stage = Annotated[int, BeforeValidator(_stage)]
Text = Annotated[str, BeforeValidator(_text)]
Texts = Annotated[list[str], BeforeValidator(_texts)]
Params = Annotated[dict[str, Any], BeforeValidator(_params)]
DType = Annotated[torch.dtype, BeforeValidator(_dtype)]
