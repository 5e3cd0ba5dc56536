// Chapter 0: the frame of small pictures (finding, stage, spoken text), and a stepper with keys.
function panel(el, name) {
  const root = make("div", `zl-panel ${name}`, el);
  root.setAttribute("role", "group");
  const finding = make("p", "zl-finding", root);
  const stage = make("div", "zl-stage", root);
  const said = make("p", "zl-said", root);
  said.setAttribute("aria-live", "polite");
  keepKeys(root);
  return { root, finding, stage, said };
}

function drawFrame(model, ui) {
  applyTheme(model, ui.root);
  ui.root.setAttribute("aria-label", model.get("finding"));
  ui.finding.textContent = model.get("finding");
}

function isStill() {
  return window.matchMedia("(prefers-reduced-motion: reduce)").matches;
}

function choose(model, field, value) {
  model.set(field, value);
  model.save_changes();
}

function button(parent, text, label, act) {
  const node = make("button", "zl-button", parent, text);
  node.type = "button";
  if (label) node.setAttribute("aria-label", label);
  node.addEventListener("click", act);
  return node;
}

// Back, play, step and a slider over moments 0 to count() - 1; arrows, Home, End and space too.
function stepper(model, ui, { field, count, name, delay }) {
  const bar = make("div", "zl-control", ui.root);
  ui.root.insertBefore(bar, ui.said);
  let timer = 0;
  const go = (at) => choose(model, field, Math.max(0, Math.min(count() - 1, at)));
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    draw();
  };
  const play = () => {
    if (timer) return stop();
    if (model.get(field) >= count() - 1) go(0);
    timer = setInterval(() => {
      if (model.get(field) < count() - 1) go(model.get(field) + 1);
      if (model.get(field) >= count() - 1) stop();
    }, delay);
    draw();
  };
  const move = (by) => {
    if (timer) stop();
    go(model.get(field) + by);
  };
  const back = button(bar, "back", `one ${name} back`, () => move(-1));
  const player = button(bar, "play", "", play);
  const next = button(bar, "step", `one ${name} on`, () => move(1));
  const range = make("input", "", bar);
  range.type = "range";
  range.min = 0;
  range.setAttribute("aria-label", name);
  range.addEventListener("input", () => move(Number(range.value) - model.get(field)));
  const output = make("output", "", bar);
  const keys = { ArrowRight: 1, ArrowLeft: -1, Home: -1e6, End: 1e6 };
  ui.root.addEventListener("keydown", (event) => {
    if (event.target === range || event.defaultPrevented) return;
    if (event.key in keys) move(keys[event.key]);
    else if (event.key === " " && event.target.tagName !== "BUTTON") play();
    else return;
    event.preventDefault();
  });
  function draw() {
    const at = model.get(field);
    range.max = count() - 1;
    range.value = at;
    output.textContent = `${name} ${at} of ${count() - 1}`;
    range.setAttribute("aria-valuetext", output.textContent);
    player.textContent = timer ? "pause" : "play";
    back.disabled = at <= 0;
    next.disabled = at >= count() - 1;
    bar.hidden = count() < 2;
  }
  return { draw, stop: () => clearInterval(timer) };
}
