"""The wheel is complete: `pip install zerolab`, then `zerolab learn`, without the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ASK = """
import sys
from pathlib import Path
from zerolab.lab import quiz_session, workspace
copied = workspace.fill(Path("workspace"), workspace.course_folder())
print(workspace.course_folder(), len(copied.new), quiz_session.bank_path("00").name)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build the wheel and unpack it, as pip would, into a folder of its own."""
    pytest.importorskip("hatchling", reason="the build tools are not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_wheel_holds_every_notebook_and_question(installed):
    for path in [*(ROOT / "course").glob("*.ipynb"), *(ROOT / "course/quiz").glob("*.toml")]:
        inside = installed / "zerolab" / path.relative_to(ROOT)
        assert inside.read_bytes() == path.read_bytes(), path.name


def test_course_of_the_wheel_is_found_and_copied(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    words = [sys.executable, "-c", ASK]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder, num_new, bank = done.stdout.split()
    assert Path(folder) == installed / "zerolab" / "course" and bank == "00.toml"
    assert int(num_new) == len(list((ROOT / "course").glob("[0-9][0-9]_*.ipynb")))
    assert (tmp_path / "workspace" / "00_start_here.ipynb").exists()
