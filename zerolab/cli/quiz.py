"""Chapter 12: `zerolab quiz`, the questions of a chapter in a terminal, or in a pipe.

Owns the dialogue: ask, read a line, mark, say why, ask again. Answers are lines of stdin: a letter
("b"), several ("a c"), a number with or without its unit, a line of code, an order ("c a b"), or
text; "?" shows the answer and an empty line goes on. Every answer is saved at once, so Ctrl-C
and the end of stdin lose nothing.
"""

import json
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import UsageError
from . import learner

if TYPE_CHECKING:
    from ..lab.quiz_session import Quiz

INTERRUPTED = 130
FORMS = {
    "single": "a letter",
    "multiple": "letters, such as: a c",
    "numeric": "a number",
    "ordering": "letters in order, such as: c a b",
    "bug": "the number of a line",
    "short": "your answer, in one line",
}
SAID = {
    "right": "[bold green]Right.[/]",
    "wrong": "[bold red]Not yet.[/]",
    "partly": "[bold yellow]Partly right.[/]",
    "shown": "[bold]The answer:[/]",
    "judge": "[bold]Compare your answer with this one:[/]",
    "refused": "[bold yellow]Not an answer:[/]",
}


def quiz(
    chapter: Annotated[str, typer.Argument(help="Its number, such as 00.")],
    difficulty: Annotated[
        str | None, typer.Option(help="Only these: easy, medium, hard or extreme.")
    ] = None,
    part: Annotated[str | None, typer.Option(help="Only this part, such as self-test.")] = None,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Shuffle; the same seed, the same order.")
    ] = None,
    only_open: Annotated[
        bool, typer.Option("--open", help="Only what you have not answered right yet.")
    ] = False,
    workspace: learner.Workspace = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout; the questions on stderr.")
    ] = False,
) -> int:
    """Ask the questions of a chapter and say why an answer is right or wrong."""
    from ..lab import quiz_session

    console = Console(stderr=as_json, highlight=False, soft_wrap=not sys.stdout.isatty())
    where = learner.use(workspace)
    questions = quiz_session.quiz(
        chapter, difficulty=difficulty, part=part, shuffle=shuffle, only_open=only_open
    )
    if where is None:
        console.print("[dim]No workspace here, so nothing is saved; `zerolab learn` makes one.[/]")
    code = 0
    try:
        Dialogue(questions, console).run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    console.print(f"\n{summary(questions)}{' Saved.' if where is not None else ''}")
    if as_json:
        print(to_json(questions))
    return code


class Dialogue:
    """One quiz, asked on a console and answered on stdin."""

    def __init__(self, quiz: "Quiz", console: Console) -> None:
        """Prepare to ask."""
        self.quiz, self.console = quiz, console

    def run(self) -> None:
        """Ask all questions, until stdin ends."""
        questions = self.quiz.public()
        self.console.print(
            f"[bold]Quiz {self.quiz.chapter}: {escape(self.quiz.title)}[/], {len(questions)} "
            "questions. An empty line goes on, ? shows the answer, Ctrl-C ends."
        )
        for number, public in enumerate(questions):
            if not self.ask(number, public):
                return

    def ask(self, number: int, public: dict[str, Any]) -> bool:
        """Ask one question until it is right, given up or left; False when stdin has ended."""
        self.show(number, public)
        while (line := self.read(FORMS[public["kind"]], public["unit"])) is not None:
            if not line:
                return True
            if line == "?":
                self.say(self.quiz.reveal(number), public)
                return True
            verdict = self.mark(number, line, public)
            if verdict is None:
                return False
            if verdict["outcome"] == "right" or verdict["rubric"]:
                return True
        return False

    def mark(self, number: int, line: str, public: dict[str, Any]) -> dict[str, Any] | None:
        """Mark a line; after a short answer also ask which points it made."""
        try:
            answer = parse(line, public)
        except UsageError as error:
            self.console.print(f"{SAID['refused']} {escape(str(error))}")
            return {"outcome": "refused", "rubric": []}
        verdict = self.quiz.mark(number, answer)
        self.say(verdict, public)
        return self.judge(number, verdict, public) if verdict["outcome"] == "judge" else verdict

    def judge(
        self, number: int, verdict: dict[str, Any], public: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Let the author of a short answer count the points that it makes."""
        for position, point in enumerate(verdict["rubric"], 1):
            likely = "*" if position - 1 in verdict["suggested"] else " "
            self.console.print(f"  {likely} {position}  {escape(point)}")
        while (
            line := self.read("the points you made, such as: 1 3; * as marked; 0 none")
        ) is not None:
            points = verdict["suggested"] if line == "*" else parse_points(line)
            judged = self.quiz.mark(number, points)
            self.say(judged, public)
            if judged["outcome"] != "refused":
                return judged
        return None

    def show(self, number: int, public: dict[str, Any]) -> None:
        """Print a question."""
        from ..lab import quiz_page

        self.console.print()
        before = "  [green]right before[/]" if public["before"] else ""
        self.console.print(f"[bold]{number + 1}. {styled(public['text'])}[/]")
        self.console.print(f"   [dim]{public['difficulty']}[/]{before}")
        for line in quiz_page.code_lines(public):
            self.console.print(f"[cyan]{escape(line)}[/]")
        for label, text in quiz_page.entries(public):
            self.console.print(f"   [bold]{label}[/]  {styled(text)}")

    def read(self, form: str, unit: str = "") -> str | None:
        """Return the next line of stdin, None when there is none."""
        asked = f"{form} in {unit}" if unit else form
        self.console.print(f"   [dim]({escape(asked)})[/] > ", end="")
        line = sys.stdin.readline()
        if not sys.stdin.isatty():
            self.console.print(escape(line.rstrip("\n")))
        return line.strip() if line else None

    def say(self, verdict: dict[str, Any], public: dict[str, Any]) -> None:
        """Print a verdict."""
        from ..lab import quiz_page

        self.console.print(f"   {SAID[verdict['outcome']]}")
        labels = quiz_page.labels(public)
        for note in verdict["notes"]:
            named = note["at"] >= 0 and public["kind"] in ("single", "multiple", "bug")
            label = f"[bold]{labels[note['at']]}[/]  " if named else ""
            self.console.print(f"   {label}{styled(note['text'])}")
        if verdict["answer"] and verdict["outcome"] != "right":
            self.console.print(f"   {styled(verdict['answer'])}")
        if verdict["why"]:
            self.console.print(f"   {styled(verdict['why'])}")


def parse(line: str, public: dict[str, Any]) -> Any:
    """Turn a typed line into an answer, with positions as shown.

    Raises:
        UsageError: a letter or a line that is not on offer.
    """
    from ..lab import quiz_page

    if public["kind"] in ("numeric", "short"):
        return line
    labels = quiz_page.labels(public)
    words = re.split(r"[\s,;>]+", line.strip().lower())
    if len(words) == 1 and not public["lines"]:
        words = list(words[0])  # "cab" is "c a b"
    for word in words:
        if word not in labels:
            raise UsageError(f"{word!r} is not on offer; give {', '.join(labels)}")
    positions = [labels.index(word) for word in words]
    if public["kind"] in ("multiple", "ordering"):
        return positions
    if len(positions) != 1:
        raise UsageError(f"{len(positions)} were given; choose one")
    return positions[0]


def parse_points(line: str) -> list[int]:
    """Turn "1 3" into positions from 0; "0" is none of them."""
    numbers = [int(word) for word in re.findall(r"\d+", line)]
    return [number - 1 for number in numbers if number > 0]


def styled(text: str) -> str:
    """Prepare prose for rich: `code` in its own colour, brackets as they are."""
    parts = escape(text).split("`")
    return "".join(f"[cyan]{part}[/]" if i % 2 else part for i, part in enumerate(parts))


def summary(quiz: "Quiz") -> str:
    """Say in one sentence how it went."""
    return (
        f"[bold]{quiz.right} of {len(quiz.asked)} right[/], {quiz.first_try} at the first try, "
        f"{len(quiz.asked) - quiz.answered} not answered."
    )


def to_json(quiz: "Quiz") -> str:
    """Write how it went as one line of JSON."""
    questions = [
        {
            "id": asked.question.id,
            "difficulty": asked.question.difficulty,
            "outcome": asked.verdict.outcome if asked.verdict else None,
            "score": round(asked.verdict.score, 3) if asked.verdict else 0.0,
            "tries": asked.tries,
        }
        for asked in quiz.asked
    ]
    fields = {"chapter": quiz.chapter, "right": quiz.right, "first_try": quiz.first_try}
    return json.dumps({**fields, "answered": quiz.answered, "questions": questions})
