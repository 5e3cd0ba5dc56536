"""Chapter 0: the theme, one colour, one hatching and one label for each kind of memory.

Owns every colour that a picture uses; no other file names one. The fills are those of Okabe
and Ito, which people with any of the common kinds of colour blindness can tell apart; the
hatching tells them apart in grey, and labels stand beside both. A test holds the contrast of
every label at 4.5:1 or better, on light and on dark paper.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class KindStyle:
    """How one kind of memory looks, and what it is in one sentence."""

    label: str
    meaning: str
    fill: str
    ink: str  # of text on the fill
    hatch: str  # "solid", "rising", "falling", "dots", "rows", "columns", "grid", "sparse", "check"


@dataclass(frozen=True)
class Paper:
    """The colours around the data, for one of JupyterLab's themes."""

    paper: str
    ink: str
    muted: str
    line: str
    track: str
    alarm: str
    alarm_ink: str
    good: str
    good_ink: str
    focus: str


DARK_INK, LIGHT_INK = "#111111", "#ffffff"

KINDS: dict[str, KindStyle] = {
    "param": KindStyle(
        "parameters", "the weights that forward and backward read", "#0072b2", LIGHT_INK, "solid"
    ),
    "gathered": KindStyle(
        "gathered parameters",
        "full weights of one unit, there only while it computes",
        "#56b4e9",
        DARK_INK,
        "rising",
    ),
    "grad": KindStyle(
        "gradients", "what backward left for the optimizer", "#d55e00", DARK_INK, "falling"
    ),
    "bucket": KindStyle(
        "buckets", "gradients on their way to the other ranks", "#e69f00", DARK_INK, "dots"
    ),
    "master": KindStyle(
        "master weights", "fp32 copies that the optimizer updates", "#009e73", DARK_INK, "rows"
    ),
    "optimizer": KindStyle(
        "optimizer state",
        "Adam's two running averages, fp32, for every weight",
        "#cc79a7",
        DARK_INK,
        "columns",
    ),
    "activation": KindStyle(
        "activations", "kept by forward because backward needs it", "#f0e442", DARK_INK, "grid"
    ),
    "input": KindStyle("inputs", "the batch", "#999999", DARK_INK, "sparse"),
    "temp": KindStyle(
        "temporary", "scratch that an operation needs for a moment", "#cfcfcf", DARK_INK, "check"
    ),
}

# Ranks, told apart by number and by Tol's light scheme, which differs from the kinds' colours.
RANK_FILLS = (
    "#77aadd",
    "#ee8866",
    "#eedd88",
    "#ffaabb",
    "#99ddff",
    "#44bb99",
    "#bbcc33",
    "#aaaa00",
)
RANK_HATCHES = ("solid", "rising", "falling", "dots")

# Where the parameters of a unit are (stage 3); a whole unit has the colour of what was gathered.
UNIT_STATES: dict[str, KindStyle] = {
    "sharded": KindStyle(
        "sharded", "each rank has its own slice and nothing else", "#dddddd", DARK_INK, "sparse"
    ),
    "in flight": KindStyle(
        "in flight", "an all-gather fills it, and the rank waits", "#ee8866", DARK_INK, "dots"
    ),
    "prefetched": KindStyle(
        "prefetched",
        "an all-gather fills it while another unit computes",
        "#eedd88",
        DARK_INK,
        "rising",
    ),
    "unsharded": KindStyle(
        "unsharded", "whole: its module may run", KINDS["gathered"].fill, DARK_INK, "solid"
    ),
}

# What a rank does: the phases of a step, and what travels meanwhile.
LANES: dict[str, KindStyle] = {
    "init": KindStyle("init", "the model is built", "#e9e9e9", DARK_INK, "sparse"),
    "forward": KindStyle("forward", "the model is run", "#c6dbef", DARK_INK, "solid"),
    "backward": KindStyle("backward", "gradients are computed", "#6a51a3", LIGHT_INK, "rows"),
    "step": KindStyle("step", "the optimizer updates", "#525252", LIGHT_INK, "falling"),
    "idle": KindStyle("idle", "between the steps", "#f7f7f7", DARK_INK, "dots"),
    "hidden": KindStyle(
        "hidden communication",
        "on its way while the rank computes",
        "#41b6c4",
        DARK_INK,
        "rising",
    ),
    "exposed": KindStyle(
        "exposed communication", "the rank does nothing else", "#a50026", LIGHT_INK, "check"
    ),
    "control": KindStyle(
        "control", "norms, flags and losses: a few bytes", "#bdbdbd", DARK_INK, "columns"
    ),
    "copy": KindStyle("copies", "casts and clones", "#fe9929", DARK_INK, "grid"),
}

LIGHT = Paper(
    paper="#ffffff",
    ink="#1a1a1a",
    muted="#595959",
    line="#8c8c8c",
    track="#f0f0f0",
    alarm="#b00020",
    alarm_ink="#ffffff",
    good="#0a6b37",
    good_ink="#ffffff",
    focus="#0b57d0",
)
DARK = Paper(
    paper="#111111",
    ink="#f2f2f2",
    muted="#b8b8b8",
    line="#8a8a8a",
    track="#262626",
    alarm="#ff8a80",
    alarm_ink="#111111",
    good="#7fd19b",
    good_ink="#111111",
    focus="#8ab4f8",
)


def as_state() -> dict[str, Any]:
    """Return the theme as plain data, for the scripts of the widgets."""
    lanes = {lane: asdict(style) for lane, style in LANES.items()}
    return {
        "kinds": {kind: asdict(style) for kind, style in KINDS.items()},
        "lanes": lanes,
    } | papers()


def papers() -> dict[str, Any]:
    """Return the colours around the data, for the scripts of pictures that draw no memory."""
    return {"light": asdict(LIGHT), "dark": asdict(DARK)}


def rank_style(rank: int) -> KindStyle:
    """Return how a rank looks; the ninth has the first one's colour and another hatching."""
    fill = RANK_FILLS[rank % len(RANK_FILLS)]
    hatch = RANK_HATCHES[rank // len(RANK_FILLS) % len(RANK_HATCHES)]
    return KindStyle(f"rank {rank}", f"owned by rank {rank}", fill, DARK_INK, hatch)


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21, by the rule of WCAG 2."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
