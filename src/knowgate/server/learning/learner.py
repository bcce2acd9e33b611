"""Looks at requests whose replies have gone out: draws some for audits, labels the history, hears what people say."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from knowgate.core.files import sha256_text
from knowgate.data.history.entries import LabelSource
from knowgate.errors import BadSetting
from knowgate.gates import load_gate
from knowgate.gates.fitted_gate import FittedGate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.chat.gate_service import GateService, describe_staleness
from knowgate.server.chat.request_formats import REQUEST_FORMATS
from knowgate.server.json_api import ApiError
from knowgate.server.learning.answers import CounterfactualAnswerer, capture_answer
from knowgate.server.learning.arms import Experiment, ExperimentArm, LossMonitor
from knowgate.server.learning.audit import AuditJob, Auditor, AuditStore, CallBudget
from knowgate.server.learning.history_labels import HistoryLabeler, label_by_agreement, label_by_feedback
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry.decision_log import DecisionLog, RecentDecisions
from knowgate.server.telemetry.trace import RequestTrace
from knowgate.server.upstream.forwarding import UpstreamForwarder
from knowgate.types import DecisionNote


@dataclass
class TrafficLearner:
    """share: of the requests, drawn for audits."""

    auditor: Auditor
    labelling: HistoryLabeler
    recent: RecentDecisions
    share: float = 0.0
    chance: random.Random = field(default_factory=random.SystemRandom)

    async def close(self) -> None:
        await self.auditor.close()
        if self.labelling.history is not None:
            await asyncio.to_thread(self.labelling.history.close)

    def see(self, response: Response, trace: RequestTrace) -> None:
        """After a chat was answered, before the reply has gone out."""
        if trace.decision is None or trace.question is None or response.status_code != 200:
            return
        if trace.asked is not None and trace.asked.body.get("echo"):
            return  # a completion that repeats its prompt
        self.auditor.follow()
        arm = self.auditor.arms.arms.get(trace.arm)
        if arm is not None and not trace.decision.rule:
            arm.watch.see_distance(trace.decision.distance)
        drawn = arm if arm is not None and self._draws(trace) else None
        if drawn is not None or self.labelling.history is not None or self.recent.keeps_texts:
            capture_answer(response, lambda text: self._heard(trace, text, drawn))

    def _draws(self, trace: RequestTrace) -> bool:
        """By chance alone: if the decision, or what an audit costs, played a part, the mean would be no mean."""
        assert trace.decision is not None
        is_of_a_gate = not trace.decision.rule and set(trace.degraded) <= {"alarm"}
        return is_of_a_gate and self.auditor.has_room and self.chance.random() < self.share

    def _heard(self, trace: RequestTrace, text: str | None, drawn: ExperimentArm | None) -> None:
        """The reply has gone out. drawn: the arm it belongs to, if it was."""
        if text is None or trace.decision is None or trace.asked is None or trace.question is None:
            return
        given = text if trace.choice is None else trace.choice.open  # an arbiter may have given the draft
        closed, opened = (_drafted(trace), given) if trace.passages else (text, None)
        self.recent.add(trace.id, {"closed": closed, "opened": opened})
        if closed is not None and opened is not None:
            self.labelling.put(trace.question, label_by_agreement(closed, opened), LabelSource.AGREEMENT)
        if drawn is not None:
            skips = not trace.decision.retrieve or DecisionNote.WOULD_SKIP in trace.decision.notes
            self.auditor.put(AuditJob(trace.id, trace.asked, trace.question, drawn, skips, closed, opened))

    async def learn(self, id: str, rating: str, correction: str | None, found: Mapping[str, Any]) -> bool:
        """Whether feedback told something about the LLM: then it is in the history, on disk. found: of the decision."""
        self.recent.add(id, {"rating": rating})
        question = found.get("question")
        if self.labelling.history is None or not isinstance(question, str):
            return False
        label = label_by_feedback(rating, correction, {**found, "retrieved": bool(found.get("passages"))})
        written = None if label is None else self.labelling.put(question, label, LabelSource.HUMAN)
        return written is not None and await asyncio.wrap_future(written)

    @property
    def record(self) -> dict[str, Any]:
        """What was found out, as JSON."""
        arms, history = self.auditor.arms, self.labelling.history
        return {
            "arms": {name: self._about(arm) for name, arm in arms.arms.items()},
            "share_b": arms.share_b,
            "canary": arms.canary,
            "audit": self.share,
            "budget_left": int(self.auditor.budget.left),
            "labelled": history.n_labeled if history is not None else None,
        }

    def _about(self, arm: ExperimentArm) -> dict[str, Any]:
        audits = {result: count for (name, result), count in self.auditor.counts.items() if name == arm.name}
        return {"gate": arm.rag.gate.name, "threshold": arm.threshold, "audits": audits, **arm.watch.record}


def _drafted(trace: RequestTrace) -> str | None:
    """The whole answer from memory, where there is one."""
    draft, asked = trace.draft, trace.asked
    is_piece = asked is not None and (bool(asked.body.get("stream")) or asked.path in REQUEST_FORMATS)
    return draft.text if draft is not None and (draft.finished or not is_piece) else None


log = logging.getLogger(__name__)


def build_learner(
    settings: PipelineOptions,
    options: ServeOptions,
    keeper: GateService,
    forwarding: UpstreamForwarder | None,
    decisions: DecisionLog | None,
    recent: RecentDecisions,
) -> TrafficLearner | None:
    """The keeper is told which gate decides when."""
    check_learning_options(options)
    if not (options.audit or options.gate_b or is_partial_rollout(options) or settings.log is not None):
        return None
    arms = {"a": build_arm("a", keeper.rag, options)}
    if options.gate_b is not None:
        arms["b"] = build_arm("b", build_second_pipeline(settings, options, keeper), options)
    canary = 0.0 if options.shadow else 1.0 if options.canary is None else options.canary
    keeper.arms = Experiment(arms, options.share_b if "b" in arms else 0.0, canary)
    labelling = HistoryLabeler(keeper.rag, keeper.rag.log)
    again = CounterfactualAnswerer(keeper, forwarding, options.deadline)
    kept = AuditStore(decisions) if decisions is not None else None
    budget, asks_llm = CallBudget(options.audit_budget), options.audit_compare == "llm"
    auditor = Auditor(keeper.arms, again, recent, labelling, kept, budget, asks_llm)
    return TrafficLearner(auditor, labelling, recent, options.audit)


def is_partial_rollout(options: ServeOptions) -> bool:
    return options.shadow or options.canary is not None


def check_learning_options(options: ServeOptions) -> None:
    if options.audit and options.decisions is None:
        raise BadSetting("--audit needs --decisions FILE: what is found out must outlive a restart.")
    if options.audit_compare == "llm" and options.upstream is None:
        raise BadSetting("--audit-compare llm asks the upstream's LLM: it needs --upstream.")
    if options.max_loss is not None and not options.audit:
        raise BadSetting("--max-loss needs --audit SHARE: without audits nobody sees what skipping costs.")
    if options.shadow and options.canary is not None:
        raise BadSetting("give either --shadow, where no gate is obeyed, or --canary SHARE.")
    if options.threshold_b is not None and options.gate_b is None:
        raise BadSetting("--threshold-b needs --gate-b.")


def build_second_pipeline(settings: PipelineOptions, options: ServeOptions, keeper: GateService) -> AdaptiveRAG:
    """The same with the second gate, found to work here."""
    gate = load_gate(str(options.gate_b), plug_in=settings.plug_in)
    rag = keeper.rag.replace(gate=gate, threshold=options.threshold_b)
    if why := describe_staleness(rag):
        raise BadSetting(f"--gate-b: {why}.")
    if options.way == "question" and not rag.bound_gate.request.is_empty:
        raise BadSetting(f"gate '{gate.name}' reads a draft: use --way draft or race, or another --gate-b.")
    return rag


def build_arm(name: str, rag: AdaptiveRAG, options: ServeOptions) -> ExperimentArm:
    promised, confidence = options.max_loss, options.confidence
    evidence = rag.gate.artifact.manifest.get("guarantee") if isinstance(rag.gate, FittedGate) else None
    if promised is None and evidence is not None and not describe_staleness(rag) and not rag.guarantee_violations:
        promised = float(evidence["epsilon"])
    if promised is None and options.audit:
        log.warning("Nothing is promised of gate %s, so there is no alarm: give --max-loss.", rag.gate.name)
    return ExperimentArm(name, rag, LossMonitor(promised, 1 - confidence), compute_scope(rag))


def compute_scope(rag: AdaptiveRAG) -> str:
    """Names all that a loss depends on; what was found out under another name does not count here."""
    made = rag.gate.artifact.manifest if isinstance(rag.gate, FittedGate) else {}
    own = rag.gate.threshold if rag.threshold is None else rag.threshold
    there = rag.retriever.fingerprint if rag.retriever else ""
    identity = (rag.gate.name, json.dumps(made, sort_keys=True, default=str), f"{own}", f"{rag.k}", str(there))
    return sha256_text(*identity, rag.model.fingerprint, rag.prompts.fingerprint)[:16]


MAX_FEEDBACK_CHARS = 10_000  # characters of a comment or correction


@dataclass(frozen=True)
class Feedback:
    """correction: the answer as it should have been."""

    id: str
    rating: str
    comment: str | None = None
    correction: str | None = None


def read_feedback(body: Mapping[str, Any]) -> Feedback:
    """A correction alone is a thumb down."""
    correction, comment = (_text(body.get(name), name) for name in ("correction", "comment"))
    id, rating = body.get("id"), body.get("rating", "down" if correction else None)
    if not isinstance(id, str) or rating not in ("up", "down"):
        raise ApiError(400, "give 'id', 'rating' (up or down), perhaps 'comment', 'correction'.", "invalid_feedback")
    return Feedback(id, rating, comment, correction)


def _text(value: Any, name: str) -> str | None:
    if value is not None and not (isinstance(value, str) and len(value) <= MAX_FEEDBACK_CHARS):
        raise ApiError(
            400, f"'{name}' must be a text of at most {MAX_FEEDBACK_CHARS:,} characters.", "invalid_feedback"
        )
    return value


async def record_feedback(
    feedback: Feedback, decisions: DecisionLog, recent: RecentDecisions, learner: TrafficLearner | None
) -> dict[str, Any]:
    """Once it is taken it is on disk. learnt: it went into the history as a label."""
    if not await decisions.rate(feedback.id, feedback.rating, feedback.comment):
        raise ApiError(404, "there is no such decision.", "no_decision")
    learnt = False
    kept = learner.auditor.kept if learner is not None else None
    if learner is not None and kept is not None:
        if feedback.correction:
            await kept.correct(feedback.id, feedback.correction)
        found = recent.find(feedback.id) or await decisions.find(feedback.id) or {}
        found = {**await kept.answers(feedback.id), **found}
        learnt = await learner.learn(feedback.id, feedback.rating, feedback.correction, found)
    return {"id": feedback.id, "rating": feedback.rating, "learnt": learnt}
