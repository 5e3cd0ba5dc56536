"""Chapter 1: what memory_explorer draws: a training run that nobody has started, stage by stage.

Owns a `Setting`, what a reader can choose. All numbers are those of `zerolab.sim.estimate`: the
model states of the paper, activations of a GPT of that size, two buckets on their way, and the
units that stage 3 gathers. They do not all peak at one moment, so a bar is an upper bound.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from zerolab.errors import UsageError
from zerolab.sim import estimate, shapes
from zerolab.sim.shapes import GPTConfig

from .bars import Bar, finding_under, in_order, mib
from .theme import KINDS as KIND_STYLES

LARGEST_PSI, LARGEST_WORLD = 10**13, 2**16


@dataclass(frozen=True)
class Setting:
    """What a reader can choose.

    Attributes:
        num_params: Psi, a count.
        world_size: N.
        stage: 0 to 3.
        precision: "bf16", "fp16" or "fp32".
        optimizer: a name in `estimate.OPTIMIZERS`.
        micro_batch: sequences in a forward; 0 leaves activations out.
        seq_len: tokens of a sequence.
        checkpointed: whether blocks are recomputed in backward.
        offload: whether gradients, master weights and optimizer state lie in host memory.
    """

    num_params: int
    world_size: int
    stage: int = 0
    precision: str = "bf16"
    optimizer: str = "adamw"
    micro_batch: int = 1
    seq_len: int = 2048
    checkpointed: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        """Refuse what no run can have."""
        limits = {
            "num_params": (1, LARGEST_PSI),
            "world_size": (1, LARGEST_WORLD),
            "stage": (0, 3),
            "micro_batch": (0, 4096),
            "seq_len": (1, 2**20),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UsageError(f"{name} {value} is out of range; give {least} to {most:,}")


@lru_cache(maxsize=64)
def _shape(num_params: int, seq_len: int) -> GPTConfig:
    return shapes.shape_for(num_params, seq_len)


def activations(setting: Setting) -> int:
    """Return the bytes of activations of one rank; no stage changes them."""
    if not setting.micro_batch:
        return 0
    shape = _shape(setting.num_params, setting.seq_len)
    whole = estimate.activation_bytes(
        shape, setting.micro_batch, setting.precision, checkpointed=setting.checkpointed
    )
    if not setting.checkpointed:
        return whole
    return whole + estimate.block_activation_bytes(shape, setting.micro_batch, setting.precision)


def breakdown(setting: Setting) -> dict[str, int]:
    """Return the bytes on one GPU by kind."""
    shape = _shape(setting.num_params, setting.seq_len)
    parts = estimate.memory_breakdown(
        setting.num_params,
        setting.world_size,
        setting.stage,
        setting.precision,
        setting.optimizer,
        gathered_numel=estimate.gathered_peak_numel(shapes.unit_numels(shape)),
        activation=activations(setting),
    )
    if setting.offload and setting.stage:
        parts |= dict.fromkeys(on_host(setting), 0)
    return in_order(parts)


def on_host(setting: Setting) -> dict[str, int]:
    """Return the bytes by kind that one rank keeps in host memory; {} without offload."""
    if not (setting.offload and setting.stage):
        return {}
    return estimate.offload_states(
        setting.num_params,
        setting.world_size,
        setting.stage,
        setting.precision,
        setting.optimizer,
    )[1]


def bars_of(setting: Setting) -> list[Bar]:
    """Return one bar a stage."""
    stages = (replace(setting, stage=stage) for stage in estimate.STAGES)
    return [Bar(f"stage {each.stage}", breakdown(each)) for each in stages]


def finding(setting: Setting, capacity: int) -> str:
    """Return in two sentences which stages fit, and what is largest at the chosen one."""
    bars = bars_of(setting)
    chosen = bars[setting.stage]
    largest = max(chosen.segments, key=lambda kind: chosen.segments[kind])
    share = f"{KIND_STYLES[largest].label} ({mib(chosen.segments[largest])} of {mib(chosen.total)})"
    gpus = "1 GPU" if setting.world_size == 1 else f"{setting.world_size:,} GPUs"
    return (
        f"{count(setting.num_params)} parameters on {gpus}. {finding_under(bars, capacity)} "
        f"At stage {setting.stage} the largest part is {share}."
    )


def note(setting: Setting) -> str:
    """Return what the bars suppose, and what lies in host memory."""
    shape = _shape(setting.num_params, setting.seq_len)
    words = [
        f"Estimated, nothing was run. Activations are those of a GPT with {shape.num_layers} "
        f"layers of width {shape.dim:,}, fused attention, no dropout."
    ]
    host = sum(on_host(setting).values())
    if host:
        words.append(f"In host memory: {mib(host)} for each GPU.")
    elif setting.offload:
        words.append("Stage 0 divides nothing, so nothing is offloaded.")
    return " ".join(words)


def count(number: int) -> str:
    """Return a count in words: "7.5 billion"."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"
