"""Moments: one method of a class as an exercise, and whole classes, through child and copy."""

import linecache
import re

import pytest

from zerolab import lab, zero1
from zerolab.lab import evidence, exercise, own_copy, own_text, plug
from zerolab.lab.checking import CheckFailed
from zerolab.lab.evaluate import evaluate
from zerolab.lab.exercise import Exercise, source_of
from zerolab.lab.outcome import Outcome, Wrong
from zerolab.lab.sandbox import Sandbox

METHOD, CLASS = "zerolab.zero1:Zero1.publish", "zerolab.zero1:Zero1"
IMPORTS = "from zerolab import comm, ddp\nfrom zerolab.bucket import Bucket\n\n\n"


def check(answer):
    alone = evidence.train_tiny_alone(2)
    for rank in evidence.train_tiny(1, 2):
        if not rank.weights.allclose(alone, atol=evidence.TOLERANCE):
            raise Wrong("the weights differ", expected="plain torch's", observed="others")
    yield "stage 1 trains on it"


def of(target):
    return Exercise("4.4", target, 20, 2, check, ("a", "b"), ())


SOLUTION = IMPORTS + source_of(of(CLASS)) + "\n"
STARTER = SOLUTION[: SOLUTION.rindex("        return comm.all_gather")]
WRONG = STARTER + "        return 1 / 0\n"


def cell(source, name="Zero1"):
    file = f"<moment {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


@pytest.fixture(autouse=True)
def nothing_plugged_in(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    monkeypatch.setattr("zerolab.lab.checking.strict", lambda: False)
    plug.reset()
    yield
    plug.reset()


@pytest.mark.parametrize("target", [METHOD, CLASS])
def test_solution_starter_wrong_answer_and_cheat(target):
    found, reference = of(target), plug.running(target)
    assert evaluate(found, cell(SOLUTION)).outcome is Outcome.PASS
    starter = STARTER + '        raise NotImplementedError("Exercise: publish")\n'
    assert evaluate(found, cell(starter)).outcome is Outcome.UNATTEMPTED
    assert evaluate(found, cell(STARTER + "        return None\n")).outcome is Outcome.FAIL
    caller = "from zerolab.zero1 import Zero1 as Theirs\n" + STARTER
    caller += "        return Theirs.publish(self, bucket)\n"
    heir = "from zerolab import zero1\n\nclass Zero1(zero1.Zero1):\n    pass\n"
    for cheat in (caller, heir):
        report = evaluate(found, cell(cheat))
        assert report.outcome is Outcome.FAIL and "asked to write" in report.message
    assert plug.running(target) is reference


def test_solution_of_a_method_is_the_method_alone():
    text = source_of(of(METHOD))
    assert text.startswith("def publish(self") and text.rstrip().endswith(")")
    assert text.count("def ") == 1


def test_a_method_is_plugged_into_the_class_that_is_there():
    own = cell(SOLUTION)
    plug.plug(METHOD, own, verified=True)
    assert zero1.Zero1 is not own and zero1.Zero1.publish.__code__ is own.publish.__code__
    assert zero1.Zero1.reduce.__code__ is not own.reduce.__code__
    assert plug.whose(METHOD) == "your Zero1.publish" and own.publish.__code__ in plug.codes()
    with pytest.raises(plug.UsageError, match="class C has no method publish"):
        plug.plug(METHOD, type("C", (), {}), verified=True)
    plug.reset()
    assert zero1.Zero1.publish.__code__ is not own.publish.__code__


def test_a_class_goes_through_lab_check_in_the_child_and_names_the_line(monkeypatch, capsys):
    found = next(one for one in exercise.every() if one.target == CLASS)
    sandbox = Sandbox()
    monkeypatch.setattr("zerolab.lab.checking.shared", sandbox)
    try:
        lab.check(found.id, cell(SOLUTION))
        assert f"PASS  {found.id} Zero1" in capsys.readouterr().out
        assert plug.whose(CLASS) == "your Zero1"
        with pytest.raises(CheckFailed):
            lab.check(found.id, cell(WRONG))
    finally:
        sandbox.close()
    text = capsys.readouterr().out
    assert "ZeroDivisionError" in text and re.search(r"your line\s+\d+: return 1 / 0", text)
    assert plug.whose(CLASS) == "your Zero1 (unverified)"


def test_an_exception_in_a_method_names_the_learners_line():
    for target in (METHOD, CLASS):
        report = evaluate(of(target), cell(WRONG))
        assert report.outcome is Outcome.EXCEPTION
        assert linecache.getline(report.file, report.line).strip() == "return 1 / 0"


HELPER = "import math\n\n\ndef mine(x):\n    return math.floor(x)\n\n\n" + SOLUTION.replace(
    "        return comm.all_gather", "        mine(2.5)\n        return comm.all_gather"
)


@pytest.mark.parametrize("target", [METHOD, CLASS])
def test_copy_holds_the_class_or_the_method_and_what_it_uses(target, tmp_path):
    plug.plug(target, cell(HELPER), verified=True)
    copy = lab.my_zerolab()
    text = (copy / "zero1.py").read_text()
    assert text.startswith(f"# my_zerolab: yours: {target.partition(':')[2]}.\n")
    assert text.count("class Zero1") == text.count("def publish(") == text.count("mine(2.5)") == 1
    assert text.index("import math") < text.index("def mine(x)") < text.index("class Zero1")
    compile(text, "zero1.py", "exec")
    kept = own_copy.remembered(copy)[target]
    plug.reset()
    again = own_text.function_of(target, kept)
    plug.plug(target, again, verified=True)
    assert list(check(again)) == ["stage 1 trains on it"]
    assert own_text.text_of(target, plug.entries()[target]) == kept
