"""Questions: the schema, and marks that say why."""

import pytest

from zerolab import lab
from zerolab.errors import UsageError
from zerolab.lab import quiz, workspace

BANK = workspace.course_folder() / "quiz/00.toml"
QUESTIONS = quiz.read_bank(BANK)


def test_self_test_has_five_questions_with_feedback_for_every_choice():
    assert len(QUESTIONS) == 5 and len({q.id for q in QUESTIONS}) == 5
    for question in QUESTIONS:
        assert len(question.choices) >= 3
        assert len({choice.feedback for choice in question.choices}) == len(question.choices)


def test_right_answers_are_not_all_the_same_letter():
    assert len({question.key for question in QUESTIONS}) == 3


def test_questions_are_shown_without_their_answers():
    shown = lab.self_test()
    text, html = repr(shown), shown._repr_html_()
    for question in QUESTIONS:
        assert question.text in text
        for choice in question.choices:
            assert choice.text in text
            assert choice.feedback not in text and choice.feedback not in html


def test_marks_give_the_reason_for_each_answer():
    keys = [question.key for question in QUESTIONS]
    marks = lab.self_test(*keys)
    assert marks.num_right == 5 and "5 of 5 right" in repr(marks)
    marks = lab.self_test("?", "a", *keys[2:])
    assert marks.num_right == 3
    assert "Write one of a, b, c" in repr(marks)
    assert QUESTIONS[1].choices[0].feedback in repr(marks)
    assert "3 of 5 right" in marks._repr_html_()


def test_code_in_a_question_runs_and_prints_the_key():
    (question,) = [q for q in QUESTIONS if q.code]
    said = []
    import torch

    exec(question.code, {"torch": torch, "print": said.append})
    right = next(choice for choice in question.choices if choice.correct)
    assert str(said[0]) == right.text


def test_grad_accumulates_as_the_key_says():
    import torch

    weight = torch.ones(1, requires_grad=True)
    for factor in (2.0, 5.0):
        (weight * factor).backward()
    assert weight.grad.item() == 7.0  # the sum


@pytest.mark.parametrize(
    ("answers", "message"), [(("a",), "1 answers to 5"), (("a", "b", "x", "a", "a"), "answer 3")]
)
def test_bad_answers_are_refused(answers, message):
    with pytest.raises(UsageError, match=message):
        lab.self_test(*answers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "holds no"),
        ('[[question]]\nid = "q"\nkind = "single"\ntext = "t"\n', "lacks 'choices'"),
        ('[[question]]\nid = "q"\nkind = "essay"\ntext = "t"\nchoices = []\n', "kind 'essay'"),
        ('[[question]]\nid = "q"\nkind = "single"\ntext = "t"\nchoices = []\n', "exactly one"),
    ],
)
def test_a_damaged_bank_says_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "00.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        quiz.read_bank(path)
