"""Quizzes: schema, keys that are computed, marks that say why, the dialogue in a terminal."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from zerolab import cli, lab
from zerolab.errors import UsageError
from zerolab.lab import (
    progress,
    quiz_bank,
    quiz_expression,
    quiz_grade,
    quiz_page,
    quiz_session,
    quiz_units,
    workspace,
)

BANKS = {
    path.stem: quiz_bank.read_bank(path)
    for path in sorted((workspace.course_folder() / "quiz").glob("*.toml"))
}
QUESTIONS = [question for bank in BANKS.values() for question in bank.questions]
BY_ID = {question.id: question for question in QUESTIONS}
by_id = {"argvalues": QUESTIONS, "ids": [question.id for question in QUESTIONS]}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A place without a workspace."""
    monkeypatch.setenv("ZEROLAB_WORKSPACE", "")  # a command may set it: undone afterwards
    monkeypatch.chdir(tmp_path)
    return tmp_path


def numeric():
    return [question for question in QUESTIONS if question.kind == "numeric"]


# The banks.


def test_chapter_0_asks_what_is_assumed_and_what_it_taught():
    parts = Counter(question.part for question in BANKS["00"].questions)
    assert parts["self-test"] == 5 and 4 <= parts[""] <= 6


def test_chapter_1_has_questions_of_every_difficulty_and_kind():
    questions = BANKS["01"].questions
    assert 8 <= len(questions) <= 12
    assert {question.difficulty for question in questions} == set(quiz_bank.LEVELS)
    assert {question.kind for question in questions} == set(quiz_bank.KINDS)
    levels = [quiz_bank.LEVELS.index(question.difficulty) for question in questions]
    assert levels == sorted(levels), "from easy to extreme"


@pytest.mark.parametrize("question", **by_id)
def test_every_distractor_has_a_misconception_and_feedback_of_its_own(question):
    wrong = [choice for choice in question.choices if not choice.correct]
    wrong += [*question.traps, *question.items[1:]]
    assert wrong or question.kind == "short"
    assert all(one.misconception and one.feedback for one in wrong)
    for key in ("misconception", "feedback"):
        values = [getattr(one, key) for one in wrong]
        assert len(set(values)) == len(values)
    assert question.source and question.why


@pytest.mark.parametrize("question", numeric(), ids=lambda question: question.id)
def test_numeric_keys_are_computed_and_apart_from_their_traps(question):
    key = quiz_grade.key_of(question)
    assert key > 0 and quiz_expression.calls(question.key)
    typed = [quiz_grade.in_unit(trap.value, question.unit) for trap in question.traps]
    for first, second in itertools.combinations([key, *typed], 2):
        assert not quiz_grade.close(first, second, 2 * question.tolerance)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("00-padding", 7),
        ("01-bytes-a-parameter", 2 + 2 + 4 + 8),
        ("01-fine-tune-7b", 16 * 7),
        ("01-stage-1-of-64", 4 * 7.5 + 12 * 7.5 / 64),
        ("01-saving-of-stage-1", 16 / (4 + 12 / 8)),
        ("01-activations", 32 * (34 * 2048 * 4096 + 5 * 32 * 2048**2) / 1e9),
        ("01-fewest-gpus-for-100b", 16 * 100 / 80),
        ("02-line-of-the-root", 7),
        ("02-ring-sends", 14 * 2 * 7 / 8),
        ("02-ring-or-tree", 126 * (5e-6 + 4 / 64 / 25e9) / (12 * (5e-6 + 4 / 25e9))),
        ("03-recall-sixteen", 4 + 4 + 8),
        ("03-recall-sent", 2 * 7 / 8 * 4),
        ("03-volume", 2 * 63 / 64 * 7.5 * 2),
        ("03-accumulation", 8 * 2 * 10**8),
        ("04-recall-sixteen", 4 + 8),
        ("04-traffic", 1 + 1),
        ("04-padding", 3 * 4),
        ("04-saving-on-four", 16 / (4 + 12 / 4)),
        ("05-recall-stage-1", 2 + 2 + 12 / 4),
        ("05-saved", 2 * 7 * (1 - 1 / 8)),
        ("05-accumulation", 8 + 1),
        ("05-bucket-elements", 2 * 0.5 * 2),
        ("06-recall-stage-2", 2),
        ("06-traffic-65b", 3 * 65 * 2),
        ("06-accumulation", 3 * 8 / 2),
        ("06-fits", 16 * 7.5 / 64 + 2 * 2 * 7.5 / 36),
        ("07-stage-2-in-16-bits", 2 + 14 / 4),
        ("07-master-share", 4 * 7 / 8),
    ],
)
def test_numeric_keys_match_the_arithmetic_by_hand(name, key):
    assert quiz_grade.key_of(BY_ID[name]) == pytest.approx(key, rel=1e-9)


def test_every_numeric_key_has_its_arithmetic_above():
    done = test_numeric_keys_match_the_arithmetic_by_hand.pytestmark[0].args[1]
    assert {name for name, _ in done} == {question.id for question in numeric()}


def test_the_bug_of_chapter_1_is_the_line_that_is_named():
    question = BY_ID["01-estimator-bug"]
    (right,) = question.right
    lines = question.code.splitlines()

    def estimate(text, stage):
        names = {}
        exec("\n".join(text), names)
        return names["model_state_gb"](7500 * 10**6, 64, stage)

    paper = [120.0, 31.40625, 16.640625, 1.875]
    assert [estimate(lines, stage) for stage in (0, 2, 3)] == [paper[0], *paper[2:]]
    assert estimate(lines, 1) == paper[2]
    mended = list(lines)
    mended[question.choices[right].line - 1] = "    if stage >= 2:"
    assert [estimate(mended, stage) for stage in range(4)] == paper


def test_the_bug_of_chapter_0_loses_elements_and_its_mending_does_not():
    from zerolab import flat

    question = BY_ID["00-shard-bounds-bug"]
    names = {}
    exec(question.code, names)
    for numel, same in ((12, True), (10, False)):
        found = [names["shard_bounds"](numel, 4, rank) for rank in range(4)]
        assert (found == [flat.shard_bounds(numel, 4, rank) for rank in range(4)]) is same
    assert question.choices[question.right[0]].line == 2
    exec(question.code.replace("numel // world_size", "-(-numel // world_size)"), names)
    assert names["shard_bounds"](10, 4, 3) == flat.shard_bounds(10, 4, 3)


def test_code_in_the_self_test_prints_the_key():
    import torch

    question, said = BY_ID["00-storage"], []
    exec(question.code, {"torch": torch, "print": said.append})
    assert str(said[0]) == question.choices[question.right[0]].text


def test_facts_in_feedback_match_the_closed_forms():
    from zerolab.sim import estimate

    big = [estimate.model_state_bytes(7500 * 10**6, 64, stage) / 1e9 for stage in range(4)]
    assert "16.6 GB" in BY_ID["01-stage-1-of-64"].why and round(big[2], 1) == 16.6
    assert "1.88 GB" in BY_ID["01-stage-1-of-64"].why and f"{big[3]:.3g}" == "1.88"
    gpu, host = estimate.offload_states(100 * 10**9, 8, 3)
    assert sum(gpu.values()) == 25e9 and 8 * sum(host.values()) == 1.4e12
    assert 8 * (host["master"] + host["optimizer"]) == 1.2e12
    moved = [estimate.elements_moved(stage, 1) for stage in range(4)]
    assert moved == [2, 2, 2, 3], "00-stages-true"
    assert sum(estimate.bytes_per_param("fp32").values()) == 16, "01-lowers-model-states"


# The schema.

GOOD = """chapter = "07"
title = "t"
[[question]]
id = "07-q"
kind = "single"
difficulty = "easy"
source = "s"
text = "t"
why = "w"
choices = [
  { text = "a", correct = true, feedback = "f" },
  { text = "b", misconception = "m", feedback = "g" },
]
"""
NUMERIC = GOOD[: GOOD.index("choices")].replace("single", "numeric") + (
    'key = "model_state_bytes(1)"\nunit = "B"\ntolerance = 0.01\n'
    'traps = [{ value = "2", misconception = "m", feedback = "f" }]\n'
)


def bank_of(home, text):
    path = home / "07.toml"
    path.write_text(text)
    return quiz_bank.read_bank(path)


def test_a_sound_bank_is_read(home):
    assert bank_of(home, GOOD).questions[0].right == (0,)
    assert bank_of(home, NUMERIC).questions[0].key == "model_state_bytes(1)"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('title = "t"', 'title = "t', "07.toml: is no TOML"),
        ('title = "t"', 'titel = "t"', "07.toml: unknown key 'titel'; did you mean 'title'?"),
        ('"07"', '"08"', "chapter is '08'; it must be '07'"),
        ("difficulty", "dificulty", "question 07-q: unknown key 'dificulty'; did you mean 'diff"),
        ('"easy"', '"eazy"', "question 07-q: difficulty 'eazy' is unknown; did you mean 'easy'?"),
        ('"single"', '"essay"', "kind 'essay' is unknown; known: single"),
        ('"single"', '"singel"', "kind 'singel' is unknown; did you mean 'single'?"),
        ('why = "w"\n', "", "question 07-q: lacks the key 'why'"),
        ('kind = "single"\n', "", "lacks the key 'kind'"),
        ('why = "w"', "why = 3", "'why' is 3; write a string"),
        ('why = "w"', 'why = ""', "'why' is empty"),
        ('feedback = "g"', 'feedbak = "g"', "07-q, choice 2: unknown key 'feedbak'; did you mean"),
        (', feedback = "g"', "", "07-q, choice 2: lacks the key 'feedback'"),
        ('misconception = "m", ', "", "choice 2: lacks the key 'misconception'"),
        ('"m"', '"Two Words"', "misconception 'Two Words' is no name"),
        ("correct = true, ", 'misconception = "n", ', "one has correct = true"),
        ('misconception = "m"', "correct = true", "several correct choices"),
        ('"07-q"', '"08-q"', "id '08-q' must look like '07-"),
        ("[[question]]", "question = []\n[[other]]", "07.toml"),
    ],
)
def test_a_damaged_bank_is_told_with_file_question_and_key(home, old, new, says):
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        bank_of(home, GOOD.replace(old, new))
    assert says in str(caught.value)
    assert str(caught.value).startswith("07.toml") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"model_state_bytes(1)"', '"16"', "key is a typed number"),
        ('"model_state_bytes(1)"', '"state_byts(1)"', "'state_byts'"),
        ('"2"', '"2 +"', "is no Python"),
        ('"B"', '"Bytes"', "unit 'Bytes' is unknown"),
        ("0.01", "0.9", "tolerance 0.9"),
        ("0.01", "true", "'tolerance' is True; write a number"),
        ("0.01", '"1 %"', "write a number"),
        ("value", "vlaue", "trap 1: unknown key 'vlaue'; did you mean 'value'?"),
    ],
)
def test_a_damaged_numeric_question_is_told(home, old, new, says):
    assert old in NUMERIC
    with pytest.raises(UsageError) as caught:
        bank_of(home, NUMERIC.replace(old, new))
    assert says in str(caught.value) and "question 07-q" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "rest", "says"),
    [
        ("multiple", 'choices = [{ text = "a", correct = true, feedback = "f" }, '
         '{ text = "b", correct = true, feedback = "g" }]', "no wrong choice"),
        ("bug", 'code = "a\\n\\nb"\nchoices = [{ line = 2, correct = true, feedback = "f" }, '
         '{ line = 1, misconception = "m", feedback = "g" }]', "line 2 of the code is empty"),
        ("bug", 'code = "a"\nchoices = [{ line = 9, correct = true, feedback = "f" }, '
         '{ line = 1, misconception = "m", feedback = "g" }]', "line 9"),
        ("ordering", 'items = [{ text = "a" }, { text = "b", misconception = "m", '
         'feedback = "f" }]', "three items"),
        ("ordering", 'items = [{ text = "a" }, { text = "b" }, { text = "c" }]', "item 2: lacks"),
        ("short", 'answer = "a"\nrubric = [{ point = "p" }]', "point 1: lacks the key 'words'"),
        ("short", 'answer = "a"\nrubric = ["p"]', "point 1: is 'p'"),
    ],
)  # fmt: skip
def test_a_damaged_question_of_another_kind_is_told(home, kind, rest, says):
    text = GOOD[: GOOD.index("choices")].replace("single", kind) + rest + "\n"
    with pytest.raises(UsageError, match=says):
        bank_of(home, text)


def test_an_id_twice_and_a_file_that_is_no_text_are_told(home):
    with pytest.raises(UsageError, match="'07-q' is used twice"):
        bank_of(home, GOOD + GOOD[GOOD.index("[[") :])
    (home / "07.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no TOML"):
        quiz_bank.read_bank(home / "07.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        quiz_bank.read_bank(home / "08.toml")


# Expressions and units.


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4) // 5 - -1 / 2", 2.5),
        ("model_state_bytes(10**9, 4, stage=3) / 1e9", 4),
        ("bytes_per_param('fp32')['optimizer']", 8),
        ("32 * paper_activation_bytes(8, 1, 4, 2, checkpointed=True)", 32 * 64),
    ],
)
def test_expressions_are_evaluated(expression, value):
    assert quiz_expression.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "open('x')",
        "(1).__class__",
        "model_state_bytes.__globals__",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "(lambda: 1)()",
        "model_state_bytes",
        "model_state_bytes(**{})",
        "model_state_bytes(*[1])",
        "f'{1}'",
        "1 if 1 else 2",
        "x := 1",
        "1 < 2",
        "9 ** 9 ** 9",
        "'a' * 1000000000",
        "bytes_per_param()['param'] * 'a'",
        "bytes_per_param()",
        "model_state_bytes(0)",
        "model_state_bytes(1, stage=9)",
        "1 / 0",
        "1e999",
        "True",
        "(" * 300,
        "1" * 500,
        "",
        "import os",
        "_bytes(1)",
        "dataclass()",
    ],
)
def test_what_is_no_arithmetic_is_refused(expression):
    with pytest.raises(UsageError):
        quiz_expression.evaluate(expression)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("31.4", "GB", 31.4),
        ("31.4 GB", "GB", 31.4),
        ("31.4gb", "GB", 31.4),
        ("31400 MB", "GB", 31.4),
        ("31.4e9 B", "GB", 31.4),
        ("1 GiB", "GB", 1.073741824),
        ("1,234,567", "elements", 1234567),
        ("1_234", "elements", 1234),
        (" 7 elements ", "elements", 7),
        ("1500 ms", "s", 1.5),
        (".5", "s", 0.5),
        ("-2", "B", -2),
    ],
)
def test_quantities_are_read_in_the_unit_of_the_question(text, unit, value):
    assert quiz_units.parse(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit", "says"),
    [
        ("31,4", "GB", "is no number"),
        ("about 30", "GB", "is no number"),
        ("", "GB", "is no number"),
        ("1e", "GB", "does not fit"),
        ("3 s", "GB", "unit 's' does not fit; answer in GB"),
        ("3 Gb", "GB", "b is a bit"),
        ("3 GB", "elements", "does not fit"),
        ("nan", "GB", "is no number"),
    ],
)
def test_what_is_no_quantity_is_refused_with_the_remedy(text, unit, says):
    with pytest.raises(UsageError, match=says):
        quiz_units.parse(text, unit)


# Marks.


def test_a_trap_is_answered_with_its_feedback_and_no_key():
    for question in numeric():
        for trap in question.traps:
            value = quiz_grade.in_unit(trap.value, question.unit)
            verdict = quiz_grade.grade(question, f"{value!r}")
            assert verdict.outcome == "wrong" and verdict.notes[0].text == trap.feedback
            assert verdict.misconceptions == (trap.misconception,)
            assert not verdict.answer and not verdict.why


def test_tolerance_is_relative_and_ends_where_it_says():
    question = BY_ID["01-stage-1-of-64"]
    key = quiz_grade.key_of(question)
    assert quiz_grade.grade(question, str(key * 1.009)).outcome == "right"
    assert quiz_grade.grade(question, str(key * 1.011)).outcome == "wrong"
    assert quiz_grade.grade(question, "31.4").outcome == "right"
    exact = BY_ID["00-padding"]
    assert quiz_grade.grade(exact, "7").outcome == "right"
    assert quiz_grade.grade(exact, "7.001").outcome == "wrong"


def test_the_number_in_gib_is_recognised():
    verdict = quiz_grade.grade(BY_ID["01-fine-tune-7b"], "104.3")
    assert "right in GiB" in verdict.notes[0].text
    assert verdict.misconceptions == ("mixes-gb-and-gib",)
    assert quiz_grade.grade(BY_ID["01-fine-tune-7b"], "104.3 GiB").outcome == "right"


def test_another_number_says_the_direction_and_a_factor_of_ten():
    note = quiz_grade.grade(BY_ID["01-fine-tune-7b"], "100").notes[0].text
    assert note == "Too small."
    assert "check the unit" in quiz_grade.grade(BY_ID["01-fine-tune-7b"], "99999").notes[0].text


def test_every_set_of_choices_is_marked_right_only_when_it_is():
    for question in QUESTIONS:
        if question.kind != "multiple":
            continue
        places = range(len(question.choices))
        for size in places:
            for chosen in itertools.combinations(places, size + 1):
                verdict = quiz_grade.grade(question, list(chosen))
                assert (verdict.outcome == "right") is (chosen == question.right)
                told = {note.position for note in verdict.notes if note.position >= 0}
                assert told <= set(chosen), "nothing is said about what was not chosen"
                if not set(chosen) - set(question.right):
                    assert verdict.outcome in ("right", "partly")


def test_every_wrong_order_is_told_by_the_first_step_that_comes_too_early():
    for question in QUESTIONS:
        if question.kind != "ordering":
            continue
        right = tuple(range(len(question.items)))
        for order in itertools.permutations(right):
            verdict = quiz_grade.grade(question, list(order))
            assert (verdict.outcome == "right") is (order == right)
            if order != right:
                (note,) = verdict.notes
                at = order.index(note.position)
                assert order.index(note.position - 1) > at
                assert note.text == question.items[note.position].feedback


def test_a_short_answer_is_compared_with_the_rubric():
    question = BY_ID["01-100b-on-8"]
    assert quiz_grade.grade(question, "no").outcome == "refused"
    verdict = quiz_grade.grade(question, "It needs 200 GB a GPU, so it must OFFLOAD to the host")
    assert verdict.outcome == "judge" and verdict.suggested == (0, 1)
    assert quiz_grade.grade(question, question.answer).suggested == (0, 1, 2, 3, 4)
    part = quiz_grade.grade(question, [0, 1])
    assert part.outcome == "partly" and part.score == pytest.approx(0.4)
    assert len(part.notes) == 3
    assert quiz_grade.grade(question, [0, 1, 2, 3, 4]).outcome == "right"


# Sessions.


def right_line(asked):
    """The right answer as it is typed in a terminal."""
    question = asked.question
    if question.kind == "numeric":
        return repr(quiz_grade.key_of(question))
    if question.kind == "short":
        points = " ".join(str(n) for n in range(1, len(question.rubric) + 1))
        return f"{question.answer}\n{points}"
    if question.kind == "bug":
        return str(question.choices[question.right[0]].line)
    places = range(len(question.items)) if question.items else question.right
    return " ".join("abcdefgh"[asked.order.index(place)] for place in places)


def test_the_same_seed_gives_the_same_order_and_another_one_another():
    def order(seed):
        asked = lab.quiz("01", shuffle=seed).asked
        return [(one.question.id, one.order) for one in asked]

    assert order(1) == order(1) != order(2)
    assert sorted(name for name, _ in order(1)) == sorted(q.id for q in BANKS["01"].questions)
    plain = [one.question.id for one in lab.quiz("01").asked]
    assert plain == [question.id for question in BANKS["01"].questions]


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_shuffled_choices_are_marked_as_what_they_are(seed):
    questions = lab.quiz("01", shuffle=seed)
    for number, asked in enumerate(questions.asked):
        for shown, place in enumerate(asked.order):
            if asked.question.kind != "single":
                continue
            choice = asked.question.choices[place]
            assert questions.public()[number]["entries"][shown] == choice.text
            verdict = questions.mark(number, shown)
            assert (verdict["outcome"] == "right") is choice.correct
            assert verdict["notes"] == [{"at": shown, "text": choice.feedback}]


def test_quizzes_can_be_cut_down_and_say_what_there_is():
    assert {a.question.difficulty for a in lab.quiz("01", difficulty="hard").asked} == {"hard"}
    assert len(lab.quiz("0", part="self-test").asked) == 5
    with pytest.raises(UsageError, match="difficulty 'extreme' has no questions in chapter 00"):
        lab.quiz("00", difficulty="extreme")
    with pytest.raises(UsageError, match="chapter '99' has no questions; choose one of 00, 01"):
        lab.quiz("99")
    with pytest.raises(UsageError, match="question 77 does not exist"):
        lab.quiz("00").mark(77, 0)


def test_first_tries_and_given_up_questions_are_counted():
    questions = lab.quiz("00", part="self-test")
    assert questions.mark(0, 0)["outcome"] == "wrong"
    assert questions.mark(0, 1)["outcome"] == "right"
    assert questions.mark(1, 2)["outcome"] == "right"
    questions.reveal(2)
    assert questions.mark(2, 0)["outcome"] == "right"
    assert (questions.right, questions.first_try, questions.answered) == (3, 1, 3)


def test_open_questions_are_those_not_right_yet(home, monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(home))
    questions = lab.quiz("00")
    questions.mark(0, 1)
    questions.mark(1, 0)
    left = [asked.question.id for asked in lab.quiz("00", only_open=True).asked]
    assert left == [q.id for q in BANKS["00"].questions[1:]]
    assert lab.quiz("00").public()[0]["before"] and not lab.quiz("00").public()[1]["before"]


def test_text_and_html_show_questions_and_no_answers():
    for chapter in BANKS:
        questions = lab.quiz(chapter)
        for told in (repr(questions), questions._repr_html_()):
            for asked in questions.asked:
                assert asked.question.why not in told
                for choice in asked.question.choices:
                    assert choice.feedback not in told


# The self-test in a cell.


def test_self_test_gives_the_reason_for_each_answer():
    keys = ["abc"[q.right[0]] for q in BANKS["00"].questions if q.part]
    assert len(set(keys)) == 3, "not always the same letter"
    assert lab.self_test(*keys).num_right == 5 and "5 of 5 right" in repr(lab.self_test(*keys))
    marks = lab.self_test("?", "a", *keys[2:])
    assert marks.num_right == 3 and "in place of the question mark" in repr(marks)
    assert BANKS["00"].questions[1].choices[0].feedback in repr(marks)
    assert "3 of 5 right" in marks._repr_html_()
    assert BANKS["00"].questions[0].text in repr(lab.self_test())


def test_how_to_answer_is_said_once_where_it_is_always_the_same():
    told = lab.self_test()
    assert repr(told).startswith("Choose one.\n") and repr(told).count("Choose one.") == 1
    assert quiz_page.to_html(told.public()).count("Choose one.") == 1
    mixed = lab.quiz("00")
    ways = [public["how"] for public in mixed.public()]
    assert len(set(ways)) > 1
    assert all(repr(mixed).count(how) >= ways.count(how) for how in ways)


@pytest.mark.parametrize(
    ("answers", "message"), [(("a",), "1 answers to 5"), (("a", "b", "x", "a", "a"), "answer 3")]
)
def test_bad_answers_to_the_self_test_are_refused(answers, message):
    with pytest.raises(UsageError, match=message):
        lab.self_test(*answers)


# The terminal.


def typed(monkeypatch, capsys, lines, *args):
    """Run `zerolab quiz` on lines of stdin: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code = cli.run(["quiz", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("chapter", list(BANKS))
@pytest.mark.parametrize("seed", [None, 3])
def test_right_answers_in_a_pipe(monkeypatch, capsys, chapter, seed):
    shuffle = [] if seed is None else ["--shuffle", str(seed)]
    lines = "\n".join(right_line(asked) for asked in lab.quiz(chapter, shuffle=seed).asked)
    code, out, err = typed(monkeypatch, capsys, lines, chapter, "--json", *shuffle)
    told = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert told["right"] == told["first_try"] == told["answered"] == len(told["questions"])
    assert "Not yet" not in err and f"{told['right']} of {told['right']} right" in err


def test_wrong_answers_are_explained_and_asked_again(monkeypatch, capsys):
    lines = "c\nzz\nb\n?\n\n"
    code, out, err = typed(monkeypatch, capsys, lines, "00", "--part", "self-test")
    assert (code, err) == (0, "")
    assert "zero_grad throws away" in out and "'z' is not on offer; give a, b, c" in out
    assert "1 of 5 right, 0 at the first try, 3 not answered." in " ".join(out.split())
    assert "nothing is saved" in out
    assert "the sum of both gradients" in out.split("The answer:")[1]


def test_a_wrong_order_line_and_number_are_explained(monkeypatch, capsys):
    ordering = next(a for a in lab.quiz("01", difficulty="hard").asked if a.question.items)
    first_last = " ".join(reversed(right_line(ordering).split()))
    lines = f"one layer\n0.956\n\n{first_last}\n\n2\n\n"
    _, out, _ = typed(monkeypatch, capsys, lines, "01", "--difficulty", "hard")
    text = " ".join(out.split())
    assert "is no number; write it like 31.4" in text
    assert "That is one layer" in text
    assert ordering.question.items[1].feedback in text
    assert "2 + 2 + 12 = 16 bytes is right" in text


def test_the_terminal_saves_into_the_workspace_it_finds(monkeypatch, capsys, home):
    (home / "workspace").mkdir()
    code, out, _ = typed(monkeypatch, capsys, "b\n", "00")
    log = home / "workspace" / progress.FILE
    (entry,) = progress.read(log)
    assert code == 0 and "Saved." in out
    assert entry["question"] == "00-loop-order" and entry["outcome"] == "right"
    assert entry["answer"] == 1 and entry["tries"] == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["99"], "choose one of 00, 01"),
        (["00", "--difficulty", "hrad"], "'hrad'"),
        (["00", "--workspace", "no/such"], "no/such"),
        (["00", "--shuffle", "x"], "--shuffle"),
    ],
)
def test_bad_usage_is_one_line(monkeypatch, capsys, args, says):
    code, out, err = typed(monkeypatch, capsys, "", *args)
    assert (code, out) == (2, "") and err.count("\n") == 1 and says in err


def test_ctrl_c_keeps_what_was_answered(home):
    (home / "workspace").mkdir()
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'widgets'}"}
    child = subprocess.Popen(
        [sys.executable, "-m", "zerolab", "quiz", "00"], cwd=home, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    child.stdin.write("b\na\n")
    child.stdin.flush()
    log = home / "workspace" / progress.FILE
    deadline = time.monotonic() + 90
    while not (log.exists() and len(log.read_text().splitlines()) == 2):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "Traceback" not in err
    assert "1 of 11 right, 1 at the first try, 9 not answered. Saved." in " ".join(out.split())
    assert [entry["outcome"] for entry in progress.read(log)] == ["right", "wrong"]
    assert quiz_session.bank_path("0").name == "00.toml"
