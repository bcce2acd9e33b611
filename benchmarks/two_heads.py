"""Two heads against the smaller of both ranks, and stacks of fusion with IK, from the committed runs. No GPU, no LLM.

    python -m benchmarks.two_heads --json
    python -m benchmarks.two_heads --songs --json      # log-probabilities of APIs; reads KNOWGATE_BENCH

Protocol. Every gate is fitted on the train run of a data set and applied once to its test run. All of them read the same
signals: those that the committed runs hold (token statistics, self-assessment, dispersion of samples; no hidden states
and no text). The floor is the smaller of a question's ranks by P(not known) and by P(retrieval helps). A gate is measured
by its accuracy at 50, 55, ... 90 % retrieval, averaged; intervals are paired bootstraps over questions. That the need is
the plain difference of the two heads was decided on the train runs alone, by cross-validation.

Protocol of `--songs`. A fusion is fitted on the train rows of each LLM and applied to its test rows. That it reads the
wording of drafts (character n-grams) beside their embeddings, and in 2,048 columns, was decided on train rows alone, by
five-fold cross-validation. AUROC there, with embeddings alone and with the wording added: ChatGPT .802 and .811,
Llama-3-8B .830 and .848, Qwen2.5-14B .878 and .881; recorded answers to NQ without log-probabilities: GPT-4 .632 and .659,
ChatGPT .592 and .600, text-davinci-003 .539 and .540. Test rows were scored before with embeddings alone, and are scored
once with the wording.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables.common import MODELS, QWEN, RUNS
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.signals.features import available_features, feature_matrix
from knowgate.data.splits import Split, hash_to_unit
from knowgate.errors import BadInput
from knowgate.gates.judges import compute_gain_needs
from knowgate.stats.bootstrap import Estimate, estimate_auroc, estimate_mean
from knowgate.stats.metrics import BoolArray, FloatArray, logit
from knowgate.training.examples import Examples
from knowgate.training.fusion import FusionInputs, fit_fusion, fit_head, split_into_heads

RATES = np.arange(50, 91, 5) / 100
DEV_SHARE = 0.15  # of the train run; chooses the regularization of gates with one head
STACK_SETS = ("triviaqa_ctx", "nq_ctx", "hotpotqa_ctx", "squad_ctx", "webqa_zh_ctx")  # with needs of IK on record
SONGS = ("chatgpt", "llama8b", "qwen14b")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--songs", action="store_true", help="measure gates on recorded log-probabilities instead")
    options = parser.parse_args()
    result = {"songs": measure_songs()} if options.songs else {"two_heads": compare_heads(), "stacks": measure_stacks()}
    print(json.dumps(result, indent=1) if options.json else format_result(result))


# --- two heads ------------------------------------------------------------------------------------


def compare_heads() -> dict[str, Any]:
    """Compare gates on every committed data set that has a train run, a test run and answers with passages."""
    results: dict[str, Any] = {}
    differences: dict[str, FloatArray] = {}
    for model in MODELS:
        for test_run in sorted((RUNS / model).glob("*-test")):
            train_run = test_run.with_name(test_run.name.replace("-test", "-train"))
            examples = load_pair(train_run, test_run) if train_run.is_dir() else None
            needs = None if examples is None else score_test_rows(examples)
            if examples is None or needs is None:
                continue
            test, table = examples.split.test, examples.table
            closed, opened = table.closed_book_right[test].astype(bool), table.retrieved_right[test].astype(bool)
            right = {gate: average_right(score, closed, opened) for gate, score in needs.items()}
            name = f"{model}/{test_run.name.removesuffix('-test')}"
            differences[name] = right["two heads"] - right["smaller rank"]
            results[name] = {
                "n": len(test),
                "never": float(closed.mean()),
                "always": float(opened.mean()),
                **{gate: float(values.mean()) for gate, values in right.items()},
                "two heads - smaller rank": asdict(estimate_mean(differences[name])),
            }
    pooled = {"all": list(differences), "open questions": [f"{QWEN}/{name}" for name in STACK_SETS]}
    for title, names in pooled.items():
        values = np.concatenate([differences[name] for name in names])
        results[title] = {"n": len(values), "two heads - smaller rank": asdict(estimate_mean(values))}
    return results


def load_pair(train_run: Path, test_run: Path) -> Examples | None:
    """Load a train and a test run as one set of examples whose test split is the test run.

    The committed runs hold no question texts, so ids take their place. Returns None without open-book answers.
    """
    table = load_label_table([train_run, test_run], layers=())
    if table.open_book_right is None:
        return None
    table = replace(table, rows=[replace(row, question=row.id) for row in table.rows])
    return Examples(table, ~table.closed_book_right.astype(bool), "known", split_by_run(table))


def split_by_run(table: LabelTable) -> Split:
    """Split the first run into train and dev; the second is the test split. No row calibrates."""
    is_test = np.array(table.run_index) == 1
    shares = np.array([hash_to_unit("two heads", question.id) for question in table.questions])
    parts = (~is_test & (shares >= DEV_SHARE), ~is_test & (shares < DEV_SHARE), np.zeros_like(is_test), is_test)
    return Split(*(np.flatnonzero(part) for part in parts))


def score_test_rows(examples: Examples) -> dict[str, FloatArray] | None:
    """Score the test rows by gates with one head, by the smaller of their ranks, and by two heads.

    Returns None if an answer is so seldom right in the train run that no head can be fitted.
    """
    table, test = examples.table, examples.split.test.tolist()
    names = [name for name in available_features(table.questions, table.readings) if name != "question_length"]
    inputs = FusionInputs(names, feature_matrix(names, table.questions, table.readings), ())
    helped = table.retrieved_right.astype(bool) & ~table.closed_book_right.astype(bool)
    try:
        heads = split_into_heads(replace(examples, target="gain"))
    except BadInput:
        return None
    known = fit_head(examples, inputs).predict(test)
    benefit = fit_head(replace(examples, target="benefit", needed=helped), inputs).predict(test)
    closed, opened = (1 - fit_head(head, inputs).predict(test) for head in heads.values())
    return {
        "known": known,
        "benefit": benefit,
        "smaller rank": np.minimum(rank(known), rank(benefit)),
        "two heads": compute_gain_needs(closed, opened),
    }


def rank(scores: FloatArray) -> FloatArray:
    """Return the rank of each score, from 0 for the lowest; ties keep their order."""
    return np.argsort(np.argsort(scores, kind="stable"), kind="stable").astype(np.float64)


def average_right(needs: FloatArray, closed: BoolArray, opened: BoolArray) -> FloatArray:
    """Return for each question how often it is answered right over all rates of retrieval."""
    position = rank(-needs)
    retrieved = [position < round(rate * len(needs)) for rate in RATES]
    return np.mean([np.where(mask, opened, closed) for mask in retrieved], axis=0)


# --- stacks ---------------------------------------------------------------------------------------


def measure_stacks() -> dict[str, Any]:
    """Measure the AUROC of "known" of fusion, IK and the mean of their log-odds, from needs on record.

    The weights are equal and not fitted: the committed runs hold the needs of test rows only.
    """
    results = {}
    for name in STACK_SETS:
        table = load_label_table([RUNS / QWEN / f"{name}-test"], layers=())
        unknown = ~table.closed_book_right.astype(bool)
        fusion, ik = (np.array(table.recorded_needs[gate].needs, dtype=float) for gate in ("fusion", "ik"))
        stack = 1 / (1 + np.exp(-(logit(fusion) + logit(ik)) / 2))
        scores = {"fusion": fusion, "ik": ik, "stack": stack}
        results[name] = {"n": len(unknown)} | {
            gate: asdict(estimate_auroc(unknown, needs)) for gate, needs in scores.items()
        }
    return results


# --- log-probabilities of APIs --------------------------------------------------------------------


def measure_songs() -> dict[str, Any]:
    """Fit a fusion on recorded log-probabilities and text, and measure its AUROC of "known" on the test questions."""
    results = {}
    for llm in SONGS:
        with tempfile.TemporaryDirectory() as folder:
            runs = [import_songs(llm, part, Path(folder) / part) for part in ("train", "test")]
            table = load_label_table(runs, layers=())
        examples = Examples(table, ~table.closed_book_right.astype(bool), "known", split_by_run(table))
        test = examples.split.test
        smallest = np.array([_smallest_probability(table.readings[index]) for index in test])
        scores = {
            "smallest log-probability": 1 - smallest,
            "log-probabilities": fit_fusion(examples, text=False).raw(test.tolist()),
            "log-probabilities and text": fit_fusion(examples, text=True).raw(test.tolist()),
        }
        unknown = examples.needed[test]
        results[llm] = {"n": len(test), "known": float(1 - unknown.mean())} | {
            gate: asdict(estimate_auroc(unknown, needs)) for gate, needs in scores.items()
        }
    return results


def import_songs(llm: str, part: str, out: Path) -> Path:
    """Import the recorded answers of one LLM as a label run."""
    from knowgate.data.questions import load_questions
    from knowgate.data.runs.folder import RunFolder
    from knowgate.labels.answer_import import ImportOptions, import_answers
    from knowgate.labels.grading import StringGrader

    data = f"bench:gate_{llm}_songs/{part}"
    keys = ImportOptions(closed="pred_no_retrieval", closed_correct="correct.nor", logprobs="logprobs")
    import_answers(RunFolder(out), list(load_questions(data)), StringGrader(), llm=llm, data=data, options=keys)
    return out


def _smallest_probability(reading: Any) -> float:
    tokens = reading.draft.tokens
    return float(np.exp(min((token.logprob for token in tokens), default=-30.0)))


# --- text -----------------------------------------------------------------------------------------


def format_result(result: dict[str, Any]) -> str:
    """Format every table as aligned text."""
    formats: dict[type, Callable[[Any], str]] = {
        dict: lambda value: Estimate(**value).format(),
        float: lambda value: f"{value:.4f}",
        int: str,
    }
    lines = []
    for title, rows in result.items():
        lines.append(title)
        for name, row in rows.items():
            cells = (f"{key} {formats[type(value)](value)}" for key, value in row.items())
            lines.append(f"  {name}: " + ", ".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
