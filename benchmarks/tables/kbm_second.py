"""KBM, Figure 8: a second judgement, after retrieval, drops passages.

The recorded judge asks the paper's question: is the LLM's answer with these passages right? It keeps passages only where
the answer is yes. The question that matters is another one: is the answer with passages better than the one without?

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

from benchmarks.tables.common import QWEN, RUNS, decided, table, trial_of

BOUNDARY = "boundary"  # NQ with samples of all three kinds, and a judge that was trained with passages
RESAMPLED = 2_000


def second_judgement(trials: dict[str, Any]) -> Iterator[str]:
    """Both rules, beside always retrieving and what gold answers allow."""
    yield "\n### Second judgement (Figure 8): passages that do not help are dropped\n"
    yield from _recorded(trial_of(QWEN, BOUNDARY))
    yield from _expected_gains(trials)


# --- the judge on record ----------------------------------------------------------------------------


def _recorded(trial: Any) -> Iterator[str]:
    from knowgate.data.runs.records import read_usefulness

    records = [] if trial is None else read_usefulness(Path(trial.runs[0]))
    if not records:
        return
    yield (
        "The paper asks the judge whether the LLM answers right *with* the passages, and gains by it on multiple choice. "
        "Here a judge trained with passages on 600 questions of NQ was asked on 300 others, of which the LLM knows 8 %. "
        'It finds most passages insufficient, and so drops passages that help. "Better than without" compares the share '
        "of right samples with and without passages; it knows the gold answers, so no such judge does better: "
        "even a perfect one gains little here.\n"
    )
    rows = [line for record in records for line in _recorded_lines(trial, record)]
    yield table(("rule", "right answers", "passages shown", "as many dropped at random"), rows)


def _recorded_lines(trial: Any, record: Any) -> Iterator[tuple[str, ...]]:
    with_passages, without = (
        np.array([getattr(row, side).mastery for row in trial.rows], dtype=float) for side in ("open", "closed")
    )
    rules = {
        "keep all": np.ones(len(trial.rows), dtype=bool),
        f"{record.judge}: sufficient (paper)": np.array([record.useful[row.id] for row in trial.rows]),
        "gold mastery: sufficient (≥ .5)": with_passages >= 0.5,
        "gold mastery: better than without": with_passages >= without,
    }
    for rule, kept in rules.items():
        right = np.where(kept, trial.always_right, trial.closed_right).mean()
        random = kept.mean() * trial.always_right.mean() + (1 - kept.mean()) * trial.closed_right.mean()
        yield rule, f"{100 * right:.1f}", f"{100 * kept.mean():.0f} %", f"{100 * random:.1f}"


# --- expected gain from log-probabilities -----------------------------------------------------------


def _expected_gains(trials: dict[str, Any]) -> Iterator[str]:
    rows = [line for name, trial in trials.items() if (line := _gain_line(name, trial)) is not None]
    if not rows:
        return
    yield "\n**Expected-gain rule on every data set with train rows.** " + (
        "No judge's probabilities with passages are on record for these sets. The same rule can be tried with what the "
        "rows hold: the log-probabilities of both answers. Two logistic regressions on the train rows give P(right "
        "without) and P(right with); passages are dropped where the difference is negative. Change: against keeping "
        "all, paired 95 % bootstrap interval. Sufficient: the paper's question asked of the same model, P(right with) "
        "≥ .5. Oracle: the better answer of both.\n"
    )
    yield table(("data set", "keep all", "sufficient", "expected gain", "change", "oracle"), rows)


def _gain_line(name: str, trial: Any) -> tuple[str, ...] | None:
    if not (RUNS / QWEN / f"{name}-train").is_dir() or trial.open_right is None:
        return None
    with_passages, keep = _judge_answers(name, trial)
    cells = (decided(trial, kept, with_random=False) for kept in (np.ones_like(keep), with_passages >= 0.5, keep))
    oracle = 100 * (trial.closed_right | trial.always_right).mean()
    return (name, *cells, gain_of(name, trial)[1], f"{oracle:.1f}")


def gain_of(name: str, trial: Any) -> tuple[float, str]:
    """Return (share of questions answered with passages, '+3.4 [+1.0, +5.8]' against keeping all)."""
    _, keep = _judge_answers(name, trial)
    gains = np.where(keep, 0.0, trial.closed_right.astype(float) - trial.always_right.astype(float))
    drawn = np.random.default_rng(0).integers(0, len(gains), (RESAMPLED, len(gains)))
    low, high = 100 * np.quantile(gains[drawn].mean(axis=1), [0.025, 0.975])
    return float(keep.mean()), f"{100 * gains.mean():+.1f} [{low:+.1f}, {high:+.1f}]"


def _judge_answers(name: str, trial: Any) -> tuple[Any, Any]:
    """Return P(right with passages), and whether that is at least P(right without)."""
    train = RUNS / QWEN / f"{name}-train"
    with_passages = predict_right(train, trial, "open")
    return with_passages, with_passages >= predict_right(train, trial, "closed")


def predict_right(train: Path, trial: Any, side: str) -> Any:
    """Predict from log-probabilities whether each test answer of one side is right; fitted on the train run."""
    model = _fit_right(train, side)
    return model.predict_proba([_features(getattr(row, side)) for row in trial.rows])[:, 1]


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
