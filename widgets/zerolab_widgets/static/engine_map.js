// Chapter 3: draws the engine as a table, modules by moments; a function that is chosen is told of.
const PIECE_HINT = "Choose a function, by mouse or arrow keys, to read what it does.";

function drawPiece(model, cell, piece, index) {
  const node = make("button", piece.yours ? "zl-piece zl-yours" : "zl-piece", cell);
  for (const word of piece.short.split(/(?<=[a-z]_)/)) node.append(word, document.createElement("wbr"));
  node.type = "button";
  node.dataset.index = index;
  node.tabIndex = index === model.get("selected") ? 0 : -1;
  node.setAttribute("aria-pressed", String(index === model.get("selected")));
  node.setAttribute("aria-label", `${piece.short}, ${piece.yours ? "yours" : "of the package"}`);
}

function drawEngine(model, ui) {
  drawFrame(model, ui);
  const held = ui.table.contains(document.activeElement);
  ui.table.replaceChildren();
  ui.table.hidden = !model.get("pieces").length;
  const head = make("tr", "", make("thead", "", ui.table));
  make("td", "zl-corner", head);
  for (const moment of model.get("moments")) make("th", "", head, moment).scope = "col";
  const body = make("tbody", "", ui.table);
  const shown = (piece) => model.get("helpers") || !piece.helper;
  for (const module of model.get("modules")) {
    if (!model.get("pieces").some((piece) => piece.module === module && shown(piece))) continue;
    const row = make("tr", "", body);
    make("th", "", row, module).scope = "row";
    for (const moment of model.get("moments")) {
      const cell = make("td", "", row);
      model.get("pieces").forEach((piece, index) => {
        if (piece.module === module && piece.moment === moment && shown(piece)) {
          drawPiece(model, cell, piece, index);
        }
      });
    }
  }
  ui.said.textContent = model.get("pieces")[model.get("selected")]?.says ?? PIECE_HINT;
  const chosen = ui.table.querySelector('[tabindex="0"]');
  if (held) chosen?.focus();
  if (!chosen) ui.table.querySelector(".zl-piece")?.setAttribute("tabindex", "0");
  const helpers = model.get("pieces").filter((piece) => piece.helper).length;
  ui.more.hidden = !helpers;
  ui.more.textContent = `helpers (${helpers})`;
  ui.more.setAttribute("aria-pressed", String(model.get("helpers")));
}

// Up and down in a column of the table; left and right to the nearest function beside.
function besides(ui, node, key) {
  const all = [...ui.table.querySelectorAll(".zl-piece")];
  const column = (piece) => piece.closest("td").cellIndex;
  const mine = column(node);
  if (key === "ArrowUp" || key === "ArrowDown") {
    const mates = all.filter((piece) => column(piece) === mine);
    return mates[mates.indexOf(node) + (key === "ArrowDown" ? 1 : -1)];
  }
  const way = key === "ArrowRight" ? 1 : -1;
  const beside = all.filter((piece) => (column(piece) - mine) * way > 0);
  const height = (piece) => piece.getBoundingClientRect().top;
  const cost = (piece) => Math.abs(column(piece) - mine) * 4 + Math.abs(height(piece) - height(node));
  return beside.sort((a, b) => cost(a) - cost(b))[0];
}

function renderEngine({ model, el }) {
  const ui = panel(el, "zl-engine");
  ui.table = make("table", "", ui.stage);
  ui.more = button(ui.root, "", "", () => choose(model, "helpers", !model.get("helpers")));
  ui.root.insertBefore(ui.said, ui.stage); // above a table that may be longer than the screen
  const pieceOf = (event) => event.target.closest(".zl-piece");
  ui.table.addEventListener("click", (event) => {
    if (pieceOf(event)) choose(model, "selected", Number(pieceOf(event).dataset.index));
  });
  ui.table.addEventListener("keydown", (event) => {
    if (!pieceOf(event) || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const next = besides(ui, pieceOf(event), event.key);
    if (!next) return;
    next.focus();
    choose(model, "selected", Number(next.dataset.index));
  });
  const fields = ["pieces", "selected", "helpers", "finding", "theme"];
  return redrawOn(model, fields, () => drawEngine(model, ui));
}
