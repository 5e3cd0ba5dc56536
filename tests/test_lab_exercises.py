"""Every exercise: the starter fails, the solution passes, each mutant fails in its own way."""

import functools
import importlib.util
import linecache
import sys
import textwrap
import time
from pathlib import Path

import pytest

from zerolab.lab import evaluate, exercise, plug
from zerolab.lab.outcome import Outcome

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("course_builder", ROOT / "course/build.py")
builder = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = builder  # dataclasses look their module up
spec.loader.exec_module(builder)

EXERCISES = exercise.every()
MUTANTS = [(e, mutant) for e in EXERCISES for mutant in e.mutants]
IDS = [e.id for e in EXERCISES]


def function_of(source, name):
    """Return the function, or a method's class, as a notebook cell would define it."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__"}
    exec(compile(textwrap.dedent(source), file, "exec"), namespace)
    return namespace[name.partition(".")[0]]


def cell_of(found):
    """Return what the builder puts into the notebooks: the answer, and the stub to be filled."""
    return builder.find_exercise(found.target)


def starter(found):
    return function_of(cell_of(found).stub, found.name)


def solution(found):
    return function_of(cell_of(found).answer, found.name)


def is_class(found):
    return "." in found.name or isinstance(plug.reference(found.target), type)


def cost_of(found, answer):
    """Return the CPU seconds of one check."""
    start = time.process_time()
    evaluate.evaluate(found, answer)
    return time.process_time() - start


@functools.cache
def report_of(found, mutant):
    """Evaluate a mutant once; two tests look at it."""
    return evaluate.evaluate(found, mutant.function)


def messages_of(found):
    return [report_of(found, mutant).message for mutant in found.mutants]


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_starter_counts_as_not_tried(found):
    assert evaluate.evaluate(found, starter(found)).outcome is Outcome.UNATTEMPTED


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_solution_passes(found):
    answer = solution(found)
    report = evaluate.evaluate(found, answer)
    assert report.outcome is Outcome.PASS, report.message
    assert len(report.proven) >= 3 and report.message == ""


@pytest.mark.parametrize(("found", "mutant"), MUTANTS, ids=lambda x: getattr(x, "name", None))
def test_mutant_fails_and_is_recognised(found, mutant):
    report = report_of(found, mutant)
    assert report.outcome is Outcome.FAIL
    assert report.mutant == mutant.name
    assert report.misconception == mutant.misconception and len(mutant.misconception) > 30
    assert report.expected and report.observed and (report.call or is_class(found))


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_mutants_fail_with_messages_of_their_own(found):
    messages = messages_of(found)
    assert len(messages) >= 3 and len(set(messages)) == len(messages)


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_answers_that_do_no_work_fail(found):
    here = EXERCISES.index(found)
    others = [EXERCISES[here - 1], EXERCISES[here - 2]]
    cheats = [
        function_of(f"def {found.name}(*args):\n    return None\n", found.name),
        function_of(f"def {found.name}(*args):\n    return 0\n", found.name),
        *(solution(e) for e in others),
    ]
    for cheat in cheats:
        assert evaluate.evaluate(found, cheat).outcome in (Outcome.FAIL, Outcome.EXCEPTION)


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_calling_the_reference_is_noticed_under_any_name(found):
    module, _, name = found.target.partition(":")
    outer = name.partition(".")[0]
    if is_class(found):
        sources = [f"import {module} as m\nclass {outer}(m.{outer}):\n    pass\n"]
    else:
        sources = [
            f"from {module} import {name} as other\ndef {name}(*a, **k):\n    other(*a, **k)\n",
            f"import {module} as m\ndef {name}(*a, **k):\n    return m.{name}(*a, **k)\n",
        ]
    cheats = [function_of(source, name) for source in sources]
    for cheat in (*cheats, plug.running(found.target)):
        report = evaluate.evaluate(found, cheat)
        assert report.outcome is Outcome.FAIL and "asked to write" in report.message


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_the_reference_works_again_after_a_check(found):
    evaluate.evaluate(found, starter(found))
    assert plug.running(found.target) is plug.reference(found.target)
    answer = solution(found)
    assert evaluate.evaluate(found, answer).outcome is Outcome.PASS


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_check_costs_under_two_seconds(found):
    answer = solution(found)
    # A busy machine makes the same work dearer, never cheaper: one quiet measurement is enough.
    costs = (cost_of(found, answer) for _ in range(3))
    assert any(cost < 2 for cost in costs)


@pytest.mark.parametrize("found", EXERCISES, ids=IDS)
def test_hints_do_not_repeat_and_size_is_stated(found):
    assert 2 <= len(found.hints) <= 3 and len(set(found.hints)) == len(found.hints)
    assert found.minutes > 0 and 1 <= found.difficulty <= 4


def test_unknown_ids_suggest_the_nearest():
    for asked, meant in {
        "0.11": r"did you mean '0\.1' \(shard_bounds\)\?; chapter 00 has '0\.1', '0\.2'",
        "00.2": r"did you mean '0\.2'",
        "shard_bound": r"did you mean '0\.1'",
        "9.9": r"use one of '0\.1', '0\.2'",
        "": "use one of",
    }.items():
        with pytest.raises(exercise.UsageError, match=meant):
            exercise.find(asked)
    with pytest.raises(exercise.UsageError, match=r"exercise 0\.1 is unknown; did you mean '0\.1'"):
        exercise.find(0.1)
    with pytest.raises(exercise.UsageError, match="'77' is unknown"):
        exercise.in_chapter("77")


def test_a_mistake_in_another_chapters_file_stops_nobody(monkeypatch):
    monkeypatch.setattr(exercise, "every", lambda: 1 / 0)
    assert exercise.find("0.1").name == "shard_bounds"
