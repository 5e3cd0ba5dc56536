// Chapter 2: draws the table of a deadlock; a row that is chosen is told in words below.
const HEAD = ["rank", "state", "collective", "since", "line", "source"];

function drawRow(model, body, line, index) {
  const row = make("tr", line.odd ? "zl-odd" : "", body);
  const chosen = model.get("selected") === index;
  row.setAttribute("aria-selected", String(chosen));
  row.tabIndex = index === Math.max(model.get("selected"), 0) ? 0 : -1;
  row.dataset.index = index;
  const rank = make("td", "zl-nowrap", row, String(line.rank));
  if (line.odd) make("span", "zl-mark", rank, line.mark);
  make("td", "zl-nowrap", row, line.state);
  make("td", "", row, line.call);
  make("td", "zl-nowrap", row, line.since);
  make("td", "", row, line.where);
  make("code", "", make("td", "", row), line.source);
}

function drawStuck(model, ui) {
  drawFrame(model, ui);
  const held = ui.body.contains(document.activeElement);
  ui.body.replaceChildren();
  model.get("lines").forEach((line, index) => drawRow(model, ui.body, line, index));
  const chosen = model.get("lines")[model.get("selected")];
  ui.said.textContent = chosen ? chosen.says : "Choose a row, by mouse or arrow keys.";
  if (held) ui.body.querySelector('[tabindex="0"]')?.focus();
}

function renderStuck({ model, el }) {
  const ui = panel(el, "zl-stuck");
  const table = make("table", "", ui.stage);
  table.setAttribute("role", "grid");
  const head = make("tr", "", make("thead", "", table));
  for (const text of HEAD) make("th", "", head, text).scope = "col";
  ui.body = make("tbody", "", table);
  ui.body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) choose(model, "selected", Number(row.dataset.index));
  });
  const keys = { ArrowDown: 1, ArrowUp: -1, Home: -1e6, End: 1e6, Enter: 0, " ": 0 };
  ui.body.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    const at = Number(event.target.closest("tr").dataset.index) + keys[event.key];
    choose(model, "selected", Math.max(0, Math.min(model.get("lines").length - 1, at)));
    ui.body.querySelector('[tabindex="0"]')?.focus();
  });
  return redrawOn(model, ["lines", "selected", "finding", "theme"], () => drawStuck(model, ui));
}
