"""The first table of RESULTS.md: what each paper claims, what is measured here, what gold mastery gives, and whether it holds.

Every number of the column "here" is computed from a record and links to it. Gold mastery is no gate: it skips retrieval
in the order of the share of sampled answers that are right. `make results` stands where the record is
not a label run, or where no command prints that figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.cbdr_alignment import SOURCES
from benchmarks.policy_evaluation import compare
from benchmarks.tables.cbdr import PROBES, RERANKED, always_gap
from benchmarks.tables.cbdr_alignment import HOME as ALIGNMENT
from benchmarks.tables.cbdr_alignment import format_gap
from benchmarks.tables.cbdr_probe import probe_point
from benchmarks.tables.closed_book import ik_point, mean_auroc, token_difference
from benchmarks.tables.common import QWEN, RESAMPLES, RUNS, SMOLLM, Rows, table, trial_of
from benchmarks.tables.dhicl_cut import cross_cut
from benchmarks.tables.kbm import KINDS, judge_of
from benchmarks.tables.kbm_second import BOUNDARY, gain_of
from benchmarks.tables.names import OWN

LOSS = 0.017  # accuracy that KBM gives up on WebQA for its saved searches
PAGES = {"KBM": "kbm.md", "IK": "ik.md", "CBDR": "cbdr.md", "DH-ICL": "dh-icl.md"}
COLUMNS = ("paper", "claim", "there", "here", "gold mastery", "holds?", "command")
FROM_RECORD = "make results"
CLOSED_BOOK_RECORD, PROBE_RECORD = "papers/closed_book.jsonl.gz", "papers/cbdr_probe.jsonl.gz"
ALIGNED, ALIGNED_RECORD = ALIGNMENT / "rerank.json", "cbdr/alignment/rerank.json"
TRIVIA, NQ, WEBQA = "triviaqa_ctx", "nq_ctx", "webqa_zh_ctx"


@dataclass(frozen=True)
class Claim:
    """One line of the table.

    Attributes:
        paper: Name of the paper.
        claim: What the paper says, in a few words.
        there: The paper's figure.
        here: Figures measured here, each with the record that it comes from (a path in `benchmarks/runs`).
        gold: What gold mastery, or the oracle of that table, gives; empty if that is not defined.
        verdict: Whether the claim holds here, and why if not.
        command: The command that prints the first figure; RUN stands for the folder of its record.
    """

    paper: str
    claim: str
    there: str
    here: tuple[tuple[str, str], ...]
    gold: str
    verdict: str
    command: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the line."""
        here = "; ".join(f"[{figure}](runs/{record})" for figure, record in self.here)
        paper = f"[{self.paper}](results/{PAGES[self.paper]})"
        command = self.command.replace("RUN", f"benchmarks/runs/{self.here[0][1]}")
        return (paper, self.claim, self.there, here, self.gold or "–", self.verdict, f"`{command}`")


def claims_table() -> str:
    """Render the table of all claims."""
    rows: Rows = [claim.cells() for claim in list_claims()]
    return table(COLUMNS, rows)


@cache
def list_claims() -> tuple[Claim, ...]:
    """List all claims in the order of the table."""
    return tuple(claim for claims in (_kbm, _ik, _cbdr, _dhicl) for claim in claims())


# --- figures ----------------------------------------------------------------------------------------


def run_of(name: str, model: str = QWEN) -> str:
    """Return the folder of a data set's test run within `benchmarks/runs`."""
    return f"{model}/{name}-test"


def verdict_point(trial: Any, gate: str) -> tuple[float, float]:
    """Return (share of searches saved, change of accuracy against always) at a gate's own threshold."""
    from knowgate.gates.offline_scoring import score_gate

    scores = score_gate(trial, gate)
    return decision_point(trial, scores.needs > scores.threshold)


def decision_point(trial: Any, retrieve: Any) -> tuple[float, float]:
    """Return (share of searches saved, change of accuracy against always) of given decisions."""
    right = np.where(retrieve, trial.always_right, trial.closed_right)
    return 1 - float(retrieve.mean()), float(right.mean() - trial.always_right.mean())


def above_random(trial: Any, gate: str) -> str:
    """Return '+1.2 [-0.0, +2.4]': accuracy minus that of as many random skips, with a 95 % bootstrap interval."""
    from knowgate.gates.offline_scoring import score_gate

    scores = score_gate(trial, gate)
    skips = scores.needs <= scores.threshold
    changes = trial.closed_right.astype(float) - trial.always_right
    gains = skips * (changes - changes.mean())
    drawn = np.random.default_rng(0).integers(0, len(gains), (RESAMPLES, len(gains)))
    low, high = 100 * np.quantile(gains[drawn].mean(axis=1), [0.025, 0.975])
    return f"{100 * gains.mean():+.1f} [{low:+.1f}, {high:+.1f}]"


def saved_at(trial: Any, needs: Any, loss: float = LOSS) -> float:
    """Return the largest share of searches that can go for at most `loss` accuracy, by the exact order of the rows."""
    from knowgate.stats.metrics import compute_frontier

    frontier = compute_frontier(trial.closed_right, trial.always_right, needs)
    enough = frontier.accuracies >= frontier.accuracies[-1] - loss - 1e-9
    return 1 - float(frontier.rates[enough].min())


def gold_needs(trial: Any) -> Any:
    """Return 1 - gold mastery of each question."""
    return 1 - np.array([row.closed.mastery for row in trial.rows], dtype=float)


def oracle_savings() -> str:
    """Return how many searches an oracle saves without losing an answer: all that do not turn a wrong answer right."""
    trials = {short(name): trial_of(QWEN, name) for name in (WEBQA, TRIVIA, NQ)}
    needed = {name: (trial.always_right & ~trial.closed_right).mean() for name, trial in trials.items()}
    return ", ".join(f"{100 * (1 - share):.0f} % of {name}" for name, share in needed.items())


def gold_saved(trial: Any, loss: float = LOSS) -> str:
    """Return what the order of gold mastery saves."""
    return f"{100 * saved_at(trial, gold_needs(trial), loss):.0f} %"


def correlation(trial: Any) -> float:
    """Return Pearson's r of closed-book mastery and certainty."""
    values = [(row.closed.mastery, row.closed.certainty) for row in trial.rows]
    return float(np.corrcoef(np.array(values, dtype=float).T)[0, 1])


def point_text(point: tuple[float, float]) -> str:
    """Return '24 % at -6.0'."""
    return f"{100 * point[0]:.0f} % at {100 * point[1]:+.1f}"


def short(name: str) -> str:
    """Return the name of a data set as people write it."""
    return {TRIVIA: "TriviaQA", NQ: "NQ", WEBQA: "WebQA", "openbookqa": "OpenBookQA"}.get(name, name)


# --- the claims of each paper -----------------------------------------------------------------------


def _kbm() -> Iterator[Claim]:
    webqa, trivia, llama = (trial_of(QWEN, name) for name in (WEBQA, TRIVIA, NQ))
    mastery, certainty = (judge_of(webqa, head) for head in ("mastery", "certainty"))
    saved = saved_at(webqa, _needs(webqa, mastery))
    yield Claim(
        "KBM", "mastery saves searches on WebQA", "43 % at -1.7",
        ((f"own verdict {point_text(verdict_point(webqa, mastery))}", run_of(WEBQA)),
         (f"best cut {100 * saved:.0f} % at -1.7", run_of(WEBQA))),
        gold_saved(webqa), "no: the judge finds a third of what gold allows",
        "knowgate eval --labels RUN --gates kbm,verdict=own",
    )  # fmt: skip
    yield Claim(
        "KBM", "certainty saves searches on WebQA", "10 % at -.4",
        ((f"own verdict {point_text(verdict_point(webqa, certainty))}", run_of(WEBQA)),),
        gold_saved(webqa, 0.004), "no: this judge never says certain; one trained for three epochs does, and saves no more",
        "knowgate eval --labels RUN --gates kbm-certainty,verdict=own",
    )  # fmt: skip
    yield Claim(
        "KBM", "mastery and certainty correlate", "r = .64",
        ((f"WebQA {correlation(webqa):.2f}", run_of(WEBQA)), (f"TriviaQA {correlation(trivia):.2f}", run_of(TRIVIA)),
         (f"NQ {correlation(llama):.2f}", run_of(NQ))),
        "", "**yes** on 4 of 11 sets; lower where the LLM knows little or guesses", "knowgate report RUN",
    )  # fmt: skip
    yield _second_judgement()
    yield _freshness()
    yield _plug_in()


def _second_judgement() -> Claim:
    from knowgate.data.runs.records import read_usefulness

    trial, run = trial_of(QWEN, BOUNDARY), run_of(BOUNDARY)
    verdicts = read_usefulness(RUNS / run)[0].useful
    useful = np.array([verdicts[row.id] for row in trial.rows])
    better = np.array([row.open.mastery >= row.closed.mastery for row in trial.rows])
    always, paper, gold = (
        100 * float(np.where(kept, trial.always_right, trial.closed_right).mean())
        for kept in (np.ones_like(useful), useful, better)
    )
    choice = "openbookqa"
    shown, gain = gain_of(choice, trial_of(QWEN, choice))
    return Claim(
        "KBM", "a second judgement drops useless passages without loss (multiple choice)", "level or above",
        ((f"NQ, do they suffice? {always:.1f} to {paper:.1f}", f"{run}/useful.jsonl"),
         (f"OpenBookQA, do they help (by log-probabilities)? {gain} at {100 * shown:.0f} % shown", run_of(choice))),
        f"NQ {gold:.1f}", "on 3 of 5 multiple-choice sets, if asked whether passages help",
        FROM_RECORD,
    )  # fmt: skip


def _freshness() -> Claim:
    from knowgate.gates.offline_scoring import score_gate

    trial = trial_of(QWEN, "freshqa")
    scores = score_gate(trial, judge_of(trial, "mastery"))
    kinds, retrieve = trial.get_slice_values("freshness"), scores.needs > scores.threshold
    rates = " / ".join(f"{100 * retrieve[kinds == kind].mean():.0f}" for kind in KINDS)
    return Claim(
        "KBM", "the faster facts change, the more it retrieves (fast / slow / never)", "95 / 92 / 76 %",
        ((f"{rates} %", run_of("freshqa")),), "", "fast above the rest; slow and never are level", FROM_RECORD,
    )  # fmt: skip


def _plug_in() -> Claim:
    trial = trial_of("llama3.1-8b", "gate_llama3_8b")
    gate = next(name for name in trial.recorded_needs if name.startswith("kbm, of") and name.endswith(OWN))
    saved, change = verdict_point(trial, gate)
    random = -saved * float(trial.always_right.mean() - trial.closed_right.mean())
    return Claim(
        "KBM", "a judge of one LLM serves another (points above random)", "+3 to +7 (WebQA)",
        ((f"Llama-3.1-8B {100 * (change - random):+.1f} at {100 * saved:.0f} % saved",
          run_of("gate_llama3_8b", "llama3.1-8b")),),
        "", "not shown: a 1.5B LLM's knowledge is not an 8B LLM's",
        f'knowgate eval --labels RUN --gates "{gate.removesuffix(OWN)},verdict=own" --full',
    )  # fmt: skip


def _ik() -> Iterator[Claim]:
    from knowgate.evaluation.gate_results import compute_majority_share
    from knowgate.gates.offline_scoring import score_gate

    trivia = trial_of(QWEN, TRIVIA)
    gate = f"ik{OWN}"
    scores = score_gate(trivia, gate)
    right = (scores.needs > scores.threshold) == ~trivia.closed_right
    majority, gap = compute_majority_share(trivia), compare(right, ~trivia.closed_right)
    lift = f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
    yield Claim(
        "IK", "its verdict is right for 80 %", "80 %",
        ((f"TriviaQA {100 * right.mean():.1f} %, always saying unknown {100 * majority:.1f} %", run_of(TRIVIA)),),
        "", f"**yes**: {lift} points above always saying unknown",
        "knowgate eval --labels RUN --gates ik,verdict=own --full",
    )  # fmt: skip
    sets = {name: trial_of(QWEN, name) for name in ("openbookqa", TRIVIA, WEBQA)}
    yield Claim(
        "IK", "halves the searches on some data sets", "50 %",
        (*((f"{short(name)} {point_text(verdict_point(trial, gate))}", run_of(name)) for name, trial in sets.items()),
         (f"TriviaQA, 20,000 rows {point_text(ik_point(0))}", CLOSED_BOOK_RECORD)),
        f"TriviaQA {gold_saved(trivia)}", "only where passages are useless (OpenBookQA); on TriviaQA not even gold mastery does",
        "knowgate eval --labels RUN --gates ik,verdict=own",
    )  # fmt: skip
    first, last = (_ik_auroc(tokens) for tokens in (0, 32))
    yield Claim(
        "IK", "the first T tokens of the answer help (AUROC of TriviaQA)", "yes",
        ((f"T = 0, 1, 4, 16, 32: {', '.join(f'{mean_auroc(0, tokens):.3f}' for tokens in (0, 1, 4, 16, 32))} with 20,000 rows; "
          f"{token_difference(0)} from 0 to 32", CLOSED_BOOK_RECORD),
         (f"{first} to {last} with 1,817 rows", "ik.md")), "",
        "**in part**: yes with short answers; with free-form answers (1,817 rows) no difference is shown",
        "python -m benchmarks.tables.closed_book",
    )  # fmt: skip


def _ik_auroc(tokens: int) -> str:
    """Return the AUROC of the judge with all training rows from the recorded table."""
    lines = [[cell.strip() for cell in line.split("|")] for line in (RUNS / "ik.md").read_text().splitlines()]
    return next(line[6].lstrip("0") for line in lines if line[1:4] == [str(tokens), "1817", "contains"])


def _cbdr() -> Iterator[Claim]:
    from knowgate.gates.offline_scoring import score_gate
    from knowgate.papers.sweeps import select_unsure_questions

    points = []
    for name in (NQ, TRIVIA):
        trial = trial_of(QWEN, name)
        retrieve = select_unsure_questions(score_gate(trial, PROBES[0]), 0.95)
        saved = f"{100 * (1 - retrieve.mean()):.0f} % at {always_gap(trial, retrieve)}, n = {len(trial.rows)}"
        points.append((f"{short(name)} {saved}", run_of(name)))
    points.append((f"NQ, 9,935 train rows {point_text(probe_point(1))}", PROBE_RECORD))
    yield Claim(
        "CBDR", "beta = .95 skips some searches at little loss (NQ)", "17 % at -.8", tuple(points),
        f"NQ {gold_saved(trial_of(QWEN, NQ), 0.008)}",
        "not with this LLM: with 82 known train rows the probe overfits; with 690 it is never sure enough to skip",
        f'knowgate sweep beta --labels RUN --gates "{PROBES[0]}"',
    )  # fmt: skip
    ranked = json.loads(RERANKED.read_text())
    first = ranked["rankings"]["confidence"]
    yield Claim(
        "CBDR", "alignment raises P@1 of its own preference (confidence)", "86.0 to 91.2",
        ((f"{_first_passages(first, 'aligned-confidence')}, n = {first['questions']}", "cbdr/rerank.json"),),
        "100", "no: one question fewer, from a base near 100", FROM_RECORD,
    )  # fmt: skip
    aligned = json.loads(ALIGNED.read_text())
    yield Claim(
        "CBDR", "alignment raises P@1 of its own preference (benefit, likelihood)", "–",
        (*((f"{source} {_first_passages(aligned['rankings'][source], source)}: "
            f"{format_gap(aligned['rankings'][source]['less']['base']['P@1'][source])}", ALIGNED_RECORD) for source in SOURCES),
         (f"earlier, benefit {_first_passages(ranked['rankings']['benefit'], 'aligned-benefit')}", "cbdr/rerank.json")),
        "100", "not shown: with weights chosen on dev questions it does no harm, and no interval excludes 0", FROM_RECORD,
    )  # fmt: skip
    yield _answers(ranked["answers"][0], aligned["answers"][0])


def _first_passages(ranking: dict[str, Any], name: str) -> str:
    """Return '68.4 to 69.2': P@1 of the base and of an aligned reranker."""
    values = ranking["values"]["P@1"]
    return f"{100 * values['base']['value']:.1f} to {100 * values[name]['value']:.1f}"


def _answers(earlier: dict[str, Any], aligned: dict[str, Any]) -> Claim:
    values, top = earlier["values"]["top 3"], "top 3"
    gaps = {source: format_gap(aligned["less"]["base"][top][source]) for source in SOURCES}
    return Claim(
        "CBDR", "aligned passages give more right answers (NQ, top 3)", "62.2 to 66.9",
        ((f"{100 * values['base']['value']:.1f} to {100 * values['aligned-confidence']['value']:.1f}", "cbdr/rerank.json"),
         *((f"by {source} {gap}, n = {aligned['questions']:,}", ALIGNED_RECORD) for source, gap in gaps.items())),
        f"{100 * aligned['values'][top]['oracle, likelihood']['value']:.1f} (oracle of likelihood; base "
        f"{100 * aligned['values'][top]['base']['value']:.1f})", "no", FROM_RECORD,
    )  # fmt: skip


def _dhicl() -> Iterator[Claim]:
    from knowgate.gates.offline_scoring import score_gate
    from knowgate.papers.sweeps import format_auroc

    trivia = trial_of(QWEN, TRIVIA)
    yield Claim(
        "DH-ICL", "saves half the searches on TriviaQA", "50 % at -.2",
        ((point_text(verdict_point(trivia, "dhicl")), run_of(TRIVIA)),), gold_saved(trivia, 0.002),
        f"no: passages add 33 points here, 6.5 there; {above_random(trivia, 'dhicl')} against as many random skips",
        "knowgate sweep dhicl --labels RUN",
    )  # fmt: skip
    file = f"kbsat-{QWEN}.jsonl"
    direct, history = (_kbsat(file, method) for method in ("direct", "+ history, calibrated (paper)"))
    small_file = f"kbsat-{SMOLLM}.jsonl"
    small = _kbsat(small_file, "direct")
    yield Claim(
        "DH-ICL", "asked outright, the LLM says it knows everything (KB-SAT)", "50.0",
        ((f"{direct['accuracy'] * 100:.1f}, {direct['predicted_known']} of {direct['n']} \"known\"", file),
         (f"SmolLM {small['accuracy'] * 100:.1f}, {small['predicted_known']} of {small['n']} \"known\"", small_file)),
        "100", "**yes** for Qwen, no for SmolLM (50.0 is what any constant answer scores)", FROM_RECORD,
    )  # fmt: skip
    yield Claim(
        "DH-ICL", "examples from the log repair that (KB-SAT)", "66.9",
        ((f"{history['accuracy'] * 100:.1f}, AUROC {history['auroc']:.2f}", file),), "100",
        "half of the gain; 62.1 on an earlier set of 330", FROM_RECORD,
    )  # fmt: skip
    rates = [(k, 100 * (1 - verdict_point(trivia, f"dhicl:k={k}" if k != 20 else "dhicl")[0])) for k in (5, 20, 70)]
    yield Claim(
        "DH-ICL", "more examples, fewer searches (Figure 6)", "falls with k",
        ((", ".join(f"k = {k}: {rate:.0f} %" for k, rate in rates), run_of(TRIVIA)),), "",
        "no: it rises; the LLM copies the share of known examples", "knowgate sweep dhicl --labels RUN --counts 5,20,70",
    )  # fmt: skip
    words = [name for name in trivia.recorded_needs if name.startswith("dhicl:words=")]
    searched = [100 * (1 - verdict_point(trivia, name)[0]) for name in ("dhicl", *words)]
    learned = [100 * cross_cut(_needs(trivia, name), trivia.closed_right).mean() for name in ("dhicl", *words)]
    aurocs = [float(format_auroc(trivia, score_gate(trivia, name))) for name in ("dhicl", *words)]
    yield Claim(
        "DH-ICL", "label words hardly matter (retrieval rates)", "43 to 68 %",
        ((f"at .5 {min(searched):.0f} to {max(searched):.0f} %", run_of(TRIVIA)),
         (f"at a learned cut {min(learned):.0f} to {max(learned):.0f} %", run_of(TRIVIA))), "",
        "no at .5; closer at a cut learned from the other half of the test questions, but AUROC runs from "
        f"{min(aurocs):.2f} to {max(aurocs):.2f}",
        "knowgate sweep dhicl --labels RUN",
    )  # fmt: skip


def _kbsat(file: str, method: str) -> dict[str, Any]:
    """Return the recorded KB-SAT line of a method, balanced set, words true/false."""
    lines = [json.loads(line) for line in (RUNS / file).read_text().splitlines() if line.strip()]
    return next(
        line
        for line in lines
        if (line["method"], line["words"], line["data"]) == (method, "true/false", "jsonl:kbsat.jsonl")
    )


def _needs(trial: Any, gate: str | None) -> Any:
    from knowgate.gates.offline_scoring import score_gate

    return score_gate(trial, gate).needs
