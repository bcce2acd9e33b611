// The playground: answers a question with and without passages, side by side, and shows what the gate decides.
import { post, postStreaming } from "./api.js";
import { createElement, getElement } from "./elements.js";
import { createFeedbackForm } from "./recent.js";

const TITLES = { never: "Without passages", always: "With passages" };
let latestRun = 0;

export function initPlayground(settings) {
  const form = getElement("ask"), question = getElement("question");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (question.value.trim()) run(question.value.trim(), settings);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

async function run(question, settings) {
  const runNumber = ++latestRun, button = getElement("ask").querySelector("button");
  const panels = Object.entries(TITLES).map(([retrieve, title]) => createPanel(retrieve, title));
  getElement("answers").replaceChildren(...panels.map((panel) => panel.box));
  getElement("decision").textContent = "The gate decides …";
  button.disabled = true;
  await Promise.all([showDecision(question, panels, runNumber), ...panels.map((panel) => showAnswer(question, panel, settings))]);
  if (runNumber === latestRun) button.disabled = false;
}

function createPanel(retrieve, title) {
  const answer = createElement("p", { class: "text" }, "…"), note = createElement("p", { class: "note" }), feedback = createElement("div");
  const box = createElement("article", { class: "answer" }, createElement("h3", {}, title), answer, note, feedback);
  return { retrieve, answer, note, feedback, box };
}

async function showDecision(question, panels, runNumber) {
  let message;
  try {
    const decision = await post("/v1/decide", { question });
    message = `The gate would ${decision.retrieve ? "retrieve" : "answer without passages"}: ${decision.reason}.`;
    if (runNumber === latestRun) panels[decision.retrieve ? 1 : 0].box.classList.add("chosen");
  } catch (error) {
    message = `The decision failed: ${error.message}`;
  }
  if (runNumber === latestRun) getElement("decision").textContent = message;
}

async function showAnswer(question, panel, settings) {
  const body = { model: "knowgate", messages: [{ role: "user", content: question }], knowgate: { retrieve: panel.retrieve } };
  let text = "", report = null;
  try {
    await postStreaming("/v1/chat/completions", body, (chunk) => {
      if (chunk.error) throw new Error(chunk.error.message);
      report = chunk.knowgate ?? report;
      text += chunk.choices?.[0]?.delta?.content ?? "";
      panel.answer.textContent = text || "…";
    });
  } catch (error) {
    panel.note.textContent = `The answer failed: ${error.message}`;
  }
  panel.answer.textContent = text || "(empty)";
  if (!report) return;
  const passages = report.passages.map((passage) => passage.title || passage.id).join(", ");
  panel.note.textContent ||= `${Math.round(report.milliseconds.total)} ms${passages ? `; ${passages}` : ""}`;
  if (settings.acceptsFeedback) panel.feedback.append(createFeedbackForm(report.id, null));
}
