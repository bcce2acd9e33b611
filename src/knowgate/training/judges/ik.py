"""Fit IK: a fine-tuned judge of question and draft, or a linear classifier of their sentence embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from knowgate.core.options import Count, WholeNumber, option, with_options
from knowgate.data.signals.vectors import draft_texts, text_features
from knowgate.errors import BadSetting
from knowgate.retrieval.embeddings import SentenceEmbedder
from knowgate.training.classifiers import make_scorer, select_train_and_dev, tune_linear
from knowgate.training.examples import MIN_GRADED_ROWS, Examples
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges.answer_judge import AnswerTask, make_answer_training, train_answer_judge
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.judges.training_options import JudgeFitOptions, JudgeTrainingOptions
from knowgate.types import Embedder, Signal, SignalRequest


class IKOptions(JudgeFitOptions):
    """Options of `fit("ik", ...)`."""

    mode: Literal["lora", "text"] = option(
        "lora", "Kind of judge: `lora` (a fine-tuned LLM) or `text` (a linear classifier of embeddings)."
    )
    tokens: WholeNumber = option(32, "Number of draft tokens that the judge reads: 0, 32, 64 or 128 (T in the paper).")
    rows: Count | None = option(None, "Maximum number of training questions (paper: 5,000 or 20,000). Default: all.")


@with_options(IKOptions)
def fit_ik(
    examples: Annotated[Examples, ExampleRequirements(target="known", reads_states=False)],
    *,
    options: IKOptions,
    training: JudgeTrainingOptions | None = None,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """Fit the IK ("I know") gate: a judge predicts whether the LLM knows the answer.

    The judge reads question and draft.

    Args:
        examples: The training data.
        options: Options of the gate.
        training: Hyperparameters of the judge, instead of those of the options.
        seed: Seed of the training.
        work: Folder for checkpoints.
        watch: Called with the progress.
    """
    examples = limit_training_rows(examples, options.rows, seed)
    if options.mode == "text":
        return fit_ik_text(examples, tokens=options.tokens)
    _check_draft_length(examples, options.tokens)
    default = make_answer_training(options.epochs, batch=32, rate=options.learning_rate, full=options.full, seed=seed)
    members = plan_ensemble(examples.split, training or default)
    task = AnswerTask("ik", options.tokens, options.base)
    result = train_answer_judge(task, examples, members, work=work, watch=watch)
    notes = [*_make_notes(examples, options.tokens), *result.notes]
    return replace(result, options={"mode": "lora", **result.options}, notes=notes)


def fit_ik_text(examples: Examples, *, tokens: int = 32, embedder: Embedder | None = None) -> FitResult:
    """Train a classifier of text embeddings to predict whether the LLM knows the answer.

    Args:
        examples: The training data.
        tokens: Maximum number of answer tokens that the classifier reads; 0 for the question alone.
        embedder: Text embedding model. Default: the packaged one.
    """
    encoder = embedder or SentenceEmbedder()
    _check_draft_length(examples, tokens)
    texts = draft_texts(examples.readings) if tokens else [""] * len(examples.questions)
    features = text_features(encoder, examples.questions, texts, tokens)
    tensors = tune_linear(*select_train_and_dev(features, examples)).tensors
    options: dict[str, Any] = {
        "mode": "text",
        "tokens": tokens,
        "embedder": getattr(encoder, "spec", "own"),
        "embedder_fingerprint": encoder.fingerprint,
    }
    needs = frozenset({Signal.DRAFT}) if tokens else frozenset[Signal]()
    request = SignalRequest(draft_tokens=tokens)
    return FitResult(
        "ik", options, needs, request, tensors, make_scorer(tensors, features), _make_notes(examples, tokens)
    )


def limit_training_rows(examples: Examples, rows: int | None, seed: int) -> Examples:
    """Draw `rows` training questions at random, all if None. The other parts of the split stay the same."""
    train = examples.split.train
    if rows is None or rows >= len(train):
        return examples
    if rows < MIN_GRADED_ROWS:
        raise BadSetting(f"rows={rows} is too small for the gate 'ik'. Use at least {MIN_GRADED_ROWS}.")
    drawn = np.sort(np.random.default_rng(seed).choice(train, rows, replace=False))
    return replace(examples, split=replace(examples.split, train=drawn))


def _check_draft_length(examples: Examples, tokens: int) -> None:
    """Raise BadSetting if recorded drafts are shorter than `tokens`."""
    recorded = int(examples.settings.get("max_tokens", tokens))
    if recorded < tokens:
        raise BadSetting(
            f"tokens={tokens} is too many: the recorded draft answers have at most {recorded} tokens. Use tokens={recorded}. Or "
            f"label again with prompts='free' and max_tokens={tokens}."
        )


def _make_notes(examples: Examples, draft_tokens: int) -> list[str]:
    """Return notes for the model card about differences from the paper.

    `draft_tokens` is the maximum number of tokens of a draft that the judge reads.
    """
    notes = [] if examples.target == "known" else [f"trained on '{examples.target}'; the paper's target is 'known'"]
    lengths = [len(row.closed.tokens) for row in examples.rows if row.closed and row.closed.tokens is not None]
    median = int(np.median(lengths)) if lengths else draft_tokens
    if median < draft_tokens:
        notes.append(
            f"half of the drafts have at most {median} tokens, so the limit of {draft_tokens} tokens is rarely reached; "
            "for longer drafts, label with prompts='free' and max_tokens=128"
        )
    return notes
