"""Chapter 3: what the engine tells a stage: precision and traffic, decided before the first step.

Owns nothing that changes. Phase: `of` reads a configuration once, at construction; no stage looks
into a configuration.
"""

import sys
from dataclasses import dataclass

import torch

from .config import Config


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What the engine tells a stage about precision and traffic.

    Attributes:
        mixed: keep fp32 master weights beside 16-bit parameters.
        grad_dtype: dtype in which gradients wait and are added up; None for the parameters' own.
        reduce_dtype: dtype in which gradients travel; None for the same as `grad_dtype`.
        reduce_op: "avg" or "sum".
        every_micro_step: reduce after each micro-step, or only before the optimizer steps.
        in_flight: how many reductions may run while backward fills the next bucket.
        all_reduce: stages 1 and 2 receive every slice of the mean and keep their own, as
            DeepSpeed does; twice the traffic.
        prefetch: gather the next unit while this one computes (stage 3).
        prefetch_numel: gather as many units ahead as have at most this many elements together;
            None for one unit, whatever its size (stage 3).
        reshard_after_forward: free parameters between forward and backward (stage 3).
        max_live: most elements that may stay whole between forward and backward (stage 3).
        max_reuse: keep a unit whole if at most this many elements are used between its turn
            in forward and its turn in backward (stage 3).
    """

    mixed: bool = False
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce_op: str = "avg"
    every_micro_step: bool = False
    in_flight: int = 1
    all_reduce: bool = False
    prefetch: bool = True
    prefetch_numel: int | None = None
    reshard_after_forward: bool = True
    max_live: int = 0
    max_reuse: int = 0


def of(cfg: Config) -> StageOptions:
    """Return the options that a configuration asks for."""
    return StageOptions(
        mixed=cfg.param_dtype != torch.float32,
        grad_dtype=None if cfg.grad_accum_dtype == cfg.param_dtype else cfg.grad_accum_dtype,
        reduce_dtype=None if cfg.reduce_dtype == cfg.grad_accum_dtype else cfg.reduce_dtype,
        every_micro_step=cfg.reduce_every_micro_step,
        reduce_op="sum" if cfg.gradient_allreduce_op == "sum" else "avg",
        in_flight=_in_flight(cfg),
        all_reduce=not cfg.zero.reduce_scatter,
        prefetch=cfg.prefetch,
        prefetch_numel=cfg.zero.prefetch_bucket_size,
        reshard_after_forward=cfg.reshard_after_forward,
        max_live=cfg.zero.max_live_parameters,
        max_reuse=cfg.zero.max_reuse_distance,
    )


def _in_flight(cfg: Config) -> int:
    """Return how many reductions may run at once.

    At stage 0 all of them, whatever the configuration says: waiting would free no buffer.
    """
    return sys.maxsize if cfg.stage == 0 else int(bool(cfg.zero.overlap_comm))
