"""Chapter 1: questions on paper, as text and as HTML, for where nothing can be clicked.

Owns no state, no colours and no answers: it draws the plain data of `Quiz.public()`.
"""

import html
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from . import cards

Public = Mapping[str, Any]


def labels(question: Public) -> list[str]:
    """Return what each entry is called: letters, or line numbers of the code."""
    if question["lines"]:
        return [str(line) for line in question["lines"]]
    return list(ascii_lowercase[: len(question["entries"])])


def to_text(questions: Sequence[Public]) -> str:
    """Return the questions as text; how to answer stands above them where it is always the same."""
    once = _same_for_all(questions)
    texts = [question_text(n, question, not once) for n, question in enumerate(questions, 1)]
    return "\n\n".join([*([once] if once else []), *texts])


def _same_for_all(questions: Sequence[Public]) -> str:
    """Return how to answer if that is one and the same for several questions, else ""."""
    ways = {f"{question['how']}{question['unit']}" for question in questions}
    return ways.pop() if len(ways) == 1 and len(questions) > 1 else ""


def question_text(number: int, question: Public, with_how: bool = True) -> str:
    """Return one question as text, with its choices and how to answer."""
    lines = [f"{number}. {question['text']}  [{question['difficulty']}]"]
    lines += code_lines(question)
    lines += [f"   {label}) {text}" for label, text in entries(question)]
    unit = f" ({question['unit']})" if question["unit"] else ""
    return "\n".join([*lines, *([f"   {question['how']}{unit}"] if with_how else [])])


def code_lines(question: Public) -> list[str]:
    """Return the code of a question; numbered where a line has to be chosen."""
    lines = question["code"].splitlines()
    if not question["lines"]:
        return [f"       {line}" for line in lines]
    chosen = set(question["lines"])
    marks = (f"{n:>3}" if n in chosen else "   " for n in range(1, len(lines) + 1))
    return [f"   {mark} {line}" for mark, line in zip(marks, lines, strict=True)]


def entries(question: Public) -> list[tuple[str, str]]:
    """Return label and text of what can be chosen; lines of code stand in the code already."""
    if question["lines"]:
        return []
    return list(zip(labels(question), question["entries"], strict=True))


def to_html(questions: Sequence[Public]) -> str:
    """Return the questions as HTML without script."""
    once = _same_for_all(questions)
    parts = [_question_html(n, question, not once) for n, question in enumerate(questions, 1)]
    return "".join([f"<div><i>{html.escape(once)}</i></div>" if once else "", *parts])


def _question_html(number: int, question: Public, with_how: bool) -> str:
    code = "\n".join(line[3:] for line in code_lines(question))
    unit = f" ({html.escape(question['unit'])})" if question["unit"] else ""
    how = f"<div><i>{html.escape(question['how'])}{unit}</i></div>"
    rows = "".join(
        f"<div><b>{label}</b>&nbsp; {cards.text_html(text)}</div>"
        for label, text in entries(question)
    )
    return (
        f"<p style='margin:10px 0 2px'><b>{number}.</b> {cards.text_html(question['text'])} "
        f"<i>({question['difficulty']})</i></p>"
        f"{f'<pre>{html.escape(code)}</pre>' if code else ''}{rows}"
        f"{how if with_how else ''}"
    )
