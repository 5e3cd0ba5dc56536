"""lab.my_zerolab: a copy that runs by itself, on the learner's functions, and is never lost."""

import ast
import json
import linecache
import subprocess
import sys

import pytest

from zerolab import lab
from zerolab.errors import UsageError
from zerolab.lab import own_copy, plug

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
