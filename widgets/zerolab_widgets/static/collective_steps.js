// Chapter 2: draws a collective as rows of ranks and columns of chunks; a pip for each rank's part.
const LEFT = 54;
const TOP = 22;
const ROW = 62;

// What every rank holds after step `at`: the first state and the changes since.
function heldAt(model, at) {
  const held = model.get("begin").map((row) => [...row]);
  for (const step of model.get("steps").slice(0, at)) {
    for (const [rank, chunk, now] of step.cells) held[rank][chunk] = now;
  }
  return held;
}

// Whose parts a chunk can hold: everybody's, or in a gather its owner's alone.
function partsOf(model, chunk) {
  const all = model.get("ranks").map((style, who) => ({ ...style, who }));
  return all.filter(({ who }) => (model.get("whole")[chunk] >> who) & 1);
}

function geometry(model) {
  const ranks = model.get("world_size");
  const chunks = model.get("whole").length;
  const parts = partsOf(model, 0).length;
  const perRow = parts > 4 ? Math.ceil(parts / 2) : parts;
  const cell = Math.max(perRow * 16 + 12, Math.min(150, 560 / chunks));
  const pip = Math.min(parts > 4 ? 17 : 30, (cell - 12) / perRow);
  const gap = chunks > 6 ? 22 : 34;
  const box = { x: (c) => LEFT + c * (cell + gap), y: (r) => TOP + r * ROW, width: cell, height: 44, gap };
  const total = [LEFT + chunks * (cell + gap), TOP + ranks * ROW + 4];
  return { ...box, total, perRow, pip, rows: Math.ceil(parts / perRow) };
}

function drawPips(model, group, box, chunk, rank, held, before) {
  const { perRow, pip, rows } = box;
  const left = box.x(chunk) + (box.width - perRow * pip) / 2;
  const top = box.y(rank) + (box.height - rows * pip) / 2;
  partsOf(model, chunk).forEach((part, number) => {
    const x = left + (number % perRow) * pip + 1;
    const y = top + Math.floor(number / perRow) * pip + 1;
    const size = { width: pip - 2, height: pip - 2, rx: 2 };
    const node = shape("rect", group, { x, y, ...size });
    if (!((held >> part.who) & 1)) return node.setAttribute("class", "zl-none");
    node.setAttribute("fill", part.fill);
    if (!((before >> part.who) & 1)) node.setAttribute("class", "zl-new");
    const at = { x: x + pip / 2 - 1, y: y + pip / 2 + 3, class: "zl-pip-text", fill: part.ink };
    shape("text", group, at, String(part.who));
  });
}

function drawCell(model, svg, box, rank, chunk, held, before) {
  const whole = model.get("whole")[chunk];
  const goal = model.get("goals").some(([r, c]) => r === rank && c === chunk);
  const group = shape("g", svg, { "data-rank": rank, "data-chunk": chunk, "data-held": held });
  const names = ["zl-cell", goal ? "zl-goal" : "", held === whole ? "zl-whole" : ""];
  const place = { x: box.x(chunk), y: box.y(rank), width: box.width, height: box.height, rx: 4 };
  shape("rect", group, { ...place, class: names.join(" ") });
  drawPips(model, group, box, chunk, rank, held, before);
  if (held === whole) {
    const at = { x: box.x(chunk) + box.width, y: box.y(rank) + box.height + 11 };
    shape("text", group, { ...at, class: "zl-verdict" }, "whole");
  }
}

// An arrow beside the column, from the sender's row to the receiver's.
function drawArrow(svg, box, [src, dst, chunk], lane) {
  const x = box.x(Math.max(chunk, 0)) + box.width;
  const from = box.y(src) + box.height / 2 + (dst > src ? 6 : -6);
  const to = box.y(dst) + box.height / 2 + (dst > src ? -6 : 6);
  const out = x + 8 + Math.min(box.gap - 16, Math.abs(dst - src) * 4 + lane * 3);
  const path = `M${x},${from} C${out},${from} ${out},${to} ${x + 6},${to}`;
  shape("path", svg, { d: path, class: "zl-arrow", "data-arrow": `${src}-${dst}-${chunk}` });
  shape("path", svg, { d: `M${x},${to} l8,-4 v8 z`, class: "zl-head" });
}

// What travels slides from cell to cell, unless the reader wants nothing to move.
function slide(model, svg, box, held, [src, dst, chunk]) {
  if (isStill() || chunk < 0) return;
  const group = shape("g", svg, {});
  drawPips(model, group, box, chunk, src, held[src][chunk], ~0);
  const shift = `translate(0px, ${box.y(dst) - box.y(src)}px)`;
  const frames = [{ transform: "none" }, { transform: shift, opacity: 0.9 }];
  const moving = group.animate(frames, { duration: 450, easing: "ease-in-out" });
  moving.onfinish = () => group.remove();
}

function drawSteps(model, ui, moved) {
  drawFrame(model, ui);
  const at = model.get("at");
  const held = heldAt(model, at);
  const before = heldAt(model, Math.max(at - 1, 0));
  const box = geometry(model);
  const [width, height] = box.total;
  ui.svg.replaceChildren();
  ui.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  ui.svg.style.minWidth = `${Math.min(width, 630)}px`;
  ui.svg.style.maxWidth = `${width}px`;
  const one = model.get("whole").length === 1;
  model.get("whole").forEach((_, chunk) => {
    const text = { x: box.x(chunk) + box.width / 2, y: 13, class: "zl-column" };
    shape("text", ui.svg, text, one ? "the tensor" : `chunk ${chunk}`);
  });
  held.forEach((row, rank) => {
    const y = box.y(rank) + box.height / 2 + 4;
    shape("text", ui.svg, { x: 0, y, class: "zl-row" }, `rank ${rank}`);
    row.forEach((now, chunk) => {
      drawCell(model, ui.svg, box, rank, chunk, now, at ? before[rank][chunk] : now);
    });
  });
  const step = model.get("steps")[at - 1];
  (step?.messages ?? []).forEach((message, i) => {
    drawArrow(ui.svg, box, message, one ? i : 0);
    if (moved) slide(model, ui.svg, box, before, message);
  });
  ui.said.textContent = step ? step.says : beginText(model);
  ui.svg.setAttribute("aria-label", `${model.get("title")}. ${ui.said.textContent}`);
  ui.stepper.draw();
}

function beginText(model) {
  const gathers = model.get("begin")[0].some((held) => held === 0);
  const what = gathers ? "its own chunk and nothing else" : "its own numbers in every chunk";
  return `Before the first step every rank has ${what}. A square with a number is that rank's part.`;
}

function renderSteps({ model, el }) {
  const ui = panel(el, "zl-steps");
  ui.svg = shape("svg", ui.stage, { role: "img", tabindex: 0 });
  const count = () => model.get("steps").length + 1;
  ui.stepper = stepper(model, ui, { field: "at", count, name: "step", delay: 1100 });
  let last = model.get("at");
  const redraw = () => {
    const moved = model.get("at") === last + 1;
    last = model.get("at");
    drawSteps(model, ui, moved);
  };
  const stop = redrawOn(model, ["at", "steps", "begin", "finding", "theme"], redraw);
  return () => {
    ui.stepper.stop();
    stop();
  };
}
