"""Learns from requests: samples them for audits, adds labels to the history, and processes feedback."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.responses import Response

from knowgate.core.files import sha256_text
from knowgate.core.postgres.address import is_postgres_address
from knowgate.data.history.entries import LabelSource
from knowgate.errors import BadSetting
from knowgate.evaluation.server_log import ERROR_STATUS
from knowgate.gates import load_gate
from knowgate.gates.baselines import AlwaysGate
from knowgate.gates.calibration.evidence import TARGET_KINDS
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.rules.arithmetic import ARITHMETIC_RULE
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.builder import load_gate_models
from knowgate.pipeline.settings import PipelineOptions
from knowgate.pipeline.stages import describe_constant
from knowgate.pipeline.traffic_log import CLOSE_SECONDS
from knowgate.server.chat.gate_service import GateService
from knowgate.server.chat.request_options import describe_staleness
from knowgate.server.json_api import ApiError, make_unknown_decision_error
from knowgate.server.learning.answer_text import capture_answer
from knowgate.server.learning.answers import (
    CounterfactualAnswerer,
    HistoryLabeler,
    get_full_draft,
    label_by_feedback,
    prepare_answers,
)
from knowgate.server.learning.arms import Experiment, ExperimentArm
from knowgate.server.learning.audit import AuditJob, Auditor
from knowgate.server.learning.audit_store import AuditStore
from knowgate.server.learning.loss_monitor import LossMonitor
from knowgate.server.load_limits import MAX_CALLS_PER_AUDIT, CallBudget
from knowgate.server.options import ServeOptions
from knowgate.server.schemas import FeedbackRequest, FeedbackResponse
from knowgate.server.telemetry.decision_log import DecisionLog
from knowgate.server.telemetry.snapshot import RecentDecisions
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.forwarding import UpstreamForwarder
from knowgate.types import Gate

LABEL_SECONDS = 2.0  # maximum time for which feedback waits until its label is stored
log = logging.getLogger(__name__)


@dataclass
class TrafficLearner:
    """Component that learns from requests and responses.

    It audits how many answers the gate changes, and labels questions. An audit compares the answers with and without
    passages.

    Attributes:
        auditor: Runs audits of sampled requests.
        labeler: Adds labels to the history of questions.
        recent: Recent decisions, which the dashboard shows with their answers.
        audit_share: Share of requests that are sampled for audits.
        random: Random numbers for sampling.
        start: When this component was put in use, as a value of `time.perf_counter`.
    """

    auditor: Auditor
    labeler: HistoryLabeler
    recent: RecentDecisions
    audit_share: float = 0.0
    random: random.Random = field(default_factory=random.SystemRandom)
    start: float = 0.0

    async def close(self) -> None:
        """Cancel pending audits, and write pending labels."""
        await self.auditor.close()
        if self.labeler.history is not None:
            await asyncio.to_thread(self.labeler.history.close, CLOSE_SECONDS)

    def observe(self, response: Response, trace: RequestTrace) -> None:
        """Learn from a request. Call this before its response is sent, because the answer is captured while it is sent."""
        if trace.decision is None or trace.question is None or response.status_code != 200:
            return
        if trace.client_request is not None and trace.client_request.body.get("echo"):
            return  # with `echo`, the answer contains the prompt, so it cannot be compared
        # An earlier request was decided by the gate before the reload of the settings.
        arm = self.auditor.experiment.arms.get(trace.arm) if trace.start >= self.start else None
        if arm is not None and not trace.decision.rule:
            arm.monitor.add_distance(trace.decision.distance, trace.owner)
        sampled_arm = arm if arm is not None and self._draw_for_audit(trace) else None
        needs_answer = sampled_arm is not None or self.labeler.history is not None or self.recent.stores_texts
        if needs_answer:
            capture_answer(response, partial(self._handle_answer, trace, sampled_arm))

    def _draw_for_audit(self, trace: RequestTrace) -> bool:
        """Decide at random whether to audit a request. The choice precedes the answer, to avoid bias."""
        assert trace.decision is not None
        # During an alarm, the server always retrieves, but the gate still decides. If the arbiter fails, it has decided.
        failures = set(trace.degraded) - {"alarm", "arbiter"}
        is_gate_decision = not trace.decision.rule and not failures
        is_drawn = is_gate_decision and self.random.random() < self.audit_share
        return is_drawn and self.auditor.reserve(trace)

    async def _handle_answer(
        self, trace: RequestTrace, sampled_arm: ExperimentArm | None, text: str | None, is_unreadable: bool
    ) -> None:
        """Process a sent answer: show it on the dashboard, label its question, start an audit.

        Args:
            trace: Record of the request.
            sampled_arm: Gate (arm of the A/B test) for which the request is audited, or None if it is not audited.
            text: Text of the answer. If it is None, nothing happens, unless the answer is unreadable.
            is_unreadable: Whether the answer is too large, or no text. Then the audit of a skipped search fails.
        """
        is_missing = text is None and not is_unreadable
        if is_missing or trace.decision is None or trace.client_request is None or trace.question is None:
            if sampled_arm is not None:
                self.auditor.release(trace)  # what `_draw_for_audit` has reserved
            return
        closed_answer: str | None = text
        open_answer = None
        if trace.passages:
            # If an arbiter chose between two answers, the client may have got the draft instead of the open answer.
            closed_answer = get_full_draft(trace) if trace.choice is None else trace.choice.closed
            open_answer = text if trace.choice is None else trace.choice.open
        # Many answers are held in memory, so only what is compared of them is kept.
        was_kept = self.recent.find(trace.id) is not None
        closed_answer, open_answer, label = await prepare_answers(closed_answer, open_answer)
        is_deleted = was_kept and self.recent.find(trace.id) is None  # by a client, meanwhile
        self.recent.update(trace.id, {"closed": closed_answer, "opened": open_answer})
        is_labeled = trace.way == "in-process"  # a pipeline in this process adds the label itself
        can_label = trace.shares_labels and not is_labeled and not is_deleted
        if can_label and label is not None:
            self.labeler.add(trace.question, label, LabelSource.AGREEMENT)
        if sampled_arm is not None:
            request, question = trace.client_request, trace.question
            choice = trace.choice and replace(trace.choice, closed=closed_answer or "", open=open_answer or "")
            # A waiting audit must not keep a large draft in memory.
            audited = replace(trace, draft=None, choice=choice, on_end=[])
            self.auditor.submit(AuditJob(audited, request, question, sampled_arm, closed_answer, open_answer))

    async def learn_from_feedback(self, feedback: FeedbackRequest, rating: str, decision: Mapping[str, Any]) -> bool:
        """Label a question as known or unknown to the LLM, by user feedback. Follow-up questions are not labeled.

        Neither are questions that another LLM answered, that were computed without an LLM, or whose reply was an error.

        Returns:
            Whether a label was stored. False if this takes longer than LABEL_SECONDS.
        """
        question = decision.get("question")
        if self.labeler.history is None or not isinstance(question, str) or decision.get("follow_up"):
            return False
        model_name = self.labeler.rag.model.name
        is_computed = decision.get("way") == "in-process" and decision.get("rule") == ARITHMETIC_RULE
        has_failed = decision.get("status", 200) >= ERROR_STATUS
        if is_computed or has_failed or decision.get("model", model_name) != model_name:
            return False
        # After a decision of /v1/decide, the application searches itself.
        searched_elsewhere = decision.get("only_decided") and decision.get("retrieve")
        sent_draft = (decision.get("choice") or {}).get("given") == "draft"
        sent_passages = bool(decision.get("passages")) and not sent_draft
        rated_answers = {**decision, "retrieved": sent_passages or searched_elsewhere}
        label = label_by_feedback(rating, feedback.correction, rated_answers)
        stored = None if label is None else self.labeler.add(question, label, LabelSource.HUMAN)
        if stored is None:
            return False
        await asyncio.wait([asyncio.wrap_future(stored)], timeout=LABEL_SECONDS)  # then it is stored in the background
        return stored.done() and stored.result()

    def list_problems(self) -> list[str]:
        """Return the alarms that are on, and the current problems with labels and audits, for GET /ready."""
        history_problem = "" if self.labeler.history is None else self.labeler.history.problem
        audit_problem = self.auditor.pause_reason if self.audit_share else ""
        arms = self.auditor.experiment.arms.values()
        alarms = [f"alarm for gate {arm.gate_spec}: {alarm}" for arm in arms for alarm in arm.monitor.list_alarms()]
        return [problem for problem in (history_problem, audit_problem, *alarms) if problem]

    def to_json(self, count_audits: Callable[[str], dict[str, int]]) -> dict[str, Any]:
        """Return the results of learning, in the format of `LearningResponse`.

        Args:
            count_audits: Function that returns the number of audits of an arm by result.
        """
        experiment, history = self.auditor.experiment, self.labeler.history
        return {
            "arms": {name: _arm_to_json(arm, count_audits(name)) for name, arm in experiment.arms.items()},
            "share_b": experiment.share_b,
            "canary": experiment.canary,
            "audit": self.audit_share,
            "budget_left": int(self.auditor.budget.remaining),
            "labelled": history.n_labeled if history is not None else None,
        }


def _arm_to_json(arm: ExperimentArm, audits: dict[str, int]) -> dict[str, Any]:
    """Return the results of one gate of the A/B test, with the given number of its audits for each result."""
    return {"gate": arm.gate_spec, "threshold": arm.rag.used_threshold, "audits": audits, **arm.monitor.to_json()}


async def record_feedback(
    feedback: FeedbackRequest,
    trace: RequestTrace,
    decisions: DecisionLog,
    recent: RecentDecisions,
    learner: TrafficLearner | None,
) -> FeedbackResponse:
    """Answer POST /v1/feedback: store the feedback, and learn from it. A correction alone counts as "down".

    Args:
        feedback: The feedback.
        trace: Trace of the request. The question is labeled only if its API key shares labels.
        decisions: The decision log.
        recent: Recent decisions in memory.
        learner: Component that learns from feedback, if there is one.

    Raises:
        ApiError: 400 if there is neither a rating nor a correction, 404 if the decision does not exist.
    """
    rating = feedback.rating or ("down" if feedback.correction else None)
    if rating is None:
        raise ApiError(400, "the request needs the field 'rating' (up or down) or 'correction'.", "invalid_feedback")
    if not await decisions.add_feedback(feedback.id, rating, feedback.comment, trace.owner, feedback.correction):
        raise make_unknown_decision_error(feedback.id)
    recent.update(feedback.id, {"rating": rating})
    has_learnt = False
    if learner is not None and learner.auditor.store is not None:
        audits = learner.auditor.store
        decision = recent.find(feedback.id) or await decisions.find(feedback.id) or {}
        decision = {**await audits.find_answers(feedback.id), **decision}
        has_learnt = trace.shares_labels and await learner.learn_from_feedback(feedback, rating, decision)
    return FeedbackResponse(id=feedback.id, rating=rating, learnt=has_learnt)


# --- building -------------------------------------------------------------------------------------


def build_learner(
    settings: PipelineOptions,
    options: ServeOptions,
    gate_service: GateService,
    forwarder: UpstreamForwarder | None,
    decisions: DecisionLog | None,
    recent: RecentDecisions,
    on_audit: Callable[[str, str], None],
    budget: CallBudget | None = None,
) -> TrafficLearner | None:
    """Build the component that learns from requests, and add its A/B test to the gate service.

    Args:
        settings: Options of the pipeline.
        options: Options of the server.
        gate_service: Gate service, whose gate is monitored.
        forwarder: Forwarder to the upstream, if there is one.
        decisions: The decision log, if there is one.
        recent: Recent decisions in memory.
        on_audit: Called with the name of the arm and the result of each audit.
        budget: Budget of audits, which a reload of the settings keeps. Default: a new one.

    Returns:
        The learner, or None if no option enables audits, an A/B test, shadow or canary mode, or the history.

    Raises:
        BadSetting: The options contradict each other, or the second gate does not work.
    """
    _check_options(options)
    if not (options.audit or options.gate_b or options.shadow or options.canary is not None or settings.log):
        return None
    experiment = _build_experiment(settings, options, gate_service)
    labeler = HistoryLabeler(gate_service.rag, gate_service.rag.log)
    if labeler.history is not None:
        _warn_if_questions_are_not_shared(options)
    store = AuditStore(decisions) if decisions is not None else None
    answerer = CounterfactualAnswerer(gate_service, forwarder, options.deadline, options.most_tokens)
    asks_llm = options.audit_compare == "llm"
    budget = budget or _create_budget(options, store)
    auditor = Auditor(experiment, answerer, recent, labeler, store, budget, asks_llm, on_audit)
    gate_service.experiment = experiment
    return TrafficLearner(auditor, labeler, recent, options.audit)


def _create_budget(options: ServeOptions, store: AuditStore | None) -> CallBudget:
    """Create the budget of LLM calls for audits. All workers of the server share `audit_budget` equally."""
    calls_per_hour = options.audit_budget // options.workers
    calls_per_audit = MAX_CALLS_PER_AUDIT if options.audit_compare == "llm" else 1
    audit_ages = [] if store is None else store.list_recent_ages()
    call_ages = sorted(audit_ages * calls_per_audit)  # each audit may have made several calls at the same time
    own_call_ages = call_ages[:: options.workers]  # the share of this worker: every n-th call of n workers
    return CallBudget(calls_per_hour, shares=options.keys is not None, earlier_calls=own_call_ages)


def _build_experiment(settings: PipelineOptions, options: ServeOptions, gate_service: GateService) -> Experiment:
    """Build the A/B test. Without a second gate, it has only the arm "a"."""
    arms = {"a": _build_arm("a", gate_service.rag, gate_service.gate_spec, options)}
    share_b = 0.0
    if options.gate_b is not None:
        second = _build_second_pipeline(settings, options, gate_service.rag)
        arms["b"] = _build_arm("b", second, str(options.gate_b), options)
        share_b = options.share_b
    if options.shadow:
        return Experiment(arms, share_b, canary=0.0)  # no request follows the gate
    return Experiment(arms, share_b, canary=1.0 if options.canary is None else options.canary)


def _check_options(options: ServeOptions) -> None:
    """Raise an error for contradicting options, or for a missing option."""
    if options.audit and options.decisions is None:
        raise BadSetting("`audit` needs a decision log, but `decisions` is not set. Set `decisions` to a file.")
    if options.durable and options.decisions is None:
        raise BadSetting("`durable` writes to the decision log, but `decisions` is not set. Set `decisions` to a file.")
    if options.audit_compare == "llm" and options.upstream is None:
        raise BadSetting(
            "audit_compare='llm' needs an LLM server, but `upstream` is not set. Set `upstream`, or use audit_compare='words'."
        )
    calls_per_audit = MAX_CALLS_PER_AUDIT if options.audit_compare == "llm" else 1
    if options.audit and options.audit_budget < calls_per_audit * options.workers:
        raise BadSetting(
            f"an audit needs up to {calls_per_audit} LLM calls, and each worker has an equal part of `audit_budget` (LLM calls "
            f"per hour). Set `audit_budget` to {calls_per_audit * options.workers} or more."
        )
    if options.max_changed is not None and not options.audit:
        raise BadSetting(
            "`max_changed` needs audits, which measure how often skipping a search changes the answer. Set `audit` to the "
            "share of requests to audit. Example: 0.05"
        )
    if options.shadow and options.canary is not None:
        raise BadSetting("`shadow` and `canary` are mutually exclusive. Use one of them.")
    if options.threshold_b is not None and options.gate_b is None:
        message = "`threshold_b` is the threshold of `gate_b`, which is not set. Set `gate_b`, or remove `threshold_b`."
        raise BadSetting(message)


def _build_second_pipeline(settings: PipelineOptions, options: ServeOptions, rag: AdaptiveRAG) -> AdaptiveRAG:
    """Build the pipeline with the second gate of an A/B test.

    Raises:
        BadSetting: The gate is calibrated for another LLM or index, or does not work with the option `way`.
    """
    gate = load_gate(str(options.gate_b), plug_in=settings.plug_in)
    second_rag = rag.replace(gate=gate, threshold=options.threshold_b)
    if staleness := describe_staleness(second_rag):
        raise BadSetting(f"gate_b='{gate.name}' cannot be used: {staleness.rstrip('.')}.")
    if options.way == "question" and not second_rag.bound_gate.request.is_empty:
        raise BadSetting(
            f"gate_b='{gate.name}' reads a draft answer, but way='question' generates none. Set way='draft' or way='race', "
            "or use a gate that reads only questions."
        )
    if options.upstream is not None:
        load_gate_models(second_rag)
    return second_rag


def _build_arm(name: str, rag: AdaptiveRAG, gate_spec: str, options: ServeOptions) -> ExperimentArm:
    """Build an arm of the A/B test: a gate with its alarm. Without a limit for changed answers, the alarm never goes off.

    Args:
        name: "a" or "b".
        rag: The pipeline with the gate.
        gate_spec: The gate as the user names it.
        options: Options of the server.
    """
    delta = 1 - options.confidence  # the alarm may be wrong with this probability
    measured_limit = None if options.max_changed is not None else _read_changed_bound(rag)
    limit = options.max_changed if measured_limit is None else measured_limit
    # A measured limit is itself wrong with probability delta / 2. The other half is left for the test.
    test_delta = delta if measured_limit is None else delta / 2
    if limit is None and options.audit:
        log.warning(
            "Gate %s has no limit for changed answers, so audits raise no alarm. Set `max_changed` (a setting and a flag) to "
            "the maximum share of answers that skipping retrieval may change, right or wrong.",
            gate_spec,
        )
    _warn_if_constant(rag, options)
    monitor = LossMonitor(limit, delta, test_delta=test_delta)
    return ExperimentArm(name, rag, monitor, _compute_scope(rag, gate_spec, options), gate_spec)


def _read_changed_bound(rag: AdaptiveRAG) -> float | None:
    """Return the upper bound of the share of answers changed by the gate, from its calibration. None means unknown."""
    has_other_threshold = rag.threshold is not None and rag.threshold != rag.gate.threshold
    if not isinstance(rag.gate, FittedGate) or has_other_threshold:
        return None
    manifest = rag.gate.artifact.manifest
    # The manifest holds one calibration, under the kind of its target: a guarantee, a budget or an accuracy.
    calibrations: list[Mapping[str, Any]] = [manifest[kind] for kind in TARGET_KINDS if manifest.get(kind)]
    changed = calibrations[0].get("changed") if calibrations else None
    if not changed or describe_staleness(rag) or rag.guarantee_violations:
        return None
    return float(changed["bound"])


def _warn_if_constant(rag: AdaptiveRAG, options: ServeOptions) -> None:
    """Warn about shadow mode with a gate that always retrieves. Shadow mode would show nothing."""
    always_retrieves = isinstance(rag.gate, AlwaysGate) or rag.used_threshold < 0
    if options.shadow and always_retrieves:
        log.warning(
            "Shadow mode shows nothing here: %s, so it skips no search and no second answers are recorded. Use a gate that "
            "scores questions, such as one that `knowgate fit question` or `knowgate fit judge` writes, with a threshold "
            "between 0 and 1.",
            describe_constant(rag.gate, rag.used_threshold),
        )


def _warn_if_questions_are_not_shared(options: ServeOptions) -> None:
    """Warn if server processes do not share questions. Feedback then gives labels only in the process that answered."""
    decisions = options.decisions or ""
    has_other_processes = options.workers > 1 or is_postgres_address(decisions)
    if decisions and has_other_processes and not options.keep_questions:
        log.warning(
            "Each server process remembers only the questions that it answered itself, so feedback that another process "
            "receives adds no label. Set `keep_questions` to share the questions in the decision log."
        )


def _compute_scope(rag: AdaptiveRAG, gate_spec: str, options: ServeOptions) -> str:
    """Return a hash of gate, LLM, index and so on. Stored audits count only for the same hash."""
    arbiter = rag.bound_arbiter
    parts = (
        # A fitted gate may be moved, so it is identified by its manifest instead of its folder.
        rag.gate.name if isinstance(rag.gate, FittedGate) else gate_spec,
        _dump_manifest(rag.gate),
        f"{rag.used_threshold}",
        f"{rag.k}",
        str(rag.retriever.fingerprint if rag.retriever else ""),
        rag.model.fingerprint,
        rag.prompts.fingerprint,
        f"{arbiter.fingerprint} {arbiter.makes_drafts}" if arbiter else "",
    )
    # These are left out if they are not used, so that audits of earlier versions still count.
    other_parts = [
        f"{rag.reranker.fingerprint} {rag.rerank_margin}" if rag.reranker else "",
        _dump_manifest(rag.second_look) if isinstance(rag.second_look, FittedGate) else "",
        "" if options.place == "user" else f"place {options.place}",
        "" if options.cite else "without citations",
        "" if options.audit_compare == "words" else f"compare {options.audit_compare}",
    ]
    return sha256_text(*parts, *filter(None, other_parts))[:16]


def _dump_manifest(gate: Gate) -> str:
    """Return the manifest (metadata of the training) of a fitted gate as JSON. Other gates have none."""
    manifest = gate.artifact.manifest if isinstance(gate, FittedGate) else {}
    return json.dumps(manifest, sort_keys=True, default=str)
