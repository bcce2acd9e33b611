"""Fitting KBM: a judge that learns mastery and certainty, of bare questions and of questions with passages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.fitted_gate import RAW_THRESHOLD
from knowgate.gates.judges.causal_judge import CausalJudge
from knowgate.gates.kbm import (
    KBM_HEADS,
    KBM_LABELS,
    PASSAGE_EXAMPLES,
    compute_kbm_confidence,
    encode_kbm_answer,
    render_kbm_prompt,
)
from knowgate.models.prompts.judges import build_kbm_prompt
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges.ensemble import fit_judge, plan_ensemble
from knowgate.training.judges.trainable_models import CAUSAL_JUDGE, TrainingExample
from knowgate.training.judges.trainer import JudgeProgressCallback
from knowgate.training.judges.training_options import (
    ACCUMULATE_HELP,
    BASE_HELP,
    EPOCHS_HELP,
    FULL_HELP,
    LEARNING_RATE_HELP,
    JudgeTrainingOptions,
)
from knowgate.types import SignalRequest

KBMHead = Literal["mastery", "certainty"]
DEFAULT_TAU = 0.8  # the paper's turning point (section 3): its known region is [0.8, 1]
TAU_GRID = (0.8, 0.7, 0.9, 0.6, 0.5, 1.0, 0.4, 0.3, 0.2, 0.1)  # nearest to the paper's first: it wins ties
NO_PASSAGES_NOTE = (
    "it never saw a passage, for want of sampled open-book answers, so it cannot be a --second-look: label with "
    "--open-samples 30 for that"
)


def fit_kbm(
    examples: Annotated[Examples, ExampleRequirements(target="known", reads_states=False)],
    *,
    head: Annotated[KBMHead, "What it decides by: mastery or certainty."] = "mastery",
    tau: Annotated[float | None, "Known from here on. Default: of .1 to 1, what is best on the dev split."] = None,
    base: Annotated[str | None, BASE_HELP] = None,
    epochs: Annotated[int, EPOCHS_HELP] = JudgeTrainingOptions.epochs,
    learning_rate: Annotated[float | None, LEARNING_RATE_HELP] = None,
    full: Annotated[bool, FULL_HELP] = False,
    accumulate: Annotated[int, ACCUMULATE_HELP] = JudgeTrainingOptions.accumulate,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """A judge of mastery and certainty, fine-tuned on bare questions and on questions with passages."""
    training = JudgeTrainingOptions(epochs, accumulate=accumulate, rate=learning_rate, full=full, seed=seed)
    return fit_kbm_judge(examples, head=head, tau=tau, base=base, training=training, work=work, watch=watch)


def fit_kbm_judge(
    examples: Examples,
    *,
    head: KBMHead = "mastery",
    tau: float | None = None,
    base: str | None = None,
    training: JudgeTrainingOptions | None = None,
    work: Path,
    watch: JudgeProgressCallback | None = None,
) -> FitResult:
    """Fine-tune a judge to give the mastery / certainty JSON; the gate reads one of the two heads.

    tau: an indicator of at least this is True; None chooses it on the dev split, for each indicator.
    base: the causal model to fine-tune, the answering LLM by default. work: where training is kept until it is done.
    """
    _check(examples, head, tau)
    taus = {name: choose_tau(examples, name) if tau is None else tau for name in KBM_HEADS}
    chosen, spec = training or JudgeTrainingOptions(), base or str(examples.settings["model"])

    def lessons(judge: CausalJudge, places: Sequence[int]) -> list[TrainingExample]:
        return [lesson for place in places for lesson in _lessons(judge, examples, place, taus, chosen.max_tokens)]

    fit = fit_judge(
        plan_ensemble(examples.split, chosen),
        KBM_LABELS,
        "kbm",
        lessons,
        school=CAUSAL_JUDGE,
        base=spec,
        work=work,
        watch=watch,
    )

    def raw(places: Sequence[int]) -> FloatArray:
        return 1 - compute_kbm_confidence(
            fit.judge, head, [build_kbm_prompt(examples.questions[place]) for place in places]
        )

    shown = sum(_has_passage_lesson(examples.rows[place]) for place in examples.split.train)
    options = {
        "head": head,
        "tau_mastery": taus["mastery"],
        "tau_certainty": taus["certainty"],
        PASSAGE_EXAMPLES: shown,
        **fit.options,
    }
    lessons_said = f"{shown} of its lessons had passages" if shown else NO_PASSAGES_NOTE
    notes = [*fit.notes, lessons_said, *_own_verdict(examples, head, taus, raw)]
    return FitResult(f"kbm:{head}", options, frozenset(), SignalRequest(), {}, raw, notes=notes, files=fit.files)


def _own_verdict(
    examples: Examples, head: str, taus: dict[str, float], raw: Callable[[Sequence[int]], FloatArray]
) -> list[str]:
    """How the judge's own True or False does on the test split, against its own label."""
    test = examples.split.test.tolist()
    if not test:
        return []
    place = KBM_HEADS.index(head)
    known = np.array(
        [make_kbm_labels(side, taus)[place] for i in test if (side := examples.rows[i].closed)], dtype=bool
    )
    said = raw(test) < RAW_THRESHOLD
    right, majority = float((said == known).mean()), max(float(known.mean()), 1 - float(known.mean()))
    return [
        f"its own verdict (P(True) > P(False)) on the test split: '{head} >= {taus[head]:g}' told right for "
        f"{right:.1%} (majority {majority:.1%}); it says True for {float(said.mean()):.1%}. "
        "Decide by it: --gate DIR,verdict=own"
    ]


def _lessons(
    judge: CausalJudge, examples: Examples, place: int, taus: dict[str, float], limit: int
) -> list[TrainingExample]:
    """The bare question with the closed-book labels; with passages, where there are any, the open-book ones."""
    row, question = examples.rows[place], examples.questions[place]
    pairs = [(row.closed, build_kbm_prompt(question))]
    if _has_passage_lesson(row):
        pairs.append((row.open, render_kbm_prompt(judge, question, row.passages, limit)))
    return [_lesson(judge, text, *make_kbm_labels(side, taus)) for side, text in pairs if side is not None]


def _lesson(judge: CausalJudge, text: str, masters: bool, is_certain: bool) -> TrainingExample:
    word = KBM_LABELS[0] if masters else KBM_LABELS[1]
    return TrainingExample(encode_kbm_answer(judge, text, word), (float(masters), float(is_certain)))


def make_kbm_labels(side: GradedAnswer, taus: dict[str, float]) -> tuple[bool, bool]:
    """(mastery, certainty) as True or False; the known region [tau, 1] includes its edge."""
    return (side.mastery or 0.0) >= taus["mastery"], (side.certainty or 0.0) >= taus["certainty"]


def choose_tau(examples: Examples, head: str) -> float:
    """The threshold that answers most dev questions right when those at or above it skip retrieval."""
    rows = [examples.rows[place] for place in examples.split.dev]
    usable = [row for row in rows if row.open is not None and row.open.correct is not None]
    if not usable:
        return DEFAULT_TAU
    return max(TAU_GRID, key=lambda tau: sum(_right(row, head, tau) for row in usable))


def _right(row: LabelRow, head: str, tau: float) -> bool:
    skips = row.closed is not None and getattr(row.closed, head) >= tau
    side = row.closed if skips else row.open
    return bool(side and side.correct)


def _has_passage_lesson(row: LabelRow) -> bool:
    return bool(row.passages) and _sampled(row.open)


def _sampled(side: GradedAnswer | None) -> bool:
    return side is not None and side.mastery is not None and side.certainty is not None


def _check(examples: Examples, head: str, tau: float | None) -> None:
    if head not in KBM_HEADS:
        raise BadSetting(f"kbm: head is '{head}'; allowed: {', '.join(KBM_HEADS)}.")
    if tau is not None and not 0 < tau <= 1:
        raise BadSetting(f"kbm: tau is {tau}; it must be above 0 and at most 1.")
    missing = sum(not _sampled(row.closed) for row in examples.rows)
    if missing:
        raise BadInput(
            f"kbm learns mastery and certainty, which {missing} of {len(examples.rows)} rows do not have. "
            "Label with samples: knowgate label --samples 30."
        )
