"""Fitting IK: a fine-tuned judge of question and draft, or a linear head over their sentence embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from knowgate.data.signals.vectors import draft_texts, text_features
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import apply_network
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, SentenceEmbedder
from knowgate.stats.metrics import FloatArray
from knowgate.training.classifiers import fit_best_linear
from knowgate.training.examples import MIN_GRADED_ROWS, Examples
from knowgate.training.fit_function import ExampleRequirements, FitProgressCallback, FitResult, ignore_progress
from knowgate.training.judges.answer_judge import make_answer_training, train_answer_judge
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.judges.trainer import JudgeProgressCallback
from knowgate.training.judges.training_options import (
    ACCUMULATE_HELP,
    BASE_HELP,
    EPOCHS_HELP,
    FULL_HELP,
    LEARNING_RATE_HELP,
    JudgeTrainingOptions,
)
from knowgate.types import Embedder, Signal, SignalRequest

IKMode = Literal["lora", "text"]


def fit_ik(
    examples: Annotated[Examples, ExampleRequirements(target="known", reads_states=False)],
    *,
    mode: Annotated[IKMode, "lora (fine-tuned judge) or text (head over embeddings)."] = "lora",
    tokens: Annotated[int, "Draft tokens it reads, the paper's T (0, 32, 64, 128 there)."] = 32,
    rows: Annotated[int | None, "Train on so many questions only (the paper: 5,000 or 20,000)."] = None,
    base: Annotated[str | None, BASE_HELP] = None,
    epochs: Annotated[int, EPOCHS_HELP] = 2,
    learning_rate: Annotated[float | None, LEARNING_RATE_HELP] = None,
    full: Annotated[bool, FULL_HELP] = False,
    accumulate: Annotated[int, ACCUMULATE_HELP] = JudgeTrainingOptions.accumulate,
    seed: int = 0,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FitResult:
    """A judge that was fine-tuned to say Yes where no retrieval is needed; or a head over embeddings, without LLM."""
    examples = limit_training_rows(examples, rows, seed)
    if mode == "text":
        return fit_ik_text(examples, tokens=tokens)
    training = make_answer_training(epochs, 32, learning_rate, accumulate=accumulate, full=full, seed=seed)
    return fit_ik_judge(examples, tokens=tokens, base=base, training=training, work=work, watch=watch)


def fit_ik_judge(
    examples: Examples,
    *,
    tokens: int = 32,
    base: str | None = None,
    training: JudgeTrainingOptions | None = None,
    work: Path,
    watch: JudgeProgressCallback | None = None,
) -> FitResult:
    """The judge of answers with IK's question: can you answer, given the question and `tokens` of the draft?

    The paper's target is closed-book correctness: examples with target 'known'.
    """
    _check_drafts(examples, tokens)
    members = plan_ensemble(examples.split, training or make_answer_training(2, 32, None))
    fitted = train_answer_judge("ik", examples, tokens, members, base=base, work=work, watch=watch)
    notes = [*_notes(examples, tokens), *fitted.notes]
    return replace(fitted, options={"mode": "lora", **fitted.options}, notes=notes)


def fit_ik_text(examples: Examples, *, tokens: int = 32, embedder: str | Embedder = DEFAULT_EMBEDDER) -> FitResult:
    """A linear head over embeddings; recorded answers are enough, the LLM and its weights are not needed."""
    encoder = SentenceEmbedder(embedder) if isinstance(embedder, str) else embedder
    _check_drafts(examples, tokens)
    texts = draft_texts(examples.readings) if tokens else [""] * len(examples.questions)
    rows = text_features(encoder, examples.questions, texts, tokens)
    split, needed = examples.split, examples.needed
    tensors = fit_best_linear(rows[split.train], needed[split.train], rows[split.dev], needed[split.dev])

    def raw(places: Sequence[int]) -> FloatArray:
        return apply_network(tensors, rows[list(places)])

    options: dict[str, Any] = {
        "mode": "text",
        "tokens": tokens,
        "embedder": embedder if isinstance(embedder, str) else "own",
        "embedder_fingerprint": encoder.fingerprint,
    }
    return FitResult(
        "ik", options, _needs(tokens), SignalRequest(draft_tokens=tokens), tensors, raw, _notes(examples, tokens)
    )


def _check_drafts(examples: Examples, tokens: int) -> None:
    """The recorded drafts must be as long as what the gate will read."""
    if tokens < 0:
        raise BadSetting(f"ik: tokens is {tokens}; it must be 0 (the question alone) or more.")
    drafted = int(examples.settings.get("max_tokens", tokens))
    if drafted < tokens:
        raise BadSetting(
            f"ik: the label runs drafted {drafted} tokens, {tokens} are asked for. Label again with --prompts free "
            f"--max-tokens {tokens}, or read at most {drafted}: --tokens {drafted}"
        )


def _needs(tokens: int) -> frozenset[Signal]:
    return frozenset({Signal.DRAFT}) if tokens else frozenset()


def limit_training_rows(examples: Examples, rows: int | None, seed: int) -> Examples:
    """The examples with so many questions in the train split, drawn by the seed; the other splits as they are."""
    train = examples.split.train
    if rows is None or rows >= len(train):
        return examples
    if rows < MIN_GRADED_ROWS:
        raise BadSetting(f"ik: rows is {rows}; it must be at least {MIN_GRADED_ROWS}.")
    drawn = np.sort(np.random.default_rng(seed).choice(train, rows, replace=False))
    return replace(examples, split=replace(examples.split, train=drawn))


def _notes(examples: Examples, tokens: int) -> list[str]:
    """What a reader should know: the target, and that short answers end before T tokens, so that T says nothing."""
    notes = [] if examples.target == "known" else ["trained on 'benefit'; the paper's target is 'known'"]
    lengths = [len(row.closed.tokens) for row in examples.rows if row.closed and row.closed.tokens is not None]
    middle = int(np.median(lengths)) if lengths else tokens
    if middle < tokens:
        notes.append(
            f"half of the drafts have at most {middle} tokens, so {tokens} are rarely read; longer ones come from "
            "knowgate label --prompts free --max-tokens 128"
        )
    return notes
