"""Chapter 12: `zerolab config`: explain a configuration file, write one, look a key up.

Owns the tables of the screen; what is said in them comes from `zerolab.config`.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from ..config import Report

VALID, INVALID = 0, 2
KEY_WIDTH = 38  # keys up to this long stay whole in a terminal of 80 columns
COLOURS = {"error": "bold red", "needs": "bold red", "warning": "yellow", "note": "cyan"}
STATUS_COLOURS = {
    "works": "green",
    "always so": "green",
    "default": "dim",
    "error": "bold red",
    "unknown": "bold red",
}

config_app = typer.Typer(
    help="Explain a ds_config.json, write one, or look a key up.", no_args_is_help=True
)


@config_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A JSON or HJSON file.")],
    gpus: Annotated[int, typer.Option("--gpus", "-n", min=1, help="GPUs it will run on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    optimizer_in_code: Annotated[
        bool, typer.Option(help="The script passes optimizer= to initialize.")
    ] = False,
) -> int:
    """Explain every key of a file: what it does here, what is wrong, and the corrected file."""
    from ..config import examine, explain

    if not file.is_file():
        raise UsageError(f"{file} is not a file: give the path of a ds_config.json")
    report = examine(file, gpus, optimizer_in_code=optimizer_in_code)
    if as_json:
        print(json.dumps(explain.as_json(report), indent=2, default=str))
    else:
        _draw(report)
    return INVALID if report.stoppers else VALID


@config_app.command("keys")
def keys(
    word: Annotated[str, typer.Argument(help="Show only keys that contain this.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> int:
    """List every key there is: defaults here and in DeepSpeed, status, what it does."""
    from dataclasses import asdict

    from rich.markup import escape

    from ..config import explain

    found = [entry for entry in explain.entries() if word.lower() in entry.key.lower()]
    if not found:
        raise UsageError(f"no key contains {word!r}: `zerolab config keys` lists them all")
    if as_json:
        print(json.dumps([asdict(entry) for entry in found], indent=2))
        return VALID
    table = _table("key", "default", "DeepSpeed's", "status", "what it does")
    for e in found:
        text = f"{e.does} ({e.why})" if e.why else e.does
        table.add_row(e.key, escape(e.default), escape(e.deepspeed), _status(e.status), text)
    _console().print(table)
    return VALID


@config_app.command("make")
def make(  # noqa: PLR0913 - one argument for each flag
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs it will run on.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in one optimizer step.")] = None,
    micro: Annotated[int | None, typer.Option(help="Samples in one forward on a GPU.")] = None,
    stage: Annotated[int | None, typer.Option(help="0 to 3: what is sharded.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.")] = None,
    optimizer: Annotated[str, typer.Option(help="Any elementwise torch optimizer.")] = "AdamW",
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    clip: Annotated[float, typer.Option(help="Largest gradient norm; 0 is off.")] = 1.0,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up; 0 is none.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write.")] = None,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
) -> int:
    """Write a valid file from a few answers; what no flag says is asked for on a terminal."""
    from ..config import making

    world: int = _ask("How many GPUs", gpus, 4)
    total: int = _ask("Samples in one optimizer step, over all GPUs", batch, 8 * world)
    answers = making.Answers(
        gpus=world,
        batch=total,
        micro=_ask("Samples one GPU takes at once", micro, making.fitting_micro(total, world)),
        stage=_ask("ZeRO stage (1 optimizer states, 2 + gradients, 3 + parameters)", stage, 2),
        precision=_one_of(
            "precision", _ask("bf16, fp16 or fp32", precision, "bf16"), making.PRECISIONS
        ),
        optimizer=optimizer,
        lr=_ask("Learning rate", lr, 1e-4),
        clip=clip,
        warmup=warmup,
    )
    _write(json.dumps(making.make(answers), indent=2) + "\n", output, force)
    return VALID


def interactive() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def _ask(question: str, given: Any, default: Any) -> Any:
    if given is not None:
        return given
    return typer.prompt(question, default=default, err=True) if interactive() else default


def _one_of(name: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise UsageError(f"{name} {given!r} is unknown: take one of {', '.join(known)}")
    return given


def _write(text: str, output: Path | None, force: bool) -> None:
    if output is None:
        print(text, end="")
        return
    if output.exists() and not force:
        raise UsageError(f"{output} exists: give another name, or --force to overwrite it")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise UsageError(
            f"{output} cannot be written ({cause.strerror}): give the path of a file in a folder "
            "that exists"
        ) from cause
    print(f"wrote {output}", file=sys.stderr)


def _draw(report: "Report") -> None:
    from rich.markup import escape

    from ..config import explain
    from ..config.problems import same

    console = _console()
    many = "s" if report.world_size > 1 else ""
    title = f"{escape(report.name)} on {report.world_size} GPU{many}"
    table = _table("key", "value", "here", "what it does", title=title)
    for row in explain.rows(report):
        table.add_row(escape(row.key), escape(row.value), _status(row.status), row.does)
    table.columns[0].no_wrap = all(len(row.key) <= KEY_WIDTH for row in explain.rows(report))
    console.print(table)
    if explain.batch(report):
        console.print(f"Batch: {explain.batch(report)}")
    for problem in sorted(report.problems, key=lambda p: list(COLOURS).index(p.severity)):
        _draw_problem(console, problem)
    console.print("\nThis file cannot run." if report.stoppers else "\nThis file is valid.")
    corrected = report.corrected()
    if not same(corrected, report.raw):
        console.print("The corrected file:")
        console.print_json(data=corrected)
    for key, stands in report.to_fill_in().items():
        console.print(f"Fill in {key}: {stands}.", markup=False)


def _draw_problem(console: Any, problem: Any) -> None:
    from rich.text import Text

    word = "error" if problem.severity == "needs" else str(problem.severity)
    line = Text(f"\n{word} ", style=COLOURS[problem.severity])
    line.append(problem.place, style="bold")
    line.append(problem.message, style="default")
    console.print(line)
    if problem.remedy:
        console.print(Text(f"  -> {problem.remedy}", style="default"))


def _status(word: str) -> str:
    return f"[{STATUS_COLOURS.get(word, 'yellow')}]{word}[/]"


def _table(*columns: str, title: str | None = None) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)
