// The page: asks the server every few seconds what it did, and shows it.
import { lossChart, lossWords, minutesChart, needsChart } from "./charts.js";
import { amount, clock, duration, find, make, milliseconds, percent, table } from "./elements.js";
import { startPlayground } from "./playground.js";
import { showRecent } from "./recent.js";
import { NoKey, dropKey, get, giveKey, hasKey, post } from "./api.js";

const EVERY = 4000;
const own = { takesFeedback: false };
let state = null;

function tell(id, ...words) {
  find(id).replaceChildren(...words);
}

function showTiles(figures) {
  const all = figures.arms.all, failed = (figures.requests["5xx"] ?? 0), asked = Object.values(figures.requests).reduce((a, b) => a + b, 0);
  const tiles = [
    [amount(asked), failed ? `requests, ${failed} failed` : "requests"],
    [all.decided ? percent(all.retrieved / all.decided, 0) : "–", "questions looked up"],
    [amount(all.saved.retrievals), "searches saved"],
    [amount(all.saved.tokens), "tokens saved, net of drafts"],
    [duration(all.saved.seconds), "time saved, net of drafts"],
    ...(all.saved.money === null ? [] : [[all.saved.money.toFixed(all.saved.money < 1 ? 4 : 2), "money saved"]]),
  ];
  tell("tiles", ...tiles.map(([value, words]) => make("div", {}, make("dd", {}, value), make("dt", {}, words))));
}

function showAlarm() {
  const said = [];
  for (const [arm, one] of Object.entries(state.learning?.arms ?? {})) {
    if (!one.loss.alarm) continue;
    said.push(make("p", {}, `Alarm, gate ${one.gate}: ${one.loss.alarm}. Everything is looked up.`));
    said.push(make("button", { type: "button", onclick: () => clear(arm) }, "I have looked into it: count again"));
  }
  if (state.stale) said.push(make("p", {}, `Everything is looked up: ${state.stale}.`));
  const broken = Object.entries(state.breakers).filter(([, how]) => how !== "closed");
  if (broken.length) said.push(make("p", {}, `Left alone after failures: ${broken.map(([name]) => name).join(", ")}.`));
  const words = said.map((one) => one.textContent).join("\n"), box = find("alarm");
  if (box.dataset.words === words) return;
  box.dataset.words = words;
  box.hidden = !said.length;
  box.replaceChildren(...said);
}

async function clear(arm) {
  await post("/v1/learning/clear", { arm });
  await look();
}

function showLosses() {
  const learning = state.learning;
  if (!learning || !learning.audit) {
    tell("loss-words", "Nobody looks at that: start the server with ", make("code", {}, "--audit 0.05 --decisions FILE"), ".",
      state.promise ? ` What was shown before: ${state.promise}` : "");
  } else {
    const held = learning.canary === 0 ? "; in shadow mode everything is looked up" : learning.canary < 1 ? `; gates are obeyed for ${percent(learning.canary, 0)} of them` : "";
    tell("loss-words", `${percent(learning.audit, 0)} of the requests are drawn, and skipped ones also answered with passages${held}. Budget left this hour: ${learning.budget_left}.`);
  }
  const arms = Object.entries(learning?.arms ?? {});
  tell("losses", ...arms.map(([name, arm]) => armBox(name, arm, arms.length > 1)));
}

function armBox(name, arm, several) {
  const counts = state.figures.arms[name];
  const head = several ? [make("h3", {}, `Gate ${name}: ${arm.gate}, threshold ${Number(arm.threshold.toPrecision(4))}`)] : [];
  const rate = several && counts ? [make("p", {}, `${counts.decided} questions, ${percent(counts.retrieved / counts.decided, 0)} looked up, ${counts.saved.retrievals} searches saved.`)] : [];
  const loss = state.learning.audit ? [make("p", {}, lossWords(arm.loss)), lossChart(arm.loss), ...evidence(arm.loss)] : [];
  const failed = arm.audits.failed ? [make("p", { class: "note" }, `${arm.audits.failed} audits failed and count for nothing.`)] : [];
  return make("div", { class: "arm" }, head, rate, loss, failed, make("p", { class: "note" }, driftWords(arm.drift)));
}

function evidence(loss) {
  if (loss.evidence === null) return [make("p", { class: "note" }, "Nothing is promised, so there is no alarm: --max-loss.")];
  const fill = make("i");
  fill.style.width = `${Math.round(100 * loss.evidence)}%`;
  const words = loss.alarm ? "The promise is broken." : `Evidence against the promise: ${percent(loss.evidence, 0)} of what raises the alarm.`;
  return [make("p", { class: "note" }, words), make("div", { class: `meter${loss.alarm ? " full" : ""}`, role: "img", "aria-label": words }, fill)];
}

function driftWords(drift) {
  if (!drift.questions) return "This gate cannot say how far questions are from those it was fitted on.";
  const far = `${percent(drift.mean)} of ${drift.questions} questions are unlike those the gate was fitted on (1 % was to be expected)`;
  return drift.drifted ? `Drift: ${far}. Fit again on what is asked now: knowgate refit.` : `${far}: that shows no drift.`;
}

function showParts() {
  const stages = Object.entries(state.figures.stages).map(([stage, one]) => [stage, String(one.n), milliseconds(one.p50), milliseconds(one.p95), milliseconds(one.p99)]);
  tell("stages", stages.length ? table("Times by stage", ["stage", "n", "p50", "p95", "p99"], stages) : make("p", { class: "note" }, "No times yet."));
  const lamps = Object.entries(state.breakers).map(([name, how]) => make("li", {}, make("span", { class: `lamp ${how}` }), `${name}: ${how === "closed" ? "works" : how === "open" ? "left alone" : "being tried"}`));
  tell("breakers", make("h3", {}, "Parts"), make("ul", { class: "breakers" }, lamps));
}

function show() {
  const { figures } = state;
  own.takesFeedback = state.takes_feedback;
  find("door").hidden = true;
  find("inside").hidden = false;
  const documents = state.retriever ? `, documents ${state.retriever}` : "";
  tell("about", `${state.model}, gate ${state.gate}, threshold ${Number(state.threshold.toPrecision(4))}${documents}; since ${new Date(1000 * figures.since).toLocaleString()}`);
  tell("foot", `knowgate ${state.version}, looked at ${clock(Date.now() / 1000)}. This page fetches nothing from elsewhere.`);
  showTiles(figures);
  tell("minutes", ...minutesChart(figures.minutes));
  tell("needs", ...needsChart(figures.needs, state.threshold));
  showAlarm();
  showLosses();
  showRecent(state);
  showParts();
}

async function look() {
  if (document.body.dataset.keys === "yes" && !hasKey()) return askForKey();
  try {
    state = await get("/v1/dashboard");
    show();
  } catch (error) {
    if (error instanceof NoKey) {
      dropKey();
      askForKey();
    }
    else tell("foot", `The server does not answer: ${error.message}`);
  }
}

function askForKey() {
  if (find("door").hidden) {
    find("inside").hidden = true;
    find("door").hidden = false;
    find("key").focus();
  }
}

find("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  giveKey(find("key").value.trim());
  find("key").value = "";
  await look();
  tell("key-said", find("door").hidden ? "" : "This key is not known here.");
});
find("show").addEventListener("change", () => state && showRecent(state, { force: true }));
startPlayground(own);
await look();
setInterval(() => document.hidden || !find("door").hidden || look(), EVERY);
