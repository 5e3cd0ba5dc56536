"""The learner's first notebook in JupyterLab, in headless Chromium, as a learner runs it."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
ARTEFACTS = ROOT / "test-artefacts"
CELL_SECONDS = 240

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, or a skip that says why there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("ZEROLAB_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on PATH; install it or set ZEROLAB_CHROMIUM")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a fresh workspace, started as `zerolab learn` starts it; gives its address."""
    from zerolab.cli import learn
    from zerolab.lab import workspace as workspaces

    folder = tmp_path_factory.mktemp("workspace")
    course = workspaces.course_folder()
    workspaces.fill(folder, course)
    port = free_port()
    words = learn.command(folder, workspaces.notebook_of(course, "00"), browser=False)
    words += [f"--ServerApp.port={port}", "--IdentityProvider.token=", "--ServerApp.port_retries=0"]
    environment = learn.environment(folder)
    environment.pop("PYTEST_CURRENT_TEST", None)  # a learner's kernel knows of no test
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(folder.parent / "settings")
    environment["JUPYTERLAB_WORKSPACES_DIR"] = str(folder.parent / "layouts")
    log = (folder.parent / "jupyter.log").open("wb")
    server = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    wait_for_server(address, server, folder.parent / "jupyter.log")
    yield address, folder
    server.terminate()
    server.wait(timeout=30)
    log.close()


def wait_for_server(address, server, log):
    for _ in range(240):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not start: {log.read_text()[-800:]}")


def open_notebook(browser, address, name="00_start_here.ipynb"):
    page = browser.new_page(viewport={"width": 1280, "height": 960})
    page.goto(f"{address}/lab/tree/{name}?reset")  # without what an earlier test left open
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=90_000)
    return page


def run_all(page):
    """Choose Run All Cells, until a prompt shows that it was heard: the first time may be lost."""
    for _ in range(5):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        try:
            page.wait_for_function(
                "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
                ".some((p) => /[*0-9]/.test(p.textContent))",
                timeout=20_000,
            )
            return
        except Exception:
            page.keyboard.press("Escape")
    pytest.fail("Run All Cells was not heard")


def wait_until_run(page):
    """Wait until no cell is running or waiting any more."""
    page.wait_for_function(
        "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle' &&"
        "![...document.querySelectorAll('.jp-InputPrompt')].some((p) => p.textContent === '[*]:')",
        timeout=CELL_SECONDS * 1000,
    )


def keep(page, name):
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"{name}.png")


def switch_theme(page, name):
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_role("menuitem", name=name, exact=True).click()
    page.wait_for_timeout(1500)


def reach(page, locator):
    """Scroll to what Run All left above."""
    locator.wait_for(state="attached", timeout=CELL_SECONDS * 1000)
    locator.evaluate("(node) => node.scrollIntoView({ block: 'center' })")
    page.wait_for_timeout(300)


@pytest.fixture
def page(browser, lab):
    """The first notebook, open; what it shows at the end is kept, which helps after a failure."""
    page = open_notebook(browser, lab[0])
    asked = set()
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    yield page
    keep(page, "notebook_at_the_end")
    page.close()
    away = asked - {urlsplit(lab[0]).netloc, ""}  # "" for data: and blob:
    assert asked and not away, f"something was fetched from {away}"


WRONG = """
def shard_bounds(numel, world_size, rank):
    print("a look inside:", numel)
    n = numel // world_size
    return rank * n, (rank + 1) * n
lab.check("0.1", shard_bounds)
"""
ENDLESS = """
def shard_bounds(numel, world_size, rank):
    stop = 0
    while stop < 12:
        start = stop
lab.check("0.1", shard_bounds)
"""
RIGHT = """
def shard_bounds(numel, world_size, rank):
    n = padded_numel(numel, world_size) // world_size
    return rank * n, (rank + 1) * n
lab.check("0.1", shard_bounds)
"""


def write_answers(path):
    """Write a notebook of answers; a failing cell does not stop the ones after it."""
    begin = "from zerolab import lab\nfrom zerolab.lab import exercise\nlab.begin('00')"
    patience = "object.__setattr__(exercise.find('0.1'), 'seconds', {})"
    sources = [begin, WRONG, patience.format(2.0) + ENDLESS, patience.format(60.0) + RIGHT]
    sources.append('lab.hint("0.1")')
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    for cell in cells:
        cell.metadata["tags"] = ["raises-exception"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, path)


def test_cards_of_wrong_endless_and_right_answers(browser, lab):
    address, folder = lab
    write_answers(folder / "answers.ipynb")
    page = open_notebook(browser, address, "answers.ipynb")
    run_all(page)
    wait_until_run(page)
    for heading in ("FAIL  0.1", "TIMEOUT  0.1", "PASS  0.1", "Hint 1 of 3"):
        assert page.locator("[role=status]", has_text=heading).count() == 1, heading
    failed = page.locator("[role=status]", has_text="FAIL  0.1")
    assert "Floor division forgets the remainder" in failed.text_content()
    assert "a look inside: 12" in failed.text_content()
    hung = page.locator("[role=status]", has_text="TIMEOUT").text_content()
    assert "while stop < 12:" in hung or "start = stop" in hung
    errors = page.locator("[data-mime-type='application/vnd.jupyter.error'], .jp-RenderedText pre")
    assert all("Traceback" not in text for text in errors.all_text_contents())
    reach(page, failed)
    keep(page, "cards_light")
    reach(page, page.locator("[role=status]", has_text="PASS  0.1"))
    keep(page, "cards_pass_light")
    switch_theme(page, "JupyterLab Dark")
    reach(page, failed)
    keep(page, "cards_dark")
    switch_theme(page, "JupyterLab Light")
    page.close()
    (folder / "progress.jsonl").unlink()


def test_learner_runs_the_first_notebook(page, lab):
    run_all(page)

    first = page.locator(".zl-bars").first
    reach(page, first)
    first.locator(".zl-segment").first.wait_for(timeout=CELL_SECONDS * 1000)
    keep(page, "notebook_running")  # the bars climb while the cell runs
    first.locator(".zl-failed").wait_for(timeout=CELL_SECONDS * 1000)
    assert "ran out of memory" in first.locator(".zl-finding").text_content()
    assert "Tried to allocate" in first.locator(".zl-message").text_content()
    reach(page, first)
    first.locator('.zl-failed [data-kind="optimizer"]').click()
    assert "running averages" in first.locator(".zl-meaning").text_content()
    keep(page, "notebook_light")

    peaks = first.locator(".zl-sum").all_text_contents()
    first.locator("input[type=range]").fill("5")
    page.wait_for_function(
        "(node) => node.querySelector('output').textContent.startsWith('event 6 of')",
        arg=first.element_handle(),
    )
    assert first.locator(".zl-sum").all_text_contents() != peaks
    keep(page, "notebook_slider")

    # Run All reaches the end although no exercise was tried: grey cards, and no error.
    wait_until_run(page)
    untried = page.get_by_text("NOT YET TRIED")
    assert untried.count() == 2
    assert page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0
    reach(page, untried.first)
    keep(page, "notebook_card_light")
    reach(page, page.locator(".zl-bars").last)
    keep(page, "notebook_ladder")

    switch_theme(page, "JupyterLab Dark")
    reach(page, first)
    keep(page, "notebook_dark")
    reach(page, untried.first)
    keep(page, "notebook_card_dark")
    folder = lab[1]
    log = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert [entry["outcome"] for entry in log] == ["UNATTEMPTED", "UNATTEMPTED"]
