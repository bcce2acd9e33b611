"""IK: verdict accuracy, what is saved, thresholds, and the ablations where they were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables.common import CHOICE, OPEN, QWEN, RUNS, Rows, at_threshold, table, trial_of
from benchmarks.tables.names import OWN

SWEPT = "triviaqa_ctx"
ABLATIONS = RUNS / "ik.md"  # printed by `knowgate sweep ik --markdown` where the LLM was
SUMMARY = (
    "**What was reproduced.** The verdict is right about as often as in the paper (80 %), and better than always giving "
    "the commoner verdict on TriviaQA, WebQA and OpenBookQA (+5 to +8 points). On TriviaQA one search in eight goes at "
    "no measurable loss. A few tokens of the answer help: adapters trained on 6,000 rows gain .036 AUROC [.011, .059] on "
    "TriviaQA from 32 tokens, and .019 [-.018, .052] on NQ ([policy](policy.md), last tables).\n\n"
    "**What was not.** Half of the searches are saved only on OpenBookQA, where passages do not help at all. With 1,817 "
    "rows the rise with T (.763 to .779) is within the error of one test set of 456 questions (±.05), and with 500 rows "
    "it is reversed.\n\n"
    "**Why.** The judges below were trained on 1,817 rows (ablations) or the train rows of six data sets (table); the "
    "paper has 20,000. With 500 rows a longer input is only harder to learn from. And the LLM knows 5 to 28 % of the open "
    "questions: gold mastery itself saves 27 % of the searches of TriviaQA at -1.7 points.\n\n"
    "The [protocol](../policy_protocol.md) of a run with 20,000 rows, T = 0 and 32 and several seeds was written before it.\n"
)
JUDGED = ABLATIONS.with_name("ik-judged.md")


def ik_section() -> Iterator[str]:
    trials = {name: trial for name in (*OPEN, *CHOICE) if (trial := trial_of(QWEN, name)) is not None}
    rows = [line for name, trial in trials.items() for line in _lines(name, trial)]
    if not rows:
        return
    yield "## IK, beside the paper\n"
    yield SUMMARY
    yield "### Verdicts and searches saved\n"
    yield (
        "The paper reports an accuracy of the verdict of about 80 %, and half of the retrievals saved on some data "
        "sets, with 20,000 training questions, answers of up to 128 tokens and an LLM as grader. An accuracy says "
        "nothing without the share of the commoner verdict: the column majority. Judges decide by their calibrated "
        "need, cut at .5; own verdict: Yes more probable than No.\n"
    )
    columns = ("data set", "judge", "verdict right", "majority", "lift", "accuracy (retrieval rate) / random", "always",
               "retrievals saved")  # fmt: skip
    yield table(columns, rows)
    yield (
        "\nWhy they differ: on open questions the majority is far from one half, as a 1.5B LLM knows few answers: a "
        "judge can be right in nine cases of ten and save nothing. What a judge adds is the lift, and it is largest "
        "where the LLM knows about half.\n"
    )
    yield from _thresholds(trials.get(SWEPT))
    if ABLATIONS.is_file():
        yield "\n### Draft tokens, training size, whose labels\n"
        yield ABLATIONS.read_text()
    if JUDGED.is_file():
        yield "Labels by string match beside those of a judge, the LLM itself, which knows no better than it answers:\n"
        yield "\n".join(JUDGED.read_text().splitlines()[2:]) + "\n"


def judges(trial: Any) -> list[str]:
    """IK's gates on record, the head over embeddings last."""
    names = [name for name in trial.recorded_needs if name.startswith("ik")]
    return sorted(names, key=lambda name: name.startswith("ik, text"))


def _lines(name: str, trial: Any) -> Rows:
    return [_line(name, trial, judge) for judge in judges(trial)] if trial.open_right is not None else []


def _line(name: str, trial: Any, judge: str) -> tuple[str, ...]:
    from knowgate.evaluation.gate_results import compute_majority_share
    from knowgate.gates.offline_scoring import score_gate

    scores = score_gate(trial, judge)
    retrieve = scores.needs > scores.threshold
    right, majority = float((retrieve == ~trial.closed_right).mean()), compute_majority_share(trial)
    return (
        name, judge, f"{right:.3f}", f"{majority:.3f}", f"{100 * (right - majority):+.1f}", at_threshold(trial, scores),
        f"{100 * trial.always_right.mean():.1f}", f"{100 * (1 - retrieve.mean()):.1f} %",
    )  # fmt: skip


def _thresholds(trial: Any) -> Iterator[str]:
    from knowgate.core.display import render_markdown_tables
    from knowgate.gates.offline_scoring import score_gate
    from knowgate.papers.sweeps import sweep_thresholds

    named = [name for name in judges(trial) if not name.endswith(OWN)] if trial is not None else []
    if named:
        yield f"\n### Thresholds from .1 to .9 ({SWEPT}); the paper takes .3 to .7\n"
        yield render_markdown_tables([sweep_thresholds(trial, score_gate(trial, named[0]))])
