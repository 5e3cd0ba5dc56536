"""`zerolab doctor`: every finding that is not fine says what to do."""

import socket
from importlib import metadata

import pytest

from zerolab import cli
from zerolab.cli import doctor, machine


def test_this_machine_is_examined_and_can_run(capsys):
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("Python", "torch", "cores", "memory", "GPUs", "widget manager", "loopback"):
        assert name in out


def test_everything_that_is_not_fine_has_advice(monkeypatch):
    def nothing_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing_installed)
    findings = doctor.examine()
    troubled = [finding for finding in findings if finding.state != "ok"]
    assert {"torch", "jupyterlab", "ipywidgets"} <= {finding.name for finding in troubled}
    assert all(finding.advice for finding in troubled)


def test_a_problem_makes_the_exit_code_1(capsys, monkeypatch):
    monkeypatch.setenv("ZEROLAB_WORLD", "mars")
    assert cli.run(["doctor"]) == 1
    assert "'mars'" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "state"), [("2.13.0+cpu", "ok"), ("2.9.1", "problem")])
def test_torch_must_be_new_enough(monkeypatch, version, state):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert doctor.torch().state == state


def test_an_old_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    finding = doctor.python()
    assert finding.state == "problem"
    assert "install" in finding.advice


@pytest.mark.parametrize(
    ("total", "state"), [(None, "note"), (2 * 2**30, "note"), (16 * 2**30, "ok")]
)
def test_little_memory_is_noted(total, state):
    assert doctor.memory(total).state == state


def test_one_core_is_noted(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 1)
    assert doctor.cores().state == "note"


def test_half_set_torchrun_variables_are_a_problem(monkeypatch):
    for name in doctor.TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert doctor.torchrun_variables().state == "ok"
    monkeypatch.setenv("RANK", "0")
    finding = doctor.torchrun_variables()
    assert finding.state == "problem"
    assert "unset RANK" in finding.advice


def test_a_port_in_use_is_noted():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert doctor.torchrun_port(port).state == "note"
    assert doctor.torchrun_port(port).state == "ok"


def test_missing_widget_extensions_are_a_problem(tmp_path):
    assert doctor.widget_manager([str(tmp_path)]).state == "problem"
    for name in doctor.EXTENSIONS:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "package.json").write_text("{}")
    assert doctor.widget_manager([str(tmp_path)]).state == "ok"
