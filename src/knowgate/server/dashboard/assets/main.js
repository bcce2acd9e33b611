// The dashboard: fetches the data every few seconds and renders it.
import { UnauthorizedError, deleteKey, get, hasKey, post, saveKey } from "./api.js";
import { createLossChart, createMinutesChart, createNeedsChart, describeLoss } from "./charts.js";
import { createElement, createTable, formatAmount, formatDuration, formatMilliseconds, formatMoney, formatPercent, formatThreshold, formatTime, getElement, isConstant, setContent } from "./elements.js";
import { initPlayground } from "./playground.js";
import { renderRecent } from "./recent.js";

const UNPRICED_CALLS = "; extra LLM calls are not priced (--price-llm-call)";
const REFRESH_MILLISECONDS = 4000;
const settings = { acceptsFeedback: false };
let data = null;

// A gate can take more than always retrieving only by its drafts.
const describeSaving = (amount, format, name, note = " (drafts deducted)") =>
  amount < 0 ? [`${format(-amount)} more`, `${name} than always retrieving, because of drafts`] : [format(amount), `${name} saved${note}`];

const createNote = (text) => createElement("p", { class: "note" }, text);

function renderTiles(statistics) {
  const { decided, retrieved, saved, has_unpriced_calls } = statistics.arms.all, failed = statistics.requests["5xx"] ?? 0;
  const requests = Object.values(statistics.requests).reduce((a, b) => a + b, 0);
  const tiles = [
    [formatAmount(requests), failed ? `requests, ${failed} failed` : "requests"],
    [decided ? formatPercent(retrieved / decided, 0) : "–", "of questions retrieved"],
    [formatAmount(saved.retrievals), "searches saved"],
    describeSaving(saved.tokens, formatAmount, "tokens"),
    describeSaving(saved.seconds, formatDuration, "time"),
    ...(saved.money === null ? [] : [describeSaving(saved.money, formatMoney, "money", has_unpriced_calls ? UNPRICED_CALLS : undefined)]),
  ];
  setContent("tiles", ...tiles.map(([value, label]) => createElement("div", {}, createElement("dd", {}, value), createElement("dt", {}, label))));
}

function renderAlarm() {
  const messages = [];
  for (const [name, arm] of Object.entries(data.learning?.arms ?? {})) {
    const keyAlarms = Object.values(arm.loss.keys).map((key) => key.alarm).filter(Boolean);
    if (!arm.loss.alarm && !keyAlarms.length) continue;
    if (arm.loss.alarm) messages.push(createElement("p", {}, `Alarm for gate ${arm.gate}: ${arm.loss.alarm}. Every request retrieves.`));
    for (const reason of keyAlarms) messages.push(createElement("p", {}, `Alarm for gate ${arm.gate}: ${reason}. The requests of this key retrieve.`));
    messages.push(createElement("button", { type: "button", onclick: () => clearAlarm(name) }, "Clear the alarm and start measuring again"));
  }
  if (data.stale) messages.push(createElement("p", {}, `Every request retrieves: ${data.stale}.`));
  const failing = Object.entries(data.breakers).filter(([, state]) => state !== "closed").map(([name]) => name);
  if (failing.length) messages.push(createElement("p", {}, `Not used after repeated failures: ${failing.join(", ")}.`));
  const lost = data.figures.lost_decisions;
  if (lost) messages.push(createElement("p", {}, `${lost} decisions could not be stored. Check the disk or database of the decision log.`));
  const text = messages.map((message) => message.textContent).join("\n"), box = getElement("alarm");
  if (box.dataset.text === text) return; // keep the focus on the button
  box.dataset.text = text;
  box.hidden = !messages.length;
  box.replaceChildren(...messages);
}

async function clearAlarm(arm) {
  await post("/v1/learning/clear", { arm });
  await refresh();
}

function renderLosses() {
  const learning = data.learning;
  if (!learning || !learning.audit) {
    setContent("loss-intro", "Not measured. Start the server with ", createElement("code", {}, "--audit 0.05 --decisions FILE"), ".",
      data.guarantee ? ` Guarantee of the gate: ${data.guarantee}` : "");
  } else {
    const share = formatPercent(learning.canary, 0);
    const rollout = learning.canary === 0 ? " Shadow mode: every request retrieves." : learning.canary < 1 ? ` The gate is followed for ${share} of them.` : "";
    setContent("loss-intro", `${formatPercent(learning.audit, 0)} of the requests are audited: skipped ones are also answered with passages.${rollout} Audits of this worker may make ${learning.budget_left} LLM calls now, and more with time (see --audit-budget).`);
  }
  const arms = Object.entries(learning?.arms ?? {});
  setContent("losses", ...arms.map(([name, arm]) => createArm(name, arm, arms.length > 1)));
}

function createArm(name, arm, isExperiment) {
  const counts = data.figures.arms[name];
  return createElement("div", { class: "arm" },
    isExperiment && createElement("h3", {}, `Gate ${name}: ${arm.gate}${isConstant(arm) ? "" : `, threshold ${formatThreshold(arm.threshold)}`}`),
    isExperiment && counts && createElement("p", {}, `${counts.decided} questions, ${formatPercent(counts.retrieved / counts.decided, 0)} retrieved, ${counts.saved.retrievals} searches saved.`),
    data.learning.audit && [createElement("p", {}, describeLoss(arm.loss)), createLossChart(arm.loss), createEvidence(arm.loss)],
    arm.loss.failed > 0 && createNote(`${arm.loss.failed} audits failed. The upper bound counts them as changed answers; the alarm ignores them.`),
    createNote(describeDrift(arm.drift)));
}

function createEvidence(loss) {
  if (loss.evidence === null) return createNote("There is no alarm, because this gate has no bound on changed answers. Set one with --max-changed.");
  const bar = createElement("i");
  bar.style.width = `${Math.round(100 * loss.evidence)}%`;
  const text = loss.alarm ? `Alarm: more than ${formatPercent(loss.promised)} of the answers change.`
    : loss.evidence === 1 ? `More than ${formatPercent(loss.promised)} of the answers change, but only because of one key. The other keys are not affected.`
    : `Evidence that more than ${formatPercent(loss.promised)} of the answers change: ${formatPercent(loss.evidence, 0)} of what triggers the alarm.`;
  return [createNote(text), createElement("div", { class: `meter${loss.alarm ? " full" : ""}`, role: "img", "aria-label": text }, bar)];
}

function describeDrift(drift) {
  if (!drift.questions) return "This gate cannot tell whether the questions differ from its training data.";
  const share = `${formatPercent(drift.mean)} of ${drift.questions} questions are unlike the training data (expected: 1 %)`;
  const keys = drift.keys.length ? ` Keys with such questions: ${drift.keys.join(", ")}.` : "";
  return drift.drifted ? `Drift: ${share}.${keys} Fit the gate again on recent questions: knowgate refit.` : `No drift: ${share}.${keys}`;
}

function renderComponents() {
  const columns = ["n", "p50", "p95", "p99"], states = { closed: "works", open: "not used", "half-open": "being probed" };
  const stages = Object.entries(data.figures.stages).map(([stage, times]) =>
    [stage, String(times.n), ...columns.slice(1).map((column) => formatMilliseconds(times[column]))]);
  setContent("stages", stages.length ? createTable("Time by stage", ["stage", ...columns], stages) : createNote("No timings yet."));
  const items = Object.entries(data.breakers).map(([name, state]) =>
    createElement("li", {}, createElement("span", { class: `indicator ${state}` }), `${name}: ${states[state]}`));
  setContent("breakers", createElement("h3", {}, "Components"), createElement("ul", { class: "breakers" }, items));
}

function render() {
  const statistics = data.figures;
  settings.acceptsFeedback = data.takes_feedback;
  getElement("login").hidden = true;
  getElement("content").hidden = false;
  const search = data.retriever ? `search ${data.retriever}` : "no documents";
  const since = new Date(1000 * statistics.since).toLocaleString();
  const rule = data.constant ? ` (${data.constant})` : `, threshold ${formatThreshold(data.threshold)}`;
  setContent("about", `LLM: ${data.model}. Gate: ${data.gate}${rule}; ${search}. Figures since ${since}.`);
  setContent("foot", `knowgate ${data.version}, updated at ${formatTime(Date.now() / 1000)}. This page loads nothing from other servers.`);
  renderTiles(statistics);
  setContent("minutes", ...createMinutesChart(statistics.minutes));
  if (data.constant) setContent("needs", createNote("The gate does the same for every question, so it computes no need."));
  else setContent("needs", ...createNeedsChart(statistics.needs, data.threshold));
  renderAlarm();
  renderLosses();
  renderRecent(data);
  renderComponents();
}

async function refresh() {
  if (document.body.dataset.keys === "yes" && !hasKey()) return showLogin();
  try {
    data = await get("/v1/dashboard");
    render();
  } catch (error) {
    if (error instanceof UnauthorizedError) {
      deleteKey();
      showLogin();
      setContent("key-status", error.message);
    } else setContent("foot", `The server cannot be reached: ${error.message}`);
  }
}

function showLogin() {
  if (!getElement("login").hidden) return;
  getElement("content").hidden = true;
  getElement("login").hidden = false;
  getElement("key").focus();
}

getElement("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  saveKey(getElement("key").value.trim());
  getElement("key").value = "";
  setContent("key-status", "");
  await refresh();
});
getElement("filter").addEventListener("change", () => data && renderRecent(data, { force: true }));
initPlayground(settings);
await refresh();
setInterval(() => document.hidden || !getElement("login").hidden || refresh(), REFRESH_MILLISECONDS);
