// Chapter 4: draws flat buffers as two lanes, parameters above owners; boundaries go through both.
const HINT = "Point at a part, or walk through them with the arrow keys.";

function isChosen(model, buffer, kind, number) {
  const [b, k, n] = model.get("selected");
  return b === buffer && k === kind && n === number;
}

function isRelated(model, buffer, kind, number) {
  const [b, k, n] = model.get("selected");
  if (b !== buffer || k === kind) return false;
  const params = model.get("buffers")[b].params;
  if (k === "param" && kind === "shard") return params[n].owners.includes(number);
  return k === "shard" && kind === "param" && params[number].owners.includes(n);
}

function sayingOf(model, [buffer, kind, number]) {
  const one = model.get("buffers")[buffer];
  if (!one) return HINT;
  if (kind === "padding") return one.padding;
  return (kind === "param" ? one.params : one.shards)[number].says;
}

function drawBox(model, lane, place, [start, stop], text) {
  const [buffer, kind, number] = place;
  if (stop <= start) return null;
  const length = model.get("buffers")[buffer].length;
  const node = make("button", "zl-box", lane);
  node.type = "button";
  node.style.left = `${(100 * start) / length}%`;
  node.style.width = `${(100 * (stop - start)) / length}%`;
  node.dataset.place = JSON.stringify(place);
  node.setAttribute("aria-label", sayingOf(model, place));
  node.setAttribute("aria-pressed", String(isChosen(model, buffer, kind, number)));
  if (isRelated(model, buffer, kind, number)) node.classList.add("zl-related");
  node.tabIndex = -1;
  node.textSpan = make("span", "", node, text);
  return node;
}

function drawLanes(model, parent, buffer, index) {
  const lanes = make("div", "zl-lanes", parent);
  const upper = make("div", "zl-lane", lanes);
  buffer.params.forEach((param, number) => {
    const node = drawBox(model, upper, [index, "param", number], param.span, param.name);
    if (node && param.cut) node.classList.add("zl-cut");
  });
  const padding = [buffer.numel, buffer.padded];
  drawBox(model, upper, [index, "padding", 0], padding, "padding")?.classList.add("zl-padding");
  const lower = make("div", "zl-lane", lanes);
  buffer.shards.forEach((shard, rank) => {
    const node = drawBox(model, lower, [index, "shard", rank], shard.span, `rank ${rank}`);
    if (!node) return;
    paint(node, model.get("ranks")[rank]);
    node.textSpan.style.backgroundColor = model.get("ranks")[rank].fill;
  });
  const cut = new Set(buffer.cuts.map(([position]) => position));
  const ends = new Set(buffer.shards.flatMap(({ span }) => span));
  for (const position of ends) {
    if (position <= 0 || position >= buffer.length) continue;
    const line = make("div", cut.has(position) ? "zl-boundary zl-cuts" : "zl-boundary", lanes);
    line.style.left = `${(100 * position) / buffer.length}%`;
  }
  if (buffer.length <= 64) {
    make("div", "zl-elements", lanes).style.backgroundSize = `${100 / buffer.length}% 100%`;
  }
  drawScale(parent, buffer, [...ends]);
}

// The positions of the boundaries, as long as they do not run into each other.
function drawScale(parent, buffer, ends) {
  const scale = make("div", "zl-scale", parent);
  scale.setAttribute("aria-hidden", "true");
  let last = -1;
  const sorted = [...new Set([0, ...ends, buffer.length])].sort((a, b) => a - b);
  for (const position of sorted) {
    const at = position / buffer.length;
    if (at !== 1 && (at - last < 0.12 || at > 0.87)) continue;
    const text = make("span", at === 1 ? "zl-last" : "", scale, position.toLocaleString("en-US"));
    text.style.left = `${100 * at}%`;
    last = at;
  }
}

function drawMap(model, ui) {
  drawFrame(model, ui);
  const held = ui.stage.contains(document.activeElement);
  ui.stage.replaceChildren();
  model.get("buffers").forEach((buffer, index) => {
    const parent = make("section", "zl-buffer", ui.stage);
    const title = make("h4", "", parent, buffer.name);
    const extra = buffer.padded - buffer.numel;
    const padded = extra ? ` + ${extra.toLocaleString("en-US")} of padding` : ", no padding";
    make("span", "", title, `: ${buffer.numel.toLocaleString("en-US")} elements${padded}`);
    drawLanes(model, parent, buffer, index);
    for (const problem of buffer.problems) make("p", "zl-problem", parent, `Wrong: ${problem}.`);
  });
  if (model.get("note")) make("p", "zl-note", ui.stage, model.get("note"));
  const chosen = ui.stage.querySelector('[aria-pressed="true"]');
  const first = chosen ?? ui.stage.querySelector(".zl-box");
  if (first) first.tabIndex = 0;
  if (held) chosen?.focus();
  ui.said.textContent = sayingOf(model, model.get("selected"));
}

// Left and right in a lane; up and down to what lies above or below, in any buffer.
function neighbour(ui, node, key) {
  const all = [...ui.stage.querySelectorAll(".zl-lane")];
  const lane = all.indexOf(node.parentElement);
  const mates = [...node.parentElement.children];
  if (key === "ArrowRight") return mates[mates.indexOf(node) + 1];
  if (key === "ArrowLeft") return mates[mates.indexOf(node) - 1];
  const next = all[lane + (key === "ArrowDown" ? 1 : -1)];
  const middle = parseFloat(node.style.left) + parseFloat(node.style.width) / 2;
  return [...(next?.children ?? [])].find(
    (box) => parseFloat(box.style.left) + parseFloat(box.style.width) >= middle,
  );
}

function renderMap({ model, el }) {
  const ui = panel(el, "zl-map");
  const placeOf = (node) => JSON.parse(node.dataset.place);
  const boxOf = (event) => event.target.closest(".zl-box");
  ui.stage.addEventListener("click", (event) => {
    if (boxOf(event)) choose(model, "selected", placeOf(boxOf(event)));
  });
  let pointed = "";
  ui.stage.addEventListener("pointermove", (event) => {
    const here = `${event.clientX} ${event.clientY}`;
    if (here === pointed) return; // what moved is the picture, not the pointer
    pointed = here;
    const place = boxOf(event) ? placeOf(boxOf(event)) : model.get("selected");
    ui.said.textContent = sayingOf(model, place);
  });
  ui.stage.addEventListener("pointerleave", () => {
    ui.said.textContent = sayingOf(model, model.get("selected"));
  });
  ui.stage.addEventListener("keydown", (event) => {
    if (!boxOf(event) || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const next = neighbour(ui, boxOf(event), event.key);
    if (!next) return;
    next.focus();
    choose(model, "selected", placeOf(next));
  });
  return redrawOn(model, ["buffers", "selected", "finding", "theme"], () => drawMap(model, ui));
}
