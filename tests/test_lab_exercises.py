"""Every exercise: the starter fails, the solution passes, each mutant fails in its own way."""

import textwrap
import time

import pytest

from zerolab.lab import evaluate, exercise, plug
from zerolab.lab.outcome import Outcome

EXERCISES = exercise.every()
MUTANTS = [(e, mutant) for e in EXERCISES for mutant in e.mutants]
IDS = [e.id for e in EXERCISES]


def function_of(source, name):
    """Return the function as a notebook cell would define it."""
    namespace = {"__name__": "__main__"}
    exec(compile(textwrap.dedent(source), "a cell", "exec"), namespace)
    return namespace[name]


def starter(found):
    return function_of(
        f"def {found.name}(*args, **kwargs):\n"
        f"    raise NotImplementedError('Exercise: {found.name}')\n",
        found.name,
    )


def messages_of(found):
    return [evaluate.evaluate(found, m.function).message for m in found.mutants]


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_starter_counts_as_not_tried(found):
    assert evaluate.evaluate(found, starter(found)).outcome is Outcome.UNATTEMPTED


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_solution_passes(found):
    answer = function_of(exercise.source_of(found), found.name)
    report = evaluate.evaluate(found, answer)
    assert report.outcome is Outcome.PASS, report.message
    assert len(report.proven) >= 3 and report.message == ""


@pytest.mark.parametrize(("found", "mutant"), MUTANTS, ids=lambda x: getattr(x, "name", None))
def test_mutant_fails_and_is_recognised(found, mutant):
    report = evaluate.evaluate(found, mutant.function)
    assert report.outcome is Outcome.FAIL
    assert report.mutant == mutant.name
    assert report.misconception == mutant.misconception and len(mutant.misconception) > 30
    assert report.expected and report.observed and report.call


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_mutants_fail_with_messages_of_their_own(found):
    messages = messages_of(found)
    assert len(messages) >= 3 and len(set(messages)) == len(messages)


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_answers_that_do_no_work_fail(found):
    others = [e for e in EXERCISES if e is not found]
    cheats = [
        function_of(f"def {found.name}(*args):\n    return None\n", found.name),
        function_of(f"def {found.name}(*args):\n    return 0\n", found.name),
        *(function_of(exercise.source_of(e), e.name) for e in others),
    ]
    for cheat in cheats:
        assert evaluate.evaluate(found, cheat).outcome in (Outcome.FAIL, Outcome.EXCEPTION)


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_calling_the_reference_is_noticed_under_any_name(found):
    module, name = found.target.split(":")
    alias = function_of(
        f"from {module} import {name} as other\ndef {name}(*args):\n    return other(*args)\n", name
    )
    attribute = function_of(
        f"import {module}\ndef {name}(*args):\n    return {module}.{name}(*args)\n", name
    )
    for cheat in (alias, plug.running(found.target)):
        report = evaluate.evaluate(found, cheat)
        assert report.outcome is Outcome.FAIL and "asked to write" in report.message
    assert evaluate.evaluate(found, attribute).outcome is not Outcome.PASS


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_the_reference_works_again_after_a_check(found):
    evaluate.evaluate(found, starter(found))
    assert plug.running(found.target) is plug.reference(found.target)
    answer = function_of(exercise.source_of(found), found.name)
    assert evaluate.evaluate(found, answer).outcome is Outcome.PASS


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_check_costs_under_two_seconds(found):
    answer = function_of(exercise.source_of(found), found.name)
    start = time.process_time()
    evaluate.evaluate(found, answer)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_hints_do_not_repeat_and_size_is_stated(found):
    assert 2 <= len(found.hints) <= 3 and len(set(found.hints)) == len(found.hints)
    assert found.minutes > 0 and 1 <= found.difficulty <= 4


def test_unknown_ids_name_those_that_exist():
    with pytest.raises(exercise.UsageError, match=r"'0\.1'"):
        exercise.find("9.9")
    with pytest.raises(exercise.UsageError, match="'77' is unknown"):
        exercise.in_chapter("77")
