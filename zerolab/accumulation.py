"""Chapter 12: micro-steps that make a step.

Owns the count of micro-steps and where the present accumulation began. A step of the optimizer
is `gradient_accumulation_steps` pairs of forward and backward: the last of them is the *boundary*,
where gradients are reduced and used. Phases: the batch size may change between two steps;
`no_sync` keeps gradients back inside one; an exception begins the step anew.
"""

import contextlib
from collections.abc import Iterator

from torch import nn

from . import config as config_
from . import ddp, device
from .config import resizing
from .errors import UsageError


class Accumulation(nn.Module):
    """The part of an engine that knows which micro-step ends with an update."""

    config: config_.Config
    sharding: ddp.DDP
    stage: int

    def __init__(self) -> None:
        """Begin before the first micro-step."""
        super().__init__()
        self.micro_steps = 0
        self._window_start = 0  # micro-steps before the present accumulation began

    def gradient_accumulation_steps(self) -> int:
        """Return how many micro-steps make a step."""
        return self.config.accum_steps

    def train_batch_size(self) -> int:
        """Return the samples that all ranks together use for one step."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples one rank uses in one micro-step."""
        return self.config.micro_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step ends with an update."""
        done = self.micro_steps - self._window_start + 1
        return done % self.gradient_accumulation_steps() == 0

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples a step by changing the accumulation steps, between two steps."""
        self._resize(resizing.with_train_batch_size(self.config, train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples a micro-step; the total follows."""
        self._resize(resizing.with_micro_batch_size(self.config, micro_batch_size))

    def _resize(self, cfg: config_.Config) -> None:
        done = (self.micro_steps - self._window_start) % self.gradient_accumulation_steps()
        if done:
            raise UsageError(
                f"{done} of {self.gradient_accumulation_steps()} micro-steps are done: change the "
                "batch size after the step that ends them"
            )
        self.config, self._window_start = cfg, self.micro_steps
        self.sharding.boundary = self.is_gradient_accumulation_boundary()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients pile up on this rank inside the block: nothing is reduced.

        Stages 0 and 1 only. The first backward after the block reduces the sum of all.
        """
        if self.stage > 1:
            raise UsageError(
                f"no_sync() cannot work at stage {self.stage}: gradients are sharded, so none of "
                "them may stay behind; use stage 0 or 1, or gradient_accumulation_steps"
            )
        if self.sharding.no_sync:
            raise UsageError("no_sync() was entered inside no_sync(): one block is enough")
        self.sharding.no_sync = True
        try:
            yield
        finally:
            self.sharding.no_sync = False

    @contextlib.contextmanager
    def whole_or_nothing(self) -> Iterator[None]:
        """After an exception, begin the step anew: a part of its gradients would be wrong.

        Those of earlier micro-steps go too, since they are added up with the broken ones.
        """
        try:
            yield
        except BaseException:
            self.sharding.abandon()
            self._window_start = self.micro_steps
            self.sharding.boundary = self.is_gradient_accumulation_boundary()
            device.set_phase("idle")
            raise
