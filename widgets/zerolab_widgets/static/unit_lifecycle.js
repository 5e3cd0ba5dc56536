// Chapter 6: draws a row a unit over the moments of a step, with a scrubber over the moments.
const [PHASE, UNIT, WHAT, STATES, BYTES, SAYS] = [0, 1, 2, 3, 4, 5];

function stretches(values) {
  const found = [];
  values.forEach((value, position) => {
    const last = found[found.length - 1];
    if (last && last.value === value) last.stop = position + 1;
    else found.push({ start: position, stop: position + 1, value });
  });
  return found;
}

function place(node, start, stop, count) {
  node.style.left = `${(100 * start) / count}%`;
  node.style.width = `${(100 * (stop - start)) / count}%`;
}

function drawUnit(model, parent, name, number, moments) {
  const row = make("div", "zl-unit", parent);
  row.dataset.unit = name;
  make("div", "zl-name", row, name).title = name;
  const track = make("div", "zl-track", row);
  const states = model.get("states");
  const names = Object.keys(states);
  for (const run of stretches(moments.map((moment) => moment[STATES][number]))) {
    const state = names[Number(run.value)];
    const node = make("div", "zl-run", track);
    node.dataset.state = state;
    node.title = states[state].label;
    place(node, run.start, run.stop, moments.length);
    paint(node, states[state]);
    if ((run.stop - run.start) / moments.length > 0.11) {
      make("span", "", node, states[state].label).style.backgroundColor = states[state].fill;
    }
  }
  moments.forEach((moment, at) => {
    if (moment[WHAT] === "reduce" && moment[UNIT] === number) {
      place(make("div", "zl-reduce", track), at + 0.4, at + 0.4, moments.length);
    }
  });
}

function drawHeld(parent, moments) {
  const row = make("div", "zl-unit zl-held", parent);
  const most = Math.max(1, ...moments.map((moment) => moment[BYTES]));
  make("div", "zl-name", row, `gathered, up to ${mib(most)}`);
  const track = make("div", "zl-track", row);
  moments.forEach((moment, at) => {
    const bar = make("div", "zl-bytes", track);
    place(bar, at, at + 1, moments.length);
    bar.style.height = `${(100 * moment[BYTES]) / most}%`;
  });
}

function drawPhases(parent, moments) {
  const row = make("div", "zl-unit zl-phases", parent);
  make("div", "zl-name", row);
  const track = make("div", "zl-track", row);
  for (const run of stretches(moments.map((moment) => moment[PHASE]))) {
    place(make("div", "zl-phase", track, run.value), run.start, run.stop, moments.length);
  }
}

function drawGrid(model, ui, step) {
  ui.grid.replaceChildren();
  if (!step.moments.length) return;
  drawPhases(ui.grid, step.moments);
  step.units.forEach((name, number) => drawUnit(model, ui.grid, name, number, step.moments));
  drawHeld(ui.grid, step.moments);
  ui.cursor = make("div", "zl-cursor", make("div", "zl-cursor-box", ui.grid));
}

function drawChoice(model, ui) {
  const steps = model.get("steps");
  ui.choice.hidden = steps.length < 2;
  const held = ui.choice.contains(document.activeElement);
  ui.choice.replaceChildren();
  steps.forEach((step, number) => {
    const node = button(ui.choice, step.name, "", () => {
      model.set("at", 0);
      choose(model, "step", number);
    });
    node.setAttribute("aria-pressed", String(number === model.get("step")));
  });
  if (held) ui.choice.querySelector('[aria-pressed="true"]')?.focus();
}

function drawMoment(model, ui) {
  const step = model.get("steps")[model.get("step")];
  const at = Math.min(model.get("at"), step.moments.length - 1);
  const moment = step.moments[at];
  ui.stepper.draw();
  if (!moment) return;
  place(ui.cursor, at, at + 1, step.moments.length);
  ui.grid.querySelectorAll("[data-unit]").forEach((row, number) => {
    row.classList.toggle("zl-now", number === moment[UNIT]);
  });
  ui.grid.querySelectorAll(".zl-bytes").forEach((bar, number) => {
    bar.classList.toggle("zl-now", number === at);
  });
  ui.said.textContent = moment[SAYS];
  ui.grid.setAttribute("aria-label", `${step.finding} ${moment[SAYS]}`);
}

function drawLives(model, ui) {
  drawFrame(model, ui);
  const step = model.get("steps")[model.get("step")];
  ui.finding.textContent = step.finding;
  ui.root.setAttribute("aria-label", step.finding);
  drawChoice(model, ui);
  drawGrid(model, ui, step);
  ui.legend.hidden = !step.moments.length;
  drawMoment(model, ui);
}

function renderLives({ model, el }) {
  const ui = panel(el, "zl-lives");
  ui.choice = make("div", "zl-choice");
  ui.root.insertBefore(ui.choice, ui.stage);
  ui.grid = make("div", "zl-grid", ui.stage);
  ui.grid.setAttribute("role", "img");
  ui.grid.tabIndex = 0;
  ui.legend = swatchList(ui.root, model.get("states"), Object.keys(model.get("states")));
  ui.root.insertBefore(ui.legend, ui.said);
  const tick = make("li", "", ui.legend);
  make("span", "zl-tick", tick);
  make("span", "", tick, "gradients go out");
  const count = () => model.get("steps")[model.get("step")].moments.length;
  ui.stepper = stepper(model, ui, { field: "at", count, name: "moment", delay: 500 });
  ui.grid.addEventListener("click", (event) => {
    const box = ui.grid.querySelector(".zl-cursor-box")?.getBoundingClientRect();
    if (!box || event.clientX < box.left) return;
    const at = Math.floor(((event.clientX - box.left) / box.width) * count());
    choose(model, "at", Math.max(0, Math.min(count() - 1, at)));
  });
  const moved = () => drawMoment(model, ui);
  model.on("change:at", moved);
  const stop = redrawOn(model, ["steps", "step", "theme"], () => drawLives(model, ui));
  return () => {
    ui.stepper.stop();
    model.off("change:at", moved);
    stop();
  };
}
