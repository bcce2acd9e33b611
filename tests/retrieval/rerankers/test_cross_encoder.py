from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from knowgate.errors import BadInput, ModelError, WeightsError
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.cross_encoder import CrossEncoderReranker
from knowgate.types import Passage
from tests.support.tiny_models import save_tiny_cross_encoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "apple", "blue", "sky", "what", "is", "tree"]


def write_model(folder: Path, *, labels: int = 1, broken: bool = False) -> Path:
    """A random BERT whose scores lie far apart; with `broken` its weights are NaN."""
    from transformers import BertForSequenceClassification

    save_tiny_cross_encoder(folder, WORDS, num_labels=labels, initializer_range=0.5)
    if broken:
        model = BertForSequenceClassification.from_pretrained(folder)
        model.classifier.weight.data.fill_(float("nan"))
        model.save_pretrained(folder)
    return folder


def logits(folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """One pair at a time through transformers alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(**tokenizer(*pair, return_tensors="pt")).logits.item() for pair in pairs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def test_scores_are_the_logits_of_each_pair_in_order(folder: Path):
    reranker = CrossEncoderReranker(str(folder), batch_size=2)
    rows = [
        [Passage("1", "red apple tree red apple tree"), Passage("2", "sky"), Passage("3", "blue sky")],
        [],
        [Passage("4", "apple", title="red")],
    ]
    scores = reranker.score(["what is red", "sky", "what"], rows)
    expected = logits(
        folder,
        [
            ("what is red", "red apple tree red apple tree"),
            ("what is red", "sky"),
            ("what is red", "blue sky"),
            ("what", "red\napple"),
        ],
    )
    assert [len(row) for row in scores] == [3, 0, 1]
    assert np.concatenate(scores) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4


def test_an_empty_batch_does_not_load_the_model():
    assert CrossEncoderReranker("no/such-model").score([], []) == []


def test_a_folder_is_a_spec(folder: Path):
    assert load_reranker(str(folder)).name == f"cross-encoder:{folder}"


def test_a_nan_score_is_an_error(tmp_path: Path):
    broken = write_model(tmp_path / "nan", broken=True)
    with pytest.raises(ModelError, match="not a number"):
        CrossEncoderReranker(str(broken)).score(["what"], [[Passage("1", "red")]])


def test_a_model_with_three_classes_is_an_error(tmp_path: Path):
    classifier = write_model(tmp_path / "three", labels=3)
    with pytest.raises(ModelError, match="returns 3 scores per passage"):
        CrossEncoderReranker(str(classifier)).score(["what"], [[Passage("1", "red")]])


def test_a_folder_without_a_model_is_an_error(tmp_path: Path):
    with pytest.raises(WeightsError, match="has no safetensors weights"):
        CrossEncoderReranker(str(tmp_path)).score(["what"], [[Passage("1", "red")]])


def test_questions_and_passage_lists_must_have_the_same_length(folder: Path):
    with pytest.raises(BadInput, match="got 2 questions but 1 lists"):
        CrossEncoderReranker(str(folder)).score(["a", "b"], [[]])


def test_a_repeated_pair_is_scored_once():
    asked = []

    class Counting:
        def predict(self, pairs: list[tuple[str, str]], **_: object) -> np.ndarray:
            asked.extend(pairs)
            return np.arange(len(pairs), dtype=np.float32)

    reranker = CrossEncoderReranker.from_model(Counting(), "counting")
    red, blue = Passage("1", "red"), Passage("2", "blue")
    scores = reranker.score(["what", "what", "is"], [[red, blue, red], [blue], [red]])
    assert asked == [("what", "red"), ("what", "blue"), ("is", "red")]
    assert scores == [[0.0, 1.0, 0.0], [1.0], [2.0]]
