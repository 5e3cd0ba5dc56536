"""The course builder: one source, two notebooks, the same bytes every time."""

import importlib.util
import json
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_builder():
    spec = importlib.util.spec_from_file_location("course_build", ROOT / "course/build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load_builder()

SOURCE = """\
# %% [markdown] title
# # A title
#
# Two words.

# %% hello tags=slow,nbval-skip hidden
print("hello")

# %% exercise zerolab.flat:shard_bounds
lab.check("0.1", shard_bounds)
"""


def write(tmp_path, text=SOURCE):
    for folder in ("course/_src", "solutions"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    path = tmp_path / "course/_src/00_try.py"
    path.write_text(text)
    return path


def cells_of(product):
    return {cell["id"]: cell for cell in product.notebook["cells"]}


def save(products):
    for product in products:
        product.path.write_text(product.text)


def test_committed_notebooks_are_what_the_source_says():
    assert build.main(["--check"]) == 0


def test_rebuild_is_byte_identical(tmp_path):
    source = write(tmp_path)
    first = [product.text for product in build.build_chapter(source, tmp_path)]
    second = [product.text for product in build.build_chapter(source, tmp_path)]
    assert first == second


@pytest.mark.parametrize("folder", ["course", "solutions"])
def test_committed_notebooks_are_valid(folder):
    for path in sorted((ROOT / folder).glob("*.ipynb")):
        nbformat.validate(nbformat.read(path, as_version=4))


def test_learner_gets_contract_and_raise_solution_gets_the_package_text(tmp_path):
    learner, solution = build.build_chapter(write(tmp_path), tmp_path)
    stub = "".join(cells_of(learner)["exercise-shard_bounds"]["source"])
    answer = "".join(cells_of(solution)["exercise-shard_bounds"]["source"])
    package = (ROOT / "zerolab/flat.py").read_text()
    assert 'raise NotImplementedError("Exercise: shard_bounds")' in stub
    assert "shard_numel" not in stub and '"""Return the range' in stub
    function, check = answer.split("\n\n\n")
    assert function in package and check == 'lab.check("0.1", shard_bounds)'
    compile(stub, "stub", "exec")


def test_cells_carry_label_tags_and_the_hidden_flag(tmp_path):
    cells = cells_of(build.build_chapter(write(tmp_path), tmp_path)[0])
    assert list(cells) == ["title", "hello", "exercise-shard_bounds"]
    assert cells["title"]["source"] == ["# A title\n", "\n", "Two words."]
    assert cells["hello"]["metadata"] == {
        "jupyter": {"source_hidden": True},
        "tags": ["slow", "nbval-skip"],
    }


def test_an_inserted_cell_changes_no_other_id(tmp_path):
    before = cells_of(build.build_chapter(write(tmp_path), tmp_path)[0])
    longer = SOURCE.replace("# %% exercise", "# %% extra\n1\n\n# %% exercise")
    after = cells_of(build.build_chapter(write(tmp_path, longer), tmp_path)[0])
    assert set(after) - set(before) == {"extra"} and set(before) <= set(after)


def test_check_names_missing_changed_and_fresh_files(tmp_path):
    source = write(tmp_path)
    assert len(build.check_chapter(source, tmp_path)) == 2
    products = build.build_chapter(source, tmp_path)
    save(products)
    assert build.check_chapter(source, tmp_path) == []
    products[0].path.write_text(products[0].text.replace("hello", "hallo"))
    assert build.check_chapter(source, tmp_path) == [products[0].path]


def test_kept_outputs_are_executed_once_and_only_where_asked(tmp_path, monkeypatch):
    text = '# %% one tags=nbval-check-output\n6 * 7\n\n# %% two\nprint("not kept")\n'
    source = write(tmp_path, text)
    products = build.build_chapter(source, tmp_path)
    cells = cells_of(products[1])
    assert cells["one"]["outputs"][0]["data"] == {"text/plain": ["42"]}
    assert cells["one"]["execution_count"] == 1
    assert cells["two"]["outputs"] == [] and cells["two"]["execution_count"] is None
    assert all("execution" not in cell["metadata"] for cell in products[1].notebook["cells"])
    save(products)

    def fail(*args):
        raise AssertionError("executed although no code had changed")

    monkeypatch.setattr(build, "execute", fail)
    again = build.build_chapter(source, tmp_path)
    assert [p.text for p in again] == [p.text for p in products]
    assert build.check_chapter(source, tmp_path) == []


def test_learner_notebook_holds_no_outputs():
    for path in (ROOT / "course").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# %% [markdown]\n# prose\n", "needs exactly one label"),
        ("# %% a\n1\n# %% a\n2\n", "label 'a' is used twice"),
        ("# %% Not.ok\n1\n", "may hold only"),
        ("# %% exercise zerolab.nowhere:f\n", "there is no zerolab/nowhere.py"),
        ("# %% exercise zerolab.flat:nothing\n", "zerolab.flat has no function nothing"),
        ("# %% exercise zerolab.flat:Range\n", "has no function Range"),
        ("# %% exercise zerolab.zero1:Zero1.add\n", "class Zero1 has no method add"),
        ("# %% exercise zerolab.zero1:Zero1.reduce, Zero2.step\n", "methods of one class"),
        ("# %% exercise zerolab.zero1:Zero1, Zero1.reduce\n", "methods of one class"),
    ],
)
def test_a_source_that_cannot_be_built_says_which_rule(tmp_path, text, message):
    with pytest.raises(build.SourceError, match=message):
        build.build_chapter(write(tmp_path, text), tmp_path)


def test_an_exercise_brings_the_imports_it_needs():
    exercise = build.find_exercise("zerolab.flat:view")
    assert exercise.stub.startswith("import torch\n\n\ndef view(")
    exercise = build.find_exercise("zerolab.bucket:collect")
    assert "from zerolab import device\nfrom zerolab import flat\n" in exercise.stub


MOMENT = "# %% exercise zerolab.zero1:Zero1.reduce, Zero1.publish\nlab.check('4.4', Zero1)\n"


def test_a_moment_empties_the_named_methods_and_keeps_the_rest_of_the_class(tmp_path):
    learner, solution = build.build_chapter(write(tmp_path, MOMENT), tmp_path)
    stub = "".join(cells_of(learner)["exercise-zero1-reduce-publish"]["source"])
    answer = "".join(cells_of(solution)["exercise-zero1-reduce-publish"]["source"])
    package = (ROOT / "zerolab/zero1.py").read_text()
    assert answer.split("\n\n\n")[1] in package and stub.endswith("lab.check('4.4', Zero1)")
    for text in (stub, answer):
        exec(text.rpartition("\n\n\n")[0], {})  # it stands alone in a cell
        assert text.startswith("from zerolab import comm\nfrom zerolab import ddp\n")
        assert "return [bucket.rank]" in text and '"""Start the mean of the own slice' in text
    assert "reduce_scatter" in answer and "reduce_scatter" not in stub
    for name in ("reduce", "publish"):
        assert f'        raise NotImplementedError("Exercise: {name}")\n' in stub


def test_a_class_without_named_methods_is_emptied_altogether():
    stub = build.find_exercise("zerolab.zero1:Zero1").stub
    assert stub.count("raise NotImplementedError") == 3 and "return" not in stub.split('"""')[-1]


def test_unknown_option_is_bad_usage(capsys):
    assert build.main(["--chekc"]) == 2
    assert "--chekc" in capsys.readouterr().err
