"""A browser page in which a widget's script runs on a stub model: no Jupyter, no kernel."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

ARTEFACTS = Path(__file__).resolve().parents[2] / "test-artefacts"

PAGE = """<!doctype html><html><head><meta charset="utf-8"><style>%(css)s
body { margin: 16px; background: %(paper)s; }</style></head>
<body data-jp-theme-light="%(light)s"><div id="here"></div><script type="module">
%(script)s
const state = %(state)s;
const heard = {};
const model = {
  get: (name) => state[name],
  set: (name, value) => {
    state[name] = value;
    (heard[`change:${name}`] ?? []).forEach((f) => f());
  },
  on: (name, f) => { (heard[name] ??= []).push(f); },
  off: () => {},
  save_changes: () => { window.saved = (window.saved ?? 0) + 1; },
};
window.model = model;
window.state_now = () => state;
const draw = (el) => {
  const began = performance.now();
  widget.render({ model, el });
  document.body.offsetHeight;  // lay it out now: that is part of drawing
  return performance.now() - began;
};
window.drawnIn = draw(document.getElementById("here"));
window.drawAgain = () => {
  const el = document.body.appendChild(document.createElement("div"));
  const took = draw(el);
  el.remove();
  return took;
};
</script></body></html>"""


@pytest.fixture(scope="session")
def chromium():
    """Headless Chromium, or a skip that says why there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("ZEROLAB_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on PATH; install it or set ZEROLAB_CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def draw(chromium):
    """Return a function that draws a widget's state, whose script it brings, and gives the page."""
    pages = []

    def open_page(name, widget, *, dark=False, width=920):
        script = str(widget._esm).replace("export default", "const widget =")
        keys = [k for k in widget.keys if not k.startswith("_") and k not in ("layout", "tabbable")]
        state = {k: getattr(widget, k) for k in keys if k not in ("tooltip", "comm")}
        page = chromium.new_page(viewport={"width": width, "height": 520})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_content(
            PAGE
            % {
                "css": str(widget._css),
                "paper": "#111111" if dark else "#ffffff",
                "light": "false" if dark else "true",
                "script": script,
                "state": json.dumps(state).replace("<", "\\u003c"),  # names may say </script>
            }
        )
        page.wait_for_function("window.drawnIn !== undefined")
        pages.append((page, errors))
        return page

    yield open_page
    for page, errors in pages:
        page.close()
        assert not errors


@pytest.fixture(scope="session")
def barriers():
    """Return a function that lists what axe-core finds to keep readers out of a part of a page."""
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    script = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")

    def found(page, css):
        if not page.evaluate("'axe' in window"):
            page.evaluate(script)
        result = page.evaluate("(css) => axe.run(css, { resultTypes: ['violations'] })", css)
        assert result["passes"], f"nothing of {css} was looked at"
        return [
            f"{each['impact']}, {each['id']}: {each['nodes'][0]['html'][:200]}"
            for each in result["violations"]
            if each["impact"] in ("serious", "critical")
        ]

    return found


@pytest.fixture
def drawn_in():
    """Return a function that gives the milliseconds of drawing, the best of four."""
    return lambda page: min(
        [page.evaluate("window.drawnIn"), *(page.evaluate("window.drawAgain()") for _ in range(3))]
    )


@pytest.fixture
def best_of():
    """Return a function that gives the processor time that an act takes, the best of three."""

    def seconds(*acts):
        took = []
        for act in acts:
            began = time.process_time()
            act()
            took.append(time.process_time() - began)
        return min(took)

    return seconds


@pytest.fixture
def keep():
    """Return a function that keeps a screenshot as a test artefact."""

    def save(page, name):
        ARTEFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"{name}.png")

    return save
