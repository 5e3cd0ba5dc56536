"""Chapter 12: what a run gives back to programs: one JSON object, the last line of stdout.

Owns the schema of that object, which scripts and the tests read.
"""

import json
from typing import Any

from ..config import Config
from .execute import Outcome
from .job import RankReport
from .merge import DTYPE_NAMES


def to_json(outcome: Outcome, settings: Config) -> str:
    """Write an outcome as one line of JSON.

    `error` and `sample` are there only where there is one, `skipped_steps` and `loss_scale`
    only with fp16.
    """
    first = outcome.first
    fields: dict[str, Any] = {
        "stage": settings.stage,
        "world_size": outcome.world_size,
        "dtype": DTYPE_NAMES[settings.param_dtype],
        "losses": first.losses if first else [],
        "step_seconds": first.step_seconds if first else [],
        "ranks": [_rank(report) for report in outcome.reports],
    }
    if first is not None and settings.fp16.enabled:
        fields |= {"skipped_steps": first.skipped_steps, "loss_scale": first.loss_scale}
    if first is not None and first.sample:
        fields["sample"] = first.sample
    if outcome.error is not None:
        fields["error"] = str(outcome.error) or type(outcome.error).__name__
    return json.dumps(fields)


def _rank(report: RankReport) -> dict[str, Any]:
    """Select what one rank held and moved."""
    return {
        "rank": report.rank,
        "peak_bytes": report.peak_bytes,
        "state_bytes": report.state_bytes,
        "comm": report.traffic,
    }
