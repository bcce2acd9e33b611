"""Fitting IK: a fine-tuned judge of question and draft, or a linear head over their sentence embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from knowgate.embedding import DEFAULT, SentenceEmbedder
from knowgate.errors import BadSetting
from knowgate.fitting.examples import FEWEST_GRADED, Examples
from knowgate.fitting.fit_options import Wanted
from knowgate.fitting.fit_result import FitResult
from knowgate.fitting.judges.answer import answer_training, fit_answers
from knowgate.fitting.judges.crew import crew
from knowgate.fitting.judges.settings import ACCUMULATE, BASE, EPOCHS, FULL, LEARNING_RATE, JudgeTraining
from knowgate.fitting.judges.training import Watch
from knowgate.fitting.networks import best_linear
from knowgate.fitting.steps import WatchFit, unwatched
from knowgate.gates import apply_network
from knowgate.signals import draft_texts, text_features
from knowgate.statistics import Floats
from knowgate.types import Embedder, Signal, Want

Mode = Literal["lora", "text"]


def fit_ik(
    examples: Annotated[Examples, Wanted(target="known", reads_states=False)],
    *,
    mode: Annotated[Mode, "lora (fine-tuned judge) or text (head over embeddings)."] = "lora",
    tokens: Annotated[int, "Draft tokens it reads, the paper's T (0, 32, 64, 128 there)."] = 32,
    rows: Annotated[int | None, "Train on so many questions only (the paper: 5,000 or 20,000)."] = None,
    base: Annotated[str | None, BASE] = None,
    epochs: Annotated[int, EPOCHS] = 2,
    learning_rate: Annotated[float | None, LEARNING_RATE] = None,
    full: Annotated[bool, FULL] = False,
    accumulate: Annotated[int, ACCUMULATE] = JudgeTraining.accumulate,
    seed: int = 0,
    work: Path,
    watch: WatchFit = unwatched,
) -> FitResult:
    """A judge that was fine-tuned to say Yes where no retrieval is needed; or a head over embeddings, without LLM."""
    examples = fewer(examples, rows, seed)
    if mode == "text":
        return fit_ik_text(examples, tokens=tokens)
    training = answer_training(epochs, 32, learning_rate, accumulate=accumulate, full=full, seed=seed)
    return fit_ik_judge(examples, tokens=tokens, base=base, training=training, work=work, watch=watch)


def fit_ik_judge(
    examples: Examples,
    *,
    tokens: int = 32,
    base: str | None = None,
    training: JudgeTraining | None = None,
    work: Path,
    watch: Watch | None = None,
) -> FitResult:
    """The judge of answers with IK's question: can you answer, given the question and `tokens` of the draft?

    The paper's target is closed-book correctness: examples with target 'known'.
    """
    _check_drafts(examples, tokens)
    members = crew(examples.split, training or answer_training(2, 32, None))
    fitted = fit_answers("ik", examples, tokens, members, base=base, work=work, watch=watch)
    notes = [*_notes(examples, tokens), *fitted.notes]
    return replace(fitted, options={"mode": "lora", **fitted.options}, notes=notes)


def fit_ik_text(examples: Examples, *, tokens: int = 32, embedder: str | Embedder = DEFAULT) -> FitResult:
    """A linear head over embeddings; recorded answers are enough, the LLM and its weights are not needed."""
    encoder = SentenceEmbedder(embedder) if isinstance(embedder, str) else embedder
    _check_drafts(examples, tokens)
    texts = draft_texts(examples.readings) if tokens else [""] * len(examples.questions)
    rows = text_features(encoder, examples.questions, texts, tokens)
    split, needed = examples.split, examples.needed
    tensors = best_linear(rows[split.train], needed[split.train], rows[split.dev], needed[split.dev])

    def raw(places: Sequence[int]) -> Floats:
        return apply_network(tensors, rows[list(places)])

    options: dict[str, Any] = {
        "mode": "text",
        "tokens": tokens,
        "embedder": embedder if isinstance(embedder, str) else "own",
        "embedder_fingerprint": encoder.fingerprint,
    }
    return FitResult("ik", options, _needs(tokens), Want(draft_tokens=tokens), tensors, raw, _notes(examples, tokens))


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


def fewer(examples: Examples, rows: int | None, seed: int) -> Examples:
    """The examples with so many questions in the train split, drawn by the seed; the other splits as they are."""
    train = examples.split.train
    if rows is None or rows >= len(train):
        return examples
    if rows < FEWEST_GRADED:
        raise BadSetting(f"ik: rows is {rows}; it must be at least {FEWEST_GRADED}.")
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
