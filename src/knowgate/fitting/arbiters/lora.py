"""Fitting the fine-tuned arbiter: one judge learns of every pair whether either answer is right, both shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np

from knowgate.arbiters import ARBITER_LABELS, ARBITER_PROMPTS, arbiter_cuts
from knowgate.errors import BadSetting
from knowgate.fitting.arbiters.arbiter_result import ArbiterResult
from knowgate.fitting.arbiters.pairs import Pairs
from knowgate.fitting.judges.answer import BASE, answer_training
from knowgate.fitting.judges.artefact import fit_judge
from knowgate.fitting.judges.crew import FOLDS, SEEDS, crew
from knowgate.fitting.judges.lessons import Lesson
from knowgate.fitting.judges.schools import CAUSAL
from knowgate.fitting.judges.settings import EPOCHS, FULL
from knowgate.fitting.steps import WatchFit, unwatched
from knowgate.gates import Judge
from knowgate.prompts import SIDES
from knowgate.statistics import Floats

RATE = 5e-5  # at 1e-4, which suits a judge of one answer, this one diverged (METHODS, section 9)
LONGEST = {False: 512, True: 1580}  # tokens of a lesson, without passages and with


def fit_lora(
    pairs: Pairs,
    *,
    base: Annotated[str | None, BASE] = None,
    tokens: Annotated[int, "Tokens of each answer it reads."] = 64,
    passages: Annotated[int, "Passages it is shown, 0 for none."] = 0,
    seeds: Annotated[int, SEEDS] = 1,
    folds: Annotated[int, FOLDS] = 0,
    epochs: Annotated[int, EPOCHS] = 2,
    learning_rate: Annotated[float | None, "Default: 5e-5, and 1e-5 with full."] = None,
    full: Annotated[bool, FULL] = False,
    seed: int = 0,
    work: Path,
    watch: WatchFit = unwatched,
) -> ArbiterResult:
    """One judge that is asked twice: is the answer from memory right, is the answer from documents right?"""
    _check(pairs, tokens, passages)
    rate = learning_rate or (None if full else RATE)
    training = replace(answer_training(epochs, 32, rate, full=full, seed=seed), max_tokens=LONGEST[passages > 0])
    members = crew(pairs.split, training, seeds, folds, [both.question.text for both in pairs.answers])
    truths = dict(zip(SIDES, (pairs.closed_right, pairs.open_right), strict=True))

    def lessons(judge: Judge, places: Sequence[int]) -> list[Lesson]:
        shown = [pairs.answers[place] for place in places]
        return [
            Lesson(cut, (float(truths[side][place]),))
            for side in SIDES
            for place, cut in zip(places, arbiter_cuts(judge, shown, side, tokens, passages), strict=True)
        ]

    spec = base or str(pairs.trial.settings["model"])
    fit = fit_judge(members, ARBITER_LABELS, ARBITER_PROMPTS, lessons, school=CAUSAL, base=spec, work=work, watch=watch)

    def raw(places: Sequence[int]) -> Floats:
        shown = [pairs.answers[place] for place in places]
        known = [fit.known(arbiter_cuts(fit.judge, shown, side, tokens, passages), places) for side in SIDES]
        found: Floats = np.stack(known, axis=1)
        return found

    options = {"tokens": tokens, "passages": passages, **fit.options}
    whole = fit.learnt == frozenset(range(len(pairs.answers)))
    return ArbiterResult(
        "lora", options, frozenset(), passages > 0, raw, notes=fit.notes, files=fit.files, learnt_all=whole
    )


def _check(pairs: Pairs, tokens: int, passages: int) -> None:
    if tokens < 1:
        raise BadSetting(f"fit arbiter: tokens is {tokens}; it must be at least 1.")
    if passages < 0:
        raise BadSetting(f"fit arbiter: passages is {passages}; it must be 0 (none) or more.")
    if passages and not any(both.passages for both in pairs.answers):
        raise BadSetting(
            "fit arbiter: the label runs keep no passages, so the judge cannot be shown any. Label with --index DIR, "
            "or leave --passages away."
        )
