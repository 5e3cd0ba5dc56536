// Chapter 1: the controls of memory_explorer; the bars beside them are drawn by memory_bars.js.
// A slider moves in even steps through what is usual: a decade in 20, a power of two, one by one.
const powers = (field, from, to, label, text) => ({
  field, label, text, min: from, max: to,
  place: (value) => Math.log2(value), value: (place) => 2 ** place,
});
const counted = (psi) => {
  if (psi >= 1e12) return `${(psi / 1e12).toPrecision(3)} trillion`;
  return psi >= 1e9 ? `${(psi / 1e9).toPrecision(3)} billion` : `${(psi / 1e6).toPrecision(3)} million`;
};
const SLIDERS = [
  {
    field: "psi", label: "parameters", min: 160, max: 240, text: counted,
    place: (value) => 20 * Math.log10(value), value: (place) => Number((10 ** (place / 20)).toPrecision(3)),
  },
  powers("world_size", 0, 12, "GPUs", (n) => n.toLocaleString("en")),
  {
    field: "stage", label: "stage", min: 0, max: 3, text: (n) => `stage ${n}`,
    place: (value) => value, value: (place) => place,
  },
  {
    field: "micro_batch", label: "micro-batch", min: 0, max: 64,
    text: (n) => (n ? `${n} sequence${n > 1 ? "s" : ""}` : "no activations"),
    place: (value) => value, value: (place) => place,
  },
  powers("seq_len", 7, 17, "sequence", (n) => `${n.toLocaleString("en")} tokens`),
  {
    field: "capacity", label: "capacity", min: 4, max: 288, text: mib,
    place: (value) => value / GIB, value: (place) => place * GIB,
  },
];
const BOXES = [
  ["checkpointed", "recompute activations"],
  ["offload", "offload to the host"],
];

function explorerSlider(model, parent, slider) {
  const label = make("label", "zl-choice", parent);
  make("span", "", label, slider.label);
  const range = make("input", "", label);
  Object.assign(range, { type: "range", min: slider.min, max: slider.max, step: 1 });
  range.dataset.field = slider.field;
  const output = make("output", "", label);
  const say = (value) => {
    output.textContent = slider.text(value);
    range.setAttribute("aria-valuetext", output.textContent);
  };
  range.addEventListener("input", () => {
    const value = slider.value(Number(range.value));
    say(value);
    model.set(slider.field, value);
    model.save_changes();
  });
  return () => {
    const value = model.get(slider.field);
    if (document.activeElement !== range) range.value = slider.place(value);
    say(value);
  };
}

function explorerMenu(model, parent, field) {
  const label = make("label", "zl-menu", parent);
  make("span", "", label, field);
  const menu = make("select", "", label);
  menu.dataset.field = field;
  for (const name of model.get("options")[field]) make("option", "", menu, name).value = name;
  menu.addEventListener("change", () => {
    model.set(field, menu.value);
    model.save_changes();
  });
  return () => { menu.value = model.get(field); };
}

function explorerBox(model, parent, [field, text]) {
  const label = make("label", "zl-menu", parent);
  const box = make("input", "", label);
  box.type = "checkbox";
  box.dataset.field = field;
  make("span", "", label, text);
  box.addEventListener("change", () => {
    model.set(field, box.checked);
    model.save_changes();
  });
  return () => { box.checked = model.get(field); };
}

function renderExplorer({ model, el }) {
  const root = make("div", "zl-explorer", el);
  const stopBars = renderBars({ model, el: root });
  const controls = make("div", "zl-choices", root.firstChild);
  controls.setAttribute("role", "group");
  controls.setAttribute("aria-label", "what to train, and on what");
  const sliders = SLIDERS.map((slider) => explorerSlider(model, controls, slider));
  const row = make("div", "zl-menus", controls);
  const menus = ["precision", "optimizer"].map((field) => explorerMenu(model, row, field));
  const boxes = BOXES.map((box) => explorerBox(model, row, box));
  const parts = [...sliders, ...menus, ...boxes];
  const fields = [...SLIDERS.map((s) => s.field), "precision", "optimizer", "checkpointed", "offload"];
  const stop = redrawOn(model, fields, () => parts.forEach((refresh) => refresh()));
  return () => {
    stop();
    stopBars();
  };
}
