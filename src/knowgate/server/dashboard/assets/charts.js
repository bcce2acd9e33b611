// SVG charts in the style of the reports. Each has a text alternative.
import { createElement, createSvg, formatPercent } from "./elements.js";

const WIDTH = 560, HEIGHT = 190, LEFT = 44, BOTTOM = 28, TOP = 12;

const createChart = (description, height = HEIGHT) =>
  createSvg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": description });

const createText = (x, y, text, attributes = {}) => createSvg("text", { x, y, ...attributes }, text);

// columns: for each column a list of [count, color class], stacked from the bottom.
function addBars(chart, columns, maximum) {
  const columnWidth = (WIDTH - LEFT) / columns.length, plotHeight = HEIGHT - TOP - BOTTOM;
  columns.forEach((segments, index) => {
    let y = HEIGHT - BOTTOM;
    for (const [count, color] of segments) {
      const height = (count / maximum) * plotHeight;
      y -= height;
      const x = LEFT + index * columnWidth + 0.5, width = Math.max(1, columnWidth - 1);
      if (count) chart.append(createSvg("rect", { class: `bar ${color}`, x, y, width, height }));
    }
  });
}

// labels: list of [position between 0 and 1, text, anchor].
function addAxes(chart, maximum, labels) {
  const baseline = HEIGHT - BOTTOM, end = { "text-anchor": "end" };
  chart.append(
    createSvg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: TOP, y2: TOP }),
    createSvg("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: baseline, y2: baseline }),
    createText(LEFT - 6, TOP + 5, String(maximum), end),
    createText(LEFT - 6, baseline + 4, "0", end),
    ...labels.map(([position, text, anchor]) => createText(LEFT + position * (WIDTH - LEFT), HEIGHT - 6, text, { "text-anchor": anchor })),
  );
}

function createLegend() {
  const item = (color, text) => createElement("li", {}, createElement("span", { class: `swatch box ${color}` }), text);
  return createElement("ul", { class: "legend" }, item("k0", "retrieved"), item("k2", "skipped"));
}

export function createMinutesChart(minutes) {
  const totals = minutes.map(([retrieved, skipped]) => retrieved + skipped);
  const maximum = Math.max(1, ...totals), sum = totals.reduce((a, b) => a + b, 0);
  const chart = createChart(`${sum} questions in the last hour, at most ${maximum} per minute`);
  addAxes(chart, maximum, [[0, "an hour ago", "start"], [1, "now", "end"]]);
  addBars(chart, minutes.map(([retrieved, skipped]) => [[retrieved, "k0"], [skipped, "k2"]]), maximum);
  return [createElement("figcaption", {}, "Questions per minute"), chart, createLegend()];
}

export function createNeedsChart({ retrieved, skipped }, threshold) {
  const maximum = Math.max(1, ...retrieved.map((count, bin) => count + skipped[bin]));
  const chart = createChart(`Histogram of need from 0 to 1 in ${retrieved.length} bins, at most ${maximum} questions; threshold ${threshold}`);
  addAxes(chart, maximum, [[0, "0: LLM knows the answer", "start"], [1, "1: LLM does not know", "end"]]);
  addBars(chart, retrieved.map((count, bin) => [[skipped[bin], "k2"], [count, "k0"]]), maximum);
  if (threshold >= 0) {
    const x = LEFT + threshold * (WIDTH - LEFT);
    chart.append(createSvg("line", { class: "edge", x1: x, x2: x, y1: TOP - 8, y2: HEIGHT - BOTTOM }));
  }
  return [createElement("figcaption", {}, "Need for retrieval, by question (dashed line: threshold)"), chart, createLegend()];
}

export function createLossChart(loss) {
  const height = 96, y = 48, maximum = chooseScale(loss), toX = (share) => 8 + (share / maximum) * (WIDTH - 16);
  const chart = createChart(describeLoss(loss), height);
  chart.append(
    createSvg("line", { class: "axis", x1: 8, x2: WIDTH - 8, y1: 66, y2: 66 }),
    createSvg("line", { class: "range k0", x1: toX(loss.low), x2: toX(Math.min(loss.high, maximum)), y1: y, y2: y }),
  );
  if (loss.mean !== null) chart.append(createSvg("circle", { class: "dot k0", cx: toX(Math.min(loss.mean, maximum)), cy: y, r: 7 }));
  if (loss.promised !== null) {
    const x = toX(loss.promised), anchor = x < WIDTH / 2 ? "start" : "end";
    chart.append(
      createSvg("line", { class: "guarantee", x1: x, x2: x, y1: 26, y2: 66 }),
      createText(x, 20, `limit ${formatPercent(loss.promised)}`, { class: "guarantee-label", "text-anchor": anchor }),
    );
  }
  chart.append(createText(8, 90, "0 %"), createText(WIDTH - 8, 90, formatPercent(maximum, 0), { "text-anchor": "end" }));
  return createElement("figure", {}, chart);
}

function chooseScale(loss) {
  const shown = Math.max(loss.promised ?? 0, loss.mean ?? 0) * 1.6;
  return [0.05, 0.1, 0.2, 0.5, 1].find((maximum) => shown <= maximum && (loss.high <= maximum || loss.high > 0.5)) ?? 1;
}

export function describeLoss(loss) {
  if (!loss.drawn) return "No request has been audited yet.";
  const bounds = `between ${formatPercent(loss.low)} and ${formatPercent(loss.high)}`;
  return `Audits: following the gate changes ${loss.lost} of ${loss.drawn} answers (${formatPercent(loss.mean)}). The true share is ${bounds}, with ${formatPercent(loss.confidence, 0)} confidence; it is that of all requests if audits were never paused.`;
}
