"""Fitting the fine-tuned arbiter: one judge learns of every pair whether either answer is right, both shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np

from knowgate.errors import BadSetting
from knowgate.gates.arbiters.lora import ARBITER_LABELS, ARBITER_TEMPLATES, encode_answer_pairs
from knowgate.gates.judges.causal_judge import CausalJudge
from knowgate.models.prompts.judges import ARBITER_SIDES
from knowgate.stats.metrics import FloatArray
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult
from knowgate.training.fit_function import FitProgressCallback, ignore_progress
from knowgate.training.judges.answer_judge import CAUSAL_BASE_HELP, make_answer_training
from knowgate.training.judges.ensemble import FOLDS_HELP, SEEDS_HELP, fit_judge, plan_ensemble
from knowgate.training.judges.trainable_models import CAUSAL_JUDGE, TrainingExample
from knowgate.training.judges.training_options import EPOCHS_HELP, FULL_HELP

ARBITER_LEARNING_RATE = 5e-5  # at 1e-4, which suits a judge of one answer, this one diverged (METHODS, section 9)
MAX_PROMPT_TOKENS = {False: 512, True: 1580}  # tokens of a lesson, without passages and with


def fit_lora_arbiter(
    pairs: AnswerPairs,
    *,
    base: Annotated[str | None, CAUSAL_BASE_HELP] = None,
    tokens: Annotated[int, "Tokens of each answer it reads."] = 64,
    passages: Annotated[int, "Passages it is shown, 0 for none."] = 0,
    seeds: Annotated[int, SEEDS_HELP] = 1,
    folds: Annotated[int, FOLDS_HELP] = 0,
    epochs: Annotated[int, EPOCHS_HELP] = 2,
    learning_rate: Annotated[float | None, "Default: 5e-5, and 1e-5 with full."] = None,
    full: Annotated[bool, FULL_HELP] = False,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> ArbiterResult:
    """One judge that is asked twice: is the answer from memory right, is the answer from documents right?"""
    _check(pairs, tokens, passages)
    rate = learning_rate or (None if full else ARBITER_LEARNING_RATE)
    training = replace(
        make_answer_training(epochs, 32, rate, full=full, seed=seed), max_tokens=MAX_PROMPT_TOKENS[passages > 0]
    )
    members = plan_ensemble(pairs.split, training, seeds, folds, [both.question.text for both in pairs.answers])
    truths = dict(zip(ARBITER_SIDES, (pairs.closed_right, pairs.open_right), strict=True))

    def lessons(judge: CausalJudge, places: Sequence[int]) -> list[TrainingExample]:
        shown = [pairs.answers[place] for place in places]
        return [
            TrainingExample(cut, (float(truths[side][place]),))
            for side in ARBITER_SIDES
            for place, cut in zip(places, encode_answer_pairs(judge, shown, side, tokens, passages), strict=True)
        ]

    spec = base or str(pairs.trial.settings["model"])
    fit = fit_judge(
        members, ARBITER_LABELS, ARBITER_TEMPLATES, lessons, school=CAUSAL_JUDGE, base=spec, work=work, watch=watch
    )

    def raw(places: Sequence[int]) -> FloatArray:
        shown = [pairs.answers[place] for place in places]
        known = [
            fit.known(encode_answer_pairs(fit.judge, shown, side, tokens, passages), places) for side in ARBITER_SIDES
        ]
        found: FloatArray = np.stack(known, axis=1)
        return found

    options = {"tokens": tokens, "passages": passages, **fit.options}
    whole = fit.learnt == frozenset(range(len(pairs.answers)))
    return ArbiterResult(
        "lora", options, frozenset(), passages > 0, raw, notes=fit.notes, files=fit.files, learnt_all=whole
    )


def _check(pairs: AnswerPairs, tokens: int, passages: int) -> None:
    if tokens < 1:
        raise BadSetting(f"fit arbiter: tokens is {tokens}; it must be at least 1.")
    if passages < 0:
        raise BadSetting(f"fit arbiter: passages is {passages}; it must be 0 (none) or more.")
    if passages and not any(both.passages for both in pairs.answers):
        raise BadSetting(
            "fit arbiter: the label runs keep no passages, so the judge cannot be shown any. Label with --index DIR, "
            "or leave --passages away."
        )
