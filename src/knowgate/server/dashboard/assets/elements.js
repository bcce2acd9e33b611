// Pieces of a page and ways to write numbers. All text goes in as text: nothing is ever read as markup.

export const find = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const percent = (share, digits = 1) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`);

export function amount(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${Math.round(value / 1e3)} k`;
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toPrecision(2);
}

export function milliseconds(value) {
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 0 : 1)} s`;
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size >= 7200) return `${(seconds / 3600).toFixed(1)} h`;
  if (size >= 120) return `${(seconds / 60).toFixed(1)} min`;
  return `${seconds.toFixed(size >= 10 ? 0 : 1)} s`;
}

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function table(caption, columns, rows) {
  const head = make("tr", {}, columns.map((column) => make("th", { scope: "col" }, column)));
  const body = rows.map(([first, ...rest]) => make("tr", {}, make("th", { scope: "row" }, first), rest.map((cell) => make("td", {}, cell))));
  return make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, body));
}
