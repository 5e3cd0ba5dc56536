"""Exercises that are classes: rebound, checked, plugged in where the engine looks them up."""

import linecache

import pytest

from zerolab import zero1
from zerolab.lab import evidence, own_copy, own_text, plug
from zerolab.lab.evaluate import evaluate
from zerolab.lab.exercise import Exercise, source_of
from zerolab.lab.outcome import Outcome, Wrong

TARGET = "zerolab.zero1:Zero1"
IMPORTS = "from zerolab import comm, ddp\nfrom zerolab.bucket import Bucket\n\n\n"


def check(answer):
    alone = evidence.train_tiny_alone(2)
    for rank in evidence.train_tiny(1, 2):
        if not rank.weights.allclose(alone, atol=evidence.TOLERANCE):
            raise Wrong("the weights differ", expected="plain torch's", observed="others")
    yield "stage 1 trains on it"


FOUND = Exercise("4.4", TARGET, 20, 2, check, ("a", "b"), ())
SOLUTION = IMPORTS + source_of(FOUND)


def cell(source):
    file = f"<moment {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), namespace)
    return namespace["Zero1"]


@pytest.fixture(autouse=True)
def nothing_plugged_in():
    plug.reset()
    yield
    plug.reset()


def test_solution_passes_and_the_reference_is_whole_afterwards():
    reference = zero1.Zero1
    report = evaluate(FOUND, cell(SOLUTION))
    assert report.outcome is Outcome.PASS, report.message
    assert report.proven == ["stage 1 trains on it"] and zero1.Zero1 is reference
    assert list(check(reference)) == report.proven


def test_starter_is_not_tried_and_a_wrong_class_fails():
    body = SOLUTION[: SOLUTION.rindex("        return comm.all_gather")]
    starter = body + '        raise NotImplementedError("Exercise: publish")\n'
    assert evaluate(FOUND, cell(starter)).outcome is Outcome.UNATTEMPTED
    assert evaluate(FOUND, cell(body + "        return None\n")).outcome is Outcome.FAIL


def test_inheriting_or_calling_the_reference_is_noticed():
    heir = "from zerolab import zero1\n\nclass Zero1(zero1.Zero1):\n    pass\n"
    body = SOLUTION[: SOLUTION.rindex("        return comm.all_gather")]
    caller = "from zerolab.zero1 import Zero1 as Theirs\n" + body
    caller += "        return Theirs.publish(self, bucket)\n"
    for source in (heir, caller):
        report = evaluate(FOUND, cell(source))
        assert report.outcome is Outcome.FAIL and "asked to write" in report.message


def test_plugged_class_is_the_engines_and_sees_the_module_before_the_notebook():
    own = cell(SOLUTION + "\ncomm = 3  # a scratch variable of the notebook\n")
    plug.plug(TARGET, own, verified=True)
    assert zero1.Zero1 is not own and zero1.Zero1.__name__ == "Zero1"
    assert evidence.train_tiny(1, 2)[0].moved == {"reduce_scatter": 26, "all_gather": 26}
    assert plug.whose(TARGET) == "your Zero1" and zero1.Zero1.reduce.__code__ in plug.codes()
    plug.reset()
    assert zero1.Zero1 is plug.reference(TARGET)


def test_super_properties_and_static_methods_survive_rebinding():
    class Base:
        def name(self):
            return "base"

    class Own(Base):
        def name(self):
            return super().name() + str(self.twice) + self.plain(1)

        @property
        def twice(self):
            return 2

        @staticmethod
        def plain(number):
            return str(number)

    again = plug.rebind(plug.rebind(Own, zero1), zero1)
    assert again is not Own and again().name() == Own().name() == "base21"


def test_a_class_is_spliced_into_the_copy():
    plug.plug(TARGET, cell(SOLUTION.replace("Stage 1:", "My stage 1:")), verified=True)
    text = own_text.text_of(TARGET, plug.entries()[TARGET])
    spliced = own_copy.splice("class Zero1:\n    pass\n\n\ndef f():\n    pass\n", {"Zero1": text})
    assert spliced.startswith("# my_zerolab: yours: Zero1.\n# my_zerolab: reference: f.\n")
    assert "My stage 1:" in spliced and spliced.count("class Zero1") == 1
