"""Fitting the gate of expected gain: one judge learns where the LLM's answer is right and where documents' would be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from knowgate.errors import BadSetting
from knowgate.fitting.examples import Examples
from knowgate.fitting.fit_options import Wanted
from knowgate.fitting.fit_result import FitResult
from knowgate.fitting.judges.answer import (
    ANY_BASE,
    check_answers,
    check_learnable,
    cost_note,
    tokens_read,
    usual_training,
)
from knowgate.fitting.judges.artefact import fit_judge
from knowgate.fitting.judges.crew import FOLDS, SEEDS, crew
from knowgate.fitting.judges.lessons import Lesson
from knowgate.fitting.judges.schools import answer_school
from knowgate.fitting.judges.settings import FULL
from knowgate.fitting.steps import WatchFit, unwatched
from knowgate.gates import ANSWER_LABELS, ANSWER_PROMPTS, AnswerJudge, answer_cuts, gain_needs, is_encoder
from knowgate.signals import draft_texts
from knowgate.statistics import Floats
from knowgate.types import Signal, Want

if TYPE_CHECKING:
    from knowgate.models import MarkedTokens

RATE = 7e-5  # two tasks in one adapter: between the judge's rate and the arbiter's, which diverged at the judge's


def fit_gain(
    examples: Annotated[Examples, Wanted(target="benefit", reads_states=False)],
    *,
    base: Annotated[str | None, ANY_BASE] = None,
    tokens: Annotated[int, "Answer tokens it reads, at least 1."] = 64,
    seeds: Annotated[int, SEEDS] = 1,
    folds: Annotated[int, FOLDS] = 0,
    epochs: Annotated[int | None, "Walks over the examples. Default: 2; of encoders 4."] = None,
    learning_rate: Annotated[float | None, "Default: 7e-5; 1e-5 with full; 3e-5 for mpnet."] = None,
    batch: Annotated[int, "Examples per update."] = 32,
    full: Annotated[bool, FULL] = False,
    bits: Annotated[int, "4 or 8: of the base's weights (CUDA, LoRA)."] = 0,
    seed: int = 0,
    work: Path,
    watch: WatchFit = unwatched,
) -> FitResult:
    """A small model learns whether the LLM's answer is right, and whether documents would give a right one."""
    _check(examples, tokens)
    small, read = is_encoder(base or ""), tokens_read(examples, tokens)
    check_learnable(bits, full=full or small)
    check_answers(examples, read)
    rate = RATE if learning_rate is None and not (full or small) else learning_rate
    training = usual_training(base, epochs, batch, rate, full=full, seed=seed)
    members = crew(examples.split, training, seeds, folds, [question.text for question in examples.questions])
    spec, texts = base or str(examples.settings["model"]), draft_texts(examples.readings)

    def asked(what: str, judge: AnswerJudge, places: Sequence[int]) -> list[MarkedTokens]:
        return answer_cuts(what, judge, [examples.questions[i] for i in places], [texts[i] for i in places], read)

    def lessons(judge: AnswerJudge, places: Sequence[int]) -> list[Lesson]:
        closed, opened = examples.trial.closed_right, examples.trial.always_right
        sought = [place for place in places if examples.rows[place].open is not None]
        own = zip(asked("judge", judge, places), closed[list(places)], strict=True)
        found = zip(asked("search", judge, sought), opened[sought], strict=True)
        return [Lesson(cut, (float(right),)) for cut, right in (*own, *found)]

    def both(judge: AnswerJudge, places: Sequence[int]) -> list[MarkedTokens]:
        return asked("judge", judge, places) + asked("search", judge, places)

    school = answer_school(spec, bits)
    prompts = ANSWER_PROMPTS["judge"].templates
    fit = fit_judge(members, ANSWER_LABELS, prompts, lessons, school=school, base=spec, work=work, watch=watch)

    def raw(places: Sequence[int]) -> Floats:
        known, found = (fit.known(asked(what, fit.judge, places), places) for what in ("judge", "search"))
        return gain_needs(known, found)

    notes = [*fit.notes, cost_note(fit, both, len(texts))]
    whole = fit.learnt == frozenset(range(len(texts)))
    needs, want = frozenset({Signal.DRAFT}), Want(draft_tokens=read)
    return FitResult("gain", {"tokens": read, **fit.options}, needs, want, {}, raw, notes, fit.files, whole)


def _check(examples: Examples, tokens: int) -> None:
    if tokens < 1:
        raise BadSetting(f"gain: tokens is {tokens}; it must be at least 1: what a search adds depends on the answer.")
    if examples.target != "benefit":
        raise BadSetting(
            f"gain is fitted on 'benefit': its need says what a search adds. Leave --target {examples.target} away, or "
            "fit a judge: knowgate fit judge"
        )
