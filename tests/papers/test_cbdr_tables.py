"""CBDR's Table 3 by hand: four questions, two rerankers, two numbers of passages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from knowgate.core.display import MISSING_VALUE
from knowgate.data.runs.records import TableScores
from knowgate.errors import BadSetting
from knowgate.papers.cbdr_tables import build_beta_tables
from knowgate.papers.sweeps import BETAS, select_unsure_questions
from tests.support.runs_by_hand import row, side
from tests.support.trials_by_hand import four_rows, trial_run

BM25 = {"retriever": "bm25", "retriever_fingerprint": "i"}
RERANKED = {**BM25, "reranker": "cross-encoder:some/where/aligned", "reranker_fingerprint": "r", "candidates": 20}


def runs(folder: Path) -> list[Path]:
    """Reranked, the first passage always leads to the right answer."""
    perfect = [replace(one, open=side(True)) for one in four_rows()]
    return [
        trial_run(folder / "plain-1", k=1, **BM25),
        trial_run(folder / "plain-3", k=3, **BM25),
        trial_run(folder / "reranked-1", perfect, k=1, **RERANKED),
    ]


def test_each_source_of_passages_has_its_rows_and_columns(tmp_path):
    (table,) = build_beta_tables(runs(tmp_path), ["good"])
    assert table.columns == ("passages by", "answer if confidence >", "top 1", "top 3")
    labels = ["always retrieve", *(f"{beta:g}" for beta in BETAS)]
    assert [row[:2] for row in table.rows] == [
        (MISSING_VALUE, "never retrieve"),
        *(("bm25", label) for label in labels),
        *(("aligned", label) for label in labels),
    ]


def test_cells_are_accuracy_and_retrieval_rate(tmp_path):
    (table,) = build_beta_tables(runs(tmp_path), ["good"])
    cells = {row[:2]: row[2:] for row in table.rows}
    assert cells[MISSING_VALUE, "never retrieve"] == ("50.0 % (0.0 %)", "50.0 % (0.0 %)")
    assert cells["bm25", "always retrieve"] == ("50.0 % (100.0 %)", "50.0 % (100.0 %)")
    assert cells["bm25", "0.5"] == ("75.0 % (50.0 %)", "75.0 % (50.0 %)")  # retrieved for the two it does not know
    assert cells["aligned", "0.5"] == ("100.0 % (50.0 %)", MISSING_VALUE)
    assert cells["aligned", "0.9"] == ("100.0 % (100.0 %)", MISSING_VALUE)  # nowhere is it that sure


def test_runs_with_the_same_source_of_passages_are_joined(tmp_path):
    other = [row("z", side(True), side(True))]
    both = [trial_run(tmp_path / "a", **BM25), trial_run(tmp_path / "b", other, **BM25)]
    (table,) = build_beta_tables(both, ["good"])
    assert table.rows[0][:3] == ("0.5", "40.0 %", "80.0 %")


def test_runs_with_different_questions_are_rejected(tmp_path):
    plain = trial_run(tmp_path / "plain", **BM25)
    fewer = trial_run(tmp_path / "fewer", four_rows()[:3], **RERANKED)
    with pytest.raises(BadSetting, match=r"different questions. Label the same questions"):
        build_beta_tables([plain, fewer], ["good"])


def test_beta_is_compared_with_the_raw_score_if_there_is_one():
    scores = TableScores("probe", 0.5, np.array([0.4, 0.4, 0.4]), raw=np.array([0.01, 0.05, 0.5]))
    assert select_unsure_questions(scores, 0.95).tolist() == [False, True, True]  # confidence must be above beta
    assert select_unsure_questions(replace(scores, raw=None), 0.95).tolist() == [True, True, True]
