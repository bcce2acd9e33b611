"""Tables of IK's judges on data sets that they were not trained on. `benchmarks.ik_transfer` writes the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ik_transfer import POOLED, RECORD, UNTRAINED
from benchmarks.paper_record import read_record
from benchmarks.tables.cbdr import matrices
from benchmarks.tables.closed_book import format_auroc
from benchmarks.tables.common import CHOICE, QWEN, Rows, load_test_run, resample_auroc, table
from knowgate.stats.bootstrap import Estimate, summarize_resamples
from knowgate.stats.metrics import auroc

PAPER_SET = "nq_ctx"  # the paper trains its judge on NQ and tests it on other data sets
RESAMPLES = 1_000
SHOWN = {"nq": "nq_ctx", "trivia": "triviaqa_ctx", "webqa": "webqa_zh_ctx", "temporal": "temporalqa_ctx",
         "hotpot": "hotpotqa_ctx", "cmrc": "cmrc2018_ctx", "fresh": "freshqa"}  # fmt: skip
KINDS = ("open", "choice")
KIND_NAMES = {"open": "open questions", "choice": "multiple choice"}

SETUP = (
    "`python -m benchmarks.tables.ik_transfer` prints this section. The docstring of `benchmarks/ik_transfer.py` is the "
    "protocol, written before the run. Each judge is a LoRA adapter of "
    "Qwen2.5-Coder-1.5B itself. It reads a question and the LLM's own answer (at most 32 tokens) and says whether the LLM "
    "knows the answer. One judge is trained per data set (255 to 2,000 train rows, two epochs, one seed); *pooled* is trained "
    "on all of these rows; *untrained* is the LLM without an adapter. Each judge scored all {rows:,} test questions once. No "
    "judge is trained on TemporalQA, CMRC 2018 and FreshQA. [Record](../runs/papers/ik_transfer.jsonl.gz): predictions by "
    "question.\n"
)
FINDINGS = (
    "**What transfers.** The paper trains its judge on NQ, applies it to other data sets, and concludes that it generalizes. "
    "Here this holds in part. Among short factual questions, NQ's judge has a higher AUROC than the untrained LLM: "
    "{nq[nq_ctx]:.3f} on NQ (untrained {nq[untrained]:.3f}), {temporal[nq_ctx]:.3f} on TemporalQA ({temporal[untrained]:.3f}), "
    "{trivia[nq_ctx]:.3f} on TriviaQA ({trivia[untrained]:.3f}, own judge {trivia[triviaqa_ctx]:.3f}) and {webqa[nq_ctx]:.3f} on "
    "Chinese WebQA ({webqa[untrained]:.3f}, own judge {webqa[webqa_zh_ctx]:.3f}). TriviaQA's judge, which has twice the train "
    "rows and five times the known ones, is as good on NQ as NQ's own ({nq[triviaqa_ctx]:.3f}). Elsewhere, NQ's judge has "
    "{hotpot[nq_ctx]:.3f} on HotpotQA and is near chance on multiple choice ({lowest:.3f} to {highest:.3f}). Its cut does not "
    "transfer either: it says Yes to {yes:.0f} % of the OpenBookQA questions, so its verdict is right for {openbook:.1f} %; "
    "always saying Yes is right for {openbook_known:.1f} %.\n\n"
    "**Why.** A judge also learns which questions of its own data set are easy. HotpotQA is an example, looked at after the "
    "results were known: this LLM knows {comparisons:.0f} % of its comparison questions, which name two candidates, and "
    "{others:.0f} % of the others. HotpotQA's judge tells the two kinds apart (AUROC {recognized:.3f}). On the other four "
    "data sets of open questions with train rows, no judge of open questions has a lower AUROC.\n\n"
    "**What to do.** Train on rows of all kinds of questions that you expect. The pooled judge is better than the data set's "
    "own on {n_better} of {n_sets} data sets (with an interval above 0 on {n_clear}, below 0 on {n_worse}). On the three data "
    "sets that are new to it, it has {temporal[pooled]:.3f} (TemporalQA), {cmrc[pooled]:.3f} (CMRC 2018, only {n_cmrc} known "
    "questions) and {fresh[pooled]:.3f} (FreshQA). No judge learns StrategyQA, not even its own. Limits: one seed; the paper "
    "has 20,000 train rows, NQ's judge here 1,000 with 82 known ones.\n"
)
INTERVALS = (
    "The same with 95 % bootstrap intervals over questions; differences are paired. The verdict is Yes if Yes is more likely "
    "than No. *Majority* is the share of the commoner verdict: a verdict that is right less often helps nobody.\n"
)


@dataclass(frozen=True)
class TestSet:
    """The test questions of one data set.

    Attributes:
        name: Name of the data set.
        known: Whether the LLM's closed-book answer is right, for each question.
        logits: Logit of "known" of each judge, by the name of its train set.
    """

    name: str
    known: np.ndarray[Any, Any]
    logits: dict[str, np.ndarray[Any, Any]]

    @property
    def kind(self) -> str:
        """Return "choice" for multiple choice, else "open"."""
        return kind_of(self.name)

    @property
    def aurocs(self) -> dict[str, float]:
        """Return the AUROC of each judge."""
        return {judge: compute_auroc(self.known, logits) for judge, logits in self.logits.items()}

    def verdict_share(self, judge: str) -> float:
        """Return the share of right verdicts, with Yes if it is more likely than No."""
        return float(((self.logits[judge] > 0) == self.known).mean())


def compute_auroc(known: Any, logits: Any) -> float:
    """Return the AUROC, 0.5 if all or none of the questions are known."""
    value = auroc(known, logits)
    return 0.5 if value is None else value


def kind_of(name: str) -> str:
    """Return "choice" for a data set of multiple choice, else "open"."""
    return "choice" if name in CHOICE else "open"


def read_test_sets(file: Path) -> tuple[list[str], list[TestSet]]:
    """Return the names of the trained judges without the pooled one, and the test sets; empty without a record."""
    records = read_record(file)
    if not records:
        return [], []
    judges, rows = records[0]["judges"], records[1:]
    tests = []
    for name in dict.fromkeys(row["set"] for row in rows):
        part = [row for row in rows if row["set"] == name]
        logits = np.array([row["logits"] for row in part])
        columns = {judge: logits[:, number] for number, judge in enumerate(judges)}
        tests.append(TestSet(name, np.array([row["right"] for row in part]) > 0, columns))
    return list(records[0]["train"]), tests


def render_matrix(judges: Sequence[str], tests: Sequence[TestSet]) -> str:
    """Render the AUROC of every judge on every test set; the judge of the test set's own train rows is bold."""
    names = [name for name in (UNTRAINED, *judges, POOLED) if name in tests[0].logits]
    lines = []
    for test in tests:
        cells = [f"{test.aurocs[name]:.3f}" for name in names]
        cells = [f"**{cell}**" if name == test.name else cell for name, cell in zip(names, cells, strict=True)]
        lines.append((test.name, f"{100 * test.known.mean():.0f} %", *cells))
    return table(("tested on", "known", *names), lines)


def mean_by_kind(judges: Sequence[str], tests: Sequence[TestSet], kind: str) -> dict[str, float]:
    """Return the mean AUROC on the test sets of a kind that have train rows, by where the judge comes from."""
    own = [test for test in tests if test.kind == kind and test.name in judges]
    values: dict[str, list[float]] = {UNTRAINED: [], "own": [], "same kind": [], "other kind": [], POOLED: []}
    for test in own:
        for judge in judges:
            source = "own" if judge == test.name else "same kind" if kind_of(judge) == kind else "other kind"
            values[source].append(test.aurocs[judge])
        for judge in (UNTRAINED, POOLED):
            if judge in test.logits:
                values[judge].append(test.aurocs[judge])
    return {source: float(np.mean(numbers)) for source, numbers in values.items() if numbers}


def render_kinds(judges: Sequence[str], tests: Sequence[TestSet]) -> str:
    """Render the mean AUROC by kind of the test set and source of the judge."""
    means = {kind: mean_by_kind(judges, tests, kind) for kind in KINDS}
    sources = list(means["open"])
    lines: Rows = [
        (KIND_NAMES[kind], *(f"{means[kind].get(source, np.nan):.3f}" for source in sources)) for kind in KINDS
    ]
    titles = {"own": "own data set", "same kind": "others of the same kind", "other kind": "those of the other kind"}
    return table(("tested on", *(titles.get(source, source) for source in sources)), lines)


def compare_aurocs(test: TestSet, first: str, second: str) -> Estimate:
    """Return the paired difference in AUROC of two judges, with its 95 % bootstrap interval."""
    generator, size = np.random.default_rng(0), len(test.known)
    draws = [np.arange(size), *(generator.integers(0, size, size) for _ in range(RESAMPLES))]
    values = [resample_auroc(test.known, test.logits[name], draws) for name in (first, second)]
    return summarize_resamples(values[0] - values[1])


def format_gap(test: TestSet) -> str:
    """Format how much the pooled judge is better than the test set's own one; a dash if one of them is missing."""
    if not {test.name, POOLED} <= test.logits.keys():
        return "–"
    gap = compare_aurocs(test, POOLED, test.name)
    return f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"


def render_intervals(tests: Sequence[TestSet]) -> str:
    """Render own judge, NQ's judge and pooled judge on each test set, with intervals and right verdicts."""
    lines = []
    for test in tests:
        names = (test.name, PAPER_SET, POOLED)
        cells = [format_auroc(test.known, test.logits[name]) if name in test.logits else "–" for name in names]
        verdicts = [f"{100 * test.verdict_share(name):.1f}" if name in test.logits else "–" for name in names]
        majority = 100 * max(test.known.mean(), 1 - test.known.mean())
        lines.append((test.name, *cells, format_gap(test), " / ".join(verdicts), f"{majority:.1f}"))
    columns = ("tested on", "own judge", "NQ's judge", "pooled judge", "pooled - own",
               "verdict right, % (own / NQ / pooled)", "majority, %")  # fmt: skip
    return table(columns, lines)


def describe_findings(judges: Sequence[str], tests: Sequence[TestSet]) -> str:
    """Say in words what transfers, why the rest does not, and what to do."""
    by_name = {test.name: test for test in tests}
    own, openbook = [by_name[name] for name in judges], by_name["openbookqa"]
    gaps = [compare_aurocs(test, POOLED, test.name) for test in own]
    choice = [test.aurocs[PAPER_SET] for test in own if test.kind == "choice"]
    return FINDINGS.format(
        **{key: by_name[name].aurocs for key, name in SHOWN.items()},
        lowest=min(choice),
        highest=max(choice),
        yes=100 * (openbook.logits[PAPER_SET] > 0).mean(),
        openbook=100 * openbook.verdict_share(PAPER_SET),
        openbook_known=100 * openbook.known.mean(),
        n_sets=len(own),
        n_better=sum((gap.value or 0) > 0 for gap in gaps),
        n_clear=sum((gap.low or 0) > 0 for gap in gaps),
        n_worse=sum((gap.high or 0) < 0 for gap in gaps),
        n_cmrc=by_name["cmrc2018_ctx"].known.sum(),
        **describe_comparisons(by_name["hotpotqa_ctx"]),
    )


def describe_comparisons(hotpot: TestSet) -> dict[str, float]:
    """Return how many comparison questions of HotpotQA are known, and how well its own judge recognizes them."""
    labels = load_test_run(QWEN, hotpot.name)
    is_comparison = np.array([row.meta["type"] == "comparison" for row in labels.rows])
    return {
        "comparisons": 100 * hotpot.known[is_comparison].mean(),
        "others": 100 * hotpot.known[~is_comparison].mean(),
        "recognized": compute_auroc(is_comparison, hotpot.logits[hotpot.name]),
    }


def ik_transfer_tables(file: Path = RECORD) -> Iterator[str]:
    """Yield the section, or nothing without a record."""
    judges, tests = read_test_sets(file)
    if not tests:
        return
    yield "\n### LoRA judges of IK, trained on one data set, tested on all\n"
    yield SETUP.format(rows=sum(len(test.known) for test in tests))
    yield describe_findings(judges, tests)
    yield "Mean AUROC on the test sets that have train rows, by where the judge was trained:\n"
    yield render_kinds(judges, tests)
    yield "AUROC of every judge (columns) on every test set (rows). Bold: the judge of the set's own train rows.\n"
    yield render_matrix(judges, tests)
    yield INTERVALS
    yield render_intervals(tests)


def transfer_section() -> Iterator[str]:
    """Render how gates transfer to other data sets and LLMs."""
    yield from matrices()
    yield from ik_transfer_tables()


if __name__ == "__main__":
    print("\n".join(ik_transfer_tables()))
