"""From settings to what learns from traffic; None where nothing of it is switched on."""

from __future__ import annotations

import json
import logging

from knowgate.errors import BadSetting
from knowgate.files import sha256_text
from knowgate.gates import FittedGate, load_gate
from knowgate.pipeline import AdaptiveRAG, Settings
from knowgate.server.decision_log import DecisionLog
from knowgate.server.forwarding import Forwarding
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.learning.arms import Arm, Arms
from knowgate.server.learning.asking_again import AskingAgain
from knowgate.server.learning.auditor import Auditor
from knowgate.server.learning.budget import Budget
from knowgate.server.learning.kept import Kept
from knowgate.server.learning.labelling import Labelling
from knowgate.server.learning.learner import Learner
from knowgate.server.learning.watch import Watch
from knowgate.server.options import ServeOptions
from knowgate.server.recent import Recent
from knowgate.server.staleness import stale_because

log = logging.getLogger(__name__)


def build_learner(
    settings: Settings,
    options: ServeOptions,
    keeper: Gatekeeper,
    forwarding: Forwarding | None,
    decisions: DecisionLog | None,
    recent: Recent,
) -> Learner | None:
    """The keeper is told which gate decides when."""
    check_learning(options)
    if not (options.audit or options.gate_b or is_held_back(options) or settings.log is not None):
        return None
    arms = {"a": build_arm("a", keeper.rag, options)}
    if options.gate_b is not None:
        arms["b"] = build_arm("b", second_pipeline(settings, options, keeper), options)
    canary = 0.0 if options.shadow else 1.0 if options.canary is None else options.canary
    keeper.arms = Arms(arms, options.share_b if "b" in arms else 0.0, canary)
    labelling = Labelling(keeper.rag, keeper.rag.log)
    again = AskingAgain(keeper, forwarding, options.deadline)
    kept = Kept(decisions) if decisions is not None else None
    budget, asks_llm = Budget(options.audit_budget), options.audit_compare == "llm"
    auditor = Auditor(keeper.arms, again, recent, labelling, kept, budget, asks_llm)
    return Learner(auditor, labelling, recent, options.audit)


def is_held_back(options: ServeOptions) -> bool:
    return options.shadow or options.canary is not None


def check_learning(options: ServeOptions) -> None:
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


def second_pipeline(settings: Settings, options: ServeOptions, keeper: Gatekeeper) -> AdaptiveRAG:
    """The same with the second gate, found to work here."""
    gate = load_gate(str(options.gate_b), plug_in=settings.plug_in)
    rag = keeper.rag.altered(gate=gate, threshold=options.threshold_b)
    if why := stale_because(rag):
        raise BadSetting(f"--gate-b: {why}.")
    if options.way == "question" and not rag.bound.want.is_nothing:
        raise BadSetting(f"gate '{gate.name}' reads a draft: use --way draft or race, or another --gate-b.")
    return rag


def build_arm(name: str, rag: AdaptiveRAG, options: ServeOptions) -> Arm:
    promised, confidence = options.max_loss, options.confidence
    evidence = rag.gate.artefact.manifest.get("guarantee") if isinstance(rag.gate, FittedGate) else None
    if promised is None and evidence is not None and not stale_because(rag) and not rag.objections:
        promised = float(evidence["epsilon"])
    if promised is None and options.audit:
        log.warning("Nothing is promised of gate %s, so there is no alarm: give --max-loss.", rag.gate.name)
    return Arm(name, rag, Watch(promised, 1 - confidence), scope_of(rag))


def scope_of(rag: AdaptiveRAG) -> str:
    """Names all that a loss depends on; what was found out under another name does not count here."""
    made = rag.gate.artefact.manifest if isinstance(rag.gate, FittedGate) else {}
    own = rag.gate.threshold if rag.threshold is None else rag.threshold
    there = rag.retriever.fingerprint if rag.retriever else ""
    identity = (rag.gate.name, json.dumps(made, sort_keys=True, default=str), f"{own}", f"{rag.k}", str(there))
    return sha256_text(*identity, rag.model.fingerprint, rag.prompts.fingerprint)[:16]
