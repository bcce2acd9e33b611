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
from benchmarks.tables.common import CHOICE, Rows, table
from knowgate.stats.metrics import auroc

PAPER_SET = "nq_ctx"  # the paper trains its judge on NQ and tests it on other data sets
RESAMPLES = 1_000
KINDS = ("open", "choice")
KIND_NAMES = {"open": "open questions", "choice": "multiple choice"}

SETUP = (
    "`benchmarks/ik_transfer.py`; its docstring is the protocol, written before the run. Each judge is a LoRA adapter of "
    "Qwen2.5-Coder-1.5B itself. It reads a question and the LLM's own answer (at most 32 tokens) and says whether the LLM "
    "knows the answer. One judge is trained per data set (255 to 2,000 train rows, two epochs, one seed); *pooled* is trained "
    "on all of these rows; *untrained* is the LLM without an adapter. Each judge scored all {rows:,} test questions once. No "
    "judge is trained on TemporalQA, CMRC 2018 and FreshQA. [Record](../runs/papers/ik_transfer.jsonl.gz): predictions by "
    "question.\n"
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

    def auroc(self, judge: str) -> float:
        """Return the AUROC of a judge."""
        return compute_auroc(self.known, self.logits[judge])

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
        cells = [f"{test.auroc(name):.3f}" for name in names]
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
            values[source].append(test.auroc(judge))
        for judge in (UNTRAINED, POOLED):
            if judge in test.logits:
                values[judge].append(test.auroc(judge))
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


def compare_aurocs(test: TestSet, first: str, second: str) -> str:
    """Format the paired difference in AUROC of two judges, with its 95 % bootstrap interval."""

    def difference(draw: Any) -> float:
        values = [compute_auroc(test.known[draw], test.logits[name][draw]) for name in (first, second)]
        return values[0] - values[1]

    generator, size = np.random.default_rng(0), len(test.known)
    draws = [difference(generator.integers(0, size, size)) for _ in range(RESAMPLES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{difference(np.arange(size)):+.3f} [{low:+.3f}, {high:+.3f}]"


def render_intervals(tests: Sequence[TestSet]) -> str:
    """Render own judge, NQ's judge and pooled judge on each test set, with intervals and right verdicts."""
    lines = []
    for test in tests:
        names = (test.name, PAPER_SET, POOLED)
        cells = [format_auroc(test.known, test.logits[name]) if name in test.logits else "–" for name in names]
        has_both = {test.name, POOLED} <= test.logits.keys()
        gap = compare_aurocs(test, POOLED, test.name) if has_both else "–"
        verdicts = [f"{100 * test.verdict_share(name):.1f}" if name in test.logits else "–" for name in names]
        majority = 100 * max(test.known.mean(), 1 - test.known.mean())
        lines.append((test.name, *cells, gap, " / ".join(verdicts), f"{majority:.1f}"))
    columns = ("tested on", "own judge", "NQ's judge", "pooled judge", "pooled - own",
               "verdict right, % (own / NQ / pooled)", "majority, %")  # fmt: skip
    return table(columns, lines)


def ik_transfer_tables(file: Path = RECORD) -> Iterator[str]:
    """Yield the section, or nothing without a record."""
    judges, tests = read_test_sets(file)
    if not tests:
        return
    yield "\n### LoRA judges of IK, trained on one data set, tested on all\n"
    yield SETUP.format(rows=sum(len(test.known) for test in tests))
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
