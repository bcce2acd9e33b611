"""Which gate, at which threshold: the one that is proven to lose little and skips most; else none.

Two gates may compete: one that is there without learning (that of the embedded LLM, or the draft's probability), and
one learnt from the questions of the part 'fit'. Neither has seen the questions its threshold is chosen on. Where both
compete, each is held to half the chance of being wrong, so that choosing between them costs no confidence (the union
bound). The questions of the part 'test' have no say in any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadInput, KnowgateError, MissingExtra
from knowgate.evaluation.first_run.labeling import LabeledParts
from knowgate.evaluation.first_run.options import ProgressReporter
from knowgate.gates import default_gate
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.calibration.guarantee import compute_required_rows
from knowgate.gates.calibration.threshold_calibration import Calibration, calibrate
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.offline_scoring import can_score, score_gate
from knowgate.stats.bootstrap import Estimate, estimate_auroc
from knowgate.training.examples import MIN_GRADED_ROWS
from knowgate.training.fit_function import FitProgress
from knowgate.training.gate import fit
from knowgate.types import Model

CONFIDENCE = 0.95
COMMON_LOSSES = (0.02, 0.01)  # losses people ask for


def smallest_provable_loss(n: int, delta: float = 1 - CONFIDENCE) -> float:
    """The smallest loss that n questions can prove, if none of them is harmed: (1 - loss)^n = delta."""
    return 1.0 - delta ** (1 / n) if n else 1.0


def can_prove(n: int, loss: float, delta: float = 1 - CONFIDENCE) -> bool:
    return n >= compute_required_rows(loss, delta)


def describe_provable_loss(n: int, wanted: float | None = None, delta: float = 1 - CONFIDENCE) -> str:
    """An honest sentence. wanted: a loss to be spoken of, beside those people ask for."""
    asked = {*COMMON_LOSSES, *([wanted] if wanted else [])}
    beyond = sorted((loss for loss in asked if not can_prove(n, loss, delta)), reverse=True)
    takes = ", ".join(f"{100 * loss:g} % takes {compute_required_rows(loss, delta)}" for loss in beyond)
    sure = f"with {100 * (1 - delta):.3g} % confidence"
    if not n:
        return f"Questions it takes to prove, {sure}, that skipping loses at most so much: {takes}."
    least = f"at most {100 * smallest_provable_loss(n, delta):.1f} % of the answers, if none of them is harmed"
    return f"{n} questions can prove, {sure}, that skipping loses {least}{'; ' if takes else ''}{takes}."


UNTRAINED_GATE = "logprob:min"  # the best without fitting, on most data sets of benchmarks/RESULTS.md
ALWAYS_RETRIEVE_GATE = "always:rules"  # looks up every question but small talk and the like
TRAINED_GATE_FOLDER, PACKAGED_GATE_FOLDER = "learnt-gate", "packaged-gate"
NO_GUARANTEE_MESSAGE = (
    "Nothing is proven of a gate yet: every question is looked up, but for small talk and the like (knowgate rules)."
)
NOT_PROVEN = "nothing is proven"
MIN_SKIP_RATE = 0.02  # share of searches; a gate that skips less is not worth its upkeep


@dataclass(frozen=True)
class GateChoice:
    """gate: folder or spec; EVERY where nothing is proven. threshold: None for the gate's own.

    others: gates that were made and not chosen. said: how it came about, in sentences.
    """

    gate: str = ALWAYS_RETRIEVE_GATE
    threshold: float | None = None
    proven: str = ""
    others: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class GateCandidate:
    """A gate that competes. runs: those its threshold may be chosen on. kept: where a fitted one goes with it."""

    gate: str
    runs: list[Path]
    about: str
    kept: Path | None = None


@dataclass
class GateSelector:
    """Fits, calibrates, compares; collects what is to be said."""

    labelled: LabeledParts
    model: Model
    out: Path
    max_loss: float
    tell: ProgressReporter
    said: list[str] = field(default_factory=list)

    def choose(self) -> GateChoice:
        to_choose_on = self.labelled.runs("fit", "calibration")
        n = count_graded_questions(to_choose_on)
        if n == 0:
            return GateChoice(
                said=(
                    f"There are too few questions to choose a threshold on. {describe_provable_loss(0, self.max_loss)}",
                )
            )
        n_fit = count_graded_questions(self.labelled.runs("fit"))
        plain = self._plain(to_choose_on)
        delta = (1 - CONFIDENCE) / (2 if n_fit >= MIN_GRADED_ROWS and plain else 1)
        rivals = [one for one in (plain, self._learnt(n_fit)) if one]
        found = [(rival, made) for rival in rivals if (made := self._calibrated(rival, delta)) is not None]
        return self._best(found, rivals, n, is_shared=delta < 1 - CONFIDENCE - 1e-9)

    # --- who competes -----------------------------------------------------------------------------

    def _plain(self, runs: list[Path]) -> GateCandidate | None:
        """The gate that comes with the LLM; else the draft's probability, where the LLM tells it."""
        gate = default_gate(self.model)
        if isinstance(gate, FittedGate):
            about = "the gate that comes with knowgate for this LLM"
            return GateCandidate(str(gate.artifact.path), runs, about, self.out / PACKAGED_GATE_FOLDER)
        if can_score(load_label_table(runs, layers=()), UNTRAINED_GATE):
            return GateCandidate(UNTRAINED_GATE, runs, f"'{UNTRAINED_GATE}', the draft's least probable token")
        self.said.append(f"{self.model.name} gives no log-probabilities: only a learnt gate can tell what it knows.")
        return None

    def _learnt(self, n: int) -> GateCandidate | None:
        """A fusion of the signals of one pass; of token statistics and text where those are all there is."""
        if n < MIN_GRADED_ROWS:
            self.said.append(
                f"No gate was learnt: that takes {MIN_GRADED_ROWS} graded questions, {n} were there for it."
            )
            return None
        folder = self.out / TRAINED_GATE_FOLDER
        self.tell.say(f"Learning a gate from {n} questions.")
        try:
            fit("fusion", self.labelled.runs("fit"), out=folder, target="known", cheap=True, watch=self._watch)
        except (BadInput, MissingExtra) as error:
            self.said.append(f"No gate was learnt: {error}")
            return None
        told = self._ranks(str(folder))
        if told.low is None or told.low <= 0.5:
            self.said.append(f"A gate learnt from your questions is not better than chance{_auroc(told)}; left aside.")
            return None
        self.said.append(f"A gate learnt from your questions tells what the LLM knows{_auroc(told)}.")
        return GateCandidate(
            str(folder), self.labelled.runs("calibration"), "the gate learnt from your questions", folder
        )

    def _watch(self, step: FitProgress) -> None:
        self.tell.show("learning a gate", step.done, step.total, "examples")

    def _ranks(self, gate: str) -> Estimate:
        """AUROC of not knowing, on questions it was not fitted on."""
        if not count_graded_questions(self.labelled.runs("calibration")):
            return Estimate(None)
        trial = load_label_table(self.labelled.runs("calibration"))
        needs = np.asarray(score_gate(trial, gate).needs)
        return estimate_auroc(~trial.closed_right, needs)

    # --- who wins ---------------------------------------------------------------------------------

    def _calibrated(self, rival: GateCandidate, delta: float) -> Calibration | None:
        n = count_graded_questions(rival.runs)
        if not can_prove(n, self.max_loss, delta):
            self.said.append(f"Of {rival.about} {NOT_PROVEN}: {describe_provable_loss(n, self.max_loss, delta)}")
            return None
        try:
            return calibrate(
                rival.gate, rival.runs, max_loss=self.max_loss, confidence=1 - delta, held_out=0, out=rival.kept
            )
        except KnowgateError as error:
            self.said.append(f"Of {rival.about} {NOT_PROVEN}: {error}")
            return None

    def _best(
        self,
        found: Sequence[tuple[GateCandidate, Calibration]],
        rivals: Sequence[GateCandidate],
        n: int,
        *,
        is_shared: bool,
    ) -> GateChoice:
        others = tuple(str(rival.kept if rival.kept and rival.kept.is_dir() else rival.gate) for rival in rivals)
        proven = [
            (rival, made)
            for rival, made in found
            if made.threshold != ALWAYS_RETRIEVE and _skips(made) >= MIN_SKIP_RATE
        ]
        self.said += [f"Of {rival.about}: {_unproven(made)}" for rival, made in found if (rival, made) not in proven]
        if not proven:
            told = [] if any(NOT_PROVEN in one for one in self.said) else [describe_provable_loss(n, self.max_loss)]
            return GateChoice(others=others, said=(*self.said, *told))
        rival, made = max(proven, key=lambda pair: _skips(pair[1]))
        skips = f"It skips {100 * _skips(made):.0f} % of the searches there."
        told = [f"Chosen: {rival.about}. {skips} {made.sentence}", *([_shared(1 - CONFIDENCE)] if is_shared else [])]
        chosen = str(rival.kept or rival.gate)
        rest = tuple(one for one in others if one != chosen)
        return GateChoice(chosen, None if rival.kept else made.threshold, made.sentence, rest, (*told, *self.said))


def count_graded_questions(runs: Sequence[Path]) -> int:
    """Graded questions of these runs."""
    rows = (row for run in runs for row in RunFolder(run).rows())
    return sum(row.error is None and row.closed is not None and row.closed.correct is not None for row in rows)


def _skips(made: Calibration) -> float:
    return 1 - made.chosen.rate


def _unproven(made: Calibration) -> str:
    if made.threshold == ALWAYS_RETRIEVE:
        return made.sentence
    return f"it is proven, but skips {100 * _skips(made):.0f} % of the searches, which is not worth a gate."


def _auroc(found: Estimate) -> str:
    if found.value is None or found.low is None:
        return " (the questions kept back are all known, or none is)"
    return f" (AUROC {found.value:.2f}, 95 % interval {found.low:.2f} to {found.high:.2f}, on questions it never saw)"


def _shared(delta: float) -> str:
    return (
        f"Two gates competed, so each had to be proven at {100 * (1 - delta / 2):g} %; that leaves "
        f"{100 * (1 - delta):g} % for the one that was chosen."
    )
