// Charts as SVG, in the style of the reports. Each says in words what it shows.
import { draw, make, percent } from "./elements.js";

const WIDTH = 560, HEIGHT = 190, LEFT = 44, BOTTOM = 28, TOP = 12;

function frame(words, height = HEIGHT) {
  return draw("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": words });
}

const text = (x, y, words, attributes = {}) => draw("text", { x, y, ...attributes }, words);

function bars(svg, columns, most) {
  const wide = (WIDTH - LEFT) / columns.length, tall = HEIGHT - TOP - BOTTOM;
  columns.forEach((parts, place) => {
    let y = HEIGHT - BOTTOM;
    for (const [count, colour] of parts) {
      const size = (count / most) * tall;
      y -= size;
      if (count) svg.append(draw("rect", { class: `bar ${colour}`, x: LEFT + place * wide + 0.5, y, width: Math.max(1, wide - 1), height: size }));
    }
  });
}

function axes(svg, most, marks) {
  const floor = HEIGHT - BOTTOM;
  svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: TOP, y2: TOP }));
  svg.append(draw("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: floor, y2: floor }));
  svg.append(text(LEFT - 6, TOP + 5, String(most), { "text-anchor": "end" }), text(LEFT - 6, floor + 4, "0", { "text-anchor": "end" }));
  marks.forEach(([place, words, anchor]) => svg.append(text(LEFT + place * (WIDTH - LEFT), HEIGHT - 6, words, { "text-anchor": anchor })));
}

function legend() {
  const item = (colour, words) => make("li", {}, make("span", { class: `swatch box ${colour}` }), words);
  return make("ul", { class: "legend" }, item("k0", "looked up"), item("k2", "skipped"));
}

export function minutesChart(minutes) {
  const most = Math.max(1, ...minutes.map(([looked, skipped]) => looked + skipped));
  const all = minutes.reduce((sum, [looked, skipped]) => sum + looked + skipped, 0);
  const svg = frame(`${all} questions in the last hour, at most ${most} a minute`);
  axes(svg, most, [[0, "an hour ago", "start"], [1, "now", "end"]]);
  bars(svg, minutes.map(([looked, skipped]) => [[looked, "k0"], [skipped, "k2"]]), most);
  return [make("figcaption", {}, "Questions a minute"), svg, legend()];
}

export function needsChart({ retrieved, skipped }, threshold) {
  const most = Math.max(1, ...retrieved.map((count, place) => count + skipped[place]));
  const svg = frame(`Need from 0 to 1 in ${retrieved.length} steps, the commonest ${most} times; threshold ${threshold}`);
  axes(svg, most, [[0, "0: knows", "start"], [1, "1: must look up", "end"]]);
  bars(svg, retrieved.map((count, place) => [[skipped[place], "k2"], [count, "k0"]]), most);
  if (threshold >= 0) {
    const x = LEFT + threshold * (WIDTH - LEFT);
    svg.append(draw("line", { class: "edge", x1: x, x2: x, y1: TOP - 8, y2: HEIGHT - BOTTOM }));
  }
  return [make("figcaption", {}, "Need of the questions, and the threshold"), svg, legend()];
}

export function lossChart(loss) {
  const high = 96, line = 48, most = scale(loss), x = (share) => 8 + (share / most) * (WIDTH - 16);
  const svg = frame(lossWords(loss), high);
  svg.append(draw("line", { class: "axis", x1: 8, x2: WIDTH - 8, y1: 66, y2: 66 }));
  svg.append(draw("line", { class: "range k0", x1: x(loss.low), x2: x(Math.min(loss.high, most)), y1: line, y2: line }));
  if (loss.mean !== null) svg.append(draw("circle", { class: "dot k0", cx: x(Math.min(loss.mean, most)), cy: line, r: 7 }));
  if (loss.promised !== null) {
    const at = x(loss.promised), anchor = at < WIDTH / 2 ? "start" : "end";
    svg.append(draw("line", { class: "promise", x1: at, x2: at, y1: 26, y2: 66 }));
    svg.append(text(at, 20, `promised ${percent(loss.promised)}`, { class: "promised", "text-anchor": anchor }));
  }
  svg.append(text(8, 90, "0 %"), text(WIDTH - 8, 90, percent(most, 0), { "text-anchor": "end" }));
  return make("figure", {}, svg);
}

const scale = (loss) => [0.05, 0.1, 0.2, 0.5, 1].find((most) => Math.max(loss.promised ?? 0, loss.mean ?? 0) * 1.6 <= most && (loss.high <= most || loss.high > 0.5)) ?? 1;

export function lossWords(loss) {
  const sure = percent(loss.confidence, 0);
  if (!loss.drawn) return "No request was drawn yet.";
  return `Of ${loss.drawn} requests drawn ${loss.lost} would have been answered otherwise: ${percent(loss.mean)}, between ${percent(loss.low)} and ${percent(loss.high)}, ${sure} sure at every moment.`;
}
