"""Chapter 1: what training a model holds and moves at every stage, for `zerolab estimate`.

Owns a `Question` (what was asked, checked) and a `Row` for each stage. Phases: work the rows out
with `sim.estimate`, find the cheapest that fits, print tables.

With a number of parameters and nothing else only model states are compared with the memory. A
model of a known shape adds its activations, its buckets and the units that stage 3 gathers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WHY_DEEPSPEED_DIFFERS = """\
DeepSpeed counts 18 bytes a sharded parameter: 4 more than ZeRO's paper at stage 2 (gradients once
more, in fp32) and 2 more at stage 3, where it adds 4 bytes for each parameter of the largest
layer. It assumes mixed Adam always, has no estimator of stages 0 and 1, and prints GiB as "GB".\
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for.

    Attributes:
        num_params: Psi, a count.
        gpus: N.
        precision: "bf16", "fp16" or "fp32".
        optimizer: a name in `sim.estimate.OPTIMIZERS`.
        gpu_memory: bytes of one GPU.
        micro_batch: sequences in a forward.
        accum_steps: G.
        model: name of a preset, or None.
    """

    num_params: int
    gpus: int
    precision: str
    optimizer: str
    gpu_memory: int
    micro_batch: int
    accum_steps: int
    model: str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One stage.

    Attributes:
        stage: 0 to 3.
        parts: bytes on one GPU by kind, model states first.
        states: bytes of the model states.
        fits: whether all parts together fit the memory.
        elements: elements that one step moves.
        sent: bytes that one GPU sends on a ring for them.
        deepspeed: bytes on one GPU as DeepSpeed estimates them; None where it has no estimator.
    """

    stage: int
    parts: dict[str, int]
    states: int
    fits: bool
    elements: int
    sent: int
    deepspeed: int | None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def work_out(asked: Question) -> list[Row]:
    """Work every stage out."""
    import torch

    from .. import gpt
    from ..sim import estimate as sim

    if asked.model is None:
        return [_row(asked, stage, {}, None) for stage in sim.STAGES]
    shape = gpt.preset(asked.model)
    with torch.device("meta"):
        module = gpt.GPT(shape)
    sizes = sim.layout(module, sim.BUCKET_NUMEL, asked.gpus)
    arrivals, largest = sim.gpt_arrivals(sizes), sim.model_to_params(module)[1]
    rows = []
    for stage in sim.STAGES:
        more = {
            "activation": sim.activation_bytes(shape, asked.micro_batch, asked.precision),
            "bucket": sim.bucket_peak_bytes(stage, sizes, asked.precision, arrivals),
            "gathered": sim.gathered_peak_bytes(stage, sizes, asked.precision),
        }
        rows.append(_row(asked, stage, more, largest))
    return rows


def _row(asked: Question, stage: int, more: dict[str, int], largest: int | None) -> Row:
    """Work one stage out, given what is beside the model states."""
    from ..sim import estimate as sim

    states = sim.model_states(asked.num_params, asked.gpus, stage, asked.precision, asked.optimizer)
    elements = sim.elements_moved(stage, asked.num_params, asked.accum_steps)
    parts = states | more
    return Row(
        stage=stage,
        parts=parts,
        states=sum(states.values()),
        fits=sum(parts.values()) <= asked.gpu_memory,
        elements=elements,
        sent=sim.sent_bytes(elements, asked.gpus, asked.precision),
        deepspeed=_deepspeed(asked, stage, largest or 0),
    )


def _deepspeed(asked: Question, stage: int, largest: int) -> int | None:
    """Return DeepSpeed's estimate of a GPU without offload; it depends on N, not on nodes."""
    from ..sim import estimate as sim

    if stage == 2:
        return sim.estimate_zero2_model_states_mem_needs(
            asked.num_params, asked.gpus, cpu_offload=False
        )[1]
    if stage == 3:
        return sim.estimate_zero3_model_states_mem_needs(
            asked.num_params, largest, asked.gpus, cpu_offload=False
        )[1]
    return None


def cheapest(rows: list[Row]) -> int | None:
    """Return the lowest stage that fits: each next one moves as much or more. None if none does."""
    return next((row.stage for row in rows if row.fits), None)


def show(asked: Question, rows: list[Row], chosen: int | None) -> None:
    """Print the tables and the sentences under them."""
    from rich.console import Console

    from .. import device

    console = Console(highlight=False, soft_wrap=True)
    what = asked.model or f"{asked.num_params / 1e9:,g} billion parameters"
    console.print(f"{what} on {asked.gpus:,} GPUs, {asked.precision}, {asked.optimizer}")
    console.print(_memory(asked, rows))
    if asked.model is not None:
        console.print(_beside(asked, rows))
    console.print(_traffic(rows, asked))
    console.print(_deepspeeds(rows, asked))
    console.print(f"{WHY_DEEPSPEED_DIFFERS}\n")
    memory = device.format_bytes(asked.gpu_memory)
    counted = "all of the above" if asked.model else "model states, activations come on top"
    console.print(f"{memory} a GPU ({counted}): {verdict(rows, chosen)}.")


def verdict(rows: list[Row], chosen: int | None) -> str:
    """Say which stage it is and whether it fits."""
    if chosen is None:
        return "no stage fits"
    if not rows[chosen].fits:
        return f"stage {chosen} does not fit"
    cheapest_one = " is the cheapest that" if chosen == cheapest(rows) else ""
    return f"stage {chosen}{cheapest_one} fits"


def _memory(asked: Question, rows: list[Row]) -> "Table":
    """Model states of one GPU in GB, and their sum in GiB too."""
    from . import tables

    columns = ["stage", *tables.STATES, "GB", "GiB"]
    fits = [] if asked.model else ["fits"]
    table = tables.new_table("model states on one GPU, in GB (1e9 bytes)", [*columns, *fits])
    for row in rows:
        cells = [gb(row.parts[kind]) for kind in tables.STATES]
        end = [] if asked.model else [yes(row.fits)]
        table.add_row(str(row.stage), *cells, gb(row.states), gib(row.states), *end)
    return table


def _beside(asked: Question, rows: list[Row]) -> "Table":
    """What a model with a shape holds beside its states; the parts need not peak together."""
    from . import tables

    kinds = ("activation", "bucket", "gathered")
    title = f"beside them, micro-batch {asked.micro_batch}, in GB"
    table = tables.new_table(title, ["stage", *kinds, "all GB", "all GiB", "fits"])
    for row in rows:
        cells = [gb(row.parts[kind]) for kind in kinds]
        table.add_row(str(row.stage), *cells, gb(row.total), gib(row.total), yes(row.fits))
    return table


def _traffic(rows: list[Row], asked: Question) -> "Table":
    """What a step moves."""
    from . import tables

    title = (
        f"one step of {asked.accum_steps} micro-batches" if asked.accum_steps > 1 else "one step"
    )
    table = tables.new_table(f"traffic of {title}", ["stage", "moves", "each GPU sends, GB"])
    for row in rows:
        table.add_row(str(row.stage), f"{row.elements // asked.num_params} Psi", gb(row.sent))
    return table


def _deepspeeds(rows: list[Row], asked: Question) -> "Table":
    """DeepSpeed's estimators beside ours."""
    from . import tables

    largest = "" if asked.model else " (stage 3 without its largest layer: give --model)"
    title = f"DeepSpeed's estimate of a GPU{largest}"
    table = tables.new_table(title, ["stage", "its GB", "its GiB", "ours GB"])
    for row in rows:
        if row.deepspeed is not None:
            cells = (gb(row.deepspeed), gib(row.deepspeed), gb(row.states))
            table.add_row(str(row.stage), *cells)
    return table


def gb(nbytes: int) -> str:
    """Write bytes in GB of 1e9, with three digits that count: 120.0, 31.4, 1.88, 0.00123."""
    return _digits(nbytes / 10**9)


def gib(nbytes: int) -> str:
    """Write bytes in GiB of 2**30, likewise."""
    return _digits(nbytes / 2**30)


def _digits(number: float) -> str:
    """Write one digit behind the point from 10 on, two from 1 on, and three that count below."""
    if number >= 10:
        return f"{number:,.1f}"
    return f"{number:.2f}" if number >= 1 or number == 0 else f"{number:.3g}"


def yes(fits: bool) -> str:
    """Write whether something fits."""
    return "yes" if fits else "no"
