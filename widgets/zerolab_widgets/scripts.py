"""Chapter 0: the scripts, put together: anywidget wants one text, and pictures share drawing code.

Owns no state. static/common.js holds what all pictures need (paint, hatching, the theme of the
page, sizes as text); a picture that contains another one names its script before its own.
"""

from pathlib import Path

STATIC = Path(__file__).parent / "static"


def script(*names: str, entry: str = "render") -> str:
    """Return common.js and the scripts named, as one module.

    Args:
        names: files in static/, without ".js", each after those whose functions it calls.
        entry: the function that draws.
    """
    texts = [_text(f"{name}.js") for name in ("common", *names)]
    return "".join([*texts, f"\nexport default {{ render: {entry} }};\n"])


def style(*names: str) -> str:
    """Return the style sheets named, as one text."""
    return "".join(_text(f"{name}.css") for name in names)


def _text(file: str) -> str:
    return (STATIC / file).read_text(encoding="utf-8")
