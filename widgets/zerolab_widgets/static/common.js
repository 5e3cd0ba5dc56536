// Chapter 0: what all pictures share: elements, colours of the page, hatching, sizes as text.
const MIB = 2 ** 20;
const GIB = 2 ** 30;

function mib(bytes) {
  if (bytes >= GIB) return `${(bytes / GIB).toFixed(1)} GiB`;
  if (bytes >= MIB) return `${(bytes / MIB).toFixed(1)} MiB`;
  return bytes >= 1024 ? `${(bytes / 1024).toFixed(0)} KiB` : `${bytes} B`;
}

// Hatchings as CSS backgrounds over the fill, in the ink of the kind.
const HATCH = {
  solid: () => "none",
  rising: (c) => `repeating-linear-gradient(135deg, ${c} 0 1px, transparent 1px 8px)`,
  falling: (c) => `repeating-linear-gradient(45deg, ${c} 0 1px, transparent 1px 8px)`,
  dots: (c) => `radial-gradient(${c} 1px, transparent 1.5px) 0 0 / 8px 8px`,
  rows: (c) => `repeating-linear-gradient(0deg, ${c} 0 1px, transparent 1px 8px)`,
  columns: (c) => `repeating-linear-gradient(90deg, ${c} 0 1px, transparent 1px 8px)`,
  grid: (c) => `${HATCH.rows(c)}, ${HATCH.columns(c)}`,
  sparse: (c) => `repeating-linear-gradient(45deg, ${c} 0 1px, transparent 1px 14px)`,
  check: (c) => `${HATCH.rising(c)}, ${HATCH.falling(c)}`,
};

function paint(node, style) {
  node.style.background = style.hatch === "solid" ? "" : HATCH[style.hatch](`${style.ink}59`);
  node.style.backgroundColor = style.fill;
  node.style.color = style.ink;
}

// The same hatchings as SVG patterns, 8 by 8: what is drawn over the fill.
const STROKES = {
  solid: "",
  rising: "M-1,1 L1,-1 M0,8 L8,0 M7,9 L9,7",
  falling: "M-1,7 L1,9 M0,0 L8,8 M7,-1 L9,1",
  dots: "M4,3 L4,5 M3,4 L5,4",
  rows: "M0,4 L8,4",
  columns: "M4,0 L4,8",
  grid: "M0,4 L8,4 M4,0 L4,8",
  sparse: "M0,8 L8,0",
  check: "M0,0 L8,8 M0,8 L8,0",
};

function make(tag, className, parent, text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function shape(tag, parent, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// Every picture has its own copy of this script, and all of them one page.
const pageName = `zl-${Math.random().toString(36).slice(2, 8)}`;
let patternNumber = 0;

// Patterns for a set of styles; returns what to write into `fill`, by name.
function patterns(svg, styles) {
  const defs = shape("defs", svg);
  const number = (patternNumber += 1);
  const fills = {};
  for (const [name, style] of Object.entries(styles)) {
    const id = `${pageName}-${number}-${name}`;
    const box = { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" };
    const pattern = shape("pattern", defs, box);
    shape("rect", pattern, { width: 8, height: 8, fill: style.fill });
    const line = { d: STROKES[style.hatch], stroke: style.ink, "stroke-opacity": 0.4, fill: "none" };
    if (STROKES[style.hatch]) shape("path", pattern, line);
    fills[name] = `url(#${id})`;
  }
  return fills;
}

function isDark() {
  const flag = document.body.dataset.jpThemeLight;
  if (flag !== undefined) return flag === "false";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function applyTheme(model, root) {
  const paper = model.get("theme")[isDark() ? "dark" : "light"];
  for (const [name, colour] of Object.entries(paper)) {
    root.style.setProperty(`--zl-${name.replace("_", "-")}`, colour);
  }
}

// Redraw when one of the fields or the page's theme changes; returns how to stop.
function redrawOn(model, fields, redraw) {
  for (const field of fields) model.on(`change:${field}`, redraw);
  const watcher = new MutationObserver(redraw);
  watcher.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  redraw();
  return () => {
    watcher.disconnect();
    for (const field of fields) model.off(`change:${field}`, redraw);
  };
}

// JupyterLab takes arrow keys and Enter from inside outputs unless we keep them.
function keepKeys(root) {
  root.addEventListener("keydown", (event) => event.stopPropagation());
}

function swatchList(parent, styles, names) {
  const list = make("ul", "zl-legend", parent);
  for (const name of names) {
    const item = make("li", "", list);
    paint(make("span", "zl-swatch", item), styles[name]);
    make("span", "", item, styles[name].label);
  }
  return list;
}

