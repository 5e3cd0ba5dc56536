"""Chapter 12: the kinds of values a key may have, each with its own refusal.

Data: pydantic types built from one small check each. A check returns the clean value or raises a
ValueError that reads `rule; remedy`, and the reader puts the key and the value in front of it.
"""

import difflib
import math
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


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that this one most likely means, or ""."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else ""


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        raise ValueError(f"must be true or false, not a text; write {value.lower()}, no quotes")
    raise ValueError("must be true or false; write one of the two")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "no quotes" if isinstance(value, str) else "for example 1.0"
        raise ValueError(f"must be a number; write it as a number, {hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be finite; write an ordinary number")
    return value if abs(value) < 2**63 else _too_large()


def _too_large() -> float:
    raise ValueError("must be below 2**63; write a smaller number")


def _integer(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        near = f"{math.floor(number)} or {math.ceil(number)}"
        raise ValueError(f"must be a whole number; write {near}")
    return int(number)


def _at_least(check: Callable[[Any], Any], low: float) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        number = check(value)
        if number < low:
            raise ValueError(f"must be at least {low}; write {low} or more")
        return number

    return checked


def _power_of_two(value: Any) -> int:
    power = _integer(value)
    if not 0 <= power <= LARGEST_POWER:
        raise ValueError(f"must lie between 0 and {LARGEST_POWER}, fp32's largest; write 16")
    return power


def _share(value: Any) -> float:
    number = _number(value)
    if not 0 <= number <= 1:
        raise ValueError("must lie between 0 and 1; write a share such as 0.5")
    return number


def _stage(value: Any) -> int:
    if value in ("0", "1", "2", "3"):
        return int(value)
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError("is not a ZeRO stage; write 0, 1, 2 or 3")
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text; put it in quotes")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError('must be a list of texts; write ["one", "two"]')
    return list(value)


def _counts(value: Any) -> int | list[int]:
    return [_integer(item) for item in value] if isinstance(value, list) else _integer(value)


def _params(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a block of name: value; write {}")
    return value


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return value
    if not isinstance(value, str) or value.lower() not in DTYPES:
        raise ValueError('is not a known type of number; write "fp32", "bf16" or "fp16"')
    return DTYPES[value.lower()]


def one_of(*words: str) -> BeforeValidator:
    """The check of a text that must be one of some words; case does not matter."""

    def check(value: Any) -> str:
        asked = value if isinstance(value, str) else ""
        found = {word.lower(): word for word in words}.get(asked.lower())
        if found is None:
            meant = closest(asked, words)
            remedy = f"did you mean {meant!r}?" if meant else "write one of them, in quotes"
            raise ValueError(f"is not one of {', '.join(words)}; {remedy}")
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
