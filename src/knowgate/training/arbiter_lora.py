"""Fit the fine-tuned arbiter: a judge reads both answers and learns to say of each whether it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from knowgate.core.options import Count, WholeNumber, option, with_options
from knowgate.errors import BadSetting
from knowgate.gates.arbiters.lora import ARBITER_LABELS, ARBITER_TEMPLATES, encode_answer_pairs
from knowgate.gates.judges.causal_judge import CausalJudge
from knowgate.models.prompts.questions import ARBITER_SIDES
from knowgate.stats.metrics import FloatArray
from knowgate.training.arbiter_pairs import AnswerPairs, ArbiterResult
from knowgate.training.fit_function import FitProgressCallback, ignore_progress
from knowgate.training.judges.answer_judge import make_answer_training
from knowgate.training.judges.ensemble import FittedJudge, fit_judge, plan_ensemble
from knowgate.training.judges.trainable_models import JudgeSpec, TrainingExample
from knowgate.training.judges.training_options import EnsembleFitOptions, JudgeTrainingOptions

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

ARBITER_LEARNING_RATE = 5e-5  # at 1e-4, which suits a judge of one answer, training diverged (METHODS, section 9)
MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS_WITH_PASSAGES = 512, 1580


class LoraArbiterOptions(EnsembleFitOptions):
    """Options of `fit_arbiter(mode="lora", ...)`."""

    base: str | None = option(
        None, "Model to fine-tune: smollm, hf:NAME or gguf:FILE. Default: the LLM whose answers were labeled."
    )
    tokens: Count = option(64, "Maximum number of tokens of each answer that the judge reads.")
    passages: WholeNumber = option(0, "Number of passages that the judge reads; 0 for none.")
    learning_rate: float | None = option(
        None, "Highest learning rate of the training. Default: 5e-5, or 1e-5 with `full`.", gt=0
    )


@with_options(LoraArbiterOptions)
def fit_lora_arbiter(
    pairs: AnswerPairs,
    *,
    options: LoraArbiterOptions,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> ArbiterResult:
    """Fine-tune a judge as arbiter (it picks one of the two answers).

    The judge predicts whether each answer is right.
    """
    _check_passages(pairs, options.passages)
    base = options.base or str(pairs.table.settings["model"])
    spec = JudgeSpec(base, ARBITER_LABELS, ARBITER_TEMPLATES)
    texts = [pair.question.text for pair in pairs.answers]
    training = _make_training(options, seed)
    members = plan_ensemble(pairs.split, training, options.seeds, options.folds, texts)
    encoder = PairEncoder(pairs, options.tokens, options.passages)
    fitted = fit_judge(spec, members, encoder.make_examples, work=work, watch=watch)
    return ArbiterResult(
        "lora",
        options={"tokens": options.tokens, "passages": options.passages, **fitted.options},
        needs=frozenset(),
        wants_passages=options.passages > 0,
        raw=partial(_predict_right, fitted, encoder),
        notes=fitted.notes,
        files=fitted.files,
        uses_test_split=len(fitted.seen) == len(pairs.answers),
    )


def _make_training(options: LoraArbiterOptions, seed: int) -> JudgeTrainingOptions:
    """Return the hyperparameters. Prompts may be longer if they contain passages."""
    default_rate = None if options.full else ARBITER_LEARNING_RATE  # None: the usual rate for training all weights
    rate = options.learning_rate or default_rate
    training = make_answer_training(options.epochs, batch=32, rate=rate, full=options.full, seed=seed)
    max_tokens = MAX_PROMPT_TOKENS_WITH_PASSAGES if options.passages else MAX_PROMPT_TOKENS
    return replace(training, max_tokens=max_tokens)


def _predict_right(fitted: FittedJudge, encoder: PairEncoder, indices: Sequence[int]) -> FloatArray:
    """Predict how probably the closed-book (column 0) and open-book answers are right."""
    columns = []
    for side in ARBITER_SIDES:
        prompts = encoder.encode(fitted.judge, indices, side)
        columns.append(fitted.predict_known(prompts, indices))
    return np.stack(columns, axis=1)


def _check_passages(pairs: AnswerPairs, n_passages: int) -> None:
    """Raise BadSetting if the judge should read passages but the label runs contain none."""
    if n_passages and not any(pair.passages for pair in pairs.answers):
        raise BadSetting(f"passages={n_passages} needs answers with passages. Label with `index`, or use passages=0.")


@dataclass(frozen=True)
class PairEncoder:
    """Encodes two answers to a question, with and without passages, as a prompt for a judge.

    The prompt asks about one side: "memory" (without passages) or "documents" (with passages).

    Attributes:
        pairs: The pairs of answers and their grades.
        tokens: Maximum number of tokens of each answer to show.
        passages: Maximum number of passages to show; 0 for none.
    """

    pairs: AnswerPairs
    tokens: int
    passages: int

    def encode(self, judge: CausalJudge, indices: Sequence[int], side: str) -> list[LabelPromptTokens]:
        """Encode prompts about the answers of one side ("memory" or "documents")."""
        pairs = [self.pairs.answers[index] for index in indices]
        return encode_answer_pairs(judge, pairs, side, self.tokens, self.passages)

    def make_examples(self, judge: CausalJudge, indices: Sequence[int]) -> list[TrainingExample]:
        """Make two training examples per pair: about the closed-book answer, and about the open-book answer.

        The target is 1 for a right answer and 0 for a wrong one.
        """
        made = []
        grades = (self.pairs.closed_book_right, self.pairs.open_book_right)  # in the order of ARBITER_SIDES
        for side, is_right in zip(ARBITER_SIDES, grades, strict=True):
            prompts = self.encode(judge, indices, side)
            targets = [(float(is_right[index]),) for index in indices]
            made += list(map(TrainingExample, prompts, targets))
        return made
