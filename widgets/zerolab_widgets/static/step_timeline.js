// Chapter 3: the step timeline: three lanes a rank, over order or over measured time.
const STEP = { width: 640, lane: 20, gap: 3 };

function stepsSkeleton(el) {
  const root = make("div", "zl-step-timeline", el);
  root.setAttribute("role", "group");
  const finding = make("p", "zl-finding", root);
  finding.setAttribute("aria-live", "polite");
  const ranks = make("div", "zl-ranks", root);
  const axis = make("div", "zl-axis", root);
  const control = make("div", "zl-control", root);
  const label = make("label", "", control, "step");
  const range = make("input", "", label);
  range.type = "range";
  range.min = 1;
  const output = make("output", "", control);
  const back = make("button", "", control, "previous piece");
  const next = make("button", "", control, "next piece");
  back.type = next.type = "button";
  const said = make("p", "zl-said", root);
  said.setAttribute("aria-live", "polite");
  const legend = make("div", "", root);
  keepKeys(root);
  return { root, finding, ranks, axis, control, label, range, output, back, next, said, legend };
}

function lanesOf(pieces) {
  const rows = [1, 1, 1];
  for (const [lane, , , , row] of pieces) rows[lane] = Math.max(rows[lane], row + 1);
  return rows;
}

function drawPiece(model, svg, fills, piece, box, index) {
  const [, what, start, end, , text] = piece;
  const { lanes } = model.get("theme");
  const scale = STEP.width / (model.get("drawn").length || 1);
  const width = Math.max((end - start) * scale, 2);
  const at = { x: start * scale, y: box.y, width, height: box.height };
  const fill = width < 8 ? lanes[what]?.fill : fills[what]; // hatching needs room
  const node = shape("rect", svg, { ...at, fill: fill ?? fills.idle, class: width > 4 ? "zl-piece zl-wide" : "zl-piece" });
  node.dataset.piece = index;
  node.dataset.what = what;
  shape("title", node, {}, `${model.get("drawn").texts[text]} (${lanes[what]?.label ?? what})`);
  if (box.lane === 0 && width > 60) {
    const label = { x: at.x + width / 2, y: at.y + 14, "text-anchor": "middle", class: "zl-name-of" };
    const written = shape("text", svg, { ...label, fill: lanes[what]?.ink, stroke: lanes[what]?.fill }, what);
    written.style.pointerEvents = "none";
  }
}

function drawRank(model, ui, rank, index) {
  const row = make("div", "zl-row", ui.ranks);
  const names = make("div", "zl-names", row);
  make("b", "", names, rank.label);
  const rows = lanesOf(rank.pieces);
  const tops = [0, STEP.lane + STEP.gap, 2 * (STEP.lane + STEP.gap)];
  for (const name of model.get("drawn").lanes) make("span", "", names, name);
  const height = 3 * STEP.lane + 2 * STEP.gap;
  const svg = shape("svg", row, { viewBox: `0 0 ${STEP.width} ${height}`, class: "zl-lanes", role: "img" });
  svg.setAttribute("aria-label", `${rank.label}, ${rank.pieces.length} pieces`);
  svg.dataset.rank = index;
  for (const y of tops) shape("rect", svg, { y, width: STEP.width, height: STEP.lane, class: "zl-paper" });
  const fills = patterns(svg, model.get("theme").lanes);
  rank.pieces.forEach((piece, i) => {
    const [lane, , , , sub] = piece;
    const each = STEP.lane / rows[lane];
    drawPiece(model, svg, fills, piece, { lane, y: tops[lane] + sub * each, height: each }, i);
  });
}

function drawAxis(model, ui) {
  const { axis, length } = model.get("drawn");
  ui.axis.replaceChildren();
  const order = axis === "order";
  make("span", "", ui.axis, order ? "first" : "0 ms");
  make("b", "", ui.axis, order ? "order, not time: lockstep ranks run one at a time" : "measured time");
  make("span", "", ui.axis, order ? "last" : `${length.toFixed(1)} ms`);
}

function drawStep(model, ui) {
  applyTheme(model, ui.root);
  const { lanes } = model.get("theme");
  const drawn = model.get("drawn");
  ui.root.setAttribute("aria-label", model.get("finding"));
  ui.finding.textContent = model.get("finding");
  ui.ranks.replaceChildren();
  drawn.ranks.forEach((rank, i) => drawRank(model, ui, rank, i));
  drawAxis(model, ui);
  ui.legend.replaceChildren();
  const used = new Set(drawn.ranks.flatMap((rank) => rank.pieces.map(([, what]) => what)));
  swatchList(ui.legend, lanes, Object.keys(lanes).filter((what) => used.has(what)));
  const steps = model.get("steps");
  ui.control.hidden = ui.axis.hidden = !steps;
  ui.label.hidden = steps < 2;
  ui.range.max = Math.max(steps, 1);
  ui.range.value = model.get("step") + 1;
  ui.output.textContent = `step ${model.get("step") + 1} of ${steps}`;
  ui.range.setAttribute("aria-valuetext", ui.output.textContent);
  drawChosen(model, ui);
}

function drawChosen(model, ui) {
  const { lanes } = model.get("theme");
  const drawn = model.get("drawn");
  for (const node of ui.ranks.querySelectorAll(".zl-chosen")) node.classList.remove("zl-chosen");
  ui.said.textContent = "Click a piece, or go from piece to piece with the buttons.";
  if (!model.get("chosen").length) return;
  const [index, number] = model.get("chosen");
  const piece = drawn.ranks[index]?.pieces[number];
  if (!piece) return;
  ui.ranks.querySelector(`[data-rank="${index}"] [data-piece="${number}"]`)?.classList.add("zl-chosen");
  const [, what, start, end, , text] = piece;
  const length = drawn.axis === "time" ? ` for ${(end - start).toFixed(2)} ms` : "";
  const style = lanes[what] ?? { label: what, meaning: "" };
  ui.said.textContent = `${drawn.ranks[index].label}: ${drawn.texts[text]}${length}. ${style.label[0].toUpperCase()}${style.label.slice(1)}: ${style.meaning}.`;
}

function listenToSteps(model, ui) {
  ui.range.addEventListener("input", () => {
    model.set("step", Number(ui.range.value) - 1);
    model.save_changes();
  });
  ui.ranks.addEventListener("click", (event) => {
    const node = event.target.closest(".zl-piece");
    if (!node) return;
    model.set("chosen", [Number(node.closest("svg").dataset.rank), Number(node.dataset.piece)]);
    model.save_changes();
  });
  const go = (by) => {
    const all = model.get("drawn").ranks.flatMap((rank, i) => rank.pieces.map((_, k) => [i, k]));
    if (!all.length) return;
    const [index, number] = model.get("chosen");
    const at = all.findIndex(([i, k]) => i === index && k === number);
    model.set("chosen", at < 0 ? all[0] : all[(at + by + all.length) % all.length]);
    model.save_changes();
  };
  ui.back.addEventListener("click", () => go(-1));
  ui.next.addEventListener("click", () => go(1));
}

function renderSteps({ model, el }) {
  const ui = stepsSkeleton(el);
  listenToSteps(model, ui);
  const stop = redrawOn(model, ["drawn", "finding", "theme"], () => drawStep(model, ui));
  const chosen = () => drawChosen(model, ui);
  model.on("change:chosen", chosen);
  return () => {
    stop();
    model.off("change:chosen", chosen);
  };
}
