"""The page on IK: accuracy of its verdicts, searches saved, thresholds, and the recorded ablations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.closed_book import (
    GROUPS,
    LONG,
    list_judges,
    match_run,
    mean_auroc,
    mean_logits,
    measure_ik_verdict,
    select,
    single_seed_auroc,
)
from benchmarks.tables.common import CHOICE, OPEN, QWEN, RUNS, Rows, format_at_threshold, load_test_run, table
from benchmarks.tables.names import OWN_VERDICT
from knowgate.core.chart import COLORS, Axis, ChartFrame, ChartPoint, Curve, fit_axis, render_line_chart
from knowgate.stats.metrics import sigmoid

SWEEP_SET = "triviaqa_ctx"
FIGURE = "ik.svg"
ABLATIONS = RUNS / "ik.md"  # output of `knowgate sweep ik --markdown`
SUMMARY = (
    "**What was reproduced.** On TriviaQA the verdict is right about as often as in the paper (80 %). There, on WebQA "
    "and on OpenBookQA it is right 5 to 8 points more often than always giving the commoner verdict ({lift} on TriviaQA by the "
    "own verdict). The first tokens of a short answer help, given as many training rows as in the paper: with 20,000 rows "
    "and one seed, AUROC rises from {trivia[0]:.3f} (no tokens) over {trivia[1]:.3f} (1), {trivia[4]:.3f} (4) and "
    "{trivia[16]:.3f} (16) to {trivia[32]:.3f} (32) on TriviaQA, and from {nq[0]:.3f} over {nq[1]:.3f}, {nq[4]:.3f} and "
    "{nq[16]:.3f} to {nq[32]:.3f} on NQ. One token adds next to nothing, four add most. With five seeds, whose logits are "
    "averaged, 0 and 32 tokens reach {ensembles[0]} on TriviaQA and {ensembles[1]} on NQ. These five together, with 32 "
    "tokens, save {saved} on TriviaQA by their own verdict; with the best threshold they save {most} at -1.7 points, and gold "
    "mastery allows {gold} at the same loss.\n\n"
    "**What was not.** Half of the searches are saved only on OpenBookQA, where passages do not help at all.\n\n"
    "**Why.** The LLM knows 2 to 28 % of the open questions, by data set, so even the gold order saves no more than {gold} on "
    "TriviaQA. Training rows matter most: with 1,817 rows the rise with T (.763 at 0, .774 at 32, .779 at 128 tokens) is "
    "within the error of 456 test questions (±.05), and with 500 rows it is reversed.\n\n"
    "**On other data sets.** The paper says that the judge generalizes. Here a judge of NQ helps on other short factual "
    "questions, and is near chance on HotpotQA and on multiple choice. A judge that is trained on rows of ten data sets is "
    "better than the data set's own judge on nine of them: see [transfer](transfer.md).\n\n"
    "With 20,000 rows, T = 0 and T = 32 were trained with five seeds, T = 1, 4 and 16 with one. These answers are short: "
    "nearly all end before 32 tokens, and the paper's are free-form answers of up to 128 tokens. So its claim is tested in "
    "part only. The tables with intervals and all seeds are on the page [policy](policy.md), at its end.\n"
)
ABLATION_TEXT = (
    "One judge per line, trained on free-form answers (up to 128 tokens) to questions of `triviaqa_ctx/train` and tested on 456 "
    "other questions of that set. T: answer tokens that the judge reads. Judged right: share of right verdicts (known or not) at "
    "the calibrated cut; answers count as right if they contain a gold answer. There were no answers with passages, so "
    "accuracy is empty; the retrieval rate is in brackets.\n"
)
JUDGED_TEXT = (
    "The same with labels from a grader LLM in place of string match. The grader is Qwen2.5-Coder-1.5B itself, a weak grader: it "
    "does not know the answers that it grades.\n"
)
JUDGED = ABLATIONS.with_name("ik-judged.md")


def ik_section() -> Iterator[str]:
    """Render the page on IK."""
    runs = {name: labels for name in (*OPEN, *CHOICE) if (labels := load_test_run(QWEN, name)) is not None}
    rows = [line for name, labels in runs.items() for line in _rows(name, labels)]
    if not rows:
        return
    yield "## IK, beside the paper\n"
    yield _summary(runs[SWEEP_SET])
    yield "### Verdicts and searches saved\n"
    yield (
        "The paper reports an accuracy of the verdict of about 80 %, and half of the retrievals saved on some data "
        "sets, with 20,000 training questions, answers of up to 128 tokens and an LLM as grader. An accuracy says "
        "nothing without the share of the commoner verdict: the column majority. Judges decide by their calibrated "
        "need, cut at .5; own verdict: Yes more probable than No. `ik, text` is a linear head on text embeddings of question and "
        "draft, not a fine-tuned LLM. cmrc2018_ctx has no line: the LLM knows 5 of its 1,000 training questions, too few to "
        "fit a judge ([more](gates-qwen.md)); judges of other data sets are in [transfer](transfer.md).\n"
    )
    columns = ("data set", "judge", "verdict right", "majority", "lift", "accuracy (retrieval rate) / random", "always",
               "retrievals saved")  # fmt: skip
    yield table(columns, rows)
    yield (
        "\nWhy they differ: on open questions the majority is far from one half, as a 1.5B LLM knows few answers: a "
        "judge can be right in nine cases of ten and save nothing. What a judge adds is the lift, and it is largest "
        "where the LLM knows about half.\n"
    )
    yield "\n### Scores of known and unknown questions\n"
    yield (
        "The judge that was taught with 20,000 rows and reads 32 tokens (ensemble of five seeds), on the test questions. Each "
        "line shows the share of the known or of the unknown questions whose score lies in each tenth from 0 to 1.\n"
    )
    yield f"![Share of known and of unknown questions by the judge's score](../{FIGURE})\n"
    yield from _thresholds(runs.get(SWEEP_SET))
    if ABLATIONS.is_file():
        yield "\n### Draft tokens, training size, whose labels\n"
        yield ABLATION_TEXT
        yield "\n".join(ABLATIONS.read_text().splitlines()[2:]) + "\n"
    if JUDGED.is_file():
        yield JUDGED_TEXT
        yield "\n".join(JUDGED.read_text().splitlines()[2:]) + "\n"


def _summary(labels: Any) -> str:
    from benchmarks.policy_evaluation import compare
    from benchmarks.tables.claims import compute_savings, format_gold_savings
    from knowgate.gates.offline_scoring import score_gate

    scores = score_gate(labels, f"ik{OWN_VERDICT}")
    gap = compare((scores.needs > scores.threshold) == ~labels.closed_book_right, ~labels.closed_book_right)
    lift = f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
    run, rows = match_run(0)
    trivia, nq = ({tokens: single_seed_auroc(group, tokens) for tokens in list_judges()} for group in (0, 1))
    saved, change = measure_ik_verdict(0)
    return SUMMARY.format(
        lift=lift,
        trivia=trivia,
        nq=nq,
        ensembles=[f"{mean_auroc(group, 0):.3f} and {mean_auroc(group, LONG):.3f}" for group in (0, 1)],
        saved=f"{100 * saved:.0f} % of the searches at {100 * change:+.1f} points",
        most=f"{100 * compute_savings(run, -mean_logits(rows, LONG)):.0f} %",
        gold=format_gold_savings(run),
    )


def draw_histogram(folder: Path) -> None:
    """Write the figure of the judge's scores, P(known), on test questions of both data sets into a folder."""
    edges = np.linspace(0, 1, 11)
    curves = []
    for group, name in enumerate(GROUPS):
        rows = select(group)
        scores, known = sigmoid(mean_logits(rows, LONG)), np.array([row["right"] for row in rows], dtype=bool)
        for part, title in ((known, "known"), (~known, "unknown")):
            shares = np.histogram(scores[part], edges)[0] / part.sum()
            points = [ChartPoint(float(x), float(y)) for x, y in zip((edges[1:] + edges[:-1]) / 2, shares, strict=True)]
            color = COLORS[0] if title == "known" else COLORS[1]
            curves.append(Curve(f"{name}, {title} ({part.sum():,})", points, color, dashed=bool(group)))
    heights = [point.y for curve in curves for point in curve.points]
    frame = ChartFrame(Axis("score: P(known)"), fit_axis("share of questions", heights), width=420, height=280)
    (folder / FIGURE).write_text(render_line_chart(curves, frame), encoding="utf-8")


def list_ik_gates(labels: Any) -> list[str]:
    """List the recorded gates of IK; those that read text embeddings come last."""
    names = [name for name in labels.recorded_needs if name.startswith("ik")]
    return sorted(names, key=lambda name: name.startswith("ik, text"))


def _rows(name: str, labels: Any) -> Rows:
    return [_row(name, labels, judge) for judge in list_ik_gates(labels)] if labels.open_book_right is not None else []


def _row(name: str, labels: Any, judge: str) -> tuple[str, ...]:
    from knowgate.evaluation.gate_results import compute_majority_share
    from knowgate.gates.offline_scoring import score_gate

    scores = score_gate(labels, judge)
    retrieve = scores.needs > scores.threshold
    right, majority = float((retrieve == ~labels.closed_book_right).mean()), compute_majority_share(labels)
    return (
        name, judge, f"{right:.3f}", f"{majority:.3f}", f"{100 * (right - majority):+.1f}", format_at_threshold(labels, scores),
        f"{100 * labels.retrieved_right.mean():.1f}", f"{100 * (1 - retrieve.mean()):.1f} %",
    )  # fmt: skip


def _thresholds(labels: Any) -> Iterator[str]:
    from knowgate.core.display import render_markdown_tables
    from knowgate.gates.offline_scoring import score_gate
    from knowgate.papers.sweeps import sweep_thresholds

    gates = [name for name in list_ik_gates(labels) if not name.endswith(OWN_VERDICT)] if labels is not None else []
    if gates:
        yield f"\n### Thresholds from .1 to .9 ({SWEEP_SET}); the paper takes .3 to .7\n"
        rendered = render_markdown_tables([sweep_thresholds(labels, score_gate(labels, gates[0]))])
        yield rendered.partition("\n\n")[2]  # without its own heading
