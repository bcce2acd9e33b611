// Helpers that create elements and format numbers. All content is inserted as text, never parsed as HTML.

export const getElement = (id) => document.getElementById(id);

export const setContent = (id, ...children) => getElement(id).replaceChildren(...children);

export function createElement(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function createSvg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function createTable(caption, columns, rows) {
  const head = createElement("tr", {}, columns.map((column) => createElement("th", { scope: "col" }, column)));
  const body = rows.map(([first, ...cells]) =>
    createElement("tr", {}, createElement("th", { scope: "row" }, first), cells.map((cell) => createElement("td", {}, cell))));
  return createElement("table", {}, createElement("caption", {}, caption), createElement("thead", {}, head), createElement("tbody", {}, body));
}

export const formatPercent = (share, digits = 1) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`);

export const formatThreshold = (threshold) => String(Number(threshold.toPrecision(4)));

// Constant gates decide the same for every question, so their need and their threshold mean nothing.
export const isConstant = ({ gate, threshold }) => threshold < 0 || threshold >= 1 || ["always", "never"].includes(gate);

export function formatAmount(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${Math.round(value / 1e3)} k`;
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toPrecision(2);
}

export const formatMoney = (amount) => amount.toFixed(amount < 1 ? 4 : 2);

export function formatMilliseconds(value) {
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 0 : 1)} s`;
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ms`;
}

export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size > 0 && size < 1) return formatMilliseconds(1000 * seconds);
  if (size >= 7200) return `${(seconds / 3600).toFixed(1)} h`;
  if (size >= 120) return `${(seconds / 60).toFixed(1)} min`;
  return `${seconds.toFixed(size >= 10 ? 0 : 1)} s`;
}

export const formatTime = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
