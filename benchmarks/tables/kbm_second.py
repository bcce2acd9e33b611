"""KBM, Figure 8: a second judgement, after retrieval, drops passages.

The recorded judge asks the question of the paper: is the LLM's answer with these passages right? Passages are keeps only
if it says yes. A better question is: is the answer with passages better than the answer without them?

Protocol of the second table, written before it was run on test rows. For each data set, two logistic regressions learn
on its train rows whether an answer is right: one from the token log-probabilities of the closed-book answer, one from
those of the open-book answer (first, smallest and mean log-probability, and the number of tokens). Passages are dropped
where the expected gain, P(right with) - P(right without), is negative. Test rows are used once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.common import QWEN, RUNS, format_decisions, load_test_run, table

BOUNDARY = "boundary"  # NQ with samples without, with and with masked passages, and a judge trained with passages
RESAMPLES = 2_000


def second_judgement(runs: dict[str, Any]) -> Iterator[str]:
    """Render both rules, compared with keeping all passages and with what gold answers allow."""
    yield "\n### Second judgement (Figure 8): passages that do not help are dropped\n"
    yield from _recorded_table(load_test_run(QWEN, BOUNDARY))
    yield from _expected_gains(runs)


# --- the recorded judge -----------------------------------------------------------------------------


def _recorded_table(labels: Any) -> Iterator[str]:
    from knowgate.data.runs.records import read_usefulness

    records = [] if labels is None else read_usefulness(Path(labels.runs[0]))
    if not records:
        return
    yield (
        "The paper asks the judge whether the LLM answers right *with* the passages, and gains by it on multiple choice. "
        "Here a judge trained with passages on 600 questions of NQ was asked on 300 others, of which the LLM knows 8 %. "
        'It finds most passages insufficient, and so drops passages that help. "Better than without" compares the share '
        "of right samples with and without passages; it knows the gold answers: "
        "even a perfect one gains little here.\n"
    )
    rows = [line for record in records for line in _recorded_lines(labels, record)]
    yield table(("rule", "right answers", "passages shown", "as many dropped at random"), rows)


def _recorded_lines(labels: Any, record: Any) -> Iterator[tuple[str, ...]]:
    with_passages, without = (
        np.array([getattr(row, side).mastery for row in labels.rows], dtype=float) for side in ("open", "closed")
    )
    rules = {
        "keep all": np.ones(len(labels.rows), dtype=bool),
        f"{record.judge}: sufficient (paper)": np.array([record.useful[row.id] for row in labels.rows]),
        "gold mastery: sufficient (≥ .5)": with_passages >= 0.5,
        "gold mastery: better than without": with_passages >= without,
    }
    for rule, keeps in rules.items():
        right = np.where(keeps, labels.retrieved_right, labels.closed_book_right).mean()
        random = keeps.mean() * labels.retrieved_right.mean() + (1 - keeps.mean()) * labels.closed_book_right.mean()
        yield rule, f"{100 * right:.1f}", f"{100 * keeps.mean():.0f} %", f"{100 * random:.1f}"


# --- expected gain from log-probabilities -----------------------------------------------------------


def _expected_gains(runs: dict[str, Any]) -> Iterator[str]:
    rows = [line for name, labels in runs.items() if (line := _gain_line(name, labels)) is not None]
    if not rows:
        return
    yield "\n**Expected-gain rule on every data set with train rows.** " + (
        "The same rule without a judge, with what the "
        "rows hold: the log-probabilities of both answers. Two logistic regressions on the train rows give P(right "
        "without) and P(right with); passages are dropped where the difference is negative. Change: against keeping "
        "all, paired 95 % bootstrap interval. Sufficient: the paper's question asked of the same model, P(right with) "
        "≥ .5. Oracle: the better answer of both.\n"
    )
    yield table(("data set", "keep all", "sufficient", "expected gain", "change", "oracle"), rows)


def _gain_line(name: str, labels: Any) -> tuple[str, ...] | None:
    if not (RUNS / QWEN / f"{name}-train").is_dir() or labels.open_book_right is None:
        return None
    with_passages, keep = _judge_answers(name, labels)
    cells = (
        format_decisions(labels, keeps, with_random=False) for keeps in (np.ones_like(keep), with_passages >= 0.5, keep)
    )
    oracle = 100 * (labels.closed_book_right | labels.retrieved_right).mean()
    return (name, *cells, measure_gain(name, labels)[1], f"{oracle:.1f}")


def measure_gain(name: str, labels: Any) -> tuple[float, str]:
    """Return (share of questions answered with passages, '+3.4 [+1.0, +5.8]' against keeping all)."""
    _, keep = _judge_answers(name, labels)
    gains = np.where(keep, 0.0, labels.closed_book_right.astype(float) - labels.retrieved_right.astype(float))
    drawn = np.random.default_rng(0).integers(0, len(gains), (RESAMPLES, len(gains)))
    low, high = 100 * np.quantile(gains[drawn].mean(axis=1), [0.025, 0.975])
    return float(keep.mean()), f"{100 * gains.mean():+.1f} [{low:+.1f}, {high:+.1f}]"


def _judge_answers(name: str, labels: Any) -> tuple[Any, Any]:
    """Return P(right with passages), and whether that is at least P(right without)."""
    train = RUNS / QWEN / f"{name}-train"
    with_passages = predict_right(train, labels, "open")
    return with_passages, with_passages >= predict_right(train, labels, "closed")


def predict_right(train: Path, labels: Any, side: str) -> Any:
    """Predict from log-probabilities whether each test answer of one side is right; fitted on the train run."""
    model = _fit_right(train, side)
    return model.predict_proba([_features(getattr(row, side)) for row in labels.rows])[:, 1]


@functools.cache
def _fit_right(train: Path, side: str) -> Any:
    """Fit the probability that an answer is right to its log-probabilities in a train run."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from knowgate.data.runs.folder import RunFolder

    answers = [answer for row in RunFolder(train).rows() if (answer := getattr(row, side)) is not None]
    answers = [answer for answer in answers if answer.tokens]
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1_000))
    return model.fit([_features(answer) for answer in answers], [bool(answer.correct) for answer in answers])


def _features(answer: Any) -> tuple[float, float, float, float]:
    """Return (first, smallest, mean log-probability, log of the number of tokens) of an answer."""
    values = [token.logprob for token in answer.tokens] if answer and answer.tokens else [0.0]
    return values[0], min(values), float(np.mean(values)), float(np.log1p(len(values)))
