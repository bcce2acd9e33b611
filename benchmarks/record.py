"""Full label runs to what is committed under `benchmarks/runs`: fit every gate, keep its needs, drop the texts.

    python benchmarks/record.py FULL_RUNS OUT [--needs FILE.json ...] [--only NAME]

FULL_RUNS holds `NAME-train` and `NAME-test` folders of `knowgate label` of one model (see benchmarks/README.md). For
each NAME, every gate that label runs allow is fitted on the train run (the paths of DESIGN: no LLM), scores the test
run, and its needs are kept in `needs.jsonl`. --needs adds those of gates that had to ask the LLM, recorded where the
LLM was: {"NAME-test|gate": {id: need}}. Questions, gold answers and passages stay behind.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ABOUT = {
    "dhicl": "DH-ICL with the train run as its log",
    "ik-lora": "IK: LoRA on the LLM, one epoch over the train rows of all six data sets, T = 32",
    "kbm": "KBM: LoRA on the LLM, one epoch over the train rows of all six data sets",
}


class CachedEmbedder:
    """The embedding model, asked once per text."""

    def __init__(self) -> None:
        from knowgate.embedding import SentenceEmbedder

        self.inner, self.known = SentenceEmbedder(), {}  # type: ignore[var-annotated]

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    def embed(self, texts: Sequence[str]) -> Any:
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        if new:
            self.known.update(zip(new, self.inner.embed(new), strict=True))
        return np.stack([self.known[text] for text in texts])


def makers(embedder: Any) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """name -> (target, fit)."""
    from knowgate.fitting.adaptive import fit_adaptive
    from knowgate.fitting.fusion import fit_fusion
    from knowgate.fitting.judges.ik import fit_ik_text
    from knowgate.fitting.probe import fit_probe

    return {
        "probe": ("known", lambda ex: fit_probe(ex, layer="mid", kind="mlp")),
        "probe, linear": ("known", lambda ex: fit_probe(ex, layer="late", kind="linear")),
        "probe after draft": ("known", lambda ex: fit_probe(ex, layer="late", position="post", kind="linear")),
        "ik, text": ("known", lambda ex: fit_ik_text(ex, embedder=embedder)),
        "adaptive": ("known", lambda ex: fit_adaptive(ex, embedder=embedder)),
        "fusion": ("known", lambda ex: fit_fusion(ex)),
        "fusion, cheap": ("known", lambda ex: fit_fusion(ex, cheap=True)),
        "fusion, early": ("known", lambda ex: fit_fusion(ex, early=True)),
        "fusion + text": ("known", lambda ex: fit_fusion(ex, text=True, embedder=embedder)),
        "fusion on benefit": ("benefit", lambda ex: fit_fusion(ex)),
    }


def fitted_needs(train: Path, trial: Any, embedder: Any, scratch: Path) -> list[Any]:
    """Fit on one run, score another."""
    from knowgate.errors import KnowgateError
    from knowgate.fitting.examples import load_examples
    from knowgate.fitting.save import save_fitted
    from knowgate.gates import load_gate, score_questions
    from knowgate.runs.needs import RecordedNeeds

    found = []
    for name, (target, make) in makers(embedder).items():
        start = time.perf_counter()
        try:
            examples = load_examples([train], target=target)  # type: ignore[arg-type]
            save_fitted(make(examples), examples, scratch / name)
            gate = load_gate(str(scratch / name), plug_in=True)
            if hasattr(gate, "embedder"):
                gate = replace(gate, embedder=embedder)
            needs = score_questions(gate, trial.questions, trial.readings)
        except (KnowgateError, TypeError) as error:
            print(f"  left out: {name}: {error}")
            continue
        ids = [row.id for row in trial.rows]
        found.append(RecordedNeeds(name, gate.threshold, dict(zip(ids, needs, strict=True)), f"fitted on {train.name}"))
        print(f"  {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return found


SKR = {"skr": "smooth", "skr, vote": "vote"}  # ours, and the paper's majority


def neighbour_needs(train: Path, trial: Any, embedder: Any, scratch: Path) -> list[Any]:
    """SKR with the train run as its log, in both forms."""
    from knowgate.gates import score_questions
    from knowgate.gates.skr import SkrGate
    from knowgate.history.sqlite import SqliteHistory
    from knowgate.labels.logbook import entries_of, scope_of
    from knowgate.runs.needs import RecordedNeeds
    from knowgate.runs.run_folder import RunFolder

    log = SqliteHistory(scratch / "log.db", embedder=embedder)
    scope = scope_of(RunFolder(train).manifest()["settings"])
    log.add(list(entries_of(RunFolder(train).rows(), scope)))
    near = SkrGate(log, scope=scope).recall(trial.questions)
    readings = [replace(one, neighbours={"skr": found}) for one, found in zip(trial.readings, near, strict=True)]
    ids = [row.id for row in trial.rows]
    recorded = []
    for name, mode in SKR.items():
        gate = SkrGate(log, scope=scope, mode=mode)  # type: ignore[arg-type]
        needs = score_questions(gate, trial.questions, readings)
        about = f"{mode}, log: {train.name}"
        recorded.append(RecordedNeeds(name, gate.threshold, dict(zip(ids, needs, strict=True)), about))
    return recorded


def asked_needs(files: Sequence[Path], run: str) -> list[Any]:
    """What was recorded where the LLM was."""
    from knowgate.runs.needs import RecordedNeeds

    found = []
    for file in files:
        for key, needs in json.loads(file.read_text()).items():
            where, gate = key.split("|")
            if where == run:
                about = next((text for start, text in ABOUT.items() if gate.startswith(start)), "")
                found.append(RecordedNeeds(gate, 0.5, needs, about))
    return found


def packed(row: Any, foreign: bool) -> Any:
    """The row without what belongs to the data set: questions, gold answers, passages, choices, samples.

    foreign: the answers were recorded by others and are part of the data set too.
    """
    from knowgate.types import Token

    def numbers(side: Any, whole: bool) -> Any:
        if side is None:
            return None
        tokens = side.tokens and tuple(
            Token(
                "", round(t.logprob, 3), round(t.entropy, 3) if whole else None, round(t.margin, 3) if whole else None
            )
            for t in side.tokens
        )
        return replace(side, text="" if foreign else side.text, tokens=tokens, samples=(), sample_correct=())

    meta = {key: row.meta[key] for key in ("dataset", "type", "num_hops", "fact_type") if key in row.meta}
    return replace(
        row,
        question="",
        answers=(),
        choices=("",) * len(row.choices),
        passages=(),
        vector=None,
        meta=meta,
        answer_frequency=row.meta.get("answer_frequency", row.answer_frequency),
        closed=numbers(row.closed, True),
        open=numbers(row.open, False),
        signals={name: round(value, 3) for name, value in row.signals.items()},
        seconds=round(row.seconds, 3),
    )


def write_packed(full: Path, out: Path) -> None:
    from knowgate.files import write_json
    from knowgate.runs.rows import to_json
    from knowgate.runs.run_folder import RunFolder

    out.mkdir(parents=True, exist_ok=True)
    foreign = str(RunFolder(full).manifest()["settings"]["model"]).startswith("recorded:")
    lines = [json.dumps(to_json(packed(row, foreign)), ensure_ascii=False) for row in RunFolder(full).rows()]
    with gzip.GzipFile(out / "labels.jsonl.gz", "wb", mtime=0) as file:
        file.write(("\n".join(lines) + "\n").encode())
    write_json(out / "run.json", RunFolder(full).manifest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--needs", type=Path, action="append", default=[])
    parser.add_argument("--only")
    options = parser.parse_args()
    from knowgate.runs.needs import write_needs
    from knowgate.runs.trial import load_trial

    embedder = CachedEmbedder()
    for train in sorted(options.full.glob(f"{options.only or '*'}-train")):
        name = train.name.removesuffix("-train")
        test = options.full / f"{name}-test"
        print(f"{options.full.name} {name}", flush=True)
        trial = load_trial([test])
        with tempfile.TemporaryDirectory() as scratch:
            needs = fitted_needs(train, trial, embedder, Path(scratch))
            needs += neighbour_needs(train, trial, embedder, Path(scratch))
        write_packed(train, options.out / train.name)
        write_packed(test, options.out / test.name)
        write_needs(options.out / test.name, [*needs, *asked_needs(options.needs, test.name)])


if __name__ == "__main__":
    main()
