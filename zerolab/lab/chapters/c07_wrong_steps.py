"""Chapter 7: wrong answers to LossScaler and run_step. The docstring is the misconception.

Owns nothing. The scalers share a right one that is cut into small methods; each replaces one.
"""

from collections.abc import Sequence
from typing import Any

from ... import precision

# 7.6 LossScaler


class _Scaler:
    """A right one, in small methods that a wrong one can replace."""

    def __init__(
        self,
        scale: float = 1.0,
        dynamic: bool = False,
        window: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> None:
        self.scale, self.dynamic, self.window, self.min_scale = scale, dynamic, window, min_scale
        self.hysteresis, self.consecutive_hysteresis = hysteresis, consecutive_hysteresis
        self.budget, self.good_steps = hysteresis, 0
        self.refuse(scale)

    def refuse(self, scale: float) -> None:
        """Refuse a scale that is not above 0."""
        if scale <= 0:
            raise precision.UsageError(f"loss scale {scale} must be greater than 0")

    def update(self, overflow: bool) -> None:
        """Draw the conclusion from a step."""
        if self.dynamic:
            self.bad() if overflow else self.good()

    def bad(self) -> None:
        """Note an overflow."""
        self.good_steps = 0
        if self.budget > 1:
            self.budget -= 1
        else:
            self.halve()

    def halve(self) -> None:
        """Halve the scale."""
        self.scale = max(self.scale / 2, self.min_scale)

    def good(self) -> None:
        """Note a good step."""
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.refill()
        if self.good_steps % self.window == 0:
            self.scale *= 2
            self.refill()

    def refill(self) -> None:
        """Allow as many overflows again."""
        self.budget = self.hysteresis


class HalvesAtOnce(_Scaler):
    """With hysteresis 2 the first overflow is borne: a single bad batch need not cost a bit."""

    def bad(self) -> None:
        """Note an overflow."""
        self.good_steps = 0
        self.halve()


class CountsAllGoodSteps(_Scaler):
    """The window counts good steps in a row: an overflow starts the count anew."""

    def bad(self) -> None:
        """Note an overflow."""
        counted = self.good_steps
        super().bad()
        self.good_steps = counted


class HasNoFloor(_Scaler):
    """A scale that may fall for ever ends at zero, and then every gradient is zero."""

    def halve(self) -> None:
        """Halve the scale."""
        self.scale /= 2


class NeverRefills(_Scaler):
    """When the scale has doubled, the next overflow is a new story: the budget begins again."""

    def refill(self) -> None:
        """Allow no more overflows than before."""


class RefillsAtEveryGoodStep(_Scaler):
    """A good step refills the budget only where `consecutive_hysteresis` says so."""

    def good(self) -> None:
        """Note a good step."""
        super().good()
        self.budget = self.hysteresis


class MovesWhenStatic(_Scaler):
    """A fixed scale is one that somebody chose: only a dynamic one changes."""

    def update(self, overflow: bool) -> None:
        """Draw the conclusion from a step."""
        self.bad() if overflow else self.good()


class DoublesEverAfter(_Scaler):
    """After a window the next window begins: `>=` in place of a multiple doubles at every step."""

    def good(self) -> None:
        """Note a good step."""
        self.good_steps += 1
        if self.consecutive_hysteresis:
            self.refill()
        if self.good_steps >= self.window:
            self.scale *= 2
            self.refill()


# 7.7 run_step


def scale_changes_first(
    sharding: Any,
    groups: Any,
    scaler: Any,
    max_norm: float,
    check_overflow: bool,
    changed: Sequence[bool] = (),
) -> Any:
    """The scale grows first and the gradients are divided after that: by twice what is in them."""
    agreed = precision.agree(sharding.trainable, check_overflow, changed)
    scaler.update(agreed.overflow)
    if agreed.overflow:
        sharding.drop_grads()
        return agreed
    norm = precision.global_norm(sharding.trainable, agreed.unused) if max_norm > 0 else None
    factor = precision.step_factor(norm, scaler.scale, max_norm)
    sharding.step(groups, agreed.unused, factor)
    agreed.norm = None if norm is None else norm / scaler.scale
    return agreed


def steps_whatever_comes(
    sharding: Any,
    groups: Any,
    scaler: Any,
    max_norm: float,
    check_overflow: bool,
    changed: Sequence[bool] = (),
) -> Any:
    """The scale is halved, but the infinite step was made: an infinity in the weights stays."""
    agreed = precision.agree(sharding.trainable, check_overflow, changed)
    norm = precision.global_norm(sharding.trainable, agreed.unused) if max_norm > 0 else None
    factor = precision.step_factor(norm, scaler.scale, max_norm)
    sharding.step(groups, agreed.unused, factor)
    agreed.norm = None if norm is None else norm / scaler.scale
    scaler.update(agreed.overflow)
    return agreed


def forgets_to_drop(
    sharding: Any,
    groups: Any,
    scaler: Any,
    max_norm: float,
    check_overflow: bool,
    changed: Sequence[bool] = (),
) -> Any:
    """A step that is skipped leaves gradients behind: the next ones are added to an infinity."""
    agreed = precision.agree(sharding.trainable, check_overflow, changed)
    if not agreed.overflow:
        norm = precision.global_norm(sharding.trainable, agreed.unused) if max_norm > 0 else None
        factor = precision.step_factor(norm, scaler.scale, max_norm)
        sharding.step(groups, agreed.unused, factor)
        agreed.norm = None if norm is None else norm / scaler.scale
    scaler.update(agreed.overflow)
    return agreed


def tells_only_good_news(
    sharding: Any,
    groups: Any,
    scaler: Any,
    max_norm: float,
    check_overflow: bool,
    changed: Sequence[bool] = (),
) -> Any:
    """The scaler never hears of the overflow: the scale stays, and so do the overflows."""
    agreed = precision.agree(sharding.trainable, check_overflow, changed)
    if agreed.overflow:
        sharding.drop_grads()
        return agreed
    norm = precision.global_norm(sharding.trainable, agreed.unused) if max_norm > 0 else None
    factor = precision.step_factor(norm, scaler.scale, max_norm)
    sharding.step(groups, agreed.unused, factor)
    agreed.norm = None if norm is None else norm / scaler.scale
    scaler.update(False)
    return agreed


def decides_alone(
    sharding: Any,
    groups: Any,
    scaler: Any,
    max_norm: float,
    check_overflow: bool,
    changed: Sequence[bool] = (),
) -> Any:
    """After an all-reduce every rank sees the infinity; after a reduce-scatter only its owner."""
    overflow = not all(precision.is_finite(bucket) for bucket in sharding.trainable)
    agreed = precision.agree(sharding.trainable, False, changed)
    agreed.overflow = check_overflow and overflow
    if agreed.overflow:
        sharding.drop_grads()
    else:
        norm = precision.global_norm(sharding.trainable, agreed.unused) if max_norm > 0 else None
        factor = precision.step_factor(norm, scaler.scale, max_norm)
        sharding.step(groups, agreed.unused, factor)
        agreed.norm = None if norm is None else norm / scaler.scale
    scaler.update(agreed.overflow)
    return agreed


def never_clips(
    sharding: Any,
    groups: Any,
    scaler: Any,
    max_norm: float,
    check_overflow: bool,
    changed: Sequence[bool] = (),
) -> Any:
    """The gradients are unscaled and never measured: `gradient_clipping` has no effect."""
    agreed = precision.agree(sharding.trainable, check_overflow, changed)
    if agreed.overflow:
        sharding.drop_grads()
    else:
        factor = precision.step_factor(None, scaler.scale, max_norm)
        sharding.step(groups, agreed.unused, factor)
    scaler.update(agreed.overflow)
    return agreed
