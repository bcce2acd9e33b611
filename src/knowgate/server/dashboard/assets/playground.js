// A question answered both ways, streamed side by side, with what the gate decides on it.
import { find, make } from "./elements.js";
import { post, stream } from "./api.js";
import { thumbs } from "./recent.js";

const SIDES = { never: "From memory", always: "With passages" };
let asked = 0;

export function startPlayground(state) {
  const form = find("ask"), question = find("question");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (question.value.trim()) ask(question.value.trim(), state);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

async function ask(question, state) {
  const mine = ++asked, button = find("ask").querySelector("button");
  const sides = Object.entries(SIDES).map(([retrieve, title]) => side(retrieve, title));
  find("answers").replaceChildren(...sides.map((one) => one.box));
  find("decided").textContent = "The gate decides …";
  button.disabled = true;
  await Promise.all([decide(question, sides, mine), ...sides.map((one) => speak(question, one, state))]);
  if (mine === asked) button.disabled = false;
}

function side(retrieve, title) {
  const said = make("p", { class: "said" }, "…"), note = make("p", { class: "note" });
  const under = make("div"), box = make("article", { class: "answer" }, make("h3", {}, title), said, note, under);
  return { retrieve, said, note, under, box };
}

async function decide(question, sides, mine) {
  let words;
  try {
    const decision = await post("/v1/decide", { question });
    words = `The gate would ${decision.retrieve ? "look this up" : "answer from memory"}: ${decision.reason}.`;
    if (mine === asked) sides[decision.retrieve ? 1 : 0].box.classList.add("chosen");
  } catch (error) {
    words = `The gate decided nothing: ${error.message}`;
  }
  if (mine === asked) find("decided").textContent = words;
}

async function speak(question, one, state) {
  const body = { model: "knowgate", messages: [{ role: "user", content: question }], knowgate: { retrieve: one.retrieve } };
  let text = "", record = null;
  try {
    await stream("/v1/chat/completions", body, (chunk) => {
      if (chunk.error) throw new Error(chunk.error.message);
      record = chunk.knowgate ?? record;
      text += chunk.choices?.[0]?.delta?.content ?? "";
      one.said.textContent = text || "…";
    });
  } catch (error) {
    one.note.textContent = `It broke off: ${error.message}`;
  }
  one.said.textContent = text || "(nothing)";
  if (!record) return;
  const passages = record.passages.map((passage) => passage.title || passage.id).join(", ");
  one.note.textContent ||= `${Math.round(record.milliseconds.total)} ms${passages ? `; ${passages}` : ""}`;
  if (state.takesFeedback) one.under.append(thumbs(record.id, null));
}
