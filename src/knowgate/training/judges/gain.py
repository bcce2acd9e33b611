"""Fitting the gate of expected gain: one judge learns where the LLM's answer is right and where documents' would be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from knowgate.data.signals.vectors import draft_texts
from knowgate.errors import BadSetting
from knowgate.gates.judges import ANSWER_LABELS, ANSWER_PROMPTS, AnswerJudge, compute_gain_needs, encode_answers
from knowgate.gates.judges.encoder_judge import is_encoder_spec
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges.answer_judge import (
    ANY_BASE_HELP,
    check_judge_answers,
    check_trainable_bits,
    describe_cost,
    limit_answer_tokens,
    make_default_training,
)
from knowgate.training.judges.ensemble import FOLDS_HELP, SEEDS_HELP, fit_judge, plan_ensemble
from knowgate.training.judges.trainable_models import TrainingExample, select_judge_kind
from knowgate.training.judges.training_options import FULL_HELP
from knowgate.types import Signal, SignalRequest

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

GAIN_LEARNING_RATE = (
    7e-5  # two tasks in one adapter: between the judge's rate and the arbiter's, which diverged at the judge's
)


def fit_gain(
    examples: Annotated[Examples, ExampleRequirements(target="benefit", reads_states=False)],
    *,
    base: Annotated[str | None, ANY_BASE_HELP] = None,
    tokens: Annotated[int, "Answer tokens it reads, at least 1."] = 64,
    seeds: Annotated[int, SEEDS_HELP] = 1,
    folds: Annotated[int, FOLDS_HELP] = 0,
    epochs: Annotated[int | None, "Walks over the examples. Default: 2; of encoders 4."] = None,
    learning_rate: Annotated[float | None, "Default: 7e-5; 1e-5 with full; 3e-5 for mpnet."] = None,
    batch: Annotated[int, "Examples per update."] = 32,
    full: Annotated[bool, FULL_HELP] = False,
    bits: Annotated[int, "4 or 8: of the base's weights (CUDA, LoRA)."] = 0,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """A small model learns whether the LLM's answer is right, and whether documents would give a right one."""
    _check(examples, tokens)
    small, read = is_encoder_spec(base or ""), limit_answer_tokens(examples, tokens)
    check_trainable_bits(bits, full=full or small)
    check_judge_answers(examples, read)
    rate = GAIN_LEARNING_RATE if learning_rate is None and not (full or small) else learning_rate
    training = make_default_training(base, epochs, batch, rate, full=full, seed=seed)
    members = plan_ensemble(examples.split, training, seeds, folds, [question.text for question in examples.questions])
    spec, texts = base or str(examples.settings["model"]), draft_texts(examples.readings)

    def asked(what: str, judge: AnswerJudge, places: Sequence[int]) -> list[LabelPromptTokens]:
        return encode_answers(what, judge, [examples.questions[i] for i in places], [texts[i] for i in places], read)

    def lessons(judge: AnswerJudge, places: Sequence[int]) -> list[TrainingExample]:
        closed, opened = examples.trial.closed_right, examples.trial.always_right
        sought = [place for place in places if examples.rows[place].open is not None]
        own = zip(asked("judge", judge, places), closed[list(places)], strict=True)
        found = zip(asked("search", judge, sought), opened[sought], strict=True)
        return [TrainingExample(cut, (float(right),)) for cut, right in (*own, *found)]

    def both(judge: AnswerJudge, places: Sequence[int]) -> list[LabelPromptTokens]:
        return asked("judge", judge, places) + asked("search", judge, places)

    school = select_judge_kind(spec, bits)
    prompts = ANSWER_PROMPTS["judge"].templates
    fit = fit_judge(members, ANSWER_LABELS, prompts, lessons, school=school, base=spec, work=work, watch=watch)

    def raw(places: Sequence[int]) -> FloatArray:
        known, found = (fit.known(asked(what, fit.judge, places), places) for what in ("judge", "search"))
        return compute_gain_needs(known, found)

    notes = [*fit.notes, describe_cost(fit, both, len(texts))]
    whole = fit.learnt == frozenset(range(len(texts)))
    needs, want = frozenset({Signal.DRAFT}), SignalRequest(draft_tokens=read)
    return FitResult("gain", {"tokens": read, **fit.options}, needs, want, {}, raw, notes, fit.files, whole)


def _check(examples: Examples, tokens: int) -> None:
    if tokens < 1:
        raise BadSetting(f"gain: tokens is {tokens}; it must be at least 1: what a search adds depends on the answer.")
    if examples.target != "benefit":
        raise BadSetting(
            f"gain is fitted on 'benefit': its need says what a search adds. Leave --target {examples.target} away, or "
            "fit a judge: knowgate fit judge"
        )
