"""The set-up: what it decides, says and runs. No environment is made and nothing is downloaded."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bootstrap
from tools import lock

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path):
    """A folder that looks like a fresh clone to the set-up."""
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """The commands that the set-up would run; each succeeds until the test says otherwise."""

    class Calls(list):
        failing = ""

        def __call__(self, command, variables=None, watch=None):
            self.append(" ".join(command))
            return 1 if self.failing and self.failing in self[-1] else 0

    recorded = Calls()
    monkeypatch.setattr(bootstrap, "call", recorded)
    monkeypatch.setattr(
        bootstrap, "begin", lambda commands: lambda: [recorded(*command) for command in commands]
    )
    return recorded


@pytest.fixture
def with_venv(monkeypatch, clone):
    """A clone with an environment whose Python starts."""
    python = bootstrap.venv_python(clone)
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(bootstrap, "usable", Path.exists)
    return clone


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 9, 6), (2, 7, 18)])
def test_an_old_python_is_refused_with_the_remedy(version):
    with pytest.raises(bootstrap.SetupError, match=r"needs Python 3\.11.* this is Python \d\.\d+"):
        bootstrap.check_python(version)


def test_a_new_python_is_accepted():
    bootstrap.check_python((3, 11, 0))
    bootstrap.check_python((3, 14, 1))


def test_old_pythons_can_read_the_file_to_its_refusal():
    source = (ROOT / "bootstrap.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 7))


def test_bootstrap_needs_the_standard_library_only():
    code = (
        "import sys; sys.path.insert(0, '.'); import bootstrap; "
        "print(sorted({n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout == "['__main__', 'bootstrap']\n"


def test_the_environment_is_ready_only_after_the_stamp(with_venv):
    assert not bootstrap.is_ready(with_venv)
    stamp = bootstrap.stamp_path(with_venv)
    stamp.write_text(bootstrap.fingerprint(with_venv))
    assert bootstrap.is_ready(with_venv)
    bootstrap.venv_python(with_venv).unlink()
    assert not bootstrap.is_ready(with_venv)


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_asks_for_a_new_set_up(with_venv, name):
    bootstrap.stamp_path(with_venv).write_text(bootstrap.fingerprint(with_venv))
    (with_venv / name).write_text("numpy==2.4.6\n")
    assert not bootstrap.is_ready(with_venv)


def test_a_moved_folder_asks_for_a_new_set_up(with_venv):
    bootstrap.stamp_path(with_venv).write_text(bootstrap.fingerprint(with_venv))
    moved = with_venv.rename(with_venv.with_name("moved"))
    assert not bootstrap.is_ready(moved)


def test_a_first_set_up_makes_the_environment_and_leaves_the_stamp(clone, calls):
    (clone / ".venv").mkdir()  # what `python -m venv`, recorded and not run, would make
    bootstrap.set_up(clone)
    assert [" -m venv " in c or "-r requirements.lock" in c or " -e ." in c for c in calls] == [
        True,
        True,
        True,
    ]
    assert bootstrap.stamp_path(clone).read_text() == bootstrap.fingerprint(clone)


def test_an_interrupted_set_up_leaves_no_stamp_and_keeps_the_environment(with_venv, calls):
    bootstrap.stamp_path(with_venv).write_text("of an older set-up")
    calls.failing = "requirements.lock"
    with pytest.raises(bootstrap.SetupError, match="goes on where this one stopped"):
        bootstrap.set_up(with_venv)
    assert not bootstrap.stamp_path(with_venv).exists()
    calls.failing = ""
    calls.clear()
    bootstrap.set_up(with_venv)
    assert not any(" -m venv " in command for command in calls)
    assert bootstrap.is_ready(with_venv)


def test_a_half_made_environment_is_not_usable(clone):
    python = bootstrap.venv_python(clone)
    assert not bootstrap.usable(python)
    python.parent.mkdir(parents=True)
    python.write_text("no program")
    assert not bootstrap.usable(python)
    assert bootstrap.usable(Path(sys.executable))


def test_the_plan_is_printed_before_anything_runs(clone, calls, capsys):
    calls.failing = "venv"
    with pytest.raises(bootstrap.SetupError):
        bootstrap.set_up(clone)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert str(clone / ".venv") in first
    assert f"{bootstrap.LIBRARIES_MB + bootstrap.TORCH_CPU_MB} MB" in second
    assert "minutes" in second


@pytest.mark.parametrize(
    ("system", "machine", "cuda"),
    [("Linux", "x86_64", True), ("Darwin", "arm64", False), ("Windows", "AMD64", False)],
)
def test_the_plan_warns_of_the_cuda_build_where_pip_takes_it(tmp_path, system, machine, cuda):
    assert ("CUDA" in bootstrap.plan(tmp_path, system, machine)) == cuda


def test_the_python_of_the_environment_is_found_on_windows_too():
    assert bootstrap.venv_python(Path("x"), windows=True) == Path("x/.venv/Scripts/python.exe")
    assert bootstrap.venv_python(Path("x"), windows=False) == Path("x/.venv/bin/python")


def test_pips_report_becomes_a_counter_and_large_downloads(capsys):
    watch = bootstrap.PipWatch(total=2, terminal=False)
    report = [
        "Collecting numpy==2.4.6 (from -r requirements.lock (line 9))",
        "  Downloading numpy-2.4.6-cp311.whl.metadata (62 kB)",
        "  Downloading https://example.org/a/numpy-2.4.6-cp311.whl (16.9 MB)",
        "  Downloading six-1.17.0-py2.py3-none-any.whl (1.2 MB)",
        "Installing collected packages: six, numpy",
    ]
    for line in report:
        watch(line)
    assert watch.count == 1
    assert capsys.readouterr().out.splitlines() == [
        "    downloading numpy-2.4.6-cp311.whl (16.9 MB)",
        "    unpacking them into .venv",
    ]


def test_the_test_command_runs_all_checks_and_pytest_last(calls):
    assert bootstrap.test("python", []) == 0
    words = ["ruff check", "ruff format", "pyright", "course/build.py --check", "pytest tests"]
    words += ["solutions tests/test_browser.py", "solutions/04_optimizer_sharding.ipynb"]
    assert [word in command for word, command in zip(words, calls, strict=True)] == [True] * 7
    assert "--nbval" in calls[-2].split() and "--nbval-lax" in calls[-1].split()


def test_the_test_command_goes_on_after_a_failure_and_reports_it(calls, capsys):
    calls.failing = "pyright"
    assert bootstrap.test("python", []) == 1
    assert len(calls) == 7
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: pyright"


def test_quick_leaves_out_the_slow_checks_and_passes_arguments_on(calls):
    assert bootstrap.test("python", ["--quick", "-k", "flat"]) == 0
    assert not any("pyright" in command or "nbval" in command for command in calls)
    assert calls[-1] == "python -m pytest -m not browser and not oracle -k flat"


def test_what_runs_beside_the_tests_is_printed_when_it_has_ended(capfd):
    code = "import os, sys; print('beside', os.environ['WHO']); sys.exit(int(sys.argv[1]))"
    command = [sys.executable, "-c", code]
    finish = bootstrap.begin([([*command, "3"], {"WHO": "me"}), ([*command, "0"], {"WHO": "you"})])
    assert finish() == [3, 0]
    assert re.search(r"beside me\s+beside you", capfd.readouterr().out)


def test_notebooks_are_compared_loosely_on_gpus():
    *_, (_, command) = bootstrap.test_steps("python", quick=False, world="nccl")
    assert "--nbval-lax" in command
    assert "--nbval" not in command


@pytest.mark.parametrize("command", ["learn", "demo"])
def test_learn_and_demo_pass_their_arguments_to_the_package(calls, command):
    bootstrap.run(command, ["--json"])
    assert calls[-1].endswith(f"-m zerolab {command} --json")


def test_an_unknown_command_is_bad_usage(capsys):
    assert bootstrap.main(["lern"]) == 2
    assert "'lern' is no command: use one of learn, demo" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_is_given_without_a_set_up(arguments, calls, capsys):
    assert bootstrap.main(arguments) == 0
    assert calls == []
    assert "python bootstrap.py learn" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="exit codes of signals are a matter of POSIX")
def test_a_command_that_fails_hands_its_exit_code_on():
    assert bootstrap.call([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_call_gives_every_line_to_the_watch_and_sets_variables():
    lines = []
    code = "import os; print(os.environ['OF_THE_TEST']); print('last')"
    assert bootstrap.call([sys.executable, "-c", code], {"OF_THE_TEST": "yes"}, lines.append) == 0
    assert lines == ["yes\n", "last\n"]


def locked():
    """The lines of the lock as requirements."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_the_lock_pins_everything_and_names_no_source():
    for requirement in locked():
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        assert "+" not in specifier.version
        assert requirement.url is None
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert "torch==2.13.0\n" in text


def test_the_lock_satisfies_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in locked()}
    for line in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


WRITTEN_ON = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info[:2] != (3, 11),
    reason="the lock is written on Linux with Python 3.11",
)


@WRITTEN_ON
def test_the_lock_is_what_is_installed_here():
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if ";" in line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert lock.lock_text(project, kept) == text


@WRITTEN_ON
def test_a_package_of_another_system_without_a_line_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with pytest.raises(SystemExit, match="appnope"):
        lock.lock_text(project, ['colorama==0.4.6; sys_platform == "win32"'])


def test_the_conda_environment_uses_the_same_lock():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    assert "- -r requirements.lock" in text
    assert "- -e ." in text
