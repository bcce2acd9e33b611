"""Fit KBM (knowledge boundary model): a judge that predicts mastery and certainty of a question, alone or with passages.

Mastery is the share of sampled answers that are right; certainty is how much the sampled answers agree. Both are called
indicators here. The judge predicts whether an indicator is at least a threshold (tau in the paper).
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

DEFAULT_THRESHOLD = 0.8  # the paper's turning point (section 3): its known region is [0.8, 1]
THRESHOLD_GRID = (0.8, 0.7, 0.9, 0.6, 0.5, 1.0, 0.4, 0.3, 0.2, 0.1)  # nearest to the paper's first, which wins ties
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
    # The lowest mastery, and the lowest certainty, with which a question counts as known.
    thresholds = {name: options.tau or choose_threshold(examples, name) for name in KBM_HEADS}
    if training is None:
        training = JudgeTrainingOptions(options.epochs, rate=options.learning_rate, full=options.full, seed=seed)
    spec = JudgeSpec(options.base or str(examples.settings["model"]), KBM_LABELS, "kbm")
    make_examples = functools.partial(_make_examples, examples, thresholds, training.max_tokens)
    fitted = fit_judge(spec, plan_ensemble(examples.split, training), make_examples, work=work, watch=watch)
    score_rows = functools.partial(_score_rows, examples, fitted.judge, head)
    n_with_passages = sum(_has_passage_labels(examples.rows[index]) for index in examples.split.train)
    stored_options = {
        "head": head,
        "tau_mastery": thresholds["mastery"],
        "tau_certainty": thresholds["certainty"],
        PASSAGE_EXAMPLES: n_with_passages,
        **fitted.options,
    }
    passages_note = f"{n_with_passages} of its examples had passages" if n_with_passages else NO_PASSAGES_NOTE
    notes = [*fitted.notes, passages_note, *_measure_verdict(examples, head, thresholds, score_rows)]
    return FitResult(
        f"kbm:{head}", stored_options, frozenset(), SignalRequest(), {}, score_rows, notes=notes, files=fitted.files
    )


def _score_rows(examples: Examples, judge: CausalJudge, head: str, indices: Sequence[int]) -> FloatArray:
    """Return the judge's probability that the LLM does not know the answer, for the questions with these indices."""
    prompts = [kbm_gate.render_kbm_prompt(judge, examples.questions[index]) for index in indices]
    return 1 - kbm_gate.compute_kbm_confidence(judge, head, prompts)


def _measure_verdict(
    examples: Examples, head: str, thresholds: Mapping[str, float], score_rows: Callable[[Sequence[int]], FloatArray]
) -> list[str]:
    """Measure on the test split how often the judge's own verdict (its uncalibrated prediction) is right.

    Args:
        examples: The label rows.
        head: The indicator that the gate decides by: 'mastery' or 'certainty'.
        thresholds: Thresholds by indicator. A question is known if its indicator is at least the threshold.
        score_rows: Returns the judge's probability that a question is not known, for the rows with the given indices.

    Returns:
        One note for the card; empty without test questions.
    """
    test = [index for index in examples.split.test.tolist() if examples.rows[index].closed]
    if not test:
        return []
    known = np.array([getattr(examples.rows[index].closed, head) >= thresholds[head] for index in test])
    predicted = score_rows(test) < RAW_THRESHOLD
    accuracy = float((predicted == known).mean())
    majority = float(max(known.mean(), 1 - known.mean()))  # accuracy of predicting the more frequent class
    return [
        f"its own verdict (P(True) > P(False)) on the test split: '{head} >= {thresholds[head]:g}' is predicted right for "
        f"{accuracy:.1%} (majority {majority:.1%}); it says True for {float(predicted.mean()):.1%}. Decide by it: "
        "gate='DIR,verdict=own'"
    ]


def _make_examples(
    examples: Examples, thresholds: Mapping[str, float], max_tokens: int, judge: CausalJudge, indices: Sequence[int]
) -> list[TrainingExample]:
    """Make the training examples of the rows: the question alone, and the question with passages.

    Args:
        examples: The label rows.
        thresholds: Lowest mastery and lowest certainty with which a question counts as known.
        max_tokens: Maximum length of a prompt; longer passages are cut.
        judge: The model to train, whose tokenizer is used.
        indices: Indices of the rows.
    """
    made = []
    for index in indices:
        row, question = examples.rows[index], examples.questions[index]
        if row.closed is not None:
            made.append(_make_example(judge, kbm_gate.render_kbm_prompt(judge, question), row.closed, thresholds))
        if row.open is not None and _has_passage_labels(row):
            prompt = kbm_gate.render_kbm_prompt(judge, question, row.passages, max_tokens)
            made.append(_make_example(judge, prompt, row.open, thresholds))
    return made


def _make_example(
    judge: CausalJudge, text: str, answer: GradedAnswer, thresholds: Mapping[str, float]
) -> TrainingExample:
    """Make a training example from a prompt and an answer. Its targets say whether mastery and certainty are high."""
    has_mastery, is_certain = make_kbm_labels(answer, thresholds)
    true_label, false_label = KBM_LABELS
    # The judge predicts certainty after it has read the label of mastery, so the prompt contains this label.
    prompt = kbm_gate.encode_kbm_answer(judge, text, true_label if has_mastery else false_label)
    return TrainingExample(prompt, (float(has_mastery), float(is_certain)))


def make_kbm_labels(answer: GradedAnswer, thresholds: Mapping[str, float]) -> tuple[bool, bool]:
    """Return whether the mastery of an answer reaches its threshold, and whether the certainty does.

    Mastery is the share of right samples, certainty the agreement of the samples.
    """
    has_mastery = (answer.mastery or 0.0) >= thresholds["mastery"]
    is_certain = (answer.certainty or 0.0) >= thresholds["certainty"]
    return has_mastery, is_certain


def choose_threshold(examples: Examples, head: str) -> float:
    """Choose the threshold of an indicator (tau in the paper) that gives the most right answers on the dev split.

    Questions whose indicator is at or above the threshold are answered without passages, all others with passages.

    Args:
        examples: The label rows with their split.
        head: The indicator: 'mastery' (share of sampled answers that are right) or 'certainty' (their agreement).

    Returns:
        The threshold. If no dev row has a graded answer with passages, the paper's value.
    """
    rows = [examples.rows[index] for index in examples.split.dev]
    usable = [row for row in rows if row.open is not None and row.open.correct is not None]
    if not usable:
        return DEFAULT_THRESHOLD
    return max(THRESHOLD_GRID, key=lambda threshold: sum(_is_right(row, head, threshold) for row in usable))


def _is_right(row: LabelRow, head: str, threshold: float) -> bool:
    """Return whether a question is answered right if its indicator `head` is compared with a threshold.

    At or above the threshold, the answer without passages is given, otherwise the answer with passages.
    """
    skips = row.closed is not None and getattr(row.closed, head) >= threshold
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
