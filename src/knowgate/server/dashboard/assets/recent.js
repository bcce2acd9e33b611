// Recent decisions: why, what it took, both answers where they are known, and what people think of them.
import { clock, find, make, milliseconds } from "./elements.js";
import { post } from "./api.js";

const KINDS = {
  all: () => true,
  skipped: (row) => !row.retrieve,
  retrieved: (row) => row.retrieve,
  audited: (row) => row.closed !== undefined && row.opened !== undefined,
  lost: (row) => row.lost === 1,
};
const opened = new Set(), rated = new Map();
let seen = "";

export function showRecent(state, { force = false } = {}) {
  const rows = state.recent.filter(KINDS[find("show").value]);
  const now = JSON.stringify([rows, find("show").value]);
  if (now === seen && !force) return;
  seen = now;
  find("recent-words").textContent = state.keeps_texts
    ? `The last ${state.recent.length}, newest first.`
    : `The last ${state.recent.length}, newest first. Texts are not kept: start the server with --keep-questions to see them.`;
  const focused = document.activeElement?.closest("details.question")?.dataset.id;
  const within = document.activeElement?.dataset.name;
  find("recent").replaceChildren(...(rows.length ? rows.map((row) => line(row, state)) : [make("p", { class: "note" }, "There is none.")]));
  if (focused) refocus(focused, within);
}

// Whoever is in the list with the keyboard stays where they were.
function refocus(id, name) {
  const box = [...find("recent").children].find((one) => one.dataset.id === id);
  (box?.querySelector(name ? `[data-name="${name}"]` : "summary") ?? box?.querySelector("summary"))?.focus();
}

function line(row, state) {
  const mark = make("span", { class: `mark ${row.retrieve ? "look" : "skip-mark"}` }, row.retrieve ? "looked up" : "skipped");
  const need = make("span", { class: "need" }, row.rule ? "rule" : row.need.toFixed(2)); // a rule does not look at it
  const words = make("span", { class: "asked" }, row.question ?? row.id);
  const summary = make("summary", {}, make("time", {}, clock(row.at)), mark, need, words, flags(row));
  const box = make("details", { class: "question", "data-id": row.id, open: opened.has(row.id) }, summary, inside(row, state));
  box.addEventListener("toggle", () => (box.open ? opened.add(row.id) : opened.delete(row.id)));
  return box;
}

function flags(row) {
  const flag = (words, kind) => make("span", { class: `flag ${kind}` }, words);
  return [
    row.lost === 1 && flag("answers differ", "bad"),
    row.lost === 0 && flag("same answer", "good"),
    row.mode && flag(row.mode, "fair"),
    row.arm === "b" && flag("gate b", "fair"),
    row.degraded.filter((part) => part !== "alarm").map((part) => flag(part, "bad")),
  ];
}

function inside(row, state) {
  const times = Object.entries(row.milliseconds).map(([stage, value]) => `${stage} ${milliseconds(value)}`).join(", ");
  const passages = row.passages.map((passage) => passage.title || passage.id).join(", ");
  const facts = [
    ["Why", row.reason],
    ["From memory", row.closed],
    ["With passages", row.opened],
    ["Passages", passages],
    ["Like it", (row.neighbours ?? []).map((near) => `${near.question} (${near.label})`).join("; ")],
    ["Gate", `${row.gate}, threshold ${Number(row.threshold.toPrecision(4))}`],
    ["Times", times],
  ].filter(([, words]) => words);
  const list = make("dl", { class: "answers" }, facts.flatMap(([name, words]) => [make("dt", {}, name), make("dd", {}, words)]));
  return make("div", {}, list, make("p", { class: "id" }, row.id), state.takes_feedback && thumbs(row.id, row.rating));
}

export function thumbs(id, before) {
  const said = make("span", { class: "note", role: "status" });
  const given = rated.get(id) ?? before;
  const button = (rating, sign, words) => make("button", {
    type: "button", "data-name": rating, "aria-label": words, title: words, "aria-pressed": String(given === rating),
    onclick: () => send({ id, rating }),
  }, sign);
  const up = button("up", "Good", "A good answer"), down = button("down", "Bad", "A bad answer");
  const right = make("button", { type: "button", "data-name": "correct", onclick: correct }, "Correct it");

  function correct() {
    const field = make("input", { "aria-label": "The right answer", placeholder: "The right answer", maxlength: "2000", required: true });
    const form = make("form", { class: "line" }, field, make("button", { type: "submit" }, "Send"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) send({ id, rating: "down", correction: field.value.trim() }).then(() => form.replaceWith(right));
    });
    right.replaceWith(form);
    field.focus();
  }

  async function send(feedback) {
    try {
      const reply = await post("/v1/feedback", feedback);
      rated.set(id, reply.rating);
      up.setAttribute("aria-pressed", String(reply.rating === "up"));
      down.setAttribute("aria-pressed", String(reply.rating === "down"));
      said.textContent = reply.learnt ? "Thank you. The history has learnt from it." : "Thank you.";
    } catch (error) {
      said.textContent = `It was not taken: ${error.message}`;
    }
  }
  return make("div", { class: "thumbs" }, up, down, right, said);
}
