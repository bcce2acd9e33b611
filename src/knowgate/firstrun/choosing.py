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

from knowgate.errors import BadInput, KnowgateError, MissingExtra
from knowgate.firstrun.labelling import Labelled
from knowgate.firstrun.proof import CONFIDENCE, enough, what_they_can_prove
from knowgate.firstrun.telling import Teller
from knowgate.fitting import FEWEST_GRADED, FitStep, fit
from knowgate.gates import ALWAYS, FittedGate, default_gate, is_told, score_gate
from knowgate.runs import RunFolder, load_trial
from knowgate.statistics import Estimate, estimate_auroc
from knowgate.thresholds import Calibration, calibrate
from knowgate.types import Model

PLAIN = "logprob:min"  # the best without fitting, on most data sets of benchmarks/RESULTS.md
EVERY = "always:rules"  # looks up every question but small talk and the like
LEARNT, PACKAGED = "learnt-gate", "packaged-gate"
UNPROVEN = (
    "Nothing is proven of a gate yet: every question is looked up, but for small talk and the like (knowgate rules)."
)
NOTHING = "nothing is proven"
WORTH = 0.02  # share of searches; a gate that skips less is not worth its upkeep


@dataclass(frozen=True)
class Choice:
    """gate: folder or spec; EVERY where nothing is proven. threshold: None for the gate's own.

    others: gates that were made and not chosen. said: how it came about, in sentences.
    """

    gate: str = EVERY
    threshold: float | None = None
    proven: str = ""
    others: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rival:
    """A gate that competes. runs: those its threshold may be chosen on. kept: where a fitted one goes with it."""

    gate: str
    runs: list[Path]
    about: str
    kept: Path | None = None


@dataclass
class Chooser:
    """Fits, calibrates, compares; collects what is to be said."""

    labelled: Labelled
    model: Model
    out: Path
    max_loss: float
    tell: Teller
    said: list[str] = field(default_factory=list)

    def choose(self) -> Choice:
        to_choose_on = self.labelled.runs("fit", "calibration")
        n = usable(to_choose_on)
        if n == 0:
            return Choice(
                said=(f"There are too few questions to choose a threshold on. {what_they_can_prove(0, self.max_loss)}",)
            )
        n_fit = usable(self.labelled.runs("fit"))
        plain = self._plain(to_choose_on)
        delta = (1 - CONFIDENCE) / (2 if n_fit >= FEWEST_GRADED and plain else 1)
        rivals = [one for one in (plain, self._learnt(n_fit)) if one]
        found = [(rival, made) for rival in rivals if (made := self._calibrated(rival, delta)) is not None]
        return self._best(found, rivals, n, is_shared=delta < 1 - CONFIDENCE - 1e-9)

    # --- who competes -----------------------------------------------------------------------------

    def _plain(self, runs: list[Path]) -> Rival | None:
        """The gate that comes with the LLM; else the draft's probability, where the LLM tells it."""
        gate = default_gate(self.model)
        if isinstance(gate, FittedGate):
            about = "the gate that comes with knowgate for this LLM"
            return Rival(str(gate.artefact.path), runs, about, self.out / PACKAGED)
        if is_told(load_trial(runs, layers=()), PLAIN):
            return Rival(PLAIN, runs, f"'{PLAIN}', the draft's least probable token")
        self.said.append(f"{self.model.name} gives no log-probabilities: only a learnt gate can tell what it knows.")
        return None

    def _learnt(self, n: int) -> Rival | None:
        """A fusion of the signals of one pass; of token statistics and text where those are all there is."""
        if n < FEWEST_GRADED:
            self.said.append(f"No gate was learnt: that takes {FEWEST_GRADED} graded questions, {n} were there for it.")
            return None
        folder = self.out / LEARNT
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
        return Rival(str(folder), self.labelled.runs("calibration"), "the gate learnt from your questions", folder)

    def _watch(self, step: FitStep) -> None:
        self.tell.show("learning a gate", step.done, step.total, "examples")

    def _ranks(self, gate: str) -> Estimate:
        """AUROC of not knowing, on questions it was not fitted on."""
        if not usable(self.labelled.runs("calibration")):
            return Estimate(None)
        trial = load_trial(self.labelled.runs("calibration"))
        needs = np.asarray(score_gate(trial, gate).needs)
        return estimate_auroc(~trial.closed_right, needs)

    # --- who wins ---------------------------------------------------------------------------------

    def _calibrated(self, rival: Rival, delta: float) -> Calibration | None:
        n = usable(rival.runs)
        if not enough(n, self.max_loss, delta):
            self.said.append(f"Of {rival.about} {NOTHING}: {what_they_can_prove(n, self.max_loss, delta)}")
            return None
        try:
            return calibrate(
                rival.gate, rival.runs, max_loss=self.max_loss, confidence=1 - delta, held_out=0, out=rival.kept
            )
        except KnowgateError as error:
            self.said.append(f"Of {rival.about} {NOTHING}: {error}")
            return None

    def _best(
        self, found: Sequence[tuple[Rival, Calibration]], rivals: Sequence[Rival], n: int, *, is_shared: bool
    ) -> Choice:
        others = tuple(str(rival.kept if rival.kept and rival.kept.is_dir() else rival.gate) for rival in rivals)
        proven = [(rival, made) for rival, made in found if made.threshold != ALWAYS and _skips(made) >= WORTH]
        self.said += [f"Of {rival.about}: {_unproven(made)}" for rival, made in found if (rival, made) not in proven]
        if not proven:
            told = [] if any(NOTHING in one for one in self.said) else [what_they_can_prove(n, self.max_loss)]
            return Choice(others=others, said=(*self.said, *told))
        rival, made = max(proven, key=lambda pair: _skips(pair[1]))
        skips = f"It skips {100 * _skips(made):.0f} % of the searches there."
        told = [f"Chosen: {rival.about}. {skips} {made.sentence}", *([_shared(1 - CONFIDENCE)] if is_shared else [])]
        chosen = str(rival.kept or rival.gate)
        rest = tuple(one for one in others if one != chosen)
        return Choice(chosen, None if rival.kept else made.threshold, made.sentence, rest, (*told, *self.said))


def usable(runs: Sequence[Path]) -> int:
    """Graded questions of these runs."""
    rows = (row for run in runs for row in RunFolder(run).rows())
    return sum(row.error is None and row.closed is not None and row.closed.correct is not None for row in rows)


def _skips(made: Calibration) -> float:
    return 1 - made.chosen.rate


def _unproven(made: Calibration) -> str:
    if made.threshold == ALWAYS:
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
