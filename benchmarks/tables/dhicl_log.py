"""DH-ICL with a log of known and unknown questions: rules of decision, and the gain of more log entries.

The protocol is in `benchmarks/dhicl_log.py`, which also writes the record. All cuts and weights are learned from logged
questions; test questions are only decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from benchmarks.dhicl_log import DATA_SET, MAIN_SIZE, PAPER_COUNT, RECORD, RUNS, SIGNS
from benchmarks.paper_record import read_record
from benchmarks.tables.common import QWEN, RESAMPLES, Rows, load_test_run, table
from knowgate.stats.metrics import auroc

PAPER_CUT = 0.0  # log-odds of the need .5
PAPER_SIGN = SIGNS.index("paper")
LOSS = 0.005  # accuracy that logged questions may lose by the saved searches
FOLDS = 5
VOTE = 4  # column of the vote of the nearest questions, after three log-odds and the number of known examples
SIZES = (100, 300, 1_000, 2_000, 5_000, 12_000)
ACCURACY = "accuracy (retrieval rate)"
Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Score:
    """Log-odds of "unknown": of logged questions by leave-one-out, and of all test questions.

    Attributes:
        rows: Numbers of the logged questions, in the order of the record.
    """

    rows: Floats
    logged: Floats
    test: Floats


@dataclass(frozen=True)
class Result:
    """A score at a cut, measured on the test questions.

    Attributes:
        auroc: Of TriviaQA, for "does not know".
        retrieve: Whether each TriviaQA question is retrieved for.
        accuracy: Share of right answers to TriviaQA questions.
        changes: Right answer minus right answer of always retrieving, by question.
        balanced: Balanced accuracy of the verdict on TriviaQA.
        verdicts: Whether the verdict on each question of KB-SAT is right.
        kbsat_auroc: Of KB-SAT.
        cut: Log-odds above which the gate retrieves.
    """

    auroc: float
    retrieve: Floats
    accuracy: float
    changes: Floats
    balanced: float
    verdicts: Floats
    kbsat_auroc: float
    cut: float

    @property
    def rate(self) -> float:
        """Share of TriviaQA questions that are retrieved for."""
        return float(self.retrieve.mean())

    @property
    def loss(self) -> float:
        """Points that are lost against always retrieving."""
        return -100 * float(self.changes.mean())


class LogRecord:
    """The recorded passes of the LLM over logged questions and test questions."""

    def __init__(self, facts: dict[str, Any], rows: Sequence[dict[str, Any]]):
        self.facts = facts
        self.log = [row for row in rows if not row["test"]]
        self.tests = [row for row in rows if row["test"]]

    @property
    def tuned(self) -> tuple[str, int]:
        """The variant that was chosen on logged questions: name of its examples, and the sign as a column."""
        choice = self.facts["tuned"]
        return name_examples(choice["k"], balanced=choice["balanced"]), SIGNS.index(choice["sign"])

    @cached_property
    def known(self) -> Floats:
        """Whether each logged question is known."""
        return np.array([row["known"] for row in self.log], dtype=bool)

    @cached_property
    def log_changes(self) -> Floats:
        """Closed-book minus open-book correctness of each logged question; NaN if it was not answered with passages."""
        from knowgate.data.runs.folder import RunFolder

        rows = RunFolder(RUNS / f"{DATA_SET}-train").rows()
        changes = {
            row.id: float(bool(row.closed.correct)) - bool(row.open.correct) for row in rows if row.closed and row.open
        }
        return np.array([changes.get(row["id"], np.nan) for row in self.log])

    def read(self, size: int, examples: str, column: int) -> Score:
        """Return one column of a pass."""
        name = f"{size}-{examples}"
        rows = np.array([number for number, row in enumerate(self.log) if name in row["passes"]], dtype=int)
        logged = np.array([self.log[number]["passes"][name][column] for number in rows])
        return Score(rows, logged, np.array([row["passes"][name][column] for row in self.tests]))

    def has(self, size: int, examples: str) -> bool:
        """Return whether the test questions were decided with these examples."""
        return all(f"{size}-{examples}" in row["passes"] for row in self.tests)

    def measure(self, score: Score, cut: float) -> Result:
        """Decide the test questions with a cut."""
        from knowgate.papers.dhicl_tables import compute_balanced_accuracy

        labels = load_test_run(QWEN, DATA_SET)
        by_id = {row["id"]: value for row, value in zip(self.tests, score.test, strict=True)}
        needs = np.array([by_id[row.id] for row in labels.rows])
        retrieve = needs > cut
        changes = np.where(retrieve, 0.0, labels.closed_right.astype(float) - labels.always_right)
        in_kbsat = np.array([row["kbsat"] for row in self.tests])
        known = np.array([row["known"] for row in self.tests], dtype=bool)[in_kbsat]
        return Result(
            auroc=auroc(~labels.closed_right, needs) or 0.5,
            retrieve=retrieve,
            accuracy=float(labels.always_right.mean() + changes.mean()),
            changes=changes,
            balanced=compute_balanced_accuracy(retrieve, labels.closed_right),
            verdicts=(score.test[in_kbsat] <= cut) == known,
            kbsat_auroc=auroc(~known, score.test[in_kbsat]) or 0.5,
            cut=cut,
        )

    # --- what is learned from logged questions ------------------------------------------------------

    def learn_cut(self, score: Score) -> float:
        """Return the cut with the best balanced accuracy on logged questions."""
        from knowgate.papers.dhicl_tables import find_best_cut

        return find_best_cut(score.logged, self.known[score.rows])

    def learn_loss_cut(self, score: Score) -> float:
        """Return the cut that skips most logged questions at a loss of at most `LOSS` against always retrieving."""
        changes = self.log_changes[score.rows]
        values, changes = score.logged[~np.isnan(changes)], changes[~np.isnan(changes)]
        order = np.argsort(values, kind="stable")
        allowed = np.flatnonzero(np.cumsum(changes[order]) / len(order) >= -LOSS - 1e-9)
        return float(values[order[allowed[-1]]]) if len(allowed) else -np.inf

    def calibrate(self, parts: Sequence[Score]) -> Score:
        """Combine scores by a logistic regression; logged questions get out-of-fold predictions."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        rows = np.array(sorted(set.intersection(*(set(part.rows.tolist()) for part in parts))))
        logged = np.column_stack([part.logged[np.isin(part.rows, rows)] for part in parts])
        unknown, model = ~self.known[rows], make_pipeline(StandardScaler(), LogisticRegression())
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
        values = cross_val_predict(model, logged, unknown, cv=folds, method="decision_function")
        model.fit(logged, unknown)
        return Score(rows, values, model.decision_function(np.column_stack([part.test for part in parts])))

    def choose_draft(self) -> tuple[str, int]:
        """Return the examples and the sign with the best AUROC on logged questions, of the passes with drafts."""
        options = [
            (name_examples(PAPER_COUNT, balanced=balanced) + "-draft", sign)
            for balanced in (False, True)
            for sign in range(len(SIGNS))
        ]
        scores = {option: self.read(MAIN_SIZE, *option) for option in options}
        return max(scores, key=lambda option: auroc(~self.known[scores[option].rows], scores[option].logged) or 0.5)


@cache
def load_log_record() -> LogRecord | None:
    """Load the record; None if it was not made."""
    lines = read_record(RECORD)
    return LogRecord(lines[0], lines[1:]) if lines else None


def name_examples(k: int, *, balanced: bool = False) -> str:
    """Return the name of the examples in the record."""
    return f"k{k}-balanced" if balanced else f"k{k}"


@cache
def list_scores() -> dict[str, Score]:
    """Return the scores with the main log by name."""
    record = load_log_record()
    assert record is not None
    nearest, balanced = (name_examples(PAPER_COUNT, balanced=value) for value in (False, True))
    scores = {
        "nearest examples (paper)": record.read(MAIN_SIZE, nearest, PAPER_SIGN),
        "balanced examples": record.read(MAIN_SIZE, balanced, PAPER_SIGN),
        "tuned": record.read(MAIN_SIZE, *record.tuned),
    }
    columns = dict.fromkeys((examples, sign) for examples in (nearest, record.tuned[0]) for sign in (0, PAPER_SIGN))
    parts = [record.read(MAIN_SIZE, *column) for column in (*columns, (nearest, VOTE))]
    scores["calibrated"] = record.calibrate(parts)
    if record.has(MAIN_SIZE, f"{nearest}-draft") and record.has(MAIN_SIZE, f"{balanced}-draft"):
        drafts = [f"{examples}-draft" for examples in (nearest, balanced)]
        scores["with the draft"] = record.read(MAIN_SIZE, *record.choose_draft())
        more = [record.read(MAIN_SIZE, examples, sign) for examples in drafts for sign in (0, PAPER_SIGN)]
        scores["calibrated, with the draft"] = record.calibrate([*parts, *more])
    return scores


@cache
def list_results() -> dict[tuple[str, str], Result]:
    """Return the results with the main log by the name of the score and of the cut: paper, learned, loss."""
    record = load_log_record()
    assert record is not None
    results = {}
    for name, score in list_scores().items():
        cuts = {"paper": PAPER_CUT, "learned": record.learn_cut(score), "loss": record.learn_loss_cut(score)}
        results |= {(name, cut): record.measure(score, value) for cut, value in cuts.items()}
    return results


# --- tables -----------------------------------------------------------------------------------------


def log_tables() -> Iterator[str]:
    """Render the rules at the main size, the operating points and the curve."""
    record = load_log_record()
    if record is None:
        return
    yield from _rule_table(record)
    yield from _point_table()
    yield from _curve_table(record)


def _rule_table(record: LogRecord) -> Iterator[str]:
    """Render the rules with a log of the main size."""
    labels = load_test_run(QWEN, DATA_SET)
    choice = record.facts["tuned"]
    logged = [row for row in record.log if f"{MAIN_SIZE}-k{PAPER_COUNT}" in row["passes"]]
    yield f"\n### Balanced examples and a cut learned from the log ({MAIN_SIZE:,} entries)\n"
    examples = "balanced" if choice["balanced"] else "nearest"
    yield (
        f"A log of {MAIN_SIZE:,} TriviaQA train questions, known if the greedy answer is right "
        f"({100 * np.mean([row['known'] for row in logged]):.0f} % are). The protocol was written before the run "
        "(`benchmarks/dhicl_log.py`).\n\n"
        "- *Learned* cut: best balanced accuracy on 2,000 logged questions, each decided without itself.\n"
        f"- *Tuned*: k = {choice['k']}, {examples} examples, sign {choice['sign']}, chosen by AUROC on 1,000 logged questions.\n"
        "- *Calibrated*: a logistic regression over the paper's score, the tuned one and the vote of the nearest questions.\n"
        "- *With the draft*: an extension; the gate also reads the LLM's closed-book answer.\n"
        f"- TriviaQA: {len(labels.rows)} test questions, always {100 * labels.always_right.mean():.1f}. *Against always*: "
        "points, with 95 % bootstrap intervals.\n"
        f"- KB-SAT: {sum(row['kbsat'] for row in record.tests)} questions, half of them known. The set was drawn anew, so the "
        "paper's rule is measured again.\n"
    )
    columns = ("score", "cut", "AUROC", ACCURACY, "against always", "balanced accuracy", "KB-SAT", "its AUROC")
    rows: Rows = []
    for (name, cut), result in list_results().items():
        if cut == "learned" or (cut == "paper" and name in ("nearest examples (paper)", "balanced examples")):
            title = ".5" if cut == "paper" else f"learned, {_format_need(result.cut)}"
            rows.append((name, title, *_format_result(result)))
    yield table(columns, rows)


def _point_table() -> Iterator[str]:
    """Render the cuts that lose little on logged questions."""
    yield "\n### An operating point near always retrieving (TriviaQA)\n"
    yield (
        f"The cut that skips most logged questions at a loss of at most {100 * LOSS:.1f} points, by the recorded answers "
        "with and without passages of 2,000 train questions. The target was a loss of at most 1 point at 85 % retrieval or "
        "less.\n"
    )
    rows: Rows = []
    for (name, cut), result in list_results().items():
        if cut == "loss":
            rows.append(
                (name, _format_need(result.cut), *_format_result(result)[1:3], _format_gain_over_random(result))
            )
    yield table(("score", "cut", ACCURACY, "against always", "against random skips"), rows)


def _curve_table(record: LogRecord) -> Iterator[str]:
    """Render the results by number of log entries."""
    yield "\n### Does the log make it better with use?\n"
    yield (
        "The first n entries of one random order. 0 entries: the LLM is asked outright. The cut of the tuned variant is learned "
        "from each log itself (up to 500 of its questions, each decided without itself; 2,000 at 5,000 entries).\n"
    )
    columns = (
        "entries",
        "paper: AUROC",
        ACCURACY,
        "KB-SAT",
        "tuned: AUROC",
        "cut",
        ACCURACY,
        "balanced accuracy",
        "KB-SAT",
    )
    direct = record.measure(record.read(0, "k0", 0), PAPER_CUT)
    cells = _format_result(direct)
    rows: Rows = [("0", cells[0], cells[1], cells[4], "–", "–", "–", "–", "–")]
    for size, (paper, tuned) in list_curve().items():
        first, second = _format_result(paper), _format_result(tuned)
        rows.append(
            (
                f"{size:,}",
                first[0],
                first[1],
                first[4],
                second[0],
                _format_need(tuned.cut),
                second[1],
                second[3],
                second[4],
            )
        )
    yield table(columns, rows)


@cache
def list_curve() -> dict[int, tuple[Result, Result]]:
    """Return the results of the paper's rule and of the tuned variant at its learned cut by number of entries."""
    record = load_log_record()
    assert record is not None
    nearest, (examples, sign) = name_examples(PAPER_COUNT), record.tuned
    curve = {}
    for size in SIZES:
        if record.has(size, nearest) and record.has(size, examples):
            tuned = record.read(size, examples, sign)
            paper = record.measure(record.read(size, nearest, PAPER_SIGN), PAPER_CUT)
            curve[size] = (paper, record.measure(tuned, record.learn_cut(tuned)))
    return curve


def _format_result(result: Result) -> tuple[str, ...]:
    """Format AUROC, accuracy (rate), the difference to always, balanced accuracy, KB-SAT and its AUROC."""
    from knowgate.stats.bootstrap import estimate_mean
    from knowgate.stats.proportions import format_points_estimate

    verdicts = estimate_mean(result.verdicts.astype(float), RESAMPLES)
    low, high = (100 * (end or 0.0) for end in (verdicts.low, verdicts.high))
    return (
        f"{result.auroc:.3f}",
        f"{100 * result.accuracy:.1f} ({100 * result.rate:.0f} %)",
        format_points_estimate(estimate_mean(result.changes, RESAMPLES)),
        f"{result.balanced:.3f}",
        f"{100 * result.verdicts.mean():.1f} [{low:.1f}, {high:.1f}]",
        f"{result.kbsat_auroc:.3f}",
    )


def _format_need(log_odds: float) -> str:
    """Format a cut as a need from 0 to 1."""
    return f"{1 / (1 + np.exp(-log_odds)):.2f}"


def _format_gain_over_random(result: Result) -> str:
    """Format the accuracy minus that of as many random skips, with a 95 % bootstrap interval."""
    from knowgate.stats.bootstrap import estimate_mean
    from knowgate.stats.proportions import format_points_estimate

    labels = load_test_run(QWEN, DATA_SET)
    average = (labels.closed_right.astype(float) - labels.always_right).mean()
    return format_points_estimate(estimate_mean(result.changes - ~result.retrieve * average, RESAMPLES))
