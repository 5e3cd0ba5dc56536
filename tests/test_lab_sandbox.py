"""Checks in the child process: whatever an answer does, its outcome is named and the next works."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from zerolab.lab import exercise
from zerolab.lab.outcome import Outcome
from zerolab.lab.sandbox import Sandbox

RIGHT = "n = -(-numel // world_size)\nreturn rank * n, (rank + 1) * n"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")


@pytest.fixture(scope="module")
def sandbox():
    own = Sandbox()
    yield own
    own.close()


@pytest.fixture
def attempt(sandbox):
    def run(body, seconds=30.0, before=""):
        source = f"{before}\ndef shard_bounds(numel, world_size, rank):\n"
        source += textwrap.indent(textwrap.dedent(body), "    ")
        namespace = {"__name__": "__main__"}
        exec(compile(source, "cell.py", "exec"), namespace)
        answer = namespace["shard_bounds"]
        return sandbox.run(exercise.find("0.1"), answer, seconds)

    return run


def runs(pid):
    """Whether a process lives; one that has ended may still wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_right_answer_passes_after_every_kind_of_trouble(attempt):
    for trouble in ("import os\nos._exit(3)", "while True:\n    pass"):
        attempt(trouble, seconds=1.0)
        assert attempt(RIGHT).outcome is Outcome.PASS


def test_endless_loop_times_out_at_the_learners_line(attempt):
    report = attempt("start = 0\nwhile True:\n    start += 1", seconds=1.0)
    assert report.outcome is Outcome.TIMEOUT and not report.usable
    assert "within 1 seconds" in report.message
    assert (report.file, report.line) in [("cell.py", 4), ("cell.py", 5)]


def test_endless_wait_in_c_times_out(attempt):
    assert attempt("import time\ntime.sleep(1000)", seconds=1.0).outcome is Outcome.TIMEOUT


def exchange_in_which(rank, does):
    source = f"""
def exchange(output, input):
    import time
    from zerolab import comm
    if comm.get_rank() == {rank}:
        {does}
    comm.barrier()
"""
    namespace = {"__name__": "__main__"}
    exec(compile(source, "cell.py", "exec"), namespace)
    return namespace["exchange"]


def test_rank_that_never_comes_back_is_named_with_what_each_rank_was_doing(sandbox):
    answer = exchange_in_which(1, "while True: time.sleep(0.01)")
    report = sandbox.run(exercise.find("2.2"), answer, 8.0)
    assert report.outcome is Outcome.TIMEOUT and not report.usable
    assert (report.rank, report.file, report.line) == (1, "cell.py", 6)
    said, _, *ranks = report.message.splitlines()
    assert said.startswith("It did not come back: after") and "rank 1 was still computing" in said
    assert [line.split()[:2] for line in ranks[:2]] == [["0", "waiting"], ["1", "computing"]]
    assert "barrier #0" in ranks[0] and "cell.py:7" in ranks[0] and "cell.py:6" in ranks[1]


def test_rank_0_in_a_call_that_nothing_interrupts_is_named(sandbox):
    answer = exchange_in_which(0, "time.sleep(1000)")
    report = sandbox.run(exercise.find("2.2"), answer, 4.0)
    assert report.outcome is Outcome.TIMEOUT and (report.rank, report.line) == (0, 6)
    assert "Rank 0 sat in a call that nothing interrupts" in report.message


def test_deadlock_is_named_with_its_table(attempt):
    body = "from zerolab import comm\nif rank == 1 and comm.get_world() == 'lockstep':\n"
    body += "    comm.barrier()\n" + RIGHT
    report = attempt(body)
    assert report.outcome is Outcome.DEADLOCK
    assert "barrier" in report.message and "rank" in report.message


def test_out_of_memory_on_a_virtual_gpu_is_named(attempt):
    body = "import torch\nfrom zerolab import VirtualGPU\n"
    body += "with VirtualGPU('1KiB'):\n    torch.zeros(1000)\n" + RIGHT
    report = attempt(body)
    assert report.outcome is Outcome.OOM and "Tried to allocate" in report.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os\nos._exit(3)", "exit code 3"),
        ("raise SystemExit(2)", "SystemExit"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("return rank / 0", "ZeroDivisionError"),
        ("return scratch", "Variables of the notebook"),
        ("return input()", "EOFError"),
        ("return shard_bounds(numel, world_size, rank)", "calls itself without an end"),
    ],
)
def test_exceptions_and_deaths_are_named(attempt, body, words):
    report = attempt(body, before="scratch = 3")
    assert report.outcome is Outcome.EXCEPTION
    assert words in report.message


def test_exception_names_line_and_call(attempt):
    report = attempt("length = numel\nreturn length / 0")
    assert (report.file, report.line) == ("cell.py", 4)
    assert report.call == "shard_bounds(12, 4, 0)"


def test_a_megabyte_of_output_is_cut_and_counted(attempt):
    report = attempt("if numel == 12:\n    print('x' * 1_000_000)\n" + RIGHT)
    assert report.outcome is Outcome.PASS
    assert len(report.output) < 2_200 and "bytes in all" in report.output


def test_endless_output_is_stopped_early(attempt):
    start = time.perf_counter()
    report = attempt("while True:\n    print('x' * 10_000)", seconds=30.0)
    assert report.outcome is Outcome.TIMEOUT and "printing 64 MiB" in report.message
    assert time.perf_counter() - start < 20


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_processes_that_an_answer_forks_end_with_it(attempt, tmp_path):
    body = f"""
import os, time
if rank == 0 and numel == 12 and os.fork() == 0:
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(1000)
{RIGHT}"""
    assert attempt(body).outcome is Outcome.PASS
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30  # a killed process takes a moment to end
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(pid)


def test_changed_globals_do_not_reach_the_next_check(attempt):
    vandal = "from zerolab import flat\nflat.padded_numel = None\n" + RIGHT
    attempt(vandal)
    uses_it = "n = padded_numel(numel, world_size) // world_size\n"
    assert attempt(uses_it + "return rank * n, (rank + 1) * n").outcome is Outcome.PASS


def test_helpers_of_the_notebook_travel_along(attempt):
    helper = "def up(a, b):\n    return -(-a // b)\n"
    body = "n = up(numel, world_size)\nreturn rank * n, (rank + 1) * n"
    assert attempt(body, before=helper).outcome is Outcome.PASS


def test_an_answer_that_cannot_travel_says_so(sandbox):
    import threading

    lock = threading.Lock()

    def shard_bounds(numel, world_size, rank):
        return lock

    shard_bounds.__module__ = "__main__"
    report = sandbox.run(exercise.find("0.1"), shard_bounds)
    assert report.outcome is Outcome.EXCEPTION and "cannot leave the notebook" in report.message


def test_child_ends_when_it_is_closed():
    own = Sandbox()
    own.start()
    process = own._process
    own.close()
    assert process.poll() is not None


KERNEL = """
from zerolab.lab import exercise
from zerolab.lab.sandbox import Sandbox

def shard_bounds(numel, world_size, rank):
    import os, time
    with open(NOTE, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(1000)

sandbox = Sandbox()
sandbox.start()
print(sandbox._process.pid, flush=True)
sandbox.run(exercise.find("0.1"), shard_bounds, 1000.0)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_a_killed_kernel_leaves_no_process(tmp_path):
    note = tmp_path / "pid"
    words = [sys.executable, "-c", KERNEL.replace("NOTE", repr(str(note)))]
    kernel = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    child = int(kernel.stdout.readline())
    for _ in range(600):
        if note.exists() and note.read_text():
            break
        time.sleep(0.1)
    worker = int(note.read_text())
    assert runs(child) and runs(worker)
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    for _ in range(300):
        if not runs(child) and not runs(worker):
            return
        time.sleep(0.1)
    pytest.fail("the child or its worker outlived the kernel by 30 seconds")


def test_a_killed_child_is_replaced(sandbox, attempt):
    attempt(RIGHT)
    sandbox._process.kill()
    sandbox._process.wait()
    assert attempt(RIGHT).outcome is Outcome.PASS
