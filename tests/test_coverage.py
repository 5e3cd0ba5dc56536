"""course/COVERAGE.md names cells and questions that exist."""

import json
import re
import tomllib
from pathlib import Path

COURSE = Path(__file__).resolve().parents[1] / "course"
TEXT = (COURSE / "COVERAGE.md").read_text()
CELLS = set(re.findall(r"\b(\d\d)/([a-z][a-z0-9-]*)", TEXT))
QUESTIONS = set(re.findall(r"\b(\d\d)\?([0-9a-z-]+)", TEXT))


def cells_of(chapter):
    (path,) = COURSE.glob(f"{chapter}_*.ipynb")
    return {cell["id"] for cell in json.loads(path.read_text())["cells"]}


def questions_of(chapter):
    questions = tomllib.loads((COURSE / "quiz" / f"{chapter}.toml").read_text())["question"]
    return {question["id"] for question in questions}


def test_every_cell_that_covers_a_section_exists():
    assert len(CELLS) > 60
    known = {chapter: cells_of(chapter) for chapter, _ in CELLS}
    assert [f"{c}/{name}" for c, name in sorted(CELLS) if name not in known[c]] == []


def test_every_question_that_covers_a_claim_exists():
    assert len(QUESTIONS) > 15
    known = {chapter: questions_of(chapter) for chapter, _ in QUESTIONS}
    assert [f"{c}?{name}" for c, name in sorted(QUESTIONS) if name not in known[c]] == []


def test_every_article_is_mapped_and_nothing_is_named_twice_in_the_list_of_claims():
    for section in ("| A 1.1", "| A 4", "| B core", "| B question 10", "| C 1", "| C 5"):
        assert section in TEXT
    claims = re.findall(r"^\| ([ABC]\d[^|]*) \|", TEXT, flags=re.MULTILINE)
    assert len(claims) == len(set(claims)) > 30
