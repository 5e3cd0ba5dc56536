// Chapter 0: draws memory bars. All numbers come from the model, all colours from model.theme.
function barsSkeleton(el) {
  const root = make("div", "zl-bars", el);
  root.setAttribute("role", "group");
  const finding = make("p", "zl-finding", root);
  finding.setAttribute("aria-live", "polite");
  const message = make("p", "zl-message", root);
  const main = make("div", "zl-main", root);
  const plot = make("div", "zl-plot", main);
  const detail = make("div", "zl-detail", main);
  detail.setAttribute("aria-live", "polite");
  const control = make("div", "zl-control", root);
  const label = make("label", "", control);
  const range = make("input", "", control);
  range.type = "range";
  const output = make("output", "", control);
  const reset = make("button", "", control, "peaks");
  reset.type = "button";
  return { root, finding, message, plot, detail, control, label, range, output, reset };
}

// What is drawn now: the bars at the chosen moment, or every rank at its peak.
function shownBars(model) {
  const bars = model.get("bars");
  const frame = model.get("frames")[model.get("frame")];
  if (!frame) return bars;
  const kinds = Object.keys(model.get("theme").kinds);
  return bars.map((bar, i) => {
    const [phase, sizes] = frame.bars[i];
    const segments = kinds.map((kind, k) => [kind, sizes[k]]).filter(([, bytes]) => bytes > 0);
    return { ...bar, phase, segments, failed: false };
  });
}

const total = (bar) => bar.segments.reduce((sum, [, bytes]) => sum + bytes, 0);

function topOfScale(model) {
  const bars = model.get("bars");
  const ceiling = model.get("slider") === "ceiling" ? 0 : model.get("capacity");
  return Math.max(ceiling, 1, ...bars.map((b) => Math.max(b.peak, total(b)))) * 1.06;
}

function drawSegments(model, bar, index, track, scale) {
  const kinds = model.get("theme").kinds;
  const [chosenBar, chosenKind] = model.get("selected");
  const unit = [GIB, MIB].find((size) => scale >= size) ?? 1024;
  let bottom = 0;
  for (const [kind, bytes] of bar.segments) {
    const height = (bytes / scale) * 100;
    const node = make("button", "zl-segment", track);
    node.type = "button";
    node.dataset.kind = kind;
    node.dataset.bar = index;
    node.style.bottom = `${bottom}%`;
    node.style.height = `${height}%`;
    node.title = `${kinds[kind].label}: ${mib(bytes)}`;
    node.setAttribute("aria-label", `${bar.label}, ${kinds[kind].label}, ${mib(bytes)}`);
    node.setAttribute("aria-pressed", String(chosenBar === index && chosenKind === kind));
    if (chosenBar === index && chosenKind === kind) node.classList.add("zl-chosen");
    paint(node, kinds[kind]);
    if (height > 6.5) {
      const text = make("span", "", node, `${kind} ${(bytes / unit).toFixed(1)}`);
      text.style.backgroundColor = kinds[kind].fill;
    }
    bottom += height;
  }
}

function verdict(model, bar) {
  if (bar.failed) return "out of memory";
  if (model.get("slider") === "time") return "";
  return total(bar) > model.get("capacity") ? "out of memory" : "fits";
}

function drawColumn(model, bar, index, plot, scale) {
  const said = verdict(model, bar);
  const column = make("div", "zl-column", plot);
  if (said === "out of memory") column.classList.add("zl-failed");
  const track = make("div", "zl-track", column);
  drawSegments(model, bar, index, track, scale);
  if (bar.peak && model.get("frame") >= 0) {
    make("div", "zl-peak", track).style.bottom = `${(bar.peak / scale) * 100}%`;
  }
  make("div", "zl-label", column, bar.label);
  const phase = bar.phase && model.get("frame") >= 0 ? `, ${bar.phase}` : "";
  make("div", "zl-sum", column, mib(total(bar)) + phase);
  if (said) make("span", "zl-verdict" + (said === "fits" ? "" : " zl-alarm"), column, said);
}

function drawCeiling(model, plot, scale) {
  const capacity = model.get("capacity");
  if (!capacity || !model.get("bars").length) return;
  const line = make("div", "zl-ceiling", plot);
  line.style.top = `${4 + 230 * (1 - capacity / scale)}px`;
  make("span", "", line, `ceiling ${mib(capacity)}`);
}

function drawDetail(model, bars, detail) {
  detail.replaceChildren();
  if (!bars.length) return;
  const kinds = model.get("theme").kinds;
  const failed = bars.findIndex((b) => b.failed);
  const [index, chosen] = model.get("selected").length ? model.get("selected") : [Math.max(failed, 0), ""];
  const bar = bars[Math.min(index, bars.length - 1)];
  const sum = total(bar);
  make("h4", "", detail, `What fills ${bar.label}`);
  const table = make("table", "zl-table", detail);
  for (const [kind, bytes] of [...bar.segments].reverse()) {
    const row = make("tr", kind === chosen ? "zl-chosen" : "", table);
    paint(make("span", "zl-swatch", make("td", "", row)), kinds[kind]);
    make("td", "", row, kinds[kind].label);
    make("td", "zl-number", row, mib(bytes));
    make("td", "zl-number", row, `${Math.round((100 * bytes) / sum)} %`);
  }
  const last = make("tr", "zl-total", table);
  for (const text of ["", "sum", mib(sum), ""]) make("td", "zl-number", last, text);
  last.children[1].className = "";
  const hint = "Click a part of a bar to see what it is.";
  make("p", "zl-meaning", detail, chosen ? `${kinds[chosen].label}: ${kinds[chosen].meaning}.` : hint);
}

function drawControl(model, ui) {
  const time = model.get("slider") === "time";
  const frames = model.get("frames");
  const nothing = time ? frames.length < 2 : !model.get("bars").length;
  ui.control.hidden = nothing || model.get("slider") === "none";
  ui.reset.hidden = !time;
  ui.label.textContent = time ? "moment" : "ceiling";
  ui.range.setAttribute("aria-label", time ? "moment of the run" : "ceiling in MiB");
  ui.range.min = time ? 0 : 1;
  ui.range.max = time ? frames.length - 1 : Math.ceil((topOfScale(model) / MIB) * 1.0);
  const at = model.get("frame");
  ui.range.value = time ? (at < 0 ? frames.length - 1 : at) : model.get("capacity") / MIB;
  const moment = at < 0 ? "every rank at its peak" : `event ${at + 1} of ${frames.length}`;
  ui.output.textContent = time ? moment : mib(model.get("capacity"));
  ui.range.setAttribute("aria-valuetext", ui.output.textContent);
}

function drawBars(model, ui) {
  applyTheme(model, ui.root);
  ui.root.setAttribute("aria-label", model.get("finding"));
  ui.finding.textContent = model.get("finding");
  ui.message.textContent = model.get("message");
  ui.message.hidden = !model.get("message");
  const held = ui.plot.contains(document.activeElement) ? document.activeElement.dataset : null;
  const bars = shownBars(model);
  const scale = topOfScale(model);
  ui.plot.replaceChildren();
  bars.forEach((bar, i) => drawColumn(model, bar, i, ui.plot, scale));
  drawCeiling(model, ui.plot, scale);
  drawDetail(model, bars, ui.detail);
  drawControl(model, ui);
  if (held) {
    ui.plot.querySelector(`[data-bar="${held.bar}"][data-kind="${held.kind}"]`)?.focus();
  }
}

function listenToBars(model, ui) {
  ui.plot.addEventListener("click", (event) => {
    const node = event.target.closest(".zl-segment");
    if (!node) return;
    model.set("selected", [Number(node.dataset.bar), node.dataset.kind]);
    model.save_changes();
  });
  ui.range.addEventListener("input", () => {
    const value = Number(ui.range.value);
    if (model.get("slider") === "time") model.set("frame", value);
    else model.set("capacity", value * MIB);
    model.save_changes();
  });
  ui.reset.addEventListener("click", () => {
    model.set("frame", -1);
    model.save_changes();
  });
  keepKeys(ui.root);
}

function renderBars({ model, el }) {
  const ui = barsSkeleton(el);
  listenToBars(model, ui);
  const fields = ["bars", "frames", "frame", "capacity", "selected", "finding", "message", "theme"];
  return redrawOn(model, fields, () => drawBars(model, ui));
}
