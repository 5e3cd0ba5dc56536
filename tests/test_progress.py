"""The learner's log: nothing is lost by a crash, by two notebooks, or by a damaged file."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerolab import cli, lab
from zerolab.lab import exercise, progress, progress_summary
from zerolab.lab.outcome import Outcome, Report

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    """The log of a workspace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    return tmp_path / progress.FILE


def line(**fields):
    return json.dumps({"time": 1.0, "event": "hint", **fields})


def show(capsys, *args):
    """Run `zerolab progress`: (exit code, stdout, stderr)."""
    code = cli.run(["progress", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# Writing.


def test_every_event_is_one_line_with_a_time(log):
    before = time.time()
    progress.note_attempt(Report("0.1", Outcome.FAIL, mutant="drops_the_rest"))
    progress.note_hint("0.1", 2)
    progress.note_prediction("0.2", 160, 164.7)
    lab.quiz("00").mark(0, 0)
    entries = [json.loads(text) for text in log.read_text().splitlines()]
    assert [entry["event"] for entry in entries] == ["attempt", "hint", "prediction", "quiz"]
    assert all(before - 1 < entry["time"] < time.time() + 1 for entry in entries)
    assert entries[0]["mutant"] == "drops_the_rest" and entries[1]["number"] == 2
    assert (entries[2]["predicted"], entries[2]["measured"]) == (160, 164.7)
    assert entries[3]["misconceptions"] == ["steps-before-backward"]
    assert list(progress.read(log)) == entries


def test_the_docstring_names_every_field_that_is_written(log):
    progress.note_attempt(Report("0.1", Outcome.FAIL))
    progress.note_hint("0.1", 2)
    progress.note_prediction("0.2", 1, 2)
    lab.quiz("00").mark(0, 0)
    page = (ROOT / "course" / "PROGRESS.md").read_text()
    for entry in progress.read(log):
        for key in entry:
            assert key in progress.__doc__, key
            assert f"`{key}`" in page, key


def test_without_a_workspace_nothing_is_written(log, monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", "")
    progress.note_hint("0.1", 1)
    assert progress.path() is None and not log.exists()
    (log.parent / ".zerolab" / "base").mkdir(parents=True)
    progress.note_hint("0.1", 1)
    assert log.exists(), "a notebook that lies in a workspace"


def test_an_unwritable_log_does_not_stop_the_lesson_and_is_told_once(monkeypatch, log, capsys):
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(log.parent / "no" / "such"))
    progress.note_hint("0.1", 1)
    progress.note_hint("0.1", 2)
    assert capsys.readouterr().err.count("progress is not saved") == 1


@pytest.mark.parametrize("cut", range(1, len(line(exercise="0.2")), 7))
def test_a_line_that_a_crash_cut_short_is_kept_aside(log, cut):
    whole, last = line(exercise="0.1"), line(exercise="0.2")
    log.write_text(f"{whole}\n{last[:cut]}")
    assert [d.line for d in progress.load(log).damage] == [2]
    progress.note_hint("0.3", 1)
    assert log.with_name(progress.ASIDE).read_text() == f"{last[:cut]}\n"
    found = progress.load(log)
    assert [entry["exercise"] for entry in found.entries] == ["0.1", "0.3"]
    assert not found.damage and log.read_text().startswith(f"{whole}\n")


def test_a_second_crash_adds_to_what_is_aside(log):
    for number in range(3):
        with log.open("a") as file:
            file.write(f'{{"cut {number}')
        progress.note_hint("0.1", number)
    aside = log.with_name(progress.ASIDE).read_text()
    assert aside.splitlines() == ['{"cut 0', '{"cut 1', '{"cut 2']
    assert len(progress.load(log).entries) == 3


def test_a_whole_last_line_without_its_end_stays(log):
    log.write_text(line(exercise="0.1"))
    progress.note_hint("0.2", 1)
    assert [entry["exercise"] for entry in progress.read(log)] == ["0.1", "0.2"]
    assert not log.with_name(progress.ASIDE).exists()


def test_a_long_cut_line_is_moved_whole(log):
    cut = '{"text": "' + "x" * (3 * progress.TAIL_BYTES)
    log.write_text(f"{line(exercise='0.1')}\n{cut}")
    progress.note_hint("0.2", 1)
    assert log.with_name(progress.ASIDE).read_text() == f"{cut}\n"
    assert len(progress.load(log).entries) == 2


def test_every_entry_is_on_the_disk_before_the_call_returns(log, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    progress.note_hint("0.1", 1)
    assert synced == [log.stat().st_size]


WRITER = """
import sys
from zerolab.lab import progress
print("ready", flush=True)
for number in range(10**6):
    progress.note_hint("0.1", number)
"""


def test_a_killed_writer_leaves_whole_lines(log):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    while not log.exists() or log.stat().st_size < 2000:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    progress.note_hint("0.2", 1)
    found = progress.load(log)
    assert not found.damage
    numbers = [entry["number"] for entry in found.entries if entry["exercise"] == "0.1"]
    assert numbers == list(range(len(numbers))) and len(numbers) > 10


def write_many(folder, name, count):
    os.environ["ZEROLAB_WORKSPACE"] = folder
    for number in range(count):
        progress.record("hint", exercise=name, number=number, filler="x" * (number % 50 * 100))


def test_two_notebooks_write_at_once_and_no_line_is_lost(log):
    log.write_text('{"a crash')
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=write_many, args=(str(log.parent), name, 60))
        for name in ("0.1", "0.2", "0.3")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    found = progress.load(log)
    assert not found.damage
    for name in ("0.1", "0.2", "0.3"):
        own = [entry["number"] for entry in found.entries if entry["exercise"] == name]
        assert own == list(range(60))
    assert log.with_name(progress.ASIDE).read_text() == '{"a crash\n'


# A damaged file.

DAMAGED = b"\n".join(
    [
        line(exercise="0.1").encode(),
        b'{"event": "hint", "exercise": ',
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"time": 3}',
        b"",
        line(exercise="0.2").encode(),
        b"",
    ]
)


def test_damage_is_told_with_line_and_reason_and_nothing_is_lost(log):
    log.write_bytes(DAMAGED)
    found = progress.load(log)
    assert [entry["exercise"] for entry in found.entries] == ["0.1", "0.2"]
    assert [(damage.line, damage.reason) for damage in found.damage] == [
        (2, "is no JSON from column 31 on"),
        (3, "is no text"),
        (4, "is no object"),
        (5, "has no event"),
    ]
    assert str(found.damage[2]) == "progress.jsonl, line 4: is no object: '[1, 2]'"
    progress.note_hint("0.3", 1)
    assert log.read_bytes().startswith(DAMAGED)


def test_zerolab_progress_tells_the_damage_on_stderr_and_shows_the_rest(log, capsys):
    log.write_bytes(DAMAGED)
    code, out, err = show(capsys)
    assert code == 0 and "0.1 shard_bounds" in out
    assert "damaged: progress.jsonl, line 2: is no JSON" in err
    assert "left as they are" in err and log.read_bytes() == DAMAGED
    told = json.loads(show(capsys, "--json")[1])
    assert [damage["line"] for damage in told["damage"]] == [2, 3, 4, 5]
    assert told["entries"] == 2


def test_entries_of_any_shape_are_summed_up_without_failing(log):
    shapes = [
        line(exercise=None),
        line(exercise=["0.1"]),
        line(event="from a newer course", x=1),
        line(event="quiz", chapter=3, question={}, outcome=[]),
        line(event="quiz", chapter="00", question="00-gone", misconceptions=5, outcome="wrong"),
        line(event="quiz", chapter="00", question="00-loop-order", misconceptions=5),
        line(event="attempt", exercise="0.1", mutant=7, outcome=None),
        line(event="attempt", exercise="0.1", time="yesterday"),
    ]
    log.write_text("\n".join(shapes) + "\n")
    found = progress.load(log)
    assert len(found.entries) == len(shapes) and not found.damage
    rows = progress_summary.summarise(found.entries)
    assert rows[0].chapter == "00"
    assert progress.passed(log) == set() == progress.solved()


# The summary.


def entry(time, event, **fields):
    return {"time": float(time), "event": event, **fields}


def attempt(time, outcome, exercise="0.1", mutant=""):
    return entry(time, "attempt", exercise=exercise, outcome=outcome, mutant=mutant)


def answer(time, question, outcome, names=()):
    return entry(
        time, "quiz", chapter="00", question=question, outcome=outcome, misconceptions=list(names)
    )


def test_exercises_are_summed_up():
    entries = [
        attempt(0, "UNATTEMPTED"),
        attempt(60, "FAIL", mutant="drops_the_rest"),
        attempt(70, "FAIL", mutant="drops_the_rest"),
        attempt(80, "TIMEOUT"),
        entry(90, "hint", exercise="0.1", number=1),
        attempt(150, "PASS"),
        attempt(160, "FAIL", mutant="stops_at_numel"),
        entry(170, "prediction", exercise="0.2", predicted=1, measured=2),
    ]
    first, second = progress_summary.summarise(entries)[0].exercises[:2]
    assert (first.id, first.name) == ("0.1", "shard_bounds")
    assert first.outcome == "PASS", "what passed once stays passed"
    assert (first.attempts, first.hints) == (5, 1)
    assert first.mutants == ["drops_the_rest", "stops_at_numel"]
    assert (second.outcome, second.attempts, second.predictions) == ("UNATTEMPTED", 0, 1)


def hunt(time, named, outcome, bug="stops_at_numel"):
    return entry(time, "hunt", exercise="0.1", mutant=bug, named=named, outcome=outcome)


def test_predictions_show_the_first_try_and_hunts_how_far_they_got(tmp_path, capsys, monkeypatch):
    entries = [
        entry(1, "prediction", exercise="0.3", predicted=160, measured=61.8),
        entry(2, "prediction", exercise="0.3", predicted=62, measured=61.8),
        hunt(3, "pads_each_shard", "FAIL"),
        hunt(4, "stops_at_numel", "UNATTEMPTED"),
        hunt(5, "stops_at_numel", "PASS"),
        hunt(6, "pads_each_shard", "FAIL", bug="returns_the_length"),
    ]
    chapter = progress_summary.summarise(entries)[0]
    first, second = chapter.predictions
    assert (first.id, first.unit, first.predicted, first.measured, first.tries) == (
        "0.3",
        "MiB",
        160.0,
        61.8,
        2,
    )
    assert (second.id, second.predicted, second.tries) == ("0.4", None, 0)
    found, open_one = chapter.hunts
    assert (found.bug, found.wrong_names, found.named, found.mended) == (
        "stops_at_numel",
        1,
        True,
        True,
    )
    assert (open_one.bug, open_one.wrong_names, open_one.named) == ("", 1, False), "no name yet"

    log = tmp_path / progress.FILE
    log.write_text("".join(json.dumps(one) + "\n" for one in entries))
    monkeypatch.setenv("ZEROLAB_WORKSPACE", str(tmp_path))
    assert cli.run(["progress"]) == 0
    shown = capsys.readouterr().out
    assert "predictions of chapter 00" in shown and "bug hunts of chapter 00" in shown
    row = next(words for line in shown.splitlines() if (words := line.split())[:1] == ["0.3"])
    assert row == ["0.3", "160", "61.8", "MiB", "2"]
    assert "returns_the_length" not in shown
    assert cli.run(["progress", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["chapters"][0]
    assert told["predictions"][0]["measured"] == 61.8 and told["hunts"][0]["mended"] is True


def test_what_was_skipped_or_could_not_be_checked_is_no_attempt():
    entries = [attempt(1, "SKIPPED"), entry(2, "skip", exercise="0.1")]
    assert progress_summary.summarise(entries)[0].exercises[0].attempts == 0


def test_breaks_do_not_count_as_time():
    pause = progress_summary.PAUSE_SECONDS
    chapter = progress_summary.summarise([
        attempt(1000, "FAIL"),
        attempt(1120, "FAIL"),
        attempt(1120 + pause + 1, "FAIL"),
        attempt(1120 + pause + 61, "PASS"),
        answer(1120 + pause + 121, "00-loop-order", "right"),
    ])[0]  # fmt: skip
    assert chapter.exercises[0].minutes == 3.0
    assert chapter.minutes == 4.0


def test_quiz_scores_count_first_tries_and_what_is_left_to_learn():
    quiz = progress_summary.summarise([
        answer(1, "00-loop-order", "wrong", ["steps-before-backward"]),
        answer(2, "00-loop-order", "right"),
        answer(3, "00-storage", "right"),
        answer(4, "00-adam-state", "shown"),
        answer(5, "00-adam-state", "right"),
        answer(6, "00-padding", "wrong", ["padded-length"]),
        answer(7, "00-why-the-same", "judge"),
        answer(8, "00-no-longer-asked", "right"),
    ])[0].quiz  # fmt: skip
    assert (quiz.tried, quiz.right, quiz.first_try, quiz.answers) == (4, 3, 1, 5)
    assert quiz.misconceptions == ["padded-length"]
    assert quiz.questions == len(lab.quiz("00").asked)


def test_the_board_shows_chapters_exercises_and_quizzes(log, capsys):
    progress.note_attempt(Report("0.1", Outcome.FAIL, mutant="drops_the_rest"))
    progress.note_attempt(Report("0.1", Outcome.PASS))
    progress.note_hint("0.1", 1)
    questions = lab.quiz("00")
    questions.mark(0, 1)
    questions.mark(1, 0)
    code, out, err = show(capsys)
    assert (code, err) == (0, "")
    total = len(exercise.in_chapter("00"))
    rows = {row.split()[0]: " ".join(row.split()) for row in out.splitlines() if row.strip()}
    assert rows["00"] == f"00 start here 1 of {total} 0 1 of {len(questions.asked)} 1"
    assert rows["0.1"] == "0.1 shard_bounds PASS 2 1 0 drops_the_rest"
    assert "quiz 00: backward-replaces" in out


def test_json_holds_the_same_as_the_board(log, capsys):
    progress.note_attempt(Report("0.1", Outcome.PASS))
    code, out, _ = show(capsys, "--json")
    told = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert told["file"] == str(log) and told["damage"] == [] and told["entries"] == 1
    first = told["chapters"][0]
    assert first["chapter"] == "00" and first["passed"] == 1
    assert first["exercises"][0]["outcome"] == "PASS" and first["quiz"]["right"] == 0


def test_nothing_done_yet_and_no_workspace_are_said(capsys, monkeypatch, log):
    assert f"Nothing written down yet: {log}" in show(capsys)[1]
    monkeypatch.setenv("ZEROLAB_WORKSPACE", "")
    code, out, err = show(capsys)
    assert (code, err) == (0, "") and "zerolab learn" in out
    code, out, err = show(capsys, "--workspace", "no/such")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "no/such" in err


def test_the_log_is_never_sent_anywhere():
    """Neither module can reach a network."""
    import ast

    for module in (progress, progress_summary):
        tree = ast.parse(Path(module.__file__).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                assert names <= {"json", "os", "sys", "time", "fcntl"}
