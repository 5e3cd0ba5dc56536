"""Chapter 4: the shard map: a flat buffer, the parameters in it, its padding and its owners.

Owns the synced state of one picture: the buffers as plain data and what the reader chose. The data
come from `layouts`, the drawing is static/shard_map.js. A saved notebook shows the buffers as an
image and every parameter as a row of a table.
"""

from collections.abc import Mapping, Sequence

import traitlets

from zerolab.errors import UsageError

from . import layouts, picture, scripts, theme
from .layouts import Buffer

MAX_RANKS = 32


class ShardMap(picture.Picture):
    """Who owns which elements of which parameter.

    Args:
        shapes: the shape of each parameter by name, in the order of the model, such as
            ``{name: tuple(p.shape) for name, p in model.named_parameters()}``.
        world_size: how many ranks share the buffer, 1 to 32.
        bucket_size: most elements of a bucket; None for one flat buffer.

    Raises:
        UsageError: a value cannot work or cannot be drawn.
    """

    _esm = scripts.script("panel", "shard_map", entry="renderMap")
    _css = scripts.style("panel", "shard_map")

    buffers = traitlets.List().tag(sync=True)
    note = traitlets.Unicode("").tag(sync=True)  # what is not drawn
    selected = traitlets.List().tag(sync=True)  # [buffer, "param", "shard" or "padding", number]
    ranks = traitlets.List().tag(sync=True)  # how each rank looks

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        world_size: int,
        bucket_size: int | None = None,
    ) -> None:
        if world_size > MAX_RANKS:
            raise UsageError(f"world_size={world_size} cannot be drawn: give 1 to {MAX_RANKS}")
        every = layouts.lay_out(shapes, world_size, bucket_size)
        self._buffers = layouts.drawn(every)
        styles = {str(rank): theme.rank_style(rank) for rank in range(world_size)}
        super().__init__(
            buffers=[layouts.as_state(buffer) for buffer in self._buffers],
            ranks=list(picture.styles(styles).values()),
            note=layouts.note(len(self._buffers), len(every)),
            finding=layouts.finding(every),
        )

    def to_html(self) -> str:
        """Return the map without script: an image and every parameter as a row."""
        rows = [
            [
                buffer.name,
                param.name,
                " x ".join(map(str, param.shape)) or "scalar",
                f"{param.span[0]:,} to {param.span[1] - 1:,}",
                ", ".join(f"rank {rank}: {numel:,}" for rank, numel in param.parts) or "nobody",
            ]
            for buffer in self._buffers
            for param in buffer.params
        ]
        table = picture.table(["buffer", "parameter", "shape", "elements", "owned by"], rows)
        image = picture.image(to_svg(self._buffers), self.finding)
        note = picture.paragraph(self.note) if self.note else ""
        return picture.paragraph(self.finding) + image + note + table


# The still picture: two lanes a buffer, parameters above their owners.

WIDTH, LANE, HEAD, GAP = 640, 24, 18, 14


def to_svg(buffers: Sequence[Buffer]) -> str:
    """Return the buffers as SVG text, on light paper."""
    svg = picture.Svg(WIDTH + 2, len(buffers) * (HEAD + 2 * LANE + GAP))
    for number, buffer in enumerate(buffers):
        top = number * (HEAD + 2 * LANE + GAP)
        padding = buffer.padded - buffer.numel
        head = f"{buffer.name}: {buffer.numel:,} elements and {padding:,} of padding"
        svg.text(1, top + 13, head)
        _draw_lanes(svg, buffer, top + HEAD)
    return str(svg)


def _draw_lanes(svg: picture.Svg, buffer: Buffer, top: int) -> None:
    """Draw the parameters, and below them the owners."""
    scale = WIDTH / buffer.length
    for param in buffer.params:
        _box(svg, param.span, scale, top, theme.LIGHT.track, param.name)
    for rank, span in enumerate(buffer.shards):
        _box(svg, span, scale, top + LANE, theme.rank_style(rank).fill, f"rank {rank}")


def _box(
    svg: picture.Svg, span: layouts.Range, scale: float, top: int, fill: str, text: str
) -> None:
    """Draw a stretch of the buffer with its name, where that fits."""
    width = (span[1] - span[0]) * scale
    if width <= 0:
        return
    svg.rect(1 + span[0] * scale, top, width, LANE, fill, theme.LIGHT.line)
    if width > 6.2 * len(text) + 4:
        svg.text(1 + span[0] * scale + width / 2, top + 16, text, theme.DARK_INK, "middle")
