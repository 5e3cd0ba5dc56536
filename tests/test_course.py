"""The course as a learner gets it: workspace, `zerolab learn`, the first notebook's text."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

from zerolab.cli import learn
from zerolab.errors import UsageError
from zerolab.lab import exercise, workspace

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "00_start_here.ipynb"


def cells(folder="course"):
    return json.loads((ROOT / folder / NOTEBOOK).read_text())["cells"]


def text_of(cell):
    return "".join(cell["source"])


@pytest.fixture
def course(tmp_path):
    folder = tmp_path / "course"
    folder.mkdir()
    (folder / NOTEBOOK).write_text("first edition")
    return folder


def test_a_new_workspace_gets_a_copy(course, tmp_path):
    copied = workspace.fill(tmp_path / "mine", course)
    assert copied.new == [NOTEBOOK] and not copied.kept
    assert (tmp_path / "mine" / NOTEBOOK).read_text() == "first edition"


def test_the_learners_file_is_never_overwritten(course, tmp_path):
    workspace.fill(tmp_path / "mine", course)
    (tmp_path / "mine" / NOTEBOOK).write_text("my answers")
    assert workspace.fill(tmp_path / "mine", course).kept == []
    (course / NOTEBOOK).write_text("second edition")
    assert workspace.fill(tmp_path / "mine", course).kept == [NOTEBOOK]
    assert (tmp_path / "mine" / NOTEBOOK).read_text() == "my answers"


def test_a_file_that_was_there_before_is_kept(course, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / NOTEBOOK).write_text("from somewhere else")
    assert workspace.fill(tmp_path / "mine", course).kept == [NOTEBOOK]
    assert (tmp_path / "mine" / NOTEBOOK).read_text() == "from somewhere else"


def test_an_untouched_copy_is_brought_up_to_date(course, tmp_path):
    workspace.fill(tmp_path / "mine", course)
    (course / NOTEBOOK).write_text("second edition")
    assert workspace.fill(tmp_path / "mine", course).updated == [NOTEBOOK]
    assert (tmp_path / "mine" / NOTEBOOK).read_text() == "second edition"


def test_impossible_workspaces_are_refused(course, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        workspace.fill(tmp_path / "file", course)
    with pytest.raises(UsageError, match="in the course itself"):
        workspace.fill(course / "mine", course)


def test_chapters_are_found_by_number():
    course = workspace.course_folder()
    assert workspace.notebook_of(course, "0") == workspace.notebook_of(course, "00") == NOTEBOOK
    with pytest.raises(UsageError, match="chapter '99' does not exist; choose one of 00"):
        workspace.notebook_of(course, "99")


def test_learn_starts_jupyterlab_at_the_notebook(tmp_path, monkeypatch, capsys):
    started = {}

    def run(words, env, check):
        started.update(words=words, env=env)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(learn.subprocess, "run", run)
    assert learn.learn(no_browser=True, workspace=tmp_path / "mine", chapter="0") == 0
    assert f"--LabApp.default_url=/lab/tree/{NOTEBOOK}" in started["words"]
    assert "--no-browser" in started["words"] and "--ServerApp.ip=127.0.0.1" in started["words"]
    assert started["env"]["ZEROLAB_WORKSPACE"] == str(tmp_path / "mine")
    assert (tmp_path / "mine" / NOTEBOOK).exists()
    assert f"new      {NOTEBOOK}" in capsys.readouterr().err


def test_learn_starts_without_waiting_for_torch():
    code = "import sys; from zerolab.lab import workspace; from zerolab.cli import learn; "
    code += "workspace.course_folder(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


STARTER = "def shard_bounds(numel, world_size, rank):\n    raise NotImplementedError\n\n\n"
FLOORS = """def shard_bounds(numel, world_size, rank):
    n = numel // world_size
    return rank * n, (rank + 1) * n


"""


def test_under_nbval_starters_and_wrong_answers_fail_and_solutions_pass(tmp_path):
    check = 'lab.check("0.1", shard_bounds)'
    solution = text_of(next(c for c in cells("solutions") if c["id"] == "exercise-shard_bounds"))
    begin = 'from zerolab import lab\n\nlab.begin("00")'
    sources = [begin, STARTER + check, FLOORS + check, solution]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    nbformat.write(notebook, tmp_path / "answers.ipynb")
    words = ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=120", "-rA", "-q"]
    words += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], capture_output=True, text=True, cwd=tmp_path
    )
    outcomes = re.findall(r"^(PASSED|FAILED) \S*::Cell (\d)", done.stdout, re.M)
    verdicts = {int(number): outcome for outcome, number in outcomes}
    assert verdicts == {0: "PASSED", 1: "FAILED", 2: "FAILED", 3: "PASSED"}, done.stdout
    # Why, although nbval shows no cards:
    assert "NOT YET TRIED" in done.stdout and "belong to nobody" in done.stdout


def test_first_ten_minutes_are_under_250_words():
    words = 0
    for cell in cells():
        if cell["id"] == "four-stages":
            break
        if cell["cell_type"] == "markdown":
            prose = re.sub(r"\[!\[.*?\)\]\(.*?\)|[|#*`\-]", " ", text_of(cell))
            words += len(prose.split())
    assert 100 < words < 250


def test_first_code_is_for_colab_alone_and_leaves_torch_there():
    first = next(cell for cell in cells() if cell["cell_type"] == "code")
    assert first["metadata"] == {"jupyter": {"source_hidden": True}, "tags": ["colab"]}
    code = text_of(first)
    assert 'if "google.colab" in sys.modules' in code
    assert "torch" not in code.replace("Colab's own torch", "")
    assert "install" in code and "--upgrade" not in code


def test_colab_cell_does_nothing_elsewhere():
    code = text_of(next(cell for cell in cells() if cell["cell_type"] == "code"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_every_exercise_of_the_chapter_is_checked_in_its_own_cell():
    for found in exercise.in_chapter("00"):
        for folder in ("course", "solutions"):
            cell = next(c for c in cells(folder) if c["id"] == f"exercise-{found.name}")
            assert text_of(cell).endswith(f'\nlab.check("{found.id}", {found.name})')


def test_notebook_names_no_number_of_ranks_in_code():
    for cell in cells("solutions"):
        if cell["cell_type"] == "code":
            assert not re.search(r"world_size\s*=\s*\d", text_of(cell))


def test_course_readme_lists_every_notebook():
    readme = (ROOT / "course/README.md").read_text()
    for path in workspace.notebooks(ROOT / "course"):
        assert path.stem in readme


WORDS_A_MINUTE, MINUTES_A_QUESTION, MINUTES_A_CELL = 200, 1, 0.5
CHAPTERS = [path.stem for path in workspace.notebooks(ROOT / "course")]


def chapter_cells(name):
    found = json.loads((ROOT / "course" / f"{name}.ipynb").read_text())["cells"]
    prose = [text_of(cell) for cell in found if cell["cell_type"] == "markdown"]
    return prose, [text_of(cell) for cell in found if cell["cell_type"] == "code"]


def length_of(name):
    """What README's table says of a chapter, counted: one row, the label left out; and minutes."""
    prose, code = chapter_cells(name)
    words = sum(len(re.sub(r"\[!\[.*?\)\]\(.*?\)|[|#*`\-]", " ", p).split()) for p in prose)
    own = exercise.in_chapter(name[:2])
    again = [int(n) for n in re.findall(r"of (\d+) minutes\"\)", "\n".join(code))]
    written = sum(one.minutes for one in own) + sum(again)
    cells = len(code) - len(own) - len(again)
    quiz = tomllib.loads((ROOT / "course/quiz" / f"{name[:2]}.toml").read_text())["question"]
    minutes = words / WORDS_A_MINUTE + written
    minutes += MINUTES_A_CELL * cells + MINUTES_A_QUESTION * len(quiz)
    row = (round(words, -2), len(own) + len(again), written, cells, len(quiz), round(minutes))
    return row, minutes


@pytest.mark.parametrize("name", CHAPTERS)
def test_readme_states_the_length_of_a_chapter_as_it_is_counted(name):
    row, _ = length_of(name)
    readme = (ROOT / "course/README.md").read_text()
    stated = "| " + " | ".join([name[:2], *(f"{number:,}" for number in row)]) + " |"
    assert stated in readme, f"write: {stated}"


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_minutes_at_the_top_are_within_a_fifth_of_what_its_parts_add_up_to(name):
    prose, _ = chapter_cells(name)
    (label,) = re.findall(r"Estimated (\d+) minutes", prose[0])
    readme = (ROOT / "course/README.md").read_text()
    (listed,) = re.findall(rf"^\| \[{name}\].*\| (\d+) minutes \|$", readme, re.M)
    assert label == listed
    assert int(label) == pytest.approx(length_of(name)[1], rel=0.2)


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_prose_above_an_exercise_states_its_minutes(name):
    found = json.loads((ROOT / "course" / f"{name}.ipynb").read_text())["cells"]
    minutes = {one.id: one.minutes for one in exercise.in_chapter(name[:2])}
    stated, above = {}, ""
    for cell in found:
        if cell["cell_type"] == "markdown":
            above = " ".join(text_of(cell).split())
        for number in re.findall(r"^lab\.check\(\"([\d.]+)\"", text_of(cell), re.M):
            stated[number] = [int(m) for m in re.findall(r"About (\d+) minutes", above)][-1:]
    assert {number: stated.get(number) for number in minutes} == {
        number: [count] for number, count in minutes.items()
    }


def test_what_is_written_again_is_an_exercise_of_an_earlier_chapter():
    again = {}
    for name in CHAPTERS:
        code = "\n".join(chapter_cells(name)[1])
        used = set(re.findall(r"^lab\.check\(\"([\d.]+)\"", code, re.M))
        again[name[:2]] = {number for number in used if int(number[0]) != int(name[:2])}
    assert {chapter: ids for chapter, ids in again.items() if ids} == {
        "04": {"0.1"}, "05": {"2.5"}, "06": {"5.3"}
    }  # fmt: skip


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_bugs_that_a_chapter_names_by_number_are_there(name):
    prose, code = chapter_cells(name)
    for hunted in re.findall(r"^lab\.bug_hunt\(\"([\d.]+)\"", "\n".join(code), re.M):
        named = {int(n) for n in re.findall(r"number=(\d+)", "\n".join([*prose, *code]))}
        assert max(named) == len(exercise.find(hunted).hunted) or name[:2] in ("01", "02")
        assert max(named) <= len(exercise.find(hunted).hunted)
