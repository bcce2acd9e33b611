"""Write a policy: one folder with gate, arbiter, threshold, guarantee and a card that shows what was tried.

The folder is that of a fitted gate. Its manifest names the arbiter, and a fitted arbiter lies in a folder inside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.display import format_points
from knowgate.data.splits import fingerprint_question
from knowgate.gates.arbiters import ARBITER_FOLDER, NO_ARBITER, load_arbiter
from knowgate.gates.arbiters.fitted_arbiter import ARBITER_FORMAT
from knowgate.gates.artifacts.gate_folder import CARD_FILE, read_artifact, revise_artifact
from knowgate.gates.baselines import CONSTANT_GATE, CONSTANT_NEED
from knowgate.gates.calibration.evidence import (
    CALIBRATION_KEYS_FILE,
    describe_setup,
    render_card_section,
    replace_card_section,
)
from knowgate.gates.calibration.guarantee import compute_net_p_value
from knowgate.gates.calibration.threshold_choice import GateOutcomes, NetLoss, evaluate_threshold, find_smallest_count
from knowgate.stats.metrics import FloatArray
from knowgate.stats.proportions import wilson_interval
from knowgate.training.examples import Examples
from knowgate.training.fit_function import FitResult
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.policy.choice import PolicyChoice
from knowgate.training.policy.evidence import Evidence
from knowgate.training.policy.outcomes import CONSTANT_GATES, PolicyResult
from knowgate.training.topics import TopicResult, build_topic_table
from knowgate.types import SignalRequest

LOSS_STEP = 0.001  # a guarantee gives the loss in steps of a tenth of a percentage point
MAX_SHOWN_POLICIES = 7  # in the table of the card, besides `always` and `never`
ARBITER_WITH_DRAFTS = "rules:make_drafts=true"
LEGEND = {  # pattern of the names in the table, and what they mean
    "fusion": "fusion: learns from question and draft what the LLM knows; (benefit): whether passages help; (gain): how much.",
    "question|logprob": "question, logprob: gates that read the question alone, or the min or mean token probability.",
    "judge|stack": "judge, stack: fine-tuned models that read question and draft, and a fusion with such models.",
    "[+]": "arbiters (+ rules, + features, + lora): pick an answer by fixed rules, features of both texts, or an LLM.",
    "cross-validated": "cross-validated: chosen on three quarters of these questions and tested on the fourth, in turn.",
}


@dataclass(frozen=True)
class PolicyParts:
    """The parts of a policy (gate, threshold and perhaps arbiter) to write to its folder.

    Attributes:
        evidence: The graded questions.
        result: The fitted gate.
        examples: The training data of the gate.
        threshold: Threshold of the fitted gate.
        choice: The chosen policy; None if the questions have no open-book answers (answers with passages).
        outcomes: Needs and grades of the held-out rows; None without open-book answers.
        arbiter_folder: Folder of the fitted arbiter, which is moved into the policy; None if there is none.
        confidence: Confidence of the guarantee.
        summary: What was chosen and why, one or two sentences each.
        topics: Accuracy of the LLM and searches of the policy by topic.
    """

    evidence: Evidence
    result: FitResult
    examples: Examples
    threshold: float
    choice: PolicyChoice | None = None
    outcomes: GateOutcomes | None = None
    arbiter_folder: Path | None = None
    confidence: float = 0.95
    summary: tuple[str, ...] = ()
    topics: Sequence[TopicResult] = ()

    @property
    def arbiter(self) -> str:
        """The arbiter's name in the manifest: 'none', a spec such as 'rules', or 'arbiter' for a fitted arbiter."""
        if self.choice is None:  # without open-book answers, no arbiter could be chosen; fixed rules are the default
            return "rules"
        if self.arbiter_folder is not None:
            return ARBITER_FOLDER
        if not self.choice.chosen.arbiter:
            return NO_ARBITER
        has_draft = bool(self.result.request.draft_tokens)  # without a draft of the gate, the arbiter must generate one
        return self.choice.chosen.arbiter if has_draft else ARBITER_WITH_DRAFTS


def make_constant_result() -> FitResult:
    """Return a fitted gate with the same need for every question."""

    def score_rows(indices: Sequence[int]) -> FloatArray:
        return np.full(len(indices), CONSTANT_NEED)

    return FitResult(CONSTANT_GATE, options={}, needs=frozenset(), request=SignalRequest(), tensors={}, raw=score_rows)


def write_policy(parts: PolicyParts, work: Path, out: Path, command: str) -> None:
    """Write the folder of a policy: its gate with arbiter, guarantee and extended model card.

    Args:
        parts: The policy.
        work: Working folder, in which the gate alone is written first.
        out: Folder to write.
        command: The command line that the model card shows.
    """
    gate_folder = work / "gate"
    save_fitted(parts.result, parts.examples, gate_folder, command=command, threshold=parts.threshold)
    artifact = read_artifact(gate_folder)
    manifest = {**artifact.manifest, "threshold": parts.threshold, "policy": _make_record(parts)}
    card = (gate_folder / CARD_FILE).read_text(encoding="utf-8")
    files = {}  # texts by file name
    if parts.choice is not None and parts.outcomes is not None:
        card = _add_before_notes(card, render_policy_section(parts.choice, parts.summary))
        guarantee = build_guarantee(parts, parts.outcomes)
        manifest["guarantee"] = guarantee
        card = replace_card_section(card, render_card_section(parts.threshold, "guarantee", guarantee))
        held_out = [parts.evidence.table.questions[row] for row in parts.evidence.held_out]
        keys = sorted({fingerprint_question(question) for question in held_out})
        files[CALIBRATION_KEYS_FILE] = "\n".join(keys) + "\n"
    if parts.topics:
        topic_section = build_topic_table(parts.topics).markdown().removeprefix("#")  # a heading of level 2, not 3
        card = _add_before_notes(card, topic_section)
    folders = {ARBITER_FOLDER: parts.arbiter_folder} if parts.arbiter_folder else {}
    revise_artifact(artifact, manifest, {**files, CARD_FILE: card}, out, folders)


def _make_record(parts: PolicyParts) -> dict[str, Any]:
    """Return the field `policy` of the manifest."""
    record: dict[str, Any] = {"arbiter": parts.arbiter}
    if parts.choice is not None:
        record |= {"gate": parts.choice.chosen.gate, "reason": parts.choice.reason}
        record["tried"] = [_round_result(result) for result in parts.choice.tried]
    return record


def _round_result(result: PolicyResult) -> dict[str, Any]:
    """Return the fields of a result, with floats rounded to four decimals."""
    fields = asdict(result).items()
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields}


def _add_before_notes(card: str, section: str) -> str:
    """Insert a section before the notes of a card, or at its end."""
    head, notes, tail = card.partition("\n## Notes\n")
    return f"{head.rstrip()}\n\n{section}\n{notes}{tail}"


# --- guarantee ------------------------------------------------------------------------------------


def build_guarantee(parts: PolicyParts, outcomes: GateOutcomes) -> dict[str, Any]:
    """Build the guarantee: with confidence 1 - delta, the net loss of the policy is at most epsilon.

    The net loss is the share of questions that only always retrieving answers right, minus the share of questions that only
    the policy answers right.

    Args:
        parts: The policy.
        outcomes: Needs and grades of the held-out rows.
    """
    table = parts.evidence.table.subset(parts.evidence.held_out)
    keys = [fingerprint_question(question) for question in table.questions]
    result = evaluate_threshold(outcomes, parts.threshold)
    loss = NetLoss(result.harmed, result.gained, result.n)
    delta = round(1 - parts.confidence, 12)
    epsilon = find_proven_loss(loss, delta)
    return {
        "epsilon": epsilon,
        "delta": delta,
        "n": result.n,
        "harmed": result.harmed,
        "gained": result.gained,
        "p_value": compute_net_p_value(loss.lost, loss.gained, loss.n, epsilon, delta),
        "form": "net",
        "proven": epsilon < 1,
        "chosen_on": result.to_record(),
        "held_out": None,
        "test_only": True,
        **describe_setup(table, outcomes, keys),
        "arbiter": None if parts.arbiter == NO_ARBITER else identify_arbiter(parts),
        "left_out": {},
        "seed": parts.evidence.seed,
    }


def find_proven_loss(loss: NetLoss, delta: float) -> float:
    """Return the smallest bound on the net loss that can be proven with confidence 1 - delta.

    Returns:
        The bound as a share of the questions: 0.012 means 1.2 percentage points. 1.0 means that nothing is proven.
    """

    def is_proven(n_steps: int) -> bool:
        """Return whether the loss is proven to be at most `n_steps * LOSS_STEP`."""
        max_loss = n_steps * LOSS_STEP
        # No loss exceeds 1, so this needs no proof.
        return max_loss >= 1 or compute_net_p_value(loss.lost, loss.gained, loss.n, max_loss, delta) <= delta

    return round(find_smallest_count(is_proven) * LOSS_STEP, 6)


def format_proof(loss: NetLoss, confidence: float) -> str:
    """Describe the guarantee (the largest net loss compared with always retrieving) in two sentences."""
    proven = find_proven_loss(loss, round(1 - confidence, 12))
    limit = f"the policy loses at most {100 * proven:.1f} points" if proven < 1 else "nothing is proven"
    return (
        f"Guarantee: {limit} against always retrieving, with {confidence:.0%} confidence. It was measured on {loss.n} "
        "test questions that were not used to fit or choose anything."
    )


def identify_arbiter(parts: PolicyParts) -> dict[str, str]:
    """Return name and fingerprint of the policy's arbiter."""
    if parts.arbiter_folder is not None:
        manifest = read_artifact(parts.arbiter_folder, ARBITER_FORMAT).manifest
        return {"name": str(manifest["arbiter"]), "fingerprint": str(manifest["checksum"])}
    arbiter = load_arbiter(parts.arbiter)
    return {"name": arbiter.name, "fingerprint": arbiter.fingerprint}


# --- card -----------------------------------------------------------------------------------------


def render_policy_section(choice: PolicyChoice, summary: Sequence[str]) -> str:
    """Render the card's section about the chosen policy and the policies that were tried."""
    rows = list_shown_results(choice)
    lines = ["| policy | searches | right | LLM calls | against always |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(format_result(name, result))} |" for name, result in rows]
    return "\n\n".join(
        [
            "## Policy",
            *summary,
            f"What was tried, on the {choice.always.loss.n} questions to choose on. Each gate and arbiter is shown at its "
            "best safe threshold:",
            "\n".join(lines),
            "\n".join(f"- {line}" for line in list_legend(choice)),
            *render_frontier(choice.frontier),
        ]
    )


def render_frontier(frontier: Sequence[PolicyResult]) -> list[str]:
    """Render a table of right answers by share of searches, with its title.

    Args:
        frontier: Results of one policy at several thresholds.

    Returns:
        Title and table; an empty list without results, because no gate was tried.
    """
    if not frontier:
        return []
    lines = ["| searches | right | against always |", "|---|---|---|"]
    for result in frontier:
        low, high = wilson_interval(round(result.right * result.loss.n), result.loss.n)
        right = f"{result.right:.1%} [{low:.1%}, {high:.1%}]"
        lines.append(f"| {result.searches:.0%} | {right} | {format_points(-result.loss.mean)} |")
    title = f"{frontier[0].name} at other thresholds, on the same questions (right answers with 95 % intervals):"
    return [title, "\n".join(lines)]


def list_shown_results(choice: PolicyChoice) -> list[tuple[str, PolicyResult]]:
    """Return names and results for the card's table of policies.

    The chosen policy and the reference are always shown, and then the most valuable others. If a policy with a gate was
    cross-validated, this result comes last.
    """
    by_name = {
        result.name: result for result in (choice.chosen, choice.reference, *choice.tried)
    }  # most important first
    shown = [result for name, result in by_name.items() if name not in CONSTANT_GATES][:MAX_SHOWN_POLICIES]
    rows = [("never", choice.never), ("always", choice.always)]
    rows += [(result.name, result) for result in sorted(shown, key=lambda result: -result.value)]
    if choice.rejected is not None:
        rows.append((f"rejected: {choice.rejected.name}, cross-validated", choice.rejected.result))
    elif not choice.chosen.is_constant:
        rows.append(("the choice, cross-validated", choice.estimate))
    return rows


def list_legend(choice: PolicyChoice) -> list[str]:
    """Explain the names of gates and arbiters in the card's table."""
    names = " ".join(name for name, _ in list_shown_results(choice))
    return [text for pattern, text in LEGEND.items() if re.search(pattern, names)]


def format_result(name: str, result: PolicyResult) -> list[str]:
    """Format a result as the cells of a table row."""
    gain = format_points(-result.loss.mean)  # compared with always retrieving
    return [name, f"{result.searches:.1%}", f"{result.right:.1%}", f"{result.llm_calls:.2f}", gain]
