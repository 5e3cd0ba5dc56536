"""An update of the course meets a half-done notebook: three-way merge by cell id, nothing lost."""

import copy
import itertools
import json
import random
from pathlib import Path

import nbformat
import pytest

from zerolab.cli import learn
from zerolab.lab import merging, workspace

ROOT = Path(__file__).resolve().parents[1]
NAME = "00_start_here.ipynb"
ANSWER = "def f(a):\n    return a + 1"


def cell(name, text, kind="code", **fields):
    built = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(True)}
    if kind == "code":
        built |= {"execution_count": None, "outputs": []}
    return built | fields


def notebook(*cells):
    return {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def ids(merged):
    return [one["id"] for one in merged.notebook["cells"]]


def text(merged, name):
    found = next(one for one in merged.notebook["cells"] if one["id"] == name)
    return "".join(found["source"])


A, B, C = cell("a", "1"), cell("b", "def f(a):\n    raise NotImplementedError"), cell("c", "f(3)")
BASE = notebook(A, B, C)
ANSWERED = notebook(A, cell("b", ANSWER), C)


def test_an_answer_stays_and_an_untouched_cell_is_updated():
    merged = merging.merge(BASE, ANSWERED, notebook(A, B, cell("c", "f(4)")))
    assert text(merged, "b") == ANSWER and text(merged, "c") == "f(4)"
    assert merged.updated == ["c"] and merged.kept == ["b"] and not merged.conflicts


def test_own_cells_stay_below_the_cell_they_stood_below():
    own = notebook(cell("x", "top"), A, cell("y", "mine"), cell("z", "mine too"), B, C)
    merged = merging.merge(BASE, own, notebook(A, cell("n", "new"), B, C))
    assert ids(merged) == ["x", "a", "y", "z", "n", "b", "c"]
    assert merged.inserted == ["n"] and merged.kept == ["x", "y", "z"]


def test_new_cells_come_at_their_place_at_both_ends_too():
    new = notebook(cell("n1", ""), A, cell("n2", ""), cell("n3", ""), B, C, cell("n4", ""))
    assert ids(merging.merge(BASE, ANSWERED, new)) == ["n1", "a", "n2", "n3", "b", "c", "n4"]


def test_a_conflict_keeps_the_answer_and_shows_the_new_text_where_it_cannot_run():
    new = notebook(A, cell("b", "def f(a, b):\n    raise NotImplementedError"), C)
    merged = merging.merge(BASE, ANSWERED, new)
    assert text(merged, "b") == ANSWER and merged.conflicts == ["b"]
    note = merged.notebook["cells"][2]
    assert note["cell_type"] == "markdown" and note["metadata"]["tags"] == [merging.TAG]
    assert "def f(a, b):" in "".join(note["source"])
    assert "newer text" in "".join(note["source"])


def test_fence_of_a_note_is_longer_than_what_it_holds():
    note = merging.conflict_note(cell("b", 's = "````"'))
    assert "".join(note["source"]).endswith('`````python\ns = "````"\n`````')


def test_prose_that_the_learner_annotated_is_a_conflict_too():
    base = notebook(cell("p", "Old.", "markdown"))
    own = notebook(cell("p", "Old. My note.", "markdown"))
    merged = merging.merge(base, own, notebook(cell("p", "New.", "markdown")))
    assert text(merged, "p") == "Old. My note."
    assert "".join(merged.notebook["cells"][1]["source"]).endswith("\n\nNew.")


def test_the_same_change_on_both_sides_is_none():
    merged = merging.merge(BASE, ANSWERED, ANSWERED)
    assert merged.notebook == ANSWERED and not merged.conflicts and not merged.updated


def test_outputs_stay_with_the_text_that_made_them():
    shown = [{"name": "stdout", "output_type": "stream", "text": ["hello"]}]
    own = notebook(cell("a", "1", outputs=shown, execution_count=3), B, cell("c", "f(3)"))
    same = merging.merge(BASE, own, notebook(A, B, cell("c", "f(4)")))
    assert same.notebook["cells"][0]["outputs"] == shown
    changed = merging.merge(BASE, own, notebook(cell("a", "2"), B, C))
    assert changed.notebook["cells"][0]["outputs"] == []


def test_metadata_of_an_untouched_cell_is_the_courses():
    tagged = notebook(cell("a", "1", metadata={"tags": ["t"]}), B, C)
    merged = merging.merge(BASE, ANSWERED, tagged)
    assert merged.notebook["cells"][0]["metadata"] == {"tags": ["t"]}


def test_a_deleted_cell_stays_deleted_and_a_dropped_one_goes_only_if_untouched():
    merged = merging.merge(BASE, notebook(B, C), notebook(cell("a", "2"), B, C))
    assert ids(merged) == ["b", "c"]
    merged = merging.merge(BASE, ANSWERED, notebook(A, C))
    assert ids(merged) == ["a", "b", "c"] and text(merged, "b") == ANSWER
    assert ids(merging.merge(BASE, ANSWERED, notebook(A, B))) == ["a", "b"]


def test_cells_moved_by_the_learner_stay_and_moved_by_the_course_move():
    moved = notebook(A, C, cell("b", ANSWER))
    merged = merging.merge(BASE, moved, notebook(A, B, cell("n", ""), C))
    assert ids(merged) == ["a", "c", "b", "n"]
    assert ids(merging.merge(BASE, ANSWERED, notebook(B, A, C))) == ["b", "a", "c"]


def test_merging_again_after_a_crash_changes_nothing():
    new = notebook(cell("n", "new"), A, cell("b", "other"), cell("c", "f(4)"))
    once = merging.merge(BASE, ANSWERED, new)
    again = merging.merge(BASE, once.notebook, new)
    assert again.notebook == once.notebook and again.conflicts == ["b"]


@pytest.mark.parametrize("seed", range(40))
def test_no_text_of_the_learner_is_ever_lost(seed):
    luck = random.Random(seed)
    numbers = itertools.count()

    def edition(cells):
        left = [c for c in cells if luck.random() < 0.8]
        changed = [
            cell(c["id"], f"v{next(numbers)}") if luck.random() < 0.4 else copy.deepcopy(c)
            for c in left
        ]
        for _ in range(luck.randrange(4)):
            added = cell(f"id{next(numbers)}", f"v{next(numbers)}")
            changed.insert(luck.randrange(len(changed) + 1), added)
        if luck.random() < 0.3:
            luck.shuffle(changed)
        return notebook(*changed)

    base = edition([cell(f"id{next(numbers)}", f"v{next(numbers)}") for _ in range(8)])
    own, new = edition(base["cells"]), edition(base["cells"])
    given = {json.dumps(c["source"]) for c in base["cells"]}
    before = copy.deepcopy((base, own, new))
    merged = merging.merge(base, own, new)
    assert (base, own, new) == before
    after = [json.dumps(c["source"]) for c in merged.notebook["cells"]]
    for wrote in (json.dumps(c["source"]) for c in own["cells"]):
        assert wrote in given or after.count(wrote) == 1
    assert len(set(ids(merged))) == len(ids(merged))
    assert merging.merge(base, merged.notebook, new).notebook == merged.notebook


# Files.


def edited(path, **texts):
    """Change cells of a notebook as JupyterLab saves it: other spacing, counts, outputs."""
    node = nbformat.read(path, as_version=4)
    for one in node.cells:
        one.source = texts.get(one.id.replace("-", "_"), one.source)
        if one.cell_type == "code":
            one.execution_count = 1
    nbformat.write(node, path)


@pytest.fixture
def half_done(tmp_path):
    """The real chapter 00, copied, its first exercise answered; and the course to change."""
    course, mine = tmp_path / "course", tmp_path / "mine"
    course.mkdir()
    (course / NAME).write_bytes((ROOT / "course" / NAME).read_bytes())
    workspace.fill(mine, course)
    edited(mine / NAME, exercise_shard_bounds="my answer")
    return course, mine


def test_a_half_done_notebook_is_updated_and_keeps_its_answer(half_done):
    course, mine = half_done
    edited(course / NAME, why="Better prose.", exercise_padded_numel="a better starter")
    before = (mine / NAME).read_bytes()
    copied = workspace.fill(mine, course)
    node = nbformat.read(mine / NAME, as_version=4)
    nbformat.validate(node)
    cells = {one.id: one for one in node.cells}
    assert cells["exercise-shard_bounds"].source == "my answer"
    assert cells["why"].source == "Better prose."
    assert cells["exercise-padded_numel"].source == "a better starter"
    assert cells["stage-1"].execution_count == 1
    assert (mine / copied.backups[NAME]).read_bytes() == before
    said = learn.summary(copied, mine)
    assert f"merged   {NAME}: cells: 2 updated, 1 of yours kept" in said
    assert str(copied.backups[NAME]) in said
    assert workspace.fill(mine, course) == workspace.Copied()


def test_a_conflict_is_named_where_learn_prints(half_done):
    course, mine = half_done
    edited(course / NAME, exercise_shard_bounds="another starter")
    said = learn.summary(workspace.fill(mine, course), mine)
    assert "newer text stands in a cell below exercise-shard_bounds" in said
    node = nbformat.read(mine / NAME, as_version=4)
    nbformat.validate(node)
    place = [one.id for one in node.cells].index("exercise-shard_bounds")
    assert node.cells[place].source == "my answer"
    assert "another starter" in node.cells[place + 1].source


def test_every_merge_keeps_a_backup_of_its_own(half_done):
    course, mine = half_done
    for text in ("one", "two", "three"):
        edited(course / NAME, why=text)
        workspace.fill(mine, course)
    backups = sorted(path.name for path in (mine / workspace.BACKUP).iterdir())
    assert backups == [f"00_start_here.{number}.ipynb" for number in (1, 2, 3)]


def test_a_crash_while_writing_loses_nothing(half_done, monkeypatch):
    course, mine = half_done
    edited(course / NAME, why="Better prose.")
    before = (mine / NAME).read_bytes()
    replace = Path.replace

    def crash(path, target):
        if Path(target).parent == mine:
            raise OSError("power cut")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        workspace.fill(mine, course)
    assert (mine / NAME).read_bytes() == before
    monkeypatch.undo()
    assert workspace.fill(mine, course).merged[NAME].updated == ["why"]
    assert not list(mine.glob("*.part"))


@pytest.mark.parametrize(
    "damaged",
    ["{", "[]", '{"cells": [{"cell_type": "code", "source": ""}]}', '{"cells": [1]}'],
)
def test_a_file_that_cannot_be_merged_is_left_alone(half_done, damaged):
    course, mine = half_done
    edited(course / NAME, why="Better prose.")
    (mine / NAME).write_text(damaged)
    assert workspace.fill(mine, course).kept == [NAME]
    assert (mine / NAME).read_text() == damaged


def test_two_cells_of_one_id_are_not_merged():
    with pytest.raises(merging.NotMergeable, match="same id"):
        merging.parse(merging.to_bytes(notebook(A, A)))
