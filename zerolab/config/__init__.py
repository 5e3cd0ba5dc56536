"""Chapter 12: ds_config.json, every key explained.

Data: a file is read into a `schema.File` (what may be said) and resolved into a `Config` (what the
engine does). Phases, each a module that collects problems instead of stopping at the first:

    source      a dict, a JSON or HJSON file                  -> dict
    reading     names and types                               -> schema.File
    triad       the batch equation                            -> three numbers
    rules       keys that are idle, not yet here, or at odds with each other
    settings    everything a file leaves open, decided        -> Config

`load` raises all errors at once; `examine` returns them with the corrected file. Every key with
its status stands in `schema`, and `keys` says what each status means.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import optimizers, reading, rules, schedulers, settings, source, triad
from . import problems as _problems
from .problems import ConfigError, Problem, Severity
from .settings import Config

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "Report",
    "Severity",
    "build_optimizer",
    "build_scheduler",
    "examine",
    "load",
]


ROUNDS = 8


@dataclass(frozen=True)
class Report:
    """What there is to say about a configuration.

    Attributes:
        name: the file's name.
        world_size: the number of GPUs it was examined for.
        raw: the file as given.
        reading: the file as understood.
        problems: everything that was found.
        config: the resolved configuration; None when there are errors.
        optimizer_in_code: whether the script may pass an optimizer.
    """

    name: str
    world_size: int
    raw: dict[str, Any]
    reading: reading.Reading
    problems: tuple[Problem, ...]
    config: Config | None
    optimizer_in_code: bool

    @property
    def stoppers(self) -> tuple[Problem, ...]:
        """The problems with which nothing runs."""
        stop = (Severity.ERROR, Severity.NEEDS)
        return tuple(p for p in self.problems if p.severity in stop)

    def corrected(self) -> dict[str, Any]:
        """The file with every problem put right; what one edit uncovers, the next round mends."""
        return self._mended()[0]

    def to_fill_in(self) -> dict[str, str]:
        """What nobody but the user can put right: key -> what stands there in `corrected`."""
        return self._mended()[1]

    def _mended(self) -> tuple[dict[str, Any], dict[str, str]]:
        raw, report, open_ends = self.raw, self, {}
        for _ in range(ROUNDS):
            fixed = _problems.corrected(raw, report.problems)
            if _problems.same(fixed, raw):
                break
            open_ends |= _problems.to_fill_in(report.problems)
            raw, report = fixed, examine(fixed, self.world_size, self.optimizer_in_code)
        return raw, open_ends


def load(source: Any, world_size: int) -> Config:
    """Read and resolve a configuration.

    Args:
        source: a dict, the path of a JSON or HJSON file, or a `Config`.
        world_size: the number of ranks that will train.

    Raises:
        ConfigError: with every error of the file, each naming value, rule and remedy.
    """
    if isinstance(source, Config):
        if source.world_size == world_size:
            return source
        source = source.raw
    report = examine(source, world_size, optimizer_in_code=True)
    if report.config is None:
        raise ConfigError(report.stoppers, report.name)
    return report.config


def examine(given: Any, world_size: int, optimizer_in_code: bool = False) -> Report:
    """Everything there is to say about a configuration.

    Args:
        given: a dict, the path of a JSON or HJSON file, or base64 of JSON.
        world_size: the number of ranks that will train.
        optimizer_in_code: the script may pass an optimizer, so the file need not name one.

    Raises:
        ConfigError: the text cannot be read at all.
    """
    if world_size < 1:
        raise ConfigError(
            [_problems.error((), f"{world_size} GPUs cannot train", "give 1 or more")]
        )
    text = source.open_source(given)
    read = reading.read(text.raw)
    found = [*text.problems, *read.problems]
    solved = _solve(read, world_size)
    if isinstance(solved, Problem):
        found.append(solved)
    found += rules.apply(read, world_size)
    if optimizer_in_code:
        found = [p for p in found if p.severity is not Severity.NEEDS]
    config = None
    if isinstance(solved, triad.Triad) and not any(p.severity is Severity.ERROR for p in found):
        warnings = tuple(str(p) for p in found if p.severity is Severity.WARNING)
        config = settings.resolve(read.file, solved, world_size, warnings, text.raw)
    return Report(text.name, world_size, text.raw, read, tuple(found), config, optimizer_in_code)


def _solve(read: reading.Reading, world_size: int) -> triad.Triad | Problem | None:
    """The batch equation; None where one of its numbers was refused already."""
    if not all(read.fine(name) for name in (triad.TOTAL, triad.MICRO, triad.ACCUM)):
        return None
    file = read.file
    return triad.solve(
        file.train_batch_size,
        file.train_micro_batch_size_per_gpu,
        file.gradient_accumulation_steps,
        world_size,
    )


def build_optimizer(cfg: Config, params: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer of the file's block over tensors or parameter groups.

    Raises:
        ConfigError: the file has no optimizer block, or torch refuses its arguments.
    """
    return optimizers.build(cfg.optimizer, params, cfg.stage)


def build_scheduler(cfg: Config, optimizer: Any) -> Any:
    """The schedule of the file's block on an optimizer, or None without a block.

    Call its `step()` after every optimizer step that was not skipped.

    Raises:
        ConfigError: the schedule refuses its arguments.
    """
    return schedulers.build(cfg.scheduler, optimizer)
