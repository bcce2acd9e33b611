"""Fit KBM: a judge that predicts mastery and certainty of a question, alone or with passages.

Mastery is the share of sampled answers that are right; certainty is how much the sampled answers agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from knowgate.core.options import Count, option, with_options
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput
from knowgate.gates import kbm as kbm_gate
from knowgate.gates.fitted_gate import RAW_THRESHOLD
from knowgate.gates.judges.causal_judge import CausalJudge
from knowgate.gates.kbm import KBM_HEADS, KBM_LABELS, PASSAGE_EXAMPLES
from knowgate.stats.metrics import FloatArray
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges.ensemble import fit_judge, plan_ensemble
from knowgate.training.judges.trainable_models import JudgeSpec, TrainingExample
from knowgate.training.judges.training_options import JudgeFitOptions, JudgeTrainingOptions
from knowgate.types import SignalRequest

DEFAULT_TAU = 0.8  # the paper's turning point (section 3): its known region is [0.8, 1]
TAU_GRID = (0.8, 0.7, 0.9, 0.6, 0.5, 1.0, 0.4, 0.3, 0.2, 0.1)  # nearest to the paper's first, which wins ties
NO_PASSAGES_NOTE = (
    "it was trained without passages, because no open-book answers were sampled, so it cannot be used as a second "
    "look: label with open_samples=30 for that"
)


class KBMOptions(JudgeFitOptions):
    """Options of `fit("kbm", ...)`, the knowledge boundary model."""

    head: Literal["mastery", "certainty"] = option(
        "mastery",
        "What the gate decides by: `mastery` (the share of right samples) or `certainty` (how far the samples agree).",
    )
    tau: float | None = option(
        None, "Lowest mastery or certainty of a known question. Default: the best value on the dev split.", gt=0, le=1
    )
    epochs: Count = option(3, "Passes over the training examples.")


@with_options(KBMOptions)
def fit_kbm(
    examples: Annotated[Examples, ExampleRequirements(target="known", reads_states=False)],
    *,
    options: KBMOptions,
    training: JudgeTrainingOptions | None = None,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Fit the KBM gate (knowledge boundary model): a judge predicts how well the LLM knows an answer.

    It predicts mastery (the share of sampled answers that are right) and certainty (how much they agree).

    Args:
        examples: The training data; its rows need sampled answers.
        options: Options of the gate.
        training: Hyperparameters, instead of those of the options.
        seed: Seed of the training.
        work: Folder for checkpoints.
        watch: Called with the progress.
    """
    _check_samples(examples)
    head = options.head
    taus = {name: options.tau or choose_tau(examples, name) for name in KBM_HEADS}
    if training is None:
        training = JudgeTrainingOptions(options.epochs, rate=options.learning_rate, full=options.full, seed=seed)
    spec = JudgeSpec(options.base or str(examples.settings["model"]), KBM_LABELS, "kbm")
    make_examples = functools.partial(_make_examples, examples, taus, training.max_tokens)
    fitted = fit_judge(spec, plan_ensemble(examples.split, training), make_examples, work=work, watch=watch)
    score_rows = functools.partial(_score_rows, examples, fitted.judge, head)
    n_with_passages = sum(_has_passage_labels(examples.rows[index]) for index in examples.split.train)
    stored_options = {
        "head": head,
        "tau_mastery": taus["mastery"],
        "tau_certainty": taus["certainty"],
        PASSAGE_EXAMPLES: n_with_passages,
        **fitted.options,
    }
    passages_note = f"{n_with_passages} of its examples had passages" if n_with_passages else NO_PASSAGES_NOTE
    notes = [*fitted.notes, passages_note, *_measure_verdict(examples, head, taus, score_rows)]
    return FitResult(
        f"kbm:{head}", stored_options, frozenset(), SignalRequest(), {}, score_rows, notes=notes, files=fitted.files
    )


def _score_rows(examples: Examples, judge: CausalJudge, head: str, indices: Sequence[int]) -> FloatArray:
    """Return the judge's probability that the questions with these indices are not known."""
    prompts = [kbm_gate.render_kbm_prompt(judge, examples.questions[index]) for index in indices]
    return 1 - kbm_gate.compute_kbm_confidence(judge, head, prompts)


def _measure_verdict(
    examples: Examples, head: str, taus: Mapping[str, float], score_rows: Callable[[Sequence[int]], FloatArray]
) -> list[str]:
    """Measure on the test split how often the judge's raw prediction is right.

    Args:
        examples: The label rows.
        head: The indicator that the gate decides by: 'mastery' or 'certainty'.
        taus: Thresholds by indicator. A question is known if its indicator is at least the threshold.
        score_rows: Returns the judge's probability that a question is not known, for the rows with the given indices.

    Returns:
        One note for the card; empty without test questions.
    """
    test = examples.split.test.tolist()
    if not test:
        return []
    column = KBM_HEADS.index(head)
    rows = [examples.rows[index] for index in test]
    known = np.array([make_kbm_labels(row.closed, taus)[column] for row in rows if row.closed], dtype=bool)
    predicted = score_rows(test) < RAW_THRESHOLD
    accuracy = float((predicted == known).mean())
    share_known = float(known.mean())
    majority = max(share_known, 1 - share_known)
    return [
        f"its own verdict (P(True) > P(False)) on the test split: '{head} >= {taus[head]:g}' is predicted right for "
        f"{accuracy:.1%} (majority {majority:.1%}); it says True for {float(predicted.mean()):.1%}. Decide by it: "
        "gate='DIR,verdict=own'"
    ]


def _make_examples(
    examples: Examples, taus: Mapping[str, float], max_tokens: int, judge: CausalJudge, indices: Sequence[int]
) -> list[TrainingExample]:
    """Make the training examples of the rows: the question alone, and the question with passages.

    Args:
        examples: The label rows.
        taus: Lowest mastery and certainty that count as high.
        max_tokens: Maximum length of a prompt; longer passages are cut.
        judge: The model to train, whose tokenizer is used.
        indices: Indices of the rows.
    """
    made = []
    for index in indices:
        row, question = examples.rows[index], examples.questions[index]
        if row.closed is not None:
            made.append(_make_example(judge, kbm_gate.render_kbm_prompt(judge, question), row.closed, taus))
        if row.open is not None and _has_passage_labels(row):
            prompt = kbm_gate.render_kbm_prompt(judge, question, row.passages, max_tokens)
            made.append(_make_example(judge, prompt, row.open, taus))
    return made


def _make_example(judge: CausalJudge, text: str, answer: GradedAnswer, taus: Mapping[str, float]) -> TrainingExample:
    """Make a training example from a prompt and the labels of an answer."""
    has_mastery, is_certain = make_kbm_labels(answer, taus)
    mastery_label = KBM_LABELS[0] if has_mastery else KBM_LABELS[1]  # the judge reads it before it predicts certainty
    prompt = kbm_gate.encode_kbm_answer(judge, text, mastery_label)
    return TrainingExample(prompt, (float(has_mastery), float(is_certain)))


def make_kbm_labels(answer: GradedAnswer, taus: Mapping[str, float]) -> tuple[bool, bool]:
    """Return whether mastery and certainty of an answer reach their thresholds (taus).

    Mastery is the share of right samples, certainty their agreement.
    """
    has_mastery = (answer.mastery or 0.0) >= taus["mastery"]
    is_certain = (answer.certainty or 0.0) >= taus["certainty"]
    return has_mastery, is_certain


def choose_tau(examples: Examples, head: str) -> float:
    """Choose the threshold tau with the most right answers on the dev split.

    Questions whose mastery or certainty is at or above tau get no passages.

    Args:
        examples: The label rows with their split.
        head: The indicator: 'mastery' (share of sampled answers that are right) or 'certainty' (their agreement).

    Returns:
        Tau. If no dev row has a graded answer with passages, the paper's value.
    """
    rows = [examples.rows[index] for index in examples.split.dev]
    usable = [row for row in rows if row.open is not None and row.open.correct is not None]
    if not usable:
        return DEFAULT_TAU
    return max(TAU_GRID, key=lambda tau: sum(_is_right(row, head, tau) for row in usable))


def _is_right(row: LabelRow, head: str, tau: float) -> bool:
    """Return whether a question is answered right with the threshold `tau`.

    If its indicator (`head`) is at or above `tau`, the answer without passages is used.
    """
    skips = row.closed is not None and getattr(row.closed, head) >= tau
    answer = row.closed if skips else row.open
    return bool(answer and answer.correct)


def _has_passage_labels(row: LabelRow) -> bool:
    """Return whether answers with passages were sampled."""
    return bool(row.passages) and _is_sampled(row.open)


def _is_sampled(answer: GradedAnswer | None) -> bool:
    """Return whether answers were sampled, so that mastery and certainty are known."""
    return answer is not None and answer.mastery is not None and answer.certainty is not None


def _check_samples(examples: Examples) -> None:
    """Raise BadInput if a question has no sampled answers."""
    n_missing = sum(not _is_sampled(row.closed) for row in examples.rows)
    if n_missing:
        raise BadInput(f"gate 'kbm' needs sampled answers. {n_missing} questions have none. Label with samples=30.")
