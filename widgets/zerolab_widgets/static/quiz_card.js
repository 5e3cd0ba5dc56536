// Chapter 1: draws one question at a time. Answers go to Python and come back as verdicts:
// nothing in the model tells what is right before that. All colours come from model.theme.
const GLYPH = { right: "\u2713", wrong: "\u2717", partly: "~", shown: "?", judge: "\u2026" };
const SAID = {
  right: "Right.",
  wrong: "Not yet.",
  partly: "Partly right.",
  shown: "The answer",
  judge: "Compare your answer with this one",
  refused: "That could not be read as an answer",
};
let views = 0;

function make(tag, className, parent, text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) prose(node, text);
  if (parent) parent.append(node);
  return node;
}

// Text with `code` in it, without ever reading it as HTML.
function prose(node, text) {
  node.replaceChildren();
  text.split("`").forEach((part, i) => {
    if (!part) return;
    if (i % 2) make("code", "", node).textContent = part;
    else node.append(part);
  });
}

function button(className, parent, text, label = "") {
  const node = make("button", className, parent, text);
  node.type = "button";
  if (label) node.setAttribute("aria-label", label);
  return node;
}

function isDark() {
  const flag = document.body.dataset.jpThemeLight;
  if (flag !== undefined) return flag === "false";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function applyTheme(model, root) {
  const scheme = isDark() ? "dark" : "light";
  const paper = model.get("theme")[scheme];
  root.style.colorScheme = scheme; // for the boxes that the browser draws
  for (const [name, colour] of Object.entries(paper)) {
    root.style.setProperty(`--zl-${name.replace("_", "-")}`, colour);
  }
}

function skeleton(el, model) {
  const root = make("div", "zl-quiz", el);
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", model.get("heading"));
  const head = make("div", "zl-head", root);
  const title = make("p", "zl-title", head);
  const score = make("p", "zl-score", head);
  const nav = make("div", "zl-nav", root);
  nav.setAttribute("role", "group");
  nav.setAttribute("aria-label", "questions");
  const form = make("form", "zl-question", root);
  const outcome = make("div", "zl-outcome", root);
  outcome.setAttribute("role", "status");
  const foot = make("div", "zl-foot", root);
  return { root, title, score, nav, form, outcome, foot, name: `zl-quiz-${(views += 1)}`, drafts: {} };
}

// What the reader has entered so far, for each question: it survives going to another one.
function draftOf(ui, question, at) {
  const fresh = { ordering: () => question.entries.map((_, i) => i), multiple: () => [] };
  ui.drafts[at] ??= { answer: (fresh[question.kind] ?? (() => null))(), points: null, sent: null };
  return ui.drafts[at];
}

function resultOf(model, at) {
  return model.get("results")[String(at)];
}

function stateOf(model, at) {
  const result = resultOf(model, at);
  if (result && result.outcome !== "refused") return result.outcome;
  return model.get("questions")[at].before ? "before" : "open";
}

function drawNav(model, ui) {
  const questions = model.get("questions");
  const words = { open: "open", before: "answered right before", shown: "answer shown" };
  ui.nav.replaceChildren();
  questions.forEach((_, i) => {
    const state = stateOf(model, i);
    const label = `question ${i + 1}, ${words[state] ?? state}`;
    const node = button(`zl-step zl-is-${state}`, ui.nav, "", label);
    make("span", "", node, String(i + 1));
    const glyph = GLYPH[state === "before" ? "right" : state];
    if (glyph) make("span", "zl-glyph", node, glyph);
    if (i === model.get("at")) node.setAttribute("aria-current", "step");
    node.addEventListener("click", () => go(model, i));
  });
  const right = questions.filter((_, i) => stateOf(model, i) === "right").length;
  const before = questions.filter((_, i) => stateOf(model, i) === "before").length;
  ui.score.textContent =
    `${right} of ${questions.length} right` + (before ? `, ${before} more before` : "");
}

function go(model, to) {
  model.set("at", to);
  model.save_changes();
}

// The ways to answer, one for each kind. Each draws into `box` and writes into `draft.answer`.

function drawChoices(box, question, draft, ui, changed) {
  const many = question.kind === "multiple";
  question.entries.forEach((text, i) => {
    const row = make("label", "zl-entry", box);
    row.dataset.entry = i;
    const input = make("input", "", row);
    input.type = many ? "checkbox" : "radio";
    input.name = ui.name;
    input.checked = many ? draft.answer.includes(i) : draft.answer === i;
    make("span", "zl-letter", row, String.fromCharCode(97 + i));
    make("span", "zl-entry-text", row, text);
    input.addEventListener("change", () => {
      if (!many) draft.answer = i;
      else if (input.checked) draft.answer = [...draft.answer, i].sort((a, b) => a - b);
      else draft.answer = draft.answer.filter((k) => k !== i);
      changed();
    });
  });
}

function drawLines(box, question, draft, ui, changed) {
  const code = make("div", "zl-code zl-lines", box);
  question.code.split("\n").forEach((text, n) => {
    const i = question.lines.indexOf(n + 1);
    const row = make(i < 0 ? "div" : "label", "zl-line", code);
    if (i < 0) {
      make("span", "zl-no-input", row);
    } else {
      row.dataset.entry = i;
      const input = make("input", "", row);
      input.type = "radio";
      input.name = ui.name;
      input.checked = draft.answer === i;
      input.setAttribute("aria-label", `line ${n + 1}: ${text.trim()}`);
      input.addEventListener("change", () => {
        draft.answer = i;
        changed();
      });
    }
    make("span", "zl-line-number", row, String(n + 1));
    make("span", "zl-line-text", row).textContent = text || " ";
  });
}

function drawNumber(box, question, draft, ui, changed) {
  const row = make("label", "zl-number", box);
  make("span", "", row, "Your answer");
  const input = make("input", "", row);
  input.type = "text";
  input.inputMode = "decimal";
  input.autocomplete = "off";
  input.size = 14;
  input.value = draft.answer ?? "";
  make("span", "zl-unit", row, question.unit);
  input.addEventListener("input", () => {
    draft.answer = input.value;
    changed();
  });
}

function drawText(box, question, draft, ui, changed) {
  const row = make("label", "zl-text-answer", box);
  make("span", "zl-hidden", row, "Your answer");
  const input = make("textarea", "", row);
  input.rows = 4;
  input.value = draft.answer ?? "";
  input.addEventListener("input", () => {
    draft.answer = input.value;
    changed();
  });
}

function drawOrdering(box, question, draft, ui, changed) {
  make("p", "zl-help", box, "Drag a row, use its arrows, or focus it and press the arrow keys.");
  const list = make("ol", "zl-ordering", box);
  const spoken = make("span", "zl-hidden", box);
  spoken.setAttribute("aria-live", "assertive");
  const total = question.entries.length;
  let dragged = null;

  function move(from, to, focus) {
    if (to < 0 || to >= total || from === to) return;
    const [entry] = draft.answer.splice(from, 1);
    draft.answer.splice(to, 0, entry);
    fill();
    const item = list.children[to];
    ((focus && item.querySelector(focus)) || item).focus();
    spoken.textContent = `${question.entries[entry]}: now ${to + 1} of ${total}`;
    changed();
  }

  function arrows(item, text, at) {
    const box = make("span", "zl-arrows", item);
    for (const [step, glyph, word] of [[-1, "\u2191", "up"], [1, "\u2193", "down"]]) {
      const node = button(`zl-${word}`, box, glyph, `move ${word}: ${text}`);
      node.disabled = at + step < 0 || at + step >= total;
      node.addEventListener("click", () => move(at, at + step, `.zl-${word}:not(:disabled)`));
    }
  }

  function drop(item, at) {
    item.draggable = true;
    item.addEventListener("dragstart", (event) => {
      dragged = at;
      event.dataTransfer.effectAllowed = "move";
      event.dataTransfer.setData("text/plain", String(at));
    });
    item.addEventListener("dragover", (event) => {
      if (dragged === null) return;
      event.preventDefault();
      item.classList.add("zl-over");
    });
    item.addEventListener("dragleave", () => item.classList.remove("zl-over"));
    item.addEventListener("drop", (event) => {
      event.preventDefault();
      event.stopPropagation();
      const from = dragged;
      dragged = null;
      if (from !== null) move(from, at, "");
    });
  }

  function fill() {
    list.replaceChildren();
    draft.answer.forEach((entry, at) => {
      const item = make("li", "zl-item", list);
      item.dataset.entry = entry;
      item.tabIndex = 0;
      item.setAttribute("aria-label", `${at + 1} of ${total}: ${question.entries[entry]}`);
      make("span", "zl-letter", item, String(at + 1));
      make("span", "zl-entry-text", item, question.entries[entry]);
      arrows(item, question.entries[entry], at);
      drop(item, at);
      item.addEventListener("keydown", (event) => {
        const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
        if (!step || event.target !== item) return;
        event.preventDefault();
        move(at, at + step, "");
      });
    });
  }
  fill();
}

const DRAW = {
  single: drawChoices,
  multiple: drawChoices,
  bug: drawLines,
  numeric: drawNumber,
  ordering: drawOrdering,
  short: drawText,
};

function drawQuestion(model, ui) {
  const at = model.get("at");
  const question = model.get("questions")[at];
  if (!question) return;
  const draft = draftOf(ui, question, at);
  ui.form.replaceChildren();
  const meta = make("p", "zl-meta", ui.form);
  make("span", "", meta, `Question ${at + 1} of ${model.get("questions").length}`);
  make("span", "zl-level", meta, question.difficulty);
  const box = make("fieldset", "zl-box", ui.form);
  const legend = make("legend", "", box);
  make("span", "zl-text", legend, question.text);
  if (question.code && question.kind !== "bug") {
    make("pre", "zl-code", box).textContent = question.code;
  }
  make("p", "zl-how", box, question.how);
  DRAW[question.kind](box, question, draft, ui, () => drawFoot(model, ui));
}

// Buttons below.

function send(model, ui, fields) {
  const at = model.get("at");
  const serial = (model.get("request").serial ?? 0) + 1;
  const draft = ui.drafts[at];
  draft.sent = JSON.stringify([draft.answer, draft.points]);
  model.set("request", { serial, number: at, ...fields });
  model.save_changes();
}

// An answer that was marked already is not sent again; changing it opens the question again.
function settled(model, ui) {
  const at = model.get("at");
  const draft = ui.drafts[at];
  const result = resultOf(model, at);
  return Boolean(result) && draft.sent === JSON.stringify([draft.answer, draft.points]);
}

function check(model, ui) {
  if (settled(model, ui)) return;
  const at = model.get("at");
  const judged = resultOf(model, at)?.outcome === "judge" || ui.drafts[at].points !== null;
  send(model, ui, { answer: judged ? ui.drafts[at].points : ui.drafts[at].answer });
}

function drawFoot(model, ui) {
  const at = model.get("at");
  const questions = model.get("questions");
  const result = resultOf(model, at);
  const outcome = result?.outcome;
  const focused = ui.foot.contains(document.activeElement) ? document.activeElement.dataset.do : "";
  ui.foot.replaceChildren();
  const words = { judge: "Count the points", wrong: "Check again", partly: "Check again" };
  const main = button("zl-main-button", ui.foot, words[outcome] ?? "Check");
  main.dataset.do = "check";
  main.setAttribute("aria-disabled", String(settled(model, ui)));
  main.addEventListener("click", () => check(model, ui));
  if (["wrong", "partly"].includes(outcome)) {
    const show = button("zl-quiet-button", ui.foot, "Show the answer");
    show.dataset.do = "show";
    show.addEventListener("click", () => send(model, ui, { reveal: true }));
  }
  make("span", "zl-space", ui.foot);
  for (const [step, word] of [[-1, "Back"], [1, "Next question"]]) {
    const to = at + step;
    if (to < 0 || to >= questions.length) continue;
    const done = step > 0 && ["right", "shown"].includes(outcome);
    const node = button(done ? "zl-main-button" : "zl-quiet-button", ui.foot, word);
    node.dataset.do = word;
    node.addEventListener("click", () => go(model, to));
  }
  if (focused) ui.foot.querySelector(`[data-do="${focused}"]`)?.focus();
}

// The verdict.

function drawRubric(result, draft, box, redraw) {
  draft.points ??= [...result.suggested];
  make("p", "zl-how", box, "Tick the points that your answer makes.");
  result.rubric.forEach((point, i) => {
    const row = make("label", "zl-entry", box);
    const input = make("input", "", row);
    input.type = "checkbox";
    input.checked = draft.points.includes(i);
    make("span", "zl-entry-text", row, point);
    input.addEventListener("change", () => {
      draft.points = input.checked ? [...draft.points, i] : draft.points.filter((k) => k !== i);
      redraw();
    });
  });
}

function markEntries(ui, result) {
  for (const node of ui.form.querySelectorAll("[data-entry]")) {
    node.classList.remove("zl-marked-right", "zl-marked-wrong");
  }
  if (!result) return;
  for (const { at } of result.notes) {
    const mark = result.outcome === "wrong" ? "zl-marked-wrong" : "zl-marked-right";
    if (at >= 0) ui.form.querySelector(`[data-entry="${at}"]`)?.classList.add(mark);
  }
}

function noteText(question, note) {
  if (note.at < 0 || question.kind === "short" || question.kind === "ordering") return note.text;
  if (question.kind === "bug") return `Line ${question.lines[note.at]}: ${note.text}`;
  return `${String.fromCharCode(97 + note.at)}: ${note.text}`;
}

function drawOutcome(model, ui) {
  const at = model.get("at");
  const result = resultOf(model, at);
  const question = model.get("questions")[at];
  ui.outcome.replaceChildren();
  ui.outcome.className = `zl-outcome zl-is-${result?.outcome ?? "open"}`;
  ui.outcome.hidden = !result;
  markEntries(ui, result);
  if (!result) return;
  const head = make("p", "zl-said", ui.outcome);
  make("span", "zl-glyph", head, GLYPH[result.outcome] ?? "!");
  head.append(` ${SAID[result.outcome]}`);
  for (const note of result.notes) make("p", "zl-note", ui.outcome, noteText(question, note));
  if (result.answer && result.outcome !== "right") make("p", "zl-answer", ui.outcome, result.answer);
  if (result.why) make("p", "zl-why", ui.outcome, result.why);
  if (result.rubric.length && result.outcome !== "right" && result.outcome !== "shown") {
    drawRubric(result, ui.drafts[at], ui.outcome, () => drawFoot(model, ui));
  }
}

function render({ model, el }) {
  const ui = skeleton(el, model);
  ui.title.textContent = model.get("heading");
  const redraw = () => {
    drawNav(model, ui);
    drawOutcome(model, ui);
    drawFoot(model, ui);
  };
  const turn = () => {
    const inside = ui.nav.contains(document.activeElement) || ui.foot.contains(document.activeElement);
    drawQuestion(model, ui);
    redraw();
    if (inside) ui.form.querySelector("input, textarea, li")?.focus();
  };
  const paint = () => applyTheme(model, ui.root);
  const heard = { at: turn, questions: turn, results: redraw, theme: paint };
  for (const [field, f] of Object.entries(heard)) model.on(`change:${field}`, f);
  ui.form.addEventListener("submit", (event) => {
    event.preventDefault();
    check(model, ui);
  });
  ui.form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault();
    check(model, ui);
  });
  // JupyterLab takes arrow keys and Enter from inside outputs unless we keep them.
  ui.root.addEventListener("keydown", (event) => event.stopPropagation());
  const watcher = new MutationObserver(paint);
  watcher.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  paint();
  turn();
  return () => {
    watcher.disconnect();
    for (const [field, f] of Object.entries(heard)) model.off(`change:${field}`, f);
  };
}

export default { render };
