"""Every picture once in JupyterLab: drawn, interacted with, changed. One server, one notebook.

A picture joins by a cell in CELLS and a test that finds its place on the `page`. At the end axe
looks at all of it in both themes, the kernel is lost, and the saved notebook is opened without one.
"""

import subprocess
import time
from urllib.parse import urlsplit

import nbformat
import pytest
from test_browser import (
    free_port,
    open_notebook,
    reach,
    run_all,
    switch_theme,
    wait_for_server,
    wait_until_run,
)

from zerolab.cli import learn
from zerolab.lab import workspace

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = {
    "begin": """
import torch

from zerolab import DeadlockError, comm, lab
from zerolab.lab import cards, exercise, outcome
from zerolab_widgets import CollectiveSteps, DeadlockTable, EngineMap, ShardMap, UnitLifecycle
from zerolab_widgets import LiveDashboard, MemoryBars, MemoryExplorer, MemoryTimeline, QuizCard
from zerolab_widgets import StepTimeline
nano = {"model": "gpt-nano", "dtype": "fp32"}
""",
    "explorer": "MemoryExplorer()",
    "dashboard": "run = lab.train(stage=3, steps=3, watch=LiveDashboard(), **nano)\nrun.fits",
    "timeline": "MemoryTimeline(run)",
    "steps": "StepTimeline(run)",
    "ring": "CollectiveSteps(4)",
    "stuck": """
def leave_early():
    if comm.get_rank() != 2:
        comm.all_reduce(torch.ones(4))

try:
    comm.run(leave_early, 4, "lockstep")
except DeadlockError as error:
    table = DeadlockTable(error)
table
""",
    "map": 'ShardMap({"a.weight": (2, 3), "a.bias": (2,), "b.weight": (1, 2)}, 4)',
    "lives": "UnitLifecycle(run)",
    "engine": "EngineMap(run)",
    "bars": "lab.train(stage=0, steps=1, watch=MemoryBars(), gpu_memory='300KiB', **nano).fits",
    "quiz": "QuizCard(lab.quiz('01'))",
    "cards": """
facts = {"message": "It must be 3: `shard` is 2.", "expected": "3", "observed": "2", "rank": 1}
for each in outcome.Outcome:
    report = outcome.Report("0.1", each, **facts, proven=["it returns"], output="seen")
    display(cards.card_of(report, exercise.find("0.1"), "running on: the reference engine"))
""",
    "again": "first = MemoryTimeline(run)\ndisplay(first)\ndisplay(first)",
}

PICTURES = (
    "explorer timeline dashboard step-timeline steps stuck map lives engine bars quiz".split()
)
# From a control's event to the first change on the page, in milliseconds: the best of four.
REACTION = """async ([root, control]) => {
  const times = [];
  for (let k = 0; k < 4; k += 1) {
    const nodes = root.querySelectorAll(control);
    const node = nodes[k % 2 ? 0 : nodes.length - 1];
    times.push(await new Promise((done) => {
      let began = 0;
      setTimeout(() => done(Infinity), 3000);
      const watcher = new MutationObserver(() => {
        watcher.disconnect();
        done(performance.now() - began);
      });
      const all = { subtree: true, childList: true, attributes: true, characterData: true };
      watcher.observe(root, all);
      began = performance.now();
      if (node.type === "range") {
        node.value = Number(node.value) === Number(node.max) ? node.min : node.max;
        node.dispatchEvent(new Event("input", { bubbles: true }));
      } else node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    }));
  }
  return Math.min(...times);
}"""
# A control of each picture that always changes it.
CONTROLS = {
    "explorer": "input[type=range]",
    "timeline": "input[type=range]",
    "dashboard": "input[type=range]",
    "step-timeline": "button",
    "steps": "input[type=range]",
    "stuck": "tbody tr",
    "map": ".zl-box",
    "lives": "input[type=range]",
    "engine": ".zl-piece",
    "bars": "input[type=range]",
    "quiz": ".zl-step",
}


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    """A notebook with all pictures, run to its end; nothing is fetched from elsewhere."""
    folder = tmp_path_factory.mktemp("pictures") / "workspace"
    workspace.fill(folder, workspace.course_folder())
    write_notebook(folder / "pictures.ipynb")
    port, log = free_port(), folder.parent / "jupyter.log"
    words = learn.command(folder, "pictures.ipynb", browser=False)
    words += [f"--ServerApp.port={port}", "--IdentityProvider.token=", "--ServerApp.port_retries=0"]
    with log.open("wb") as out:
        server = subprocess.Popen(words, env=surroundings(folder), stdout=out, stderr=out)
        try:
            wait_for_server(f"http://127.0.0.1:{port}", server, log)
            page = open_notebook(chromium, f"http://127.0.0.1:{port}", "pictures.ipynb")
            hosts = set()
            page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
            run_all(page)
            wait_until_run(page)
            page.saved = folder / "pictures.ipynb"
            yield page
            page.close()
            away = hosts - {f"127.0.0.1:{port}", ""}  # "" for data: and blob:
            assert hosts and not away, f"something was fetched from {away}"
        finally:
            server.terminate()
            server.wait(timeout=30)


def write_notebook(path):
    cells = [nbformat.v4.new_code_cell(source.strip(), id=name) for name, source in CELLS.items()]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def surroundings(folder):
    environment = learn.environment(folder)
    environment.pop("PYTEST_CURRENT_TEST", None)
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(folder.parent / "settings")
    environment["JUPYTERLAB_WORKSPACES_DIR"] = str(folder.parent / "layouts")
    return environment


def changed(page, locator, before, act):
    """Do something, wait until the text of a place is another one."""
    act()
    page.wait_for_function(
        "([node, before]) => node.textContent !== before",
        arg=[locator.element_handle(), before],
        timeout=60_000,
    )


def first(page, css):
    place = page.locator(css).first
    reach(page, place)
    return place


def test_memory_explorer_follows_a_slider(page):
    explorer = first(page, ".zl-explorer")
    assert explorer.locator(".zl-column").count() == 4
    finding = explorer.locator(".zl-finding")
    slider = explorer.locator('[data-field="world_size"]')
    before = finding.text_content()
    changed(page, finding, before, lambda: slider.press("ArrowRight"))
    assert "on 128 GPUs" in finding.text_content()


def test_memory_timeline_follows_the_scrubber(page):
    timeline = first(page, ".zl-timeline")
    assert timeline.locator(".zl-row").count() == 4
    output = timeline.locator("output")
    scrubber = timeline.locator("input[type=range]")
    changed(page, output, output.text_content(), lambda: scrubber.press("Home"))
    assert output.text_content().endswith("init")
    totals = timeline.locator(".zl-total")
    changed(page, totals.first, totals.first.text_content(), lambda: scrubber.press("End"))


def test_live_dashboard_has_the_whole_run(page):
    board = first(page, ".zl-dashboard")
    page.wait_for_function(
        "(node) => node.querySelectorAll('.zl-chart rect[fill^=url]').length === 3",
        arg=board.element_handle(),
    )
    assert "reduce_scatter" in board.locator(".zl-moved").text_content()
    output = board.locator("output")
    slider = board.locator("input[type=range]")
    changed(page, output, output.text_content(), lambda: slider.press("Home"))
    assert output.text_content().startswith("event 1 of")


def test_step_timeline_changes_the_step(page):
    steps = first(page, ".zl-step-timeline")
    assert "order, not time" in steps.locator(".zl-axis").text_content()
    finding = steps.locator(".zl-finding")
    slider = steps.locator("input[type=range]")
    changed(page, finding, finding.text_content(), lambda: slider.press("Home"))
    assert finding.text_content().startswith("Step 1 of 3")
    steps.locator('[data-what="hidden"]').first.click()
    assert "on its way" in steps.locator(".zl-said").text_content()


def test_collective_steps_steps(page):
    steps = first(page, ".zl-steps")
    said = steps.locator(".zl-said")
    steps.locator("svg").focus()
    changed(page, said, said.text_content(), lambda: page.keyboard.press("ArrowRight"))
    assert said.text_content().startswith("Step 1 of 6")
    assert steps.locator("[data-arrow]").count() == 4


def test_deadlock_table_tells_of_a_row(page):
    table = first(page, ".zl-stuck")
    assert table.locator(".zl-odd").text_content().startswith("2odd one outreturned")
    said = table.locator(".zl-said")
    row = table.locator("tbody tr").nth(2)
    changed(page, said, said.text_content(), row.click)
    assert "Ranks 0, 1 and 3 wait in all_reduce #0" in said.text_content()


def test_shard_map_walks_by_keys(page):
    picture = first(page, ".zl-map")
    said = picture.locator(".zl-said")
    picture.locator(".zl-box").first.focus()
    changed(page, said, said.text_content(), lambda: page.keyboard.press("ArrowDown"))
    assert said.text_content().startswith("Rank 0 owns 3 elements of a.weight")


def test_unit_lifecycle_scrubs_and_changes_the_step(page):
    lives = first(page, ".zl-lives")
    output = lives.locator("output")
    slider = lives.locator("input[type=range]")
    changed(page, output, output.text_content(), lambda: slider.press("End"))
    finding = lives.locator(".zl-finding")
    step = lives.get_by_role("button", name="Step 1")
    changed(page, finding, finding.text_content(), step.click)
    assert finding.text_content().startswith("Step 1 of rank 0")


def test_engine_map_tells_of_a_function(page):
    engine = first(page, ".zl-engine")
    said = engine.locator(".zl-said")
    reduce = engine.get_by_role("button", name="reduce_scatter, of the package")
    changed(page, said, said.text_content(), reduce.first.click)
    assert said.text_content().startswith("comm.reduce_scatter. ")


def test_pictures_react_at_once(page):
    took = {}
    for name, control in CONTROLS.items():
        place = first(page, f".zl-{name}")
        took[name] = page.evaluate(REACTION, [place.element_handle(), control])
    print(", ".join(f"{name} {ms:.0f} ms" for name, ms in took.items()))
    assert max(took.values()) < 200


def test_one_picture_shown_twice_is_one_picture(page):
    both = page.locator(".zl-timeline")
    reach(page, both.last)
    twins = [both.nth(both.count() - 2), both.last]
    outputs = [twin.locator("output") for twin in twins]
    before = outputs[1].text_content()
    changed(page, outputs[1], before, lambda: twins[0].locator("input").press("End"))
    assert outputs[0].text_content() == outputs[1].text_content() != before


@pytest.mark.parametrize("look", ["light", "dark"])
def test_pictures_are_kept_to_be_looked_at_and_keep_nobody_out(page, keep, barriers, look):
    if look == "dark":
        switch_theme(page, "JupyterLab Dark")
    found = {}
    for name in PICTURES:
        place = first(page, f".zl-{name}")
        ink = "(n) => getComputedStyle(n.querySelector('.zl-finding, .zl-title')).color"
        inks = place.evaluate(ink)
        light = sum(map(int, inks[4:-1].split(","))) > 3 * 128
        assert light == (look == "dark")
        keep(page, f"lab_{name}_{look}")
        found[name] = barriers(page, f".zl-{name}")
    cards = page.locator("[role=status]", has_text="0.1 shard_bounds")
    assert cards.count() == 8
    reach(page, cards.first)
    keep(page, f"lab_cards_{look}")
    reach(page, cards.last)
    keep(page, f"lab_cards_end_{look}")
    found["cards"] = barriers(page, ".jp-OutputArea-output [role=status]")
    assert not any(found.values()), found


SHOWN_BY = {
    "explorer": "MemoryExplorer: ",
    "dashboard": "LiveDashboard: ",
    "timeline": "MemoryTimeline: ",
    "steps": "StepTimeline: ",
    "ring": "CollectiveSteps: ",
    "stuck": "DeadlockTable: ",
    "map": "ShardMap: ",
    "lives": "UnitLifecycle: ",
    "engine": "EngineMap: ",
    "bars": "MemoryBars: ",
    "quiz": "QuizCard: ",
}


def wait_for_outputs(path):
    """Return by cell what a saved notebook shows first, once it has been saved with outputs."""
    for _ in range(400):
        try:
            cells = nbformat.read(path, as_version=4).cells
        except ValueError:  # it is being written
            cells = []
        shown = {
            cell.id: output.data
            for cell in cells
            for output in reversed(cell.outputs)
            if "text/html" in output.get("data", {})
        }
        if "again" in shown:
            return shown
        time.sleep(0.2)
    pytest.fail("the notebook was not saved with its outputs")


def test_pictures_outlive_the_kernel_and_the_saved_notebook_needs_none(page, keep):
    page.keyboard.press("Escape")
    page.get_by_role("menuitem", name="File", exact=True).click()
    page.get_by_text("Save Notebook", exact=True).click()
    saved = wait_for_outputs(page.saved)
    assert set(saved) >= set(SHOWN_BY)
    for name, data in saved.items():
        assert "<script" not in data["text/html"] and "<svg" not in data["text/html"], name
        assert data["text/plain"].startswith(SHOWN_BY.get(name, "")), name
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_text("Restart Kernel\u2026", exact=True).click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=90_000)
    steps = first(page, ".zl-steps")  # its script needs no kernel
    said = steps.locator(".zl-said")
    steps.locator("svg").focus()
    changed(page, said, said.text_content(), lambda: page.keyboard.press("ArrowRight"))
