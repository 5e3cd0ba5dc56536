"""Chapter 12: a valid file from a few answers.

Data: `Answers`, what a person decides; everything else keeps its default.
"""

from dataclasses import dataclass
from typing import Any

from . import load

PRECISIONS = ("bf16", "fp16", "fp32")
COMFORTABLE_MICRO_BATCH = 8


@dataclass(frozen=True)
class Answers:
    """What `zerolab config make` asks.

    Attributes:
        gpus: the number of GPUs.
        batch: samples in one optimizer step, over all GPUs.
        micro: samples in one forward on one GPU.
        stage: what is sharded, 0 to 3.
        precision: bf16, fp16 or fp32.
        optimizer: name of the class.
        lr: its learning rate.
        clip: the largest gradient norm, 0 for none.
        warmup: steps of a linear warm-up, 0 for a constant rate.
    """

    gpus: int
    batch: int
    micro: int
    stage: int = 2
    precision: str = "bf16"
    optimizer: str = "AdamW"
    lr: float = 1e-4
    clip: float = 1.0
    warmup: int = 0


def make(answers: Answers) -> dict[str, Any]:
    """The file of these answers.

    Raises:
        ConfigError: they do not fit together; it says which and what fits.
    """
    params = {"lr": answers.lr}
    file: dict[str, Any] = {
        "train_batch_size": answers.batch,
        "train_micro_batch_size_per_gpu": answers.micro,
        "optimizer": {"type": answers.optimizer, "params": params},
        "gradient_clipping": answers.clip,
        "zero_optimization": {"stage": answers.stage},
    }
    if answers.precision != "fp32":
        file[answers.precision] = {"enabled": True}
    if answers.warmup:
        warmup = {"warmup_num_steps": answers.warmup, "warmup_type": "linear"}
        file["scheduler"] = {"type": "WarmupLR", "params": warmup}
    load(file, answers.gpus)
    return file


def fitting_micro(batch: int, gpus: int) -> int:
    """A micro batch that divides the share of a GPU: the largest of at most 8, or 1."""
    share = batch // gpus
    fits = (size for size in range(COMFORTABLE_MICRO_BATCH, 0, -1) if share % size == 0)
    return next(fits, 1) if share else 1
