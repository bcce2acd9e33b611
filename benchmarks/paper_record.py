"""Write the predictions of `paper_training` as compact records: ids and numbers, no questions and no answers.

    python -m benchmarks.paper_record --rows FOLDER --trained FOLDER
    python -m benchmarks.paper_record --samples FOLDER    # WORK/out of `kbm_samples`

`runs/papers/closed_book.jsonl.gz` has one row for each test question and each held-out train question: the grade, the
smallest log-probability, the fusion's log-odds by number of train rows, and IK's logits by answer tokens and seed.
`runs/papers/cbdr_probe.jsonl.gz` has a linear probe's logits of the test questions, for CBDR.
`runs/papers/kbm.jsonl.gz` has one row for each test question: the logits of KBM's judges without and with passages;
`runs/papers/kbm30.jsonl.gz` the same of the judges taught with 30 samples. `runs/cbdr/alignment/larger_base.jsonl.gz` has
one row for each dev and test question: the logits of its candidates by each reranker with a larger base.
`runs/papers/kbm30_labels.jsonl.gz` has mastery and certainty with 30 samples of each train question;
`runs/papers/probe_confidence.jsonl.gz` has the uncalibrated scores of CBDR's probes, one row for each data set.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.stats.metrics import auroc, logit

HOME = Path(__file__).parent / "runs" / "papers"
CLOSED_BOOK, KBM, TRAININGS = (HOME / name for name in ("closed_book.jsonl.gz", "kbm.jsonl.gz", "trainings.json"))
KBM_30, LARGER_BASE = HOME / "kbm30.jsonl.gz", HOME.parent / "cbdr" / "alignment" / "larger_base.jsonl.gz"
KBM_30_LABELS, PROBE_CONFIDENCE = HOME / "kbm30_labels.jsonl.gz", HOME / "probe_confidence.jsonl.gz"
SAMPLES_SECONDS = HOME / "kbm30_seconds.json"
GROUPS = ("triviaqa", "nq")
CURVE = (500, 1500, 5000, 12000)
MIDDLE_LAYER_COLUMN = 1  # of the probes: layer 14 of 28, before the answer
KBM_JUDGES = ("kbm_1_epoch", "kbm_3_epochs")
KBM_30_JUDGES = ("kbm30_1_epoch", "kbm30_3_epochs")
Floats = np.ndarray[Any, Any]


@cache
def read_record(file: Path) -> list[dict[str, Any]]:
    """Read a record; an empty list if it was not made."""
    if not file.is_file():
        return []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_record(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a record, the same bytes for the same rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(file, "wb", mtime=0) as lines:
        for row in rows:
            lines.write((json.dumps(row) + "\n").encode())


# --- closed-book answers ----------------------------------------------------------------------------


def write_closed_book(rows_folder: Path, trained: Path) -> None:
    """Fit the fusions on the train rows and write the predictions of test and held-out rows."""
    answered = np.load(trained / "white_box.npz")
    right, groups = answered["targets"][:, 0].astype(int), answered["group"]
    is_test = answered["folds"] < 0
    held_out = np.load(rows_folder / "closed_book.npz")["held_out"][: len(right)] & ~is_test
    statistics = read_statistics(trained)
    fusions = fit_fusions(np.load(trained / "probes.npz"), statistics, right, groups, answered["folds"], held_out)
    judges = {file.name.removesuffix("-1.npz"): np.load(file) for file in sorted(trained.glob("ik_*_seed*-1.npz"))}
    logits = {
        name.removeprefix("ik_").replace("_seed", "/"): dict(
            zip(part["index"].tolist(), part["logits"][:, 0, 0].tolist(), strict=True)
        )
        for name, part in judges.items()
    }
    with gzip.open(rows_folder / "closed_book.jsonl.gz", "rt", encoding="utf-8") as lines:
        ids = [json.loads(line)["id"] for line in lines][: len(right)]
    write_record(
        CLOSED_BOOK,
        (
            {
                "id": ids[number],
                "group": int(groups[number]),
                "test": bool(is_test[number]),
                "right": int(right[number]),
                "min": round(float(statistics[number, 2]), 3),
                "fusion": {name: round(float(values[number]), 3) for name, values in fusions.items()
                           if not np.isnan(values[number])},
                "ik": {name: round(float(values[number]), 3) for name, values in logits.items()},
            }
            for number in np.flatnonzero(is_test | held_out).tolist()
        ),
    )  # fmt: skip
    facts = {name: json.loads(str(part["facts"])) for name, part in judges.items()}
    facts["closed_book"] = {
        "rows": len(right),
        "seconds": float((trained / "closed_book.done").read_text()),
        "held_out": int(held_out.sum()),
    }
    facts["probes"] = json.loads(str(np.load(trained / "probes.npz")["facts"]))
    add_trainings(facts)


def read_statistics(trained: Path) -> Floats:
    """Read the token statistics of the answers; the number of tokens comes as a logarithm, with a mark for cut answers."""
    features = np.load(trained / "closed_features.npz")["features"]
    return np.column_stack([features[:, :9], np.log1p(features[:, 9] % 100), features[:, 9] >= 100])


def fit_fusions(
    probes: Any, statistics: Floats, right: Floats, groups: Floats, folds: Floats, held_out: Floats
) -> dict[str, Floats]:
    """Return log-odds of the fusion by number of train rows; `stack` did not learn from held-out rows."""
    results: dict[str, Floats] = {}
    for number, group in enumerate(GROUPS):
        train, test = (groups == number) & (folds >= 0), (groups == number) & (folds < 0)
        inputs = choose_inputs(probes, group, statistics, right, train, folds)
        for size in CURVE:
            if f"{group}_{size}.logits" in probes:
                some = np.hstack([statistics, probes[f"{group}_{size}.logits"].astype(float)])
                scores = fit_and_score(some, right, probes[f"{group}_{size}.train"], test)
                results.setdefault(str(size), np.full(len(right), np.nan))[test] = logit(scores)
        scores = fit_and_score(inputs, right, train, test)
        results.setdefault("all", np.full(len(right), np.nan))[test] = logit(scores)
        wanted = test | (held_out & train)
        scores = fit_and_score(inputs, right, train & ~held_out, wanted)
        results.setdefault("stack", np.full(len(right), np.nan))[wanted] = logit(scores)
    return results


def fit_and_score(inputs: Floats, right: Any, train: Any, test: Any) -> Floats:
    """Fit a logistic regression with standardized inputs and pairwise products; return its scores of test rows."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler

    model = make_pipeline(
        StandardScaler(),
        PolynomialFeatures(2, include_bias=False),
        StandardScaler(),
        LogisticRegression(C=0.03, max_iter=500),
    )
    return np.asarray(model.fit(inputs[train], right[train]).predict_proba(inputs[test])[:, 1])


def choose_inputs(probes: Any, group: str, statistics: Floats, right: Floats, train: Floats, folds: Floats) -> Floats:
    """Choose between probes of the data set's own rows, of both sets' rows, and all of them, on the train rows."""
    own, both = (probes[f"{name}.logits"].astype(float) for name in (group, "both"))
    candidates = {
        "own": np.hstack([statistics, own]),
        "both": np.hstack([statistics, both]),
        "own and both": np.hstack([statistics, own, both]),
    }
    scores = {}
    for name, inputs in candidates.items():
        values = np.zeros(len(right))
        for fold in np.unique(folds[train]):
            held = train & (folds == fold)
            values[held] = fit_and_score(inputs, right, train & (folds != fold), held)
        scores[name] = auroc(right[train] > 0, values[train]) or 0.5
    best = max(scores, key=lambda name: scores[name])
    print(f"{group}: probes of {best}; AUROC on train rows { ({name: round(v, 3) for name, v in scores.items()}) }")
    return candidates[best]


def write_cbdr_probe(rows_folder: Path, trained: Path) -> None:
    """Write the logits of CBDR's probe for the test rows: the middle layer at the end of the question, balanced classes."""
    answered, probes = np.load(trained / "white_box.npz"), np.load(trained / "probes.npz")
    right, groups, is_test = answered["targets"][:, 0] > 0, answered["group"], answered["folds"] < 0
    column = json.loads(str(probes["facts"]))["columns"].index(MIDDLE_LAYER_COLUMN)
    with gzip.open(rows_folder / "closed_book.jsonl.gz", "rt", encoding="utf-8") as lines:
        ids = [json.loads(line)["id"] for line in lines][: len(right)]
    facts: dict[str, list[Any]] = {"train": [], "auroc": []}
    records = []
    for number, name in enumerate(GROUPS):
        train, test = ~is_test & (groups == number), np.flatnonzero(is_test & (groups == number))
        share = right[train].mean()
        logits = probes[f"{name}.logits"][:, column].astype(float) + np.log((1 - share) / share)
        facts["train"].append({"rows": int(train.sum()), "known": int(right[train].sum())})
        facts["auroc"].append(round(auroc(right[test], logits[test]) or 0.5, 4))
        records += [{"id": ids[index], "logit": round(float(logits[index]), 3)} for index in test]
    write_record(HOME / "cbdr_probe.jsonl.gz", [facts, *records])


# --- KBM --------------------------------------------------------------------------------------------


def write_kbm(rows_folder: Path, trained: Path, rows_name: str, judges: Iterable[str], out: Path) -> None:
    """Write the logits of KBM's judges for the test rows: mastery of .8, mastery of .5, certainty."""
    with gzip.open(rows_folder / f"{rows_name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    facts = {rows_name: json.loads((rows_folder / f"{rows_name}.json").read_text(encoding="utf-8"))}
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for name in judges:
        file = trained / f"{name}--1.npz"
        if not file.is_file():
            print(f"{name} is missing")
            continue
        part = np.load(file)
        facts[name] = json.loads(str(part["facts"]))
        for index, values in zip(part["index"].tolist(), part["logits"][:, 0].tolist(), strict=True):
            row = rows[index]
            record = records.setdefault((row["set"], row["id"]), {"set": row["set"], "id": row["id"]})
            side = record.setdefault("with" if row["passages"] else "without", {})
            side[name] = [round(value, 3) for value in values]
    write_record(out, records.values())
    add_trainings(facts)


# --- CBDR's reranker with a larger base -------------------------------------------------------------


def write_larger_base(rows_folder: Path, trained: Path) -> None:
    """Write the logits of all candidates of dev and test questions by the heads that a training taught.

    `relevance` has one head; the others have benefit and likelihood.
    """
    with gzip.open(rows_folder / "rerank_rows.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    facts, records = {}, {}
    for file in sorted(trained.glob("rerank_*-1.npz")):
        part, name = np.load(file), file.name.removesuffix("-1.npz")
        heads = slice(0, 1) if "relevance" in name else slice(3, 5) if "margin" in name else slice(1, 3)
        facts[name] = json.loads(str(part["facts"]))
        for index, values in zip(part["index"].tolist(), part["logits"][:, 0].tolist(), strict=True):
            row = rows[index]
            record = records.setdefault(
                (row["set"], row["id"]), {"set": row["set"], "id": row["id"], "test": row["test"], "logits": {}}
            )
            passages = record["logits"].setdefault(name.removeprefix("rerank_"), {})
            passages[row["passage"]] = [round(value, 3) for value in values[heads]]
    write_record(LARGER_BASE, records.values())
    add_trainings(facts)


# --- labels with 30 samples, and the probes fitted on them ------------------------------------------


def write_samples(out: Path) -> None:
    """Write the labels, the scores of the probes and the seconds of each step."""
    write_record(KBM_30_LABELS, read_record(out / "kbm30_labels.jsonl.gz"))
    runs = json.loads((out / "runs.json").read_text(encoding="utf-8"))
    records = []
    for file in sorted(out.glob("*.needs.jsonl")):
        name = file.name.removesuffix(".needs.jsonl")
        [needs] = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        train = sum(runs[run]["totals"]["rows"] for part in ("with", "alone") if (run := f"{name}-{part}") in runs)
        records.append({"set": name, "train": train, "raw": {key: round(raw, 4) for key, raw in needs["raw"].items()}})
    write_record(PROBE_CONFIDENCE, records)
    seconds = json.loads((out / "seconds.json").read_text(encoding="utf-8"))
    SAMPLES_SECONDS.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def add_trainings(facts: dict[str, Any]) -> None:
    """Add rows, losses and seconds of trainings to their record."""
    known = json.loads(TRAININGS.read_text(encoding="utf-8")) if TRAININGS.is_file() else {}
    TRAININGS.write_text(json.dumps({**known, **facts}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="output of policy_rows and kbm_rows")
    parser.add_argument("--trained", type=Path, help="output of paper_training")
    parser.add_argument("--samples", type=Path, help="output of kbm_samples; writes its record alone")
    options = parser.parse_args()
    if options.samples:
        write_samples(options.samples)
        return
    if not options.rows or not options.trained:
        parser.error("--rows and --trained are required, or --samples")
    if (options.trained / "probes.npz").is_file():
        write_closed_book(options.rows, options.trained)
        write_cbdr_probe(options.rows, options.trained)
    for rows_name, judges, out in (("kbm_rows", KBM_JUDGES, KBM), ("kbm30_rows", KBM_30_JUDGES, KBM_30)):
        if (options.rows / f"{rows_name}.json").is_file():
            write_kbm(options.rows, options.trained, rows_name, judges, out)
    if any(options.trained.glob("rerank_*-1.npz")):
        write_larger_base(options.rows, options.trained)


if __name__ == "__main__":
    main()
