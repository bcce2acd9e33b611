"""Choose a gate and its threshold: the gate that skips most searches among those that provably lose few answers.

Two gates may compete: one that needs no training (the gate that comes with the LLM, or the probability of the draft
answer), and one that is trained on the questions of the part 'fit'. The threshold of a gate is chosen on questions that
the gate has not seen. If both compete, each is proven with half of the error probability, so that the proof still holds
for the better of the two (union bound). The part 'test' is not used here. If nothing is proven, no gate is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadInput, KnowgateError, MissingExtra
from knowgate.evaluation.first_run.labeling import CONFIDENCE, MIN_POLICY_ROWS, LabeledParts
from knowgate.evaluation.first_run.options import FirstRunOptions, ProgressReporter
from knowgate.gates import default_gate
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.evidence import summarize_threshold
from knowgate.gates.calibration.guarantee import compute_required_rows
from knowgate.gates.calibration.threshold_calibration import Calibration, calibrate
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.offline_scoring import can_score, score_gate
from knowgate.stats.bootstrap import Estimate, estimate_auroc
from knowgate.training.examples import MIN_GRADED_ROWS
from knowgate.training.fit_function import FitProgress
from knowgate.training.gate import fit
from knowgate.training.policy.search import FittedPolicy, fit_policy
from knowgate.types import Model

UNTRAINED_GATE = "logprob:min"  # the best without fitting, on most data sets of benchmarks/RESULTS.md
ALWAYS_RETRIEVE_GATE = "always:rules"  # retrieves for everything except small talk and the like
TRAINED_GATE_FOLDER, PACKAGED_GATE_FOLDER = "learnt-gate", "packaged-gate"
NO_GUARANTEE_MESSAGE = (
    "No gate is proven yet, so knowgate retrieves for every question, except small talk and the like (knowgate rules)."
)
MIN_SKIP_RATE = 0.02  # a gate that skips fewer searches is not worth its upkeep
POLICY_FOLDER = "policy"
RECORD_KEYS = {  # attributes of `GateChoice` -> keys of the progress file, which old files depend on
    "gate": "gate",
    "threshold": "threshold",
    "guarantee": "proven",
    "alternatives": "others",
    "explanations": "said",
}
ALLOWED_MEAN_LOSS = 0.01  # limit of a policy's measured loss; its upper confidence bound is limited by `max_loss`


@dataclass(frozen=True)
class GateChoice:
    """The gate that a first run has chosen.

    Attributes:
        gate: Folder of a fitted gate, or spec of a gate such as 'logprob:min'. ALWAYS_RETRIEVE_GATE if no gate is proven
            to lose few answers.
        threshold: Threshold to use; None if the folder of the gate stores it.
        guarantee: How many answers the gate loses at most, in one sentence; '' if nothing is proven.
        alternatives: Gates that were tried and not chosen.
        explanations: How the choice was made, in sentences.
        is_policy: Whether `gate` is the folder of a policy, which contains gate, threshold and arbiter.
    """

    gate: str = ALWAYS_RETRIEVE_GATE
    threshold: float | None = None
    guarantee: str = ""
    alternatives: Sequence[str] = ()
    explanations: Sequence[str] = ()
    is_policy: bool = False

    def to_record(self) -> dict[str, Any]:
        """Convert the choice to plain data for the progress file."""
        record = {key: getattr(self, name) for name, key in RECORD_KEYS.items()}
        return record | {"policy": True} if self.is_policy else record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> GateChoice:
        """Create a choice from the data of the progress file."""
        values = {name: record[key] for name, key in RECORD_KEYS.items()}
        return cls(**values, is_policy=bool(record.get("policy")))


@dataclass(frozen=True)
class GateCandidate:
    """A gate that may be chosen.

    Attributes:
        gate: Folder or spec of the gate.
        runs: Label runs that its threshold may be chosen on.
        description: What kind of gate it is, for messages.
        folder: Where a calibrated copy is written; None for a gate without a folder.
    """

    gate: str
    runs: list[Path]
    description: str
    folder: Path | None = None


class CalibratedCandidate(NamedTuple):
    """A gate that may be chosen, with its threshold.

    Attributes:
        candidate: The gate.
        calibration: The threshold, and how many answers it provably loses at most.
    """

    candidate: GateCandidate
    calibration: Calibration

    @property
    def skip_rate(self) -> float:
        """Share of searches that the gate skips."""
        return 1 - self.calibration.chosen.rate

    @property
    def is_useful(self) -> bool:
        """Whether the gate skips enough searches at a proven threshold."""
        # If nothing can be proven, the threshold is ALWAYS_RETRIEVE.
        is_proven = self.calibration.threshold != ALWAYS_RETRIEVE
        return is_proven and self.skip_rate >= MIN_SKIP_RATE


@dataclass
class GateSelector:
    """Chooses the gate of a first run: trains, calibrates and compares the candidates.

    Attributes:
        labeled: Label runs by part: to fit a gate, to calibrate its threshold, to test it.
        model: The LLM.
        out: Folder that gates are written to.
        max_loss: Maximum share of right answers that skipping searches may lose, to be proven.
        reporter: Receives the progress.
        explanations: How the choice was made, in sentences; collected on the way.
    """

    labeled: LabeledParts
    model: Model
    out: Path
    max_loss: float
    reporter: ProgressReporter
    explanations: list[str] = field(default_factory=list)

    def select(self) -> GateChoice:
        """Select the gate that skips most searches and provably loses few answers."""
        runs = self.labeled.runs("fit", "calibration")
        if not count_graded_questions(runs):
            return GateChoice(explanations=(describe_required_questions(0, self.max_loss),))
        n_fit = count_graded_questions(self.labeled.runs("fit"))
        untrained = self._find_untrained_gate(runs)
        # If two gates compete, each gets half of the allowed probability that a proof is wrong (delta).
        two_compete = n_fit >= MIN_GRADED_ROWS and untrained is not None
        delta = (1 - CONFIDENCE) / 2 if two_compete else 1 - CONFIDENCE
        trained = self._train_gate(n_fit)
        candidates = [candidate for candidate in (untrained, trained) if candidate is not None]
        results = [self._calibrate(candidate, delta) for candidate in candidates]
        calibrated = [result for result in results if result is not None]
        return self._choose(calibrated, candidates)

    # --- candidates -------------------------------------------------------------------------------

    def _find_untrained_gate(self, runs: list[Path]) -> GateCandidate | None:
        """Return a gate that needs no training: the one that comes with the LLM, or one that reads log-probabilities.

        Returns None, and explains it, if the LLM has neither.
        """
        gate = default_gate(self.model)
        if isinstance(gate, FittedGate):
            description = "the gate that comes with knowgate for this LLM"
            return GateCandidate(str(gate.artifact.path), runs, description, self.out / PACKAGED_GATE_FOLDER)
        if can_score(load_label_table(runs, layers=()), UNTRAINED_GATE):
            return GateCandidate(UNTRAINED_GATE, runs, f"'{UNTRAINED_GATE}', the draft's least probable token")
        self.explanations.append(
            f"{self.model.name} gives no log-probabilities: only a trained gate can predict what it knows."
        )
        return None

    def _train_gate(self, n: int) -> GateCandidate | None:
        """Train a gate on the `n` graded questions of the part 'fit'.

        Returns None, and explains it, if they are too few or the gate is not better than chance.
        """
        if n < MIN_GRADED_ROWS:
            self.explanations.append(
                f"No gate was trained: that needs {MIN_GRADED_ROWS} graded questions, and there were {n}."
            )
            return None
        folder = self.out / TRAINED_GATE_FOLDER
        self.reporter.say(f"Training a gate on {n} questions.")
        try:
            fit("fusion", self.labeled.runs("fit"), out=folder, target="known", cheap=True, watch=self._show_fit)
        except (BadInput, MissingExtra) as error:
            self.explanations.append(f"No gate was trained: {error}")
            return None
        if not self._is_better_than_chance(folder):
            return None
        description = "the gate trained on your questions"
        return GateCandidate(str(folder), self.labeled.runs("calibration"), description, folder)

    def _is_better_than_chance(self, folder: Path) -> bool:
        """Return whether a trained gate predicts what the LLM knows, and explain it."""
        auroc = self._measure_auroc(str(folder))
        is_better = auroc.low is not None and auroc.low > 0.5
        result = "predicts what the LLM knows" if is_better else "is not better than chance"
        ending = "." if is_better else "; it is not used."
        self.explanations.append(f"A gate trained on your questions {result}{_format_auroc(auroc)}{ending}")
        return is_better

    def _show_fit(self, progress: FitProgress) -> None:
        """Report the progress of training."""
        self.reporter.show("training a gate", progress.done, progress.total, "examples")

    def _measure_auroc(self, gate: str) -> Estimate:
        """Estimate the gate's AUROC for predicting unknown questions, on the part 'calibration'."""
        if not count_graded_questions(self.labeled.runs("calibration")):
            return Estimate(None)
        table = load_label_table(self.labeled.runs("calibration"))
        needs = np.asarray(score_gate(table, gate).needs)
        return estimate_auroc(~table.closed_book_right, needs)

    # --- choice -----------------------------------------------------------------------------------

    def _calibrate(self, candidate: GateCandidate, delta: float) -> CalibratedCandidate | None:
        """Choose the threshold at which a gate skips most searches and still provably loses few answers.

        Returns None, and explains it, if nothing can be proven.

        Args:
            candidate: The gate.
            delta: Allowed probability that the proof is wrong.
        """
        n = count_graded_questions(candidate.runs)
        if n < compute_required_rows(self.max_loss, delta):
            reason = describe_required_questions(n, self.max_loss, delta)
        else:
            try:
                # `held_out` is 0: all these questions calibrate, because the part 'test' measures the threshold later.
                options = {"max_loss": self.max_loss, "confidence": 1 - delta, "out": candidate.folder, "held_out": 0}
                calibration = calibrate(candidate.gate, candidate.runs, **options)
                return CalibratedCandidate(candidate, calibration)
            except KnowgateError as error:
                reason = str(error)
        self.explanations.append(f"Nothing is proven for {candidate.description}: {reason}")
        return None

    def _choose(self, calibrated: Sequence[CalibratedCandidate], candidates: Sequence[GateCandidate]) -> GateChoice:
        """Choose the useful gate that skips most searches, or else to always retrieve.

        Args:
            calibrated: Candidates whose threshold was calibrated.
            candidates: All candidates that were tried.
        """
        tried = [str(item.folder) if item.folder and item.folder.is_dir() else item.gate for item in candidates]
        for result in calibrated:
            if not result.is_useful:
                self.explanations.append(f"Of {result.candidate.description}: {_explain_useless(result)}")
        useful = [result for result in calibrated if result.is_useful]
        if not useful:
            return GateChoice(alternatives=tried, explanations=self.explanations)
        return self._make_choice(max(useful, key=lambda result: result.skip_rate), tried)

    def _make_choice(self, best: CalibratedCandidate, tried: Sequence[str]) -> GateChoice:
        """Describe the choice of the best gate. The other tried gates are its alternatives."""
        candidate, guarantee = best.candidate, best.calibration.sentence
        skipped = f"It skips {100 * best.skip_rate:.0f} % of the searches there."
        chosen = str(candidate.folder or candidate.gate)
        return GateChoice(
            chosen,
            threshold=None if candidate.folder else best.calibration.threshold,  # a folder stores its threshold
            guarantee=guarantee,
            alternatives=[gate for gate in tried if gate != chosen],
            explanations=[f"Chosen: {candidate.description}. {skipped} {guarantee}", *self.explanations],
        )


def fit_first_policy(labeled: LabeledParts, options: FirstRunOptions, reporter: ProgressReporter) -> GateChoice | None:
    """Fit a policy on the parts 'fit' and 'calibration'. A policy is a gate, its threshold and an arbiter.

    Args:
        labeled: The label runs.
        options: Options of the first run.
        reporter: Receives the progress.

    Returns:
        The policy or, if it is not proven to lose few answers, the choice to always retrieve. None if there are too few
        graded questions, or if fitting fails. The caller then selects a gate instead.
    """
    runs = labeled.runs("fit", "calibration")
    n = count_graded_questions(runs)
    if n < MIN_POLICY_ROWS:
        return None
    reporter.say(f"Fitting a policy on {n} questions: gate, arbiter and threshold together. This takes some minutes.")
    try:
        # The measured loss must be small. The proven upper bound of the loss may be as large as the user allows.
        policy = fit_policy(
            runs,
            out=options.out / POLICY_FOLDER,
            max_loss=min(ALLOWED_MEAN_LOSS, options.max_loss),
            loss_bound=options.max_loss,
            seed=options.seed,
            watch=lambda progress: reporter.show("fitting a policy", progress.done, progress.total, progress.unit),
        )
    except KnowgateError as error:
        reporter.warn(f"No policy was fitted: {error} A gate is chosen instead.")
        return None
    return _make_choice(policy, options.max_loss)


def _make_choice(policy: FittedPolicy, max_loss: float) -> GateChoice:
    """Choose the policy if it provably loses few answers, else always retrieve."""
    if policy.gate.threshold == ALWAYS_RETRIEVE:
        return GateChoice(ALWAYS_RETRIEVE_GATE, explanations=policy.summary)
    evidence = policy.gate.artifact.manifest.get("guarantee")
    if evidence is not None and evidence["epsilon"] <= max_loss:  # epsilon is the loss that is proven
        guarantee = summarize_threshold(policy.gate.threshold, "guarantee", evidence)
        return GateChoice(str(policy.path), guarantee=guarantee, explanations=policy.summary, is_policy=True)
    limit = f"It is not proven to lose at most {100 * max_loss:g} % of the answers."
    return GateChoice(ALWAYS_RETRIEVE_GATE, alternatives=(str(policy.path),), explanations=(*policy.summary, limit))


def count_graded_questions(runs: Sequence[Path]) -> int:
    """Count the questions of label runs with a graded answer without passages."""
    rows = (row for run in runs for row in RunFolder(run).rows())
    return sum(row.error is None and row.closed is not None and row.closed.correct is not None for row in rows)


def _explain_useless(calibrated: CalibratedCandidate) -> str:
    """Say why a gate is useless: no proof, or too few skipped searches."""
    if calibrated.calibration.threshold == ALWAYS_RETRIEVE:
        return calibrated.calibration.sentence
    return f"it is proven, but skips {100 * calibrated.skip_rate:.0f} % of the searches, which is not worth a gate."


def _format_auroc(auroc: Estimate) -> str:
    """Format the AUROC of a trained gate as an addition in parentheses."""
    if auroc.value is None or auroc.low is None:
        return " (the held-out questions are all known, or all unknown)"
    interval = f"95 % interval {auroc.low:.2f} to {auroc.high:.2f}"
    return f" (AUROC {auroc.value:.2f}, {interval}, on questions it never saw)"


def describe_required_questions(n: int, max_loss: float, delta: float = 1 - CONFIDENCE) -> str:
    """Say that n questions are too few for a proof, and how many are needed."""
    return (
        f"{n} questions are too few to prove, with {100 * (1 - delta):.3g} % confidence, that skipping loses at most "
        f"{100 * max_loss:g} % of the answers. That takes {compute_required_rows(max_loss, delta)}."
    )
