"""Chapter 6: the life of units: sharded, on their way, whole, and sharded again, over one step.

Owns the synced state of one picture: the steps as moments, the step and the moment that are shown.
The data come from `lifecycle`, the drawing is static/unit_lifecycle.js. A saved notebook shows the
last step as an image and a table of its moments.
"""

from collections.abc import Sequence
from typing import Any

import traitlets

from zerolab.errors import UsageError

from . import lifecycle, picture, runs, scripts, theme
from .bars import mib
from .lifecycle import Step

MAX_STEPS = 3  # the first two, and the last
LETTERS = {state: number for number, state in enumerate(theme.UNIT_STATES)}


class UnitLifecycle(picture.Picture):
    """Where the parameters of every unit are, moment by moment.

    Args:
        run: a stage-3 run: what `lab.train` returned, or records.
        rank: whose records to read.
        step: the step to show first, from 1; None for the last one.

    Raises:
        UsageError: the run has no such rank or step.
    """

    _esm = scripts.script("panel", "unit_lifecycle", entry="renderLives")
    _css = scripts.style("panel", "unit_lifecycle")

    steps = traitlets.List().tag(sync=True)  # one dict a step, see `step_state`
    step = traitlets.Int(0).tag(sync=True)  # position in `steps`
    at = traitlets.Int(0).tag(sync=True)  # the moment that is shown
    states = traitlets.Dict().tag(sync=True)  # how each state looks

    def __init__(self, run: Any, rank: int = 0, step: int | None = None) -> None:
        found = [records for records in runs.run_of(run).ranks if records.rank == rank]
        if not found:
            raise UsageError(f"rank {rank} left no records in this run")
        every = lifecycle.steps_of(found[0]) or [Step("The run", rank)]
        if step is not None and not 1 <= step <= len(every):
            raise UsageError(f"step {step} is not in this run: give 1 to {len(every)}")
        shown = len(every) if step is None else step
        self._steps = [every[number - 1] for number in chosen_steps(len(every), shown)]
        self._shown = every[shown - 1]
        super().__init__(
            steps=[step_state(each) for each in self._steps],
            step=self._steps.index(self._shown),
            states=picture.styles(theme.UNIT_STATES),
            finding=self._shown.finding,
        )

    @traitlets.observe("step")
    def _step_chosen(self, change: Any) -> None:
        if 0 <= self.step < len(self._steps):
            self.finding = self._steps[self.step].finding

    def to_html(self) -> str:
        """Return the last step without script: an image and a row a moment."""
        if not self._shown.units:
            return picture.paragraph(self._shown.finding)
        rows = [
            [str(number), moment.says, mib(moment.gathered)]
            for number, moment in enumerate(self._shown.moments)
        ]
        table = picture.table(["moment", "what happens", "gathered"], rows)
        finding = self._shown.finding
        return picture.paragraph(finding) + picture.image(to_svg(self._shown), finding) + table


def chosen_steps(count: int, shown: int) -> list[int]:
    """Return the numbers of the steps to keep, from 1: the first two, and the one shown."""
    kept = sorted({1, min(2, count), shown, count})
    while len(kept) > MAX_STEPS:
        kept.remove(next(number for number in reversed(kept) if number != shown))
    return kept


def step_state(step: Step) -> dict[str, Any]:
    """Return a step as the script wants it.

    Returns:
        ``moments`` as [phase, position of the unit, what, states, bytes, words], with the states
        as one digit a unit, its place among the states of the theme.
    """
    return {
        "name": step.name.rstrip(","),
        "finding": step.finding,
        "units": list(step.units),
        "moments": [
            [
                moment.phase,
                step.units.index(moment.unit),
                moment.what,
                "".join(str(LETTERS[state]) for state in moment.states),
                moment.gathered,
                moment.says,
            ]
            for moment in step.moments
        ],
    }


# The still picture: a row a unit, a column a moment.

LEFT, WIDTH, ROW, BOTTOM = 96, 620, 20, 40


def to_svg(step: Step) -> str:
    """Return a step as SVG text, on light paper."""
    svg = picture.Svg(LEFT + WIDTH + 4, len(step.units) * ROW + BOTTOM + 18)
    column = WIDTH / len(step.moments)
    for number, unit in enumerate(step.units):
        svg.text(0, number * ROW + 14, unit)
        for first, last, state in stretches([moment.states[number] for moment in step.moments]):
            fill = theme.UNIT_STATES[state].fill
            x, width = LEFT + first * column, (last - first) * column
            svg.rect(x, number * ROW + 2, width, ROW - 4, fill, theme.LIGHT.paper)
    top = len(step.units) * ROW + 4
    for first, last, phase in stretches([moment.phase for moment in step.moments]):
        svg.text(LEFT + (first + last) / 2 * column, top + 10, phase, anchor="middle")
    for number, (state, style) in enumerate(theme.UNIT_STATES.items()):
        svg.rect(LEFT + number * 110, top + 22, 14, 12, style.fill, theme.LIGHT.line)
        svg.text(LEFT + number * 110 + 20, top + 32, state)
    return str(svg)


def stretches(values: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return (first, one after the last, value) of the stretches of equal values."""
    found: list[tuple[int, int, str]] = []
    for position, value in enumerate(values):
        if found and found[-1][2] == value:
            found[-1] = (found[-1][0], position + 1, value)
        else:
            found.append((position, position + 1, value))
    return found
