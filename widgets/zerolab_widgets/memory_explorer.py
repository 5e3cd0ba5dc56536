"""Chapter 1: the memory explorer: four stages side by side under a capacity line, with sliders.

Owns what the reader chose; the bars follow. The data come from `explore`, which asks
`zerolab.sim.estimate`; the bars are drawn as memory_bars draws them, the controls are
static/memory_explorer.js. A saved notebook shows the picture and the table of its last setting.
"""

from typing import Any

import traitlets

from zerolab.device import parse_bytes
from zerolab.errors import UsageError
from zerolab.sim import estimate

from . import explore, scripts
from .memory_bars import MemoryBars

CHOICES = ("psi", "world_size", "stage", "precision", "optimizer", "micro_batch", "seq_len",
           "checkpointed", "offload")  # fmt: skip


class MemoryExplorer(MemoryBars):
    """What a training run would hold on each GPU, at every stage, before anything runs.

    Args:
        psi: parameters, a count.
        world_size: N, how many GPUs.
        stage: 0 to 3, the one that is looked into first.
        precision: "bf16", "fp16" or "fp32".
        capacity: of each GPU, bytes or a text such as "80GiB".
        optimizer: a name in `zerolab.sim.estimate.OPTIMIZERS`.
        micro_batch: sequences in a forward; 0 leaves activations out.
        seq_len: tokens of a sequence.
        checkpointed: whether blocks are recomputed in backward.
        offload: whether all but the parameters lies in host memory.

    Raises:
        UsageError: a value that no run can have.
    """

    _esm = scripts.script("memory_bars", "memory_explorer", entry="renderExplorer")
    _css = scripts.style("memory_bars", "memory_explorer")

    psi = traitlets.Float(7.5e9).tag(sync=True)
    world_size = traitlets.Int(64).tag(sync=True)
    stage = traitlets.Int(0).tag(sync=True)
    precision = traitlets.Enum(tuple(estimate.PARAM_BYTES), "bf16").tag(sync=True)
    optimizer = traitlets.Enum(tuple(estimate.OPTIMIZERS), "adamw").tag(sync=True)
    micro_batch = traitlets.Int(1).tag(sync=True)
    seq_len = traitlets.Int(2048).tag(sync=True)
    checkpointed = traitlets.Bool(False).tag(sync=True)
    offload = traitlets.Bool(False).tag(sync=True)
    options = traitlets.Dict(
        {"precision": list(estimate.PARAM_BYTES), "optimizer": list(estimate.OPTIMIZERS)}
    ).tag(sync=True)

    def __init__(
        self,
        psi: float = 7.5e9,
        world_size: int = 64,
        stage: int = 0,
        precision: str = "bf16",
        capacity: int | str = "80GiB",
        **choices: Any,
    ) -> None:
        given = {"psi": psi, "world_size": world_size, "stage": stage, "precision": precision}
        _check(given | choices)
        self._kind = ""  # of memory, that the reader clicked
        super().__init__(parse_bytes(capacity), slider="none")
        with self.hold_sync():
            for name, value in (given | choices).items():
                setattr(self, name, value)
            self._follow()
        self.observe(self._chosen, names=[*CHOICES, "capacity"])
        self.observe(self._clicked, names="selected")

    def setting(self) -> explore.Setting:
        """Return what is chosen now.

        Raises:
            UsageError: a value that no run can have.
        """
        values = {name: getattr(self, name) for name in CHOICES}
        return explore.Setting(num_params=round(values.pop("psi")), **values)

    def _chosen(self, change: Any) -> None:
        """Draw what was chosen; a value that no run can have goes back to what it was."""
        try:
            self.setting()
        except UsageError:
            setattr(self, change["name"], change["old"])
            return
        with self.hold_sync():
            self._follow()

    def _clicked(self, change: Any) -> None:
        if change["new"]:
            stage, self._kind = change["new"]
            self.stage = stage

    def _follow(self) -> None:
        setting = self.setting()
        self._draw(explore.bars_of(setting))
        self.message = explore.note(setting)
        self.selected = [setting.stage, self._kind]

    def _find(self) -> None:
        self.finding = explore.finding(self.setting(), self.capacity)

    def __repr__(self) -> str:
        return f"MemoryExplorer: {self.finding}"


def _check(values: dict[str, Any]) -> None:
    """Refuse unknown names, and names of precisions and optimizers that have no formula."""
    unknown = [name for name in values if name not in CHOICES]
    if unknown:
        raise UsageError(f"{unknown[0]!r} cannot be chosen; give {', '.join(CHOICES)}, capacity")
    words = {name: value for name, value in values.items() if name != "psi"}
    setting = explore.Setting(num_params=round(values["psi"]), **words)
    estimate.bytes_per_param(setting.precision, setting.optimizer)
