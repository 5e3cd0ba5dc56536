// Chapter 1: the memory timeline: a strip a rank, and beside it the bar of the chosen moment.
const STRIP = { width: 640, inner: 632, height: 92, band: 7 };

// Sizes come in KiB, one a moment or as [place, KiB] wherever they change; here in bytes.
function spread(pairs, length) {
  if (typeof pairs[0] === "number") return pairs.map((size) => size * 1024);
  const row = new Array(length).fill(0);
  pairs.forEach(([place, size], i) => {
    const end = i + 1 < pairs.length ? pairs[i + 1][0] : length;
    row.fill(size * 1024, place, end);
  });
  return row;
}

function readRank(rank) {
  const length = rank.at.length;
  let event = 0;
  const at = rank.at.map((step) => (event += step));
  const rows = Object.entries(rank.sizes).map(([kind, pairs]) => [kind, spread(pairs, length)]);
  return { ...rank, at, rows, length };
}

const placeIn = (rank, moment) => Math.min(moment, rank.length - 1);
const heldAt = (rank, place) => rank.rows.map(([kind, row]) => [kind, row[place]]).filter(([, b]) => b);
const phaseAt = (rank, place) => (rank.phases.find(([, a, b]) => a <= place && place <= b) ?? [""])[0];

function timelineSkeleton(el) {
  const root = make("div", "zl-timeline", el);
  root.setAttribute("role", "group");
  const finding = make("p", "zl-finding", root);
  const message = make("p", "zl-message", root);
  const strips = make("div", "zl-strips", root);
  const control = make("div", "zl-control", root);
  const label = make("label", "", control, "moment");
  const range = make("input", "", label);
  range.type = "range";
  range.min = 0;
  const output = make("output", "", control);
  const peak = make("button", "", control, "peak");
  peak.type = "button";
  const born = make("p", "zl-born", root);
  born.setAttribute("aria-live", "polite");
  const legend = make("div", "", root);
  keepKeys(root);
  return { root, finding, message, strips, range, output, peak, born, legend, parts: [] };
}

function staircase(heights, step, floor, scale) {
  const points = heights.map((h, i) => `V${(floor - h * scale).toFixed(1)}H${((i + 1) * step).toFixed(1)}`);
  return `M0,${floor}${points.join("")}V${floor}Z`;
}

// Areas are painted largest first, each over the one before.
function paintAreas(svg, rank, fills, step, scale) {
  const sums = [];
  let below = new Array(rank.length).fill(0);
  for (const [kind, row] of rank.rows) {
    below = below.map((size, i) => size + row[i]);
    sums.push([kind, below]);
  }
  for (const [kind, heights] of sums.reverse()) {
    const area = shape("path", svg, { d: staircase(heights, step, STRIP.height, scale), fill: fills[kind] });
    area.dataset.kind = kind;
  }
}

function paintBand(svg, rank, fills, lanes, step) {
  for (const [phase, first, last] of rank.phases) {
    const box = {
      x: first * step, y: STRIP.height + 2, width: (last - first + 1) * step, height: STRIP.band,
      fill: fills[phase] ?? fills.idle,
    };
    shape("title", shape("rect", svg, box), {}, lanes[phase]?.label ?? phase);
  }
  for (const [moment, name] of rank.marks) {
    const tick = { d: `M${(moment + 1) * step},${STRIP.height}v${STRIP.band + 4}`, class: "zl-tick" };
    shape("title", shape("path", svg, tick), {}, name);
  }
}

function paintLimits(svg, model, rank, index, step, scale) {
  const capacity = model.get("capacity");
  if (capacity) {
    const y = STRIP.height - capacity * scale;
    shape("path", svg, { d: `M0,${y}H${STRIP.width}`, class: "zl-capacity" });
  }
  const failure = model.get("failure");
  if (failure.rank !== index) return;
  const x = (failure.moment + 1) * step;
  const wanted = failure.held + failure.requested;
  const [low, high] = [failure.held, wanted].map((size) => STRIP.height - size * scale);
  shape("path", svg, { d: `M${x},${STRIP.height}V0`, class: "zl-end" });
  shape("path", svg, { d: `M${x},${low}V${high}M${x - 5},${high}h10`, class: "zl-wanted" });
  const right = x > STRIP.width / 2;
  const text = { x: right ? x - 8 : x + 8, y: 13, "text-anchor": right ? "end" : "start", class: "zl-oom" };
  shape("text", svg, text, `out of memory: ${mib(failure.requested)} more did not fit`);
}

function topOfStrips(model, ranks) {
  const failure = model.get("failure");
  const wanted = ranks[failure.rank] ? failure.held + failure.requested : 0;
  const top = Math.max(model.get("capacity"), wanted, 1, ...ranks.map((r) => r.peak));
  return top * (wanted ? 1.25 : 1.05); // room for the words above
}

function drawStrip(model, ui, rank, index, scale) {
  const { kinds, lanes } = model.get("theme");
  const row = make("div", "zl-row", ui.strips);
  const name = make("button", "zl-name", row);
  name.type = "button";
  make("b", "", name, rank.label);
  make("span", "", name, rank.length ? `peak ${mib(rank.peak)}` : "no events");
  name.addEventListener("click", () => {
    model.set("rank", index);
    model.save_changes();
  });
  const height = STRIP.height + STRIP.band + 6;
  const svg = shape("svg", row, { viewBox: `0 0 ${STRIP.width} ${height}`, class: "zl-strip" });
  svg.setAttribute("aria-hidden", "true");
  shape("rect", svg, { width: STRIP.width, height: STRIP.height, class: "zl-paper" });
  const step = STRIP.inner / Math.max(model.get("drawn").moments, 1);
  if (rank.length) {
    paintAreas(svg, rank, patterns(svg, kinds), step, scale);
    paintBand(svg, rank, patterns(svg, lanes), lanes, step);
  }
  paintLimits(svg, model, rank, index, step, scale);
  const cursor = shape("path", svg, { class: "zl-cursor" });
  const bar = make("div", "zl-bar", row);
  const total = make("div", "zl-total", row);
  dragOver(model, svg, index);
  return { row, name, svg, cursor, bar, total, step };
}

// The mouse chooses rank and moment; the keyboard has a button and the scrubber for that.
function dragOver(model, svg, index) {
  const choose = (event) => {
    const box = svg.getBoundingClientRect();
    const moments = model.get("drawn").moments;
    const x = ((event.clientX - box.left) / box.width) * STRIP.width;
    const at = Math.floor((x / STRIP.inner) * moments);
    model.set("rank", index);
    model.set("moment", Math.max(0, Math.min(moments - 1, at)));
    model.save_changes();
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    choose(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (event.buttons === 1) choose(event);
  });
}

// The bar beside a strip is as tall as the strip, which shrinks with the page.
function alignBars(ui) {
  for (const { svg, bar } of ui.parts) {
    const height = svg.getBoundingClientRect().height;
    if (height) bar.style.height = `${(height * STRIP.height) / (STRIP.height + STRIP.band + 6)}px`;
  }
}

function drawTimeline(model, ui) {
  applyTheme(model, ui.root);
  const { kinds, lanes } = model.get("theme");
  ui.ranks = model.get("drawn").ranks.map(readRank);
  ui.root.setAttribute("aria-label", model.get("finding"));
  ui.finding.textContent = model.get("finding");
  const text = model.get("failure").text ?? "";
  ui.message.textContent = text;
  ui.message.hidden = !text;
  ui.scale = STRIP.height / topOfStrips(model, ui.ranks);
  ui.strips.replaceChildren();
  ui.parts = ui.ranks.map((rank, i) => drawStrip(model, ui, rank, i, ui.scale));
  ui.legend.replaceChildren();
  const used = Object.keys(kinds).filter((kind) => ui.ranks.some((rank) => kind in rank.sizes));
  swatchList(ui.legend, kinds, used);
  alignBars(ui);
  const phases = Object.keys(lanes).filter((l) => ui.ranks.some((r) => r.phases.some(([p]) => p === l)));
  const list = swatchList(ui.legend, lanes, phases);
  if (model.get("capacity")) make("span", "zl-dash", make("li", "", list)).after(`capacity ${mib(model.get("capacity"))}`);
  make("p", "zl-axis", ui.legend, "From left to right: the memory events of each rank, in its own order.");
  drawMoment(model, ui);
}

function drawMoment(model, ui) {
  const { kinds } = model.get("theme");
  const [moment, chosen] = [model.get("moment"), model.get("rank")];
  ui.ranks.forEach((rank, i) => {
    const part = ui.parts[i];
    part.row.classList.toggle("zl-chosen", i === chosen);
    part.name.setAttribute("aria-pressed", String(i === chosen));
    part.bar.replaceChildren();
    part.total.textContent = "";
    if (!rank.length) return;
    const place = placeIn(rank, moment);
    const held = heldAt(rank, place);
    for (const [kind, bytes] of held) {
      const piece = make("div", "", part.bar);
      piece.dataset.kind = kind;
      piece.style.height = `${(100 * bytes * ui.scale) / STRIP.height}%`;
      piece.title = `${kinds[kind].label}: ${mib(bytes)}`;
      paint(piece, kinds[kind]);
    }
    part.total.textContent = mib(held.reduce((sum, [, bytes]) => sum + bytes, 0));
    part.cursor.setAttribute("d", `M${(place + 0.5) * part.step},0v${STRIP.height}`);
  });
  drawReadout(model, ui, moment, chosen);
}

function drawReadout(model, ui, moment, chosen) {
  const { kinds } = model.get("theme");
  const rank = ui.ranks[chosen];
  ui.range.max = Math.max(model.get("drawn").moments - 1, 0);
  ui.range.value = moment;
  if (!rank?.length) return;
  const place = placeIn(rank, moment);
  const phase = phaseAt(rank, place);
  const event = `event ${(rank.at[place] + 1).toLocaleString("en")} of ${rank.events.toLocaleString("en")}`;
  ui.output.textContent = `${event}${phase ? `, ${phase}` : ""}`;
  ui.range.setAttribute("aria-valuetext", `${rank.label}, ${ui.output.textContent}`);
  const birth = model.get("drawn").births[rank.births[place]];
  ui.born.replaceChildren();
  if (!birth) return;
  const [size, kind, op, during, where] = birth;
  make("b", "", ui.born, rank.label);
  ui.born.append(` allocated last ${mib(size)} of ${kinds[kind].label}: `);
  make("code", "", ui.born, op);
  ui.born.append(during ? ` in ${during}` : "");
  if (where) {
    ui.born.append(", from ");
    make("code", "zl-where", ui.born, where);
  }
}

function renderTimeline({ model, el }) {
  const ui = timelineSkeleton(el);
  ui.range.addEventListener("input", () => {
    model.set("moment", Number(ui.range.value));
    model.save_changes();
  });
  ui.peak.addEventListener("click", () => {
    model.set("moment", Math.max(ui.ranks[model.get("rank")]?.peak_moment ?? 0, 0));
    model.save_changes();
  });
  const stop = redrawOn(model, ["drawn", "capacity", "failure", "finding", "theme"], () => drawTimeline(model, ui));
  const moved = () => drawMoment(model, ui);
  model.on("change:moment", moved);
  model.on("change:rank", moved);
  const sizes = new ResizeObserver(() => alignBars(ui));
  sizes.observe(ui.root);
  return () => {
    sizes.disconnect();
    stop();
    model.off("change:moment", moved);
    model.off("change:rank", moved);
  };
}
