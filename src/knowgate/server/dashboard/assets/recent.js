// The list of recent decisions: reasons, timings, both answers if they are known, and feedback.
import { post } from "./api.js";
import { createElement, formatMilliseconds, formatThreshold, formatTime, getElement, isConstant } from "./elements.js";

const FILTERS = {
  all: () => true,
  skipped: (row) => !row.retrieve,
  retrieved: (row) => row.retrieve,
  audited: (row) => row.closed !== undefined && row.opened !== undefined,
  lost: (row) => row.lost === 1,
};
const expandedIds = new Set(), ratings = new Map();
let renderedState = "";

export function renderRecent(data, { force = false } = {}) {
  const filter = getElement("filter").value, rows = data.recent.filter(FILTERS[filter]);
  const state = JSON.stringify([rows, filter]);
  if (state === renderedState && !force) return;
  renderedState = state;
  getElement("recent-intro").textContent = [
    `The last ${data.recent.length}, newest first.`,
    !data.constant && "The number is the need for retrieval, from 0 to 1.",
    !data.keeps_texts && "Texts are not stored: start the server with --keep-questions to see them.",
  ].filter(Boolean).join(" ");
  const focusedId = document.activeElement?.closest("details.question")?.dataset.id;
  const focusedControl = document.activeElement?.dataset.name;
  const none = createElement("p", { class: "note" }, "No decisions.");
  getElement("recent").replaceChildren(...(rows.length ? rows.map((row) => createRow(row, data)) : [none]));
  if (focusedId) restoreFocus(focusedId, focusedControl);
}

// Keeps the keyboard focus at the same control when the list is rendered again.
function restoreFocus(id, control) {
  const row = [...getElement("recent").children].find((child) => child.dataset.id === id);
  (row?.querySelector(control ? `[data-name="${control}"]` : "summary") ?? row?.querySelector("summary"))?.focus();
}

function createRow(row, data) {
  const decision = createElement("span", { class: `decision ${row.retrieve ? "retrieved" : "skipped"}` }, row.retrieve ? "retrieved" : "skipped");
  const need = createElement("span", { class: "need" }, row.rule ? "rule" : isConstant(row) ? "" : row.need.toFixed(2)); // rules ignore the need
  const question = createElement("span", { class: "question-text" }, row.question ?? row.id);
  const summary = createElement("summary", {}, createElement("time", {}, formatTime(row.at)), decision, need, question, createFlags(row));
  const attributes = { class: "question", "data-id": row.id, open: expandedIds.has(row.id) };
  const details = createElement("details", attributes, summary, createDetails(row, data));
  details.addEventListener("toggle", () => (details.open ? expandedIds.add(row.id) : expandedIds.delete(row.id)));
  return details;
}

function createFlags(row) {
  const flag = (text, kind) => createElement("span", { class: `flag ${kind}` }, text);
  return [
    row.lost === 1 && flag("answers differ", "bad"),
    row.lost === 0 && flag("same answer", "good"),
    row.mode && flag(row.mode, "fair"),
    row.arm === "b" && flag("gate b", "fair"),
    row.degraded.filter((part) => part !== "alarm").map((part) => flag(part, "bad")),
  ];
}

function createDetails(row, data) {
  const timings = Object.entries(row.milliseconds).map(([stage, value]) => `${stage} ${formatMilliseconds(value)}`).join(", ");
  const facts = [
    ["Reason", row.reason],
    ["Without passages", row.closed],
    ["With passages", row.opened],
    ["Passages", row.passages.map((passage) => passage.title || passage.id).join(", ")],
    ["Similar questions", (row.neighbours ?? []).map((neighbor) => `${neighbor.label} (similarity ${neighbor.similarity.toFixed(2)})`).join("; ")],
    ["Gate", isConstant(row) ? row.gate : `${row.gate}, threshold ${formatThreshold(row.threshold)}`],
    ["Timings", timings],
  ].filter(([, text]) => text);
  const list = createElement("dl", { class: "answers" }, facts.flatMap(([name, text]) => [createElement("dt", {}, name), createElement("dd", {}, text)]));
  return createElement("div", {}, list, createElement("p", { class: "id" }, row.id), data.takes_feedback && createFeedbackForm(row.id, row.rating));
}

export function createFeedbackForm(id, storedRating) {
  const status = createElement("span", { class: "note", role: "status" });
  const currentRating = ratings.get(id) ?? storedRating;
  const createButton = (rating, label, description) => createElement("button", {
    type: "button", "data-name": rating, "aria-label": description, title: description, "aria-pressed": String(currentRating === rating),
    onclick: () => sendFeedback({ id, rating }),
  }, label);
  const upButton = createButton("up", "Good", "A good answer"), downButton = createButton("down", "Bad", "A bad answer");
  const correctButton = createElement("button", { type: "button", "data-name": "correct", onclick: showCorrectionForm }, "Correct it");

  function showCorrectionForm() {
    const field = createElement("input", { "aria-label": "The right answer", placeholder: "The right answer", maxlength: "2000", required: true });
    const form = createElement("form", { class: "line" }, field, createElement("button", { type: "submit" }, "Send"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const correction = field.value.trim();
      if (!correction) return;
      await sendFeedback({ id, rating: "down", correction });
      form.replaceWith(correctButton);
    });
    correctButton.replaceWith(form);
    field.focus();
  }

  async function sendFeedback(feedback) {
    try {
      const response = await post("/v1/feedback", feedback);
      ratings.set(id, response.rating);
      upButton.setAttribute("aria-pressed", String(response.rating === "up"));
      downButton.setAttribute("aria-pressed", String(response.rating === "down"));
      status.textContent = response.learnt ? "Thank you. It was added to the history." : "Thank you.";
    } catch (error) {
      status.textContent = `The feedback was not stored: ${error.message}`;
    }
  }
  return createElement("div", { class: "feedback" }, upButton, downButton, correctButton, status);
}
