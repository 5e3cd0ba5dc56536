"""lab.my_zerolab: a copy that runs by itself, on the learner's functions, and is never lost."""

import ast
import json
import linecache
import subprocess
import sys

import pytest

from zerolab import lab
from zerolab.errors import UsageError
from zerolab.lab import own_copy, own_text, plug, whose

TARGET = "zerolab.flat:shard_bounds"
RIGHT = """
import math

def up(numel, world_size):
    return math.ceil(numel / world_size)

def shard_bounds(numel, world_size, rank):
    n = up(numel, world_size)  # mine
    return rank * n, (rank + 1) * n
"""
NEIGHBOUR = """
def shard_bounds(numel, world_size, rank):
    n = padded_numel(numel, world_size) // world_size
    rank = (rank + 1) % world_size
    return rank * n, (rank + 1) * n
"""


@pytest.fixture(autouse=True)
def nothing_plugged_in(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    plug.reset()
    yield
    plug.reset()


def cell(source, name="shard_bounds"):
    """Return a function as a cell of a notebook defines it: its text is in linecache only."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


def losses(folder, *words, launcher=("-m",)):
    options = "--stage 1 --model gpt-nano --dtype fp32 --steps 2 --json".split()
    command = [sys.executable, *launcher, "my_zerolab", "train", *options, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["losses"]


@pytest.fixture(scope="module")
def reference_losses(tmp_path_factory):
    plug.reset()
    folder = tmp_path_factory.mktemp("reference")
    own_copy.my_zerolab(folder)
    return losses(folder, "--gpus", "2")


def test_copy_trains_on_your_function_to_the_same_losses(tmp_path, reference_losses):
    plug.plug(TARGET, cell(RIGHT), verified=True)
    copy = lab.my_zerolab()
    assert copy == tmp_path / "my_zerolab"
    text = (copy / "flat.py").read_text()
    assert "# mine" in text and "def up(" in text and "import math as math" in text
    assert text.count("def shard_bounds(") == 1
    assert losses(tmp_path, "--gpus", "2") == reference_losses


def test_a_wrong_function_changes_the_losses(tmp_path, reference_losses):
    plug.plug(TARGET, cell(NEIGHBOUR), verified=False)
    lab.my_zerolab()
    wrong = losses(tmp_path, "--gpus", "2")
    assert wrong[0] == reference_losses[0] and wrong[1] != reference_losses[1]


def test_torchrun_runs_it(tmp_path, reference_losses):
    plug.plug(TARGET, cell(RIGHT), verified=True)
    lab.my_zerolab()
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    assert losses(tmp_path, launcher=launcher) == reference_losses


def test_headers_say_what_is_whose_and_every_file_still_parses(tmp_path):
    plug.plug(TARGET, cell(RIGHT), verified=False)
    copy = lab.my_zerolab()
    flat = (copy / "flat.py").read_text().splitlines()
    assert flat[0] == "# my_zerolab: yours: shard_bounds (unverified)."
    assert flat[1].startswith("# my_zerolab: reference: padded_numel, intersect")
    for path in copy.rglob("*.py"):
        text = path.read_text()
        assert text.startswith("# my_zerolab: ")
        assert bool(ast.get_docstring(ast.parse(text))), path.name


def test_what_an_earlier_chapter_wrote_stays(tmp_path):
    plug.plug(TARGET, cell(RIGHT), verified=True)
    lab.my_zerolab()
    plug.reset()
    padded = "def padded_numel(numel, world_size):\n    return -(-numel // world_size) * world_size"
    plug.plug("zerolab.flat:padded_numel", cell(padded, "padded_numel"), verified=True)
    text = (lab.my_zerolab() / "flat.py").read_text()
    assert text.startswith("# my_zerolab: yours: padded_numel, shard_bounds.\n")
    assert "# mine" in text and padded in text
    plug.plug(TARGET, cell(NEIGHBOUR), verified=False)
    text = (lab.my_zerolab() / "flat.py").read_text()
    assert "# mine" not in text and "(rank + 1) % world_size" in text


def test_an_edit_by_hand_is_never_overwritten(tmp_path):
    copy = lab.my_zerolab()
    (copy / "flat.py").write_text("# my own flat\n")
    with pytest.raises(UsageError, match=r"my_zerolab/flat\.py was changed by hand"):
        lab.my_zerolab()
    assert (copy / "flat.py").read_text() == "# my own flat\n"
    (copy / own_copy.MEMORY).unlink()
    with pytest.raises(UsageError, match=r"yours\.json cannot be read"):
        lab.my_zerolab()


def test_a_function_without_text_is_refused_and_nothing_is_written(tmp_path):
    namespace = {}
    exec("def shard_bounds(numel, world_size, rank):\n    return 0, 0\n", namespace)
    for nameless in (namespace["shard_bounds"], lambda numel, world_size, rank: (0, 0)):
        plug.plug(TARGET, nameless, verified=False)
        with pytest.raises(UsageError, match="the text of your shard_bounds cannot be found"):
            lab.my_zerolab()
    assert not (tmp_path / "my_zerolab").exists()


# A kernel that was restarted, and exercises that are given up.


def test_a_new_kernel_resumes_from_the_copy(tmp_path, capsys):
    plug.plug(TARGET, cell(RIGHT), verified=True)
    lab.my_zerolab()
    plug.reset()
    program = (
        "from zerolab import flat, lab\n"
        "lab.resume()\n"
        "assert flat.shard_bounds(10, 4, 3) == (9, 12)\n"
        "assert lab.running('zerolab.flat:shard_bounds').__globals__['math'].pi > 3\n"
        "print(lab.running())\n"
        "lab.my_zerolab()\n"
        "print('# mine' in open('my_zerolab/flat.py').read())\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Resumed from my_zerolab\n  plugged in  your shard_bounds\n" in done.stdout
    assert "running on: your shard_bounds" in done.stdout and done.stdout.endswith("True\n")


def test_a_run_on_the_reference_says_where_the_learners_functions_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(whose, "_begun", ["00"])
    reference = whose.of_training()
    assert "my_zerolab" not in reference
    plug.plug(TARGET, cell(RIGHT), verified=True)
    lab.my_zerolab()
    assert "lab.resume()" not in whose.of_training()
    plug.reset()  # what a new kernel has
    assert whose.of_training() == (
        f"{reference}; yours of shard_bounds is in my_zerolab, and lab.resume() plugs it in"
    )
    (tmp_path / "my_zerolab" / own_copy.MEMORY).write_text("{")
    assert whose.of_training() == reference


def test_resume_keeps_unverified_answers_marked_and_says_when_there_is_nothing(tmp_path, capsys):
    lab.resume()
    assert "has written nothing yet" in capsys.readouterr().out
    plug.plug(TARGET, cell(NEIGHBOUR), verified=False)
    lab.my_zerolab()
    plug.reset()
    capsys.readouterr()
    lab.resume()
    assert "your shard_bounds (unverified)" in capsys.readouterr().out
    assert plug.entries()[TARGET].verified is False


def test_reset_and_skip_put_the_reference_back_in_engine_and_copy(tmp_path, capsys):
    for give_up, note in ((lab.reset, ""), (lab.skip, " (skipped)")):
        plug.plug(TARGET, cell(RIGHT), verified=True)
        copy = lab.my_zerolab()
        assert "# mine" in (copy / "flat.py").read_text()
        capsys.readouterr()
        give_up("0.1")
        assert "my_zerolab run on the reference" in capsys.readouterr().out
        assert (copy / "flat.py").read_text().startswith("# my_zerolab: all of this file is")
        assert plug.running(TARGET) is plug.reference(TARGET)
        assert plug.whose(TARGET) == f"reference shard_bounds{note}"
    plug.plug(TARGET, cell(RIGHT), verified=True)
    plug.unplug(TARGET)
    assert plug.whose(TARGET) == "reference shard_bounds", "whoever tries again skips no longer"
    log = (tmp_path / "progress.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in log] == ["skip"]


def test_reset_of_everything_leaves_the_copy_alone(tmp_path):
    plug.plug(TARGET, cell(RIGHT), verified=True)
    copy = lab.my_zerolab()
    lab.reset()
    assert plug.entries() == {} and "# mine" in (copy / "flat.py").read_text()


def test_imports_of_the_package_point_into_the_copy(tmp_path, reference_losses):
    source = (
        "import zerolab\nfrom zerolab import flat as f\n"
        "from zerolab.flat import padded_numel as p\n\ndef shard_bounds(numel, world_size, rank):\n"
        "    n = p(numel, world_size) // world_size\n"
        "    assert f.padded_numel(1, 2) == zerolab.flat.padded_numel(1, 2) == 2\n"
        "    assert f.__name__ == zerolab.flat.__name__\n"
        "    return rank * n, (rank + 1) * n\n"
    )
    plug.plug(TARGET, cell(source), verified=True)
    text = (lab.my_zerolab() / "flat.py").read_text()
    assert "from . import flat as f" in text and "import my_zerolab as zerolab" in text
    assert "from .flat import padded_numel as p" in text
    assert losses(tmp_path, "--gpus", "2") == reference_losses


@pytest.mark.parametrize(
    ("targets", "stage"),
    [
        ((), 1),
        (("zerolab.flat:shard_bounds",), 1),
        (("zerolab.zero2:Zero2", "zerolab.flat:pack"), 2),
        (("zerolab.zero2:Zero2", "zerolab.zero3:Zero3.post_forward"), 3),
    ],
)
def test_the_card_names_the_latest_stage_that_was_written(targets, stage, tmp_path):
    texts = {target: own_text.Text("", (), verified=True) for target in targets}
    said = repr(own_copy._card(tmp_path, texts))
    assert said.count(f"train --stage {stage} --model gpt-nano") == 2
