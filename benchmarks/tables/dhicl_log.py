"""DH-ICL with a log of known and unknown questions: rules of decision, and the gain of more log entries.

The protocol is in `benchmarks/dhicl_log.py`, which also writes the record. All cuts and weights are learned from logged
questions; test questions are only decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.dhicl_log import COUNTS, DATA_SET, LEFT_OUT, MAIN_SIZE, PAPER_COUNT, RECORD, RUNS, SIGNS
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
PAPER, BALANCED = "nearest examples (paper)", "balanced examples"
SHARE = 0.15  # of the logged questions that an operating point skips
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
        needs: Log-odds of the TriviaQA questions.
        retrieve: Whether each TriviaQA question is retrieved for.
        accuracy: Share of right answers to TriviaQA questions.
        changes: Right answer minus right answer of always retrieving, by question.
        balanced: Balanced accuracy of the verdict on TriviaQA.
        verdicts: Whether the verdict on each question of KB-SAT is right.
        kbsat_auroc: Of KB-SAT.
        cut: Log-odds above which the gate retrieves.
    """

    auroc: float
    needs: Floats
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


class LogRecord:
    """The recorded passes of the LLM over logged questions and test questions."""

    def __init__(self, facts: dict[str, Any], rows: Sequence[dict[str, Any]]):
        self.facts = facts
        self.log = [row for row in rows if not row["test"]]
        self.tests = [row for row in rows if row["test"]]

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

    def measure(self, score: Score, cut: float) -> Result:
        """Decide the test questions with a cut."""
        from knowgate.papers.dhicl_tables import compute_balanced_accuracy

        labels = load_test_run(QWEN, DATA_SET)
        by_id = {row["id"]: value for row, value in zip(self.tests, score.test, strict=True)}
        needs = np.array([by_id[row.id] for row in labels.rows])
        retrieve = needs > cut
        changes = np.where(retrieve, 0.0, labels.closed_book_right.astype(float) - labels.retrieved_right)
        in_kbsat = np.array([row["kbsat"] for row in self.tests])
        known = np.array([row["known"] for row in self.tests], dtype=bool)[in_kbsat]
        return Result(
            auroc=auroc(~labels.closed_book_right, needs) or 0.5,
            needs=needs,
            retrieve=retrieve,
            accuracy=float(labels.retrieved_right.mean() + changes.mean()),
            changes=changes,
            balanced=compute_balanced_accuracy(retrieve, labels.closed_book_right),
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


def load_log_record() -> LogRecord | None:
    """Load the record; None if it or the run of its test questions was not made."""
    return _load_cached(RECORD) if RECORD.is_file() and load_test_run(QWEN, DATA_SET) is not None else None


@cache
def _load_cached(file: Path) -> LogRecord:
    facts, *rows = read_record(file)
    return LogRecord(facts, rows)


def name_examples(k: int, *, balanced: bool = False) -> str:
    """Return the name of the examples in the record."""
    return f"k{k}-balanced" if balanced else f"k{k}"


@cache
def list_scores() -> dict[str, Score]:
    """Return the scores with the main log by name. The tuned variant is the paper's, so it has no score of its own."""
    record = load_log_record()
    assert record is not None
    nearest, balanced = (name_examples(PAPER_COUNT, balanced=value) for value in (False, True))
    parts = [record.read(MAIN_SIZE, nearest, column) for column in (0, PAPER_SIGN, VOTE)]
    drafts = [record.read(MAIN_SIZE, f"{name}-draft", sign) for name in (nearest, balanced) for sign in (0, PAPER_SIGN)]
    return {
        PAPER: record.read(MAIN_SIZE, nearest, PAPER_SIGN),
        BALANCED: record.read(MAIN_SIZE, balanced, PAPER_SIGN),
        "calibrated": record.calibrate(parts),
        "with the draft": record.read(MAIN_SIZE, *record.choose_draft()),
        "calibrated, with the draft": record.calibrate([*parts, *drafts]),
    }


@cache
def list_results() -> dict[tuple[str, str], Result]:
    """Return the results with the main log by the name of the score and of the cut: paper, learned, loss, share."""
    record = load_log_record()
    assert record is not None
    results = {}
    for name, score in list_scores().items():
        cuts = {
            "paper": PAPER_CUT,
            "learned": record.learn_cut(score),
            "loss": record.learn_loss_cut(score),
            "share": float(np.quantile(score.logged, SHARE)),
        }
        results |= {(name, cut): record.measure(score, value) for cut, value in cuts.items()}
    return results


@cache
def list_curve() -> dict[int, tuple[Result, Result]]:
    """Return the results of the paper's score, at .5 and at the cut learned from that log, by number of entries."""
    record = load_log_record()
    assert record is not None
    curve = {}
    for size in SIZES:
        score = record.read(size, name_examples(PAPER_COUNT), PAPER_SIGN)
        curve[size] = (record.measure(score, PAPER_CUT), record.measure(score, record.learn_cut(score)))
    return curve


def compare_sizes(small: int, large: int) -> tuple[float, float, float]:
    """Return the gain in AUROC on TriviaQA of a larger log, with the ends of a paired 95 % bootstrap interval."""
    unknown = ~load_test_run(QWEN, DATA_SET).closed_book_right
    needs = [list_curve()[size][0].needs for size in (small, large)]
    rng, gains = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        rows = rng.integers(0, len(unknown), len(unknown))
        first, second = (auroc(unknown[rows], part[rows]) or 0.5 for part in needs)
        gains.append(second - first)
    first, second = (auroc(unknown, part) or 0.5 for part in needs)
    low, high = np.quantile(gains, [0.025, 0.975])
    return second - first, float(low), float(high)


# --- tables -----------------------------------------------------------------------------------------


def log_tables() -> Iterator[str]:
    """Render the rules at the main size, the operating points and the curve."""
    record = load_log_record()
    if record is None:
        return
    yield from _rule_table(record)
    yield from _point_table(record)
    yield from _curve_table(record)


def summarize_log() -> dict[str, str]:
    """Return the figures of the page's summary; dashes without a record."""
    record = load_log_record()
    if record is None:
        names = ("kbsat", "half", "curve", "paper", "loss", "share", "paper_auroc", "balanced_auroc")
        return dict.fromkeys(names, "–")
    results = list_results()
    outright = record.measure(record.read(0, "k0", 0), PAPER_CUT)
    entries = (f"{list_curve()[size][0].auroc:.2f} with {size:,} entries" for size in (100, 1_000, 5_000, 12_000))
    savings = {
        name: f"{100 * (1 - results[PAPER, name].rate):.0f} % at {_format_result(results[PAPER, name])[2]} points"
        for name in ("paper", "loss", "share")
    }
    return {
        **savings,
        "kbsat": _format_result(results[PAPER, "learned"])[4],
        "half": _format_result(results[PAPER, "paper"])[4],
        "curve": f"{outright.auroc:.2f} without a log, {', '.join(entries)}",
        "paper_auroc": f"{results[PAPER, 'paper'].auroc:.2f}",
        "balanced_auroc": f"{results[BALANCED, 'paper'].auroc:.2f}",
    }


def _rule_table(record: LogRecord) -> Iterator[str]:
    """Render the rules with a log of the main size."""
    labels = load_test_run(QWEN, DATA_SET)
    logged = [row for row in record.log if f"{MAIN_SIZE}-k{PAPER_COUNT}" in row["passes"]]
    yield f"\n### Balanced examples and a cut learned from the log ({MAIN_SIZE:,} entries)\n"
    yield (
        f"A log of {MAIN_SIZE:,} TriviaQA train questions, known if the greedy answer is right "
        f"({100 * np.mean([row['known'] for row in logged]):.0f} % are). `benchmarks/dhicl_log.py` holds the protocol, which was "
        "written before the run. `python -m benchmarks.tables.dhicl_log` prints this section.\n\n"
        "- *Learned* cut: best balanced accuracy on 2,000 logged questions, each decided without itself.\n"
        "- k, examples and sign were tuned on 1,000 logged questions, too. The paper's own choice was best: "
        f"{_format_choice(record)}.\n"
        "- *Calibrated*: a logistic regression over the paper's score with and without correction, and the vote of the nearest "
        "questions.\n"
        "- *With the draft*: an extension; the gate also reads the LLM's closed-book answer.\n"
        f"- TriviaQA: {len(labels.rows)} test questions, always {100 * labels.retrieved_right.mean():.1f}. *Against always*: "
        "points, with 95 % bootstrap intervals. Known is what the label run says; `known` in the record is from another pass, "
        "and differs for 10 questions.\n"
        f"- KB-SAT: {sum(row['kbsat'] for row in record.tests)} questions, half of them known. The set was drawn anew, so the "
        "paper's rule is measured again.\n"
    )
    rows: Rows = []
    for (name, cut), result in list_results().items():
        if cut == "learned" or (cut == "paper" and name in (PAPER, BALANCED)):
            title = ".5" if cut == "paper" else f"learned, {_format_need(result.cut)}"
            rows.append((name, title, *_format_result(result)))
    yield table(("score", "cut", "AUROC", ACCURACY, "against always", "balanced accuracy", "KB-SAT", "its AUROC"), rows)


def _format_choice(record: LogRecord) -> str:
    """Format the AUROC on logged questions of the variants among which one was chosen, with the paper's sign."""
    texts = []
    for title, balanced in (("nearest", False), ("balanced", True)):
        names = [f"{MAIN_SIZE}-{name_examples(k, balanced=balanced)}" for k in COUNTS]
        values = [
            auroc(
                ~record.known[:LEFT_OUT], np.array([row["passes"][name][PAPER_SIGN] for row in record.log[:LEFT_OUT]])
            )
            for name in names
        ]
        texts.append(f"{title} {', '.join(f'{value:.3f}' for value in values)}")
    return f"AUROC for k = {', '.join(map(str, COUNTS))}: {'; '.join(texts)}"


def _point_table(record: LogRecord) -> Iterator[str]:
    """Render cuts that lose little on logged questions, and those that skip a share of them."""
    labels = load_test_run(QWEN, DATA_SET)
    added = {
        "log": -100 * np.nanmean(record.log_changes),
        "test": 100 * (labels.retrieved_right.mean() - labels.closed_book_right.mean()),
    }
    yield "\n### An operating point near always retrieving (TriviaQA)\n"
    yield (
        f"*Loss*: the cut that skips most logged questions at a loss of at most {100 * LOSS:.1f} points, by the recorded answers "
        f"with and without passages of 2,000 train questions. *Share*: the cut that skips {100 * SHARE:.0f} % of them; it was "
        "added after the run, to show the distance to the target: a loss of at most 1 point at 85 % retrieval or less. On the "
        f"log, passages add {added['log']:.0f} points, on the test questions {added['test']:.0f}.\n"
    )
    columns = (
        "score",
        "loss: cut",
        ACCURACY,
        "against always",
        "share: cut",
        ACCURACY,
        "against always",
        "loss on the log",
    )
    rows: Rows = []
    for name, score in list_scores().items():
        cells: list[str] = []
        for kind in ("loss", "share"):
            result = list_results()[name, kind]
            cells += (_format_need(result.cut), *_format_result(result)[1:3])
        skipped = score.logged <= list_results()[name, "share"].cut
        rows.append((name, *cells, f"{-100 * np.nanmean(record.log_changes[score.rows] * skipped):.1f}"))
    yield table(columns, rows)


def _curve_table(record: LogRecord) -> Iterator[str]:
    """Render the results by number of log entries."""
    yield "\n### Does the log make it better with use?\n"
    gains = [
        f"{gain:+.3f} [{low:+.3f}, {high:+.3f}] from {small:,} to {large:,}"
        for small, large in ((100, 1_000), (1_000, 5_000), (100, 5_000))
        for gain, low, high in (compare_sizes(small, large),)
    ]
    yield (
        "The paper's score with the first n entries of one random order. 0 entries: the LLM is asked outright. The cut is "
        "learned from each log itself: from up to 500 of its questions, each decided without itself; from 2,000 at 5,000 "
        f"entries. Gain in AUROC with the number of entries: {', '.join(gains)} (paired 95 % bootstrap intervals). "
        "Only the last one excludes zero, and accuracy at .5 does not rise: the need falls with more entries, so fewer questions "
        "are searched for.\n"
    )
    columns = ("entries", "AUROC", f"at .5: {ACCURACY}", "balanced accuracy", "KB-SAT", "learned cut", ACCURACY,
               "balanced accuracy", "KB-SAT")  # fmt: skip
    cells = _format_result(record.measure(record.read(0, "k0", 0), PAPER_CUT))
    rows: Rows = [("0", cells[0], cells[1], cells[3], cells[4], "–", "–", "–", "–")]
    for size, (paper, learned) in list_curve().items():
        first, second = _format_result(paper), _format_result(learned)
        rows.append(
            (f"{size:,}", first[0], first[1], first[3], first[4], _format_need(learned.cut), second[1], *second[3:5])
        )
    yield table(columns, rows)


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


if __name__ == "__main__":
    print("\n".join(log_tables()))
