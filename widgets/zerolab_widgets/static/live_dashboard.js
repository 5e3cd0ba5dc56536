// Chapter 3: losses and the share of communication beside the bars that memory_bars.js draws.
const CHART = { width: 380, height: 110, left: 46, bottom: 18, top: 8 };

function chartFrame(parent, title) {
  const figure = make("figure", "zl-chart", parent);
  const caption = make("figcaption", "", figure, title);
  const svg = shape("svg", figure, { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img" });
  return { figure, caption, svg };
}

function axes(svg, steps, low, high, format) {
  const [floor, right] = [CHART.height - CHART.bottom, CHART.width - 4];
  shape("path", svg, { d: `M${CHART.left},${CHART.top}V${floor}H${right}`, class: "zl-axes" });
  const label = (x, y, anchor, text) => shape("text", svg, { x, y, "text-anchor": anchor }, text);
  label(CHART.left - 5, CHART.top + 9, "end", format(high));
  label(CHART.left - 5, floor, "end", format(low));
  label(CHART.left, CHART.height - 4, "start", "step 1");
  if (steps > 1) label(right, CHART.height - 4, "end", `${steps}`);
  const x = (step) => CHART.left + ((step + 0.5) / Math.max(steps, 1)) * (right - CHART.left);
  const y = (value) => floor - ((value - low) / (high - low || 1)) * (floor - CHART.top);
  return { x, y, floor, width: (right - CHART.left) / Math.max(steps, 1) };
}

const stepsIn = (points) => (points.length ? points[points.length - 1][0] + 1 : 0);

function drawLoss(model, chart) {
  const points = model.get("losses");
  chart.svg.replaceChildren();
  const last = points.length ? points[points.length - 1][1].toFixed(3) : "";
  chart.caption.textContent = last ? `loss ${last}` : "loss";
  chart.svg.setAttribute("aria-label", last ? `loss, ${last} after ${stepsIn(points)} steps` : "no loss yet");
  if (!points.length) return;
  const values = points.map(([, value]) => value);
  const pad = (Math.max(...values) - Math.min(...values)) * 0.08 || 0.05;
  const frame = axes(chart.svg, stepsIn(points), Math.min(...values) - pad, Math.max(...values) + pad, (v) => v.toFixed(2));
  const path = points.map(([step, value], i) => `${i ? "L" : "M"}${frame.x(step).toFixed(1)},${frame.y(value).toFixed(1)}`);
  shape("path", chart.svg, { d: path.join(""), class: "zl-line" });
  const [step, value] = points[points.length - 1];
  shape("circle", chart.svg, { cx: frame.x(step), cy: frame.y(value), r: 3.5, class: "zl-point" });
}

function drawShares(model, chart) {
  const points = model.get("shares");
  chart.svg.replaceChildren();
  const mean = points.reduce((sum, [, share]) => sum + share, 0) / (points.length || 1);
  const text = points.length ? `${Math.round(mean * 100)} % of the time` : "";
  chart.caption.textContent = `in collectives ${text}`;
  chart.svg.setAttribute("aria-label", `share of communication, ${text || "not known yet"}`);
  if (!points.length) return;
  const high = Math.max(0.1, ...points.map(([, share]) => share));
  const frame = axes(chart.svg, stepsIn(points), 0, high, (v) => `${Math.round(v * 100)} %`);
  const fill = patterns(chart.svg, { exposed: model.get("theme").lanes.exposed }).exposed;
  const width = Math.min(Math.max(frame.width * 0.7, 1), 40);
  for (const [step, share] of points) {
    const top = frame.y(share);
    shape("rect", chart.svg, { x: frame.x(step) - width / 2, y: top, width, height: frame.floor - top, fill });
  }
}

function drawMoved(model, moved) {
  const rows = Object.entries(model.get("moved"));
  const words = rows.map(([op, bytes]) => `${op} ${mib(bytes)}`).join(", ");
  moved.textContent = rows.length ? `Moved in a step: ${words}. ${model.get("note")}` : "";
}

function renderDashboard({ model, el }) {
  const root = make("div", "zl-dashboard", el);
  const stopBars = renderBars({ model, el: root });
  const charts = make("div", "zl-charts", root.firstChild);
  const loss = chartFrame(charts, "loss");
  const shares = chartFrame(charts, "in collectives");
  const moved = make("p", "zl-moved", root.firstChild);
  const stop = redrawOn(model, ["losses", "shares", "moved", "note", "theme"], () => {
    drawLoss(model, loss);
    drawShares(model, shares);
    drawMoved(model, moved);
  });
  return () => {
    stop();
    stopBars();
  };
}
