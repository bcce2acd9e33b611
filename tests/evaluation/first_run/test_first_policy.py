"""With enough graded questions, a first run ends in a policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from knowgate.evaluation.first_run.gate_selection import ALWAYS_RETRIEVE_GATE, GateChoice, fit_first_policy
from knowgate.evaluation.first_run.options import FirstRunOptions, ProgressReporter
from knowgate.evaluation.first_run.runner import render_config
from knowgate.training.policy import candidates
from knowgate.training.policy.evidence import MemoryEmbedder
from tests.support.hand_gate import write_rows
from tests.support.hash_embedder import HashEmbedder
from tests.support.pairs_by_hand import pair_row


@dataclass(frozen=True)
class OneRun:
    """Labeled parts that consist of one label run."""

    run: Path

    def runs(self, *parts: str) -> list[Path]:
        return [self.run]


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Fit a policy on rows whose closed-book answer is sure if and only if it is right."""
    monkeypatch.setattr(candidates, "DEFAULT_GATES", ())  # they need an embedding model, and so do topics
    monkeypatch.setattr(MemoryEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))

    def fit_rows(n: int, max_loss: float) -> tuple[GateChoice | None, FirstRunOptions]:
        rows = [pair_row(f"r{i}", 0.1 if i % 2 == 0 else 0.9, i % 2 == 0, True) for i in range(n)]
        run = write_rows(tmp_path / "run", rows)
        options = FirstRunOptions(docs="docs", out=tmp_path / "out", max_loss=max_loss)
        return fit_first_policy(OneRun(run), options, ProgressReporter()), options

    return fit_rows


def test_a_proven_policy_is_chosen_and_brings_its_own_arbiter_and_threshold(fit):
    choice, options = fit(600, 0.05)
    assert choice.is_policy
    assert choice.gate == str(options.out / "policy")
    assert "loses at most" in choice.guarantee
    config = render_config(options, choice, [])
    assert "The gate is a policy" in config
    assert "threshold =" not in config
    assert "arbiter =" not in config
    assert GateChoice.from_record(choice.to_record()) == choice


def test_a_policy_that_is_not_proven_is_not_used(fit):
    choice, _ = fit(600, 0.001)
    assert (choice.gate, choice.guarantee, choice.is_policy) == (ALWAYS_RETRIEVE_GATE, "", False)


def test_with_too_few_questions_no_policy_is_fitted(fit):
    assert fit(100, 0.05)[0] is None
