"""Fit the question gate: a logistic regression on features of the question. Only label runs are needed, no LLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from knowgate.data.signals.question_text import count_word_frequencies
from knowgate.gates.question import FREQUENCY_TENSOR, describe_questions
from knowgate.retrieval.index_folder import open_passage_store, read_index_manifest
from knowgate.training.classifiers import make_scorer, select_train_and_dev, tune_linear
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.types import SignalRequest, Vector


def fit_question(
    examples: Annotated[Examples, ExampleRequirements(reads_states=False)],
    *,
    index: Annotated[
        str | None, "Index folder: also read how frequent the words of a question are in its passages."
    ] = None,
) -> FitResult:
    """Train a classifier of question texts to predict the need for retrieval."""
    frequencies = None if index is None else _count_index_words(Path(index))
    features = describe_questions(examples.questions, frequencies)
    tensors = tune_linear(*select_train_and_dev(features, examples)).tensors
    stored = tensors if frequencies is None else {**tensors, FREQUENCY_TENSOR: frequencies}
    options = {"frequencies": frequencies is not None}
    notes = ["reads the text of the question only: no LLM call is needed to decide"]
    return FitResult("question", options, frozenset(), SignalRequest(), stored, make_scorer(tensors, features), notes)


def _count_index_words(folder: Path) -> Vector:
    """Count in how many passages of an index each word occurs."""
    store = open_passage_store(folder, read_index_manifest(folder))
    return count_word_frequencies(store[row] for row in range(len(store)))
