"""Label runs whose passages a reranker chose."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from knowgate.errors import BadSetting
from knowgate.labels.labeling import label
from knowgate.models.fake import FakeModel
from knowgate.types import Passage, Question
from tests.support.tiny_models import save_tiny_cross_encoder

CONTEXTS = tuple(Passage(str(place), f"passage {place} {'gold' if place == 4 else 'dust'}") for place in range(6))
QUESTION = Question("who?", "q", ("gold",), contexts=CONTEXTS)
MODEL = FakeModel({"who?": {"closed": "dust", "open": "gold", "when": "gold"}})


class Gold:
    """Passages that hold 'gold' first, then later ones."""

    name = "gold"

    def __init__(self, fingerprint: str = "g1"):
        self.fingerprint = fingerprint
        self.seen: list[int] = []

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        self.seen += [len(found) for found in passages]
        return [[100.0 * ("gold" in one.text) + float(one.id) for one in found] for found in passages]


def made(out: Path, reranker: Gold | None, **options):
    return label([QUESTION], model=MODEL, out=out, samples=0, rerank=reranker, **options)


def test_the_best_k_of_the_candidates_are_answered_with(tmp_path):
    reranker = Gold()
    (row,) = made(tmp_path / "run", reranker, k=2, candidates=5).rows()
    assert ([passage.id for passage in row.passages], reranker.seen) == (["4", "3"], [5])
    assert row.open.correct is True


def test_passages_beyond_the_candidates_are_not_used(tmp_path):
    (row,) = made(tmp_path / "run", Gold(), k=2, candidates=4).rows()
    assert [passage.id for passage in row.passages] == ["3", "2"]
    assert row.open.correct is False


def test_the_run_records_reranker_and_candidates(tmp_path):
    settings = made(tmp_path / "run", Gold(), candidates=5).settings()
    assert {key: settings[key] for key in ("reranker", "reranker_fingerprint", "candidates", "k")} == {
        "reranker": "gold", "reranker_fingerprint": "g1", "candidates": 5, "k": 3,
    }  # fmt: skip


def test_a_run_without_reranker_records_none(tmp_path):
    assert not {"reranker", "reranker_fingerprint", "candidates"} & set(made(tmp_path / "run", None).settings())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"reranker": Gold("g2"), "candidates": 5}, "reranker_fingerprint was 'g1', now 'g2'"),
        ({"reranker": Gold(), "candidates": 6}, "candidates was 5, now 6"),
        ({"reranker": None, "k": 3}, "reranker was 'gold', now None"),
    ],
)
def test_a_run_does_not_continue_with_another_reranker(tmp_path, other, said):
    made(tmp_path / "run", Gold(), candidates=5)
    with pytest.raises(BadSetting, match=said):
        made(tmp_path / "run", other.pop("reranker"), **other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"closed_book": True}, "mutually exclusive"),
        ({"candidates": 2}, "is less than k=3"),
        ({"candidates": 4, "k": 5}, "is less than k=5"),
    ],
)
def test_a_reranker_without_a_choice_is_rejected(tmp_path, options, said):
    with pytest.raises(BadSetting, match=said):
        made(tmp_path / "run", Gold(), **options)


def test_the_fingerprint_of_a_reranker_depends_on_its_weights_only(tmp_path):
    pytest.importorskip("sentence_transformers")
    from knowgate.retrieval.rerankers import load_reranker

    prints = [
        load_reranker(str(save_tiny_cross_encoder(tmp_path / name, seed=seed))).fingerprint
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_a_reranker_aligned_to_another_llm_is_reported(tmp_path, caplog):
    pytest.importorskip("sentence_transformers")
    from knowgate.training.reranker import fit_reranker
    from knowgate.training.reranker_artifact import save_reranker
    from tests.support.planted_preferences import SETTINGS, planted_preferences

    base = str(save_tiny_cross_encoder(tmp_path / "tiny"))
    save_reranker(fit_reranker(planted_preferences(8), base=base), tmp_path / "r", settings=SETTINGS, data_hash="h")
    with caplog.at_level(logging.WARNING):
        label([QUESTION], model=MODEL, out=tmp_path / "run", samples=0, rerank=tmp_path / "r")
    assert "was aligned to planted, not to fake" in caplog.text
