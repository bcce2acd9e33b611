"""Gates fitted on a train run and scored on a test run, and SKR with the train run as its log. Runs no LLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

SKR = {"skr": "smooth", "skr, vote": "vote"}  # ours, and the paper's majority


class CachedEmbedder:
    """The embedding model, asked once per text."""

    def __init__(self) -> None:
        from knowgate.retrieval.embeddings import SentenceEmbedder

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
    from knowgate.training.adaptive import fit_adaptive
    from knowgate.training.fusion import fit_fusion
    from knowgate.training.judges.ik import fit_ik_text
    from knowgate.training.probe import fit_probe

    return {
        "probe": ("known", lambda ex: fit_probe(ex, layer="mid", kind="mlp")),
        "probe, balanced": ("known", lambda ex: fit_probe(ex, layer="mid", kind="mlp", balanced=True)),
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


@dataclass
class FittedOnce:
    """Every gate fitted on a train run, once, whichever test runs ask for it. Remembers where it put them."""

    embedder: Any
    scratch: Path
    made: dict[Path, dict[str, Path]] = field(default_factory=dict)

    def needs(self, train: Path, trial: Any) -> Iterator[Any]:
        if train not in self.made:
            self.made[train] = dict(self._fit(train))
        for name, folder in self.made[train].items():
            yield from scored_needs(name, folder, trial, f"fitted on {train.name}", self.embedder)

    def _fit(self, train: Path) -> Iterator[tuple[str, Path]]:
        from knowgate.errors import KnowgateError
        from knowgate.training.examples import load_examples
        from knowgate.training.gate_artifact import save_fitted

        for name, (target, make) in makers(self.embedder).items():
            start, folder = time.perf_counter(), self.scratch / train.name / name
            try:
                examples = load_examples([train], target=target)  # type: ignore[arg-type]
                save_fitted(make(examples), examples, folder)
            except (KnowgateError, TypeError) as error:
                print(f"  left out: {name}: {error}")
                continue
            print(f"  {name}: {time.perf_counter() - start:.0f} s", flush=True)
            yield name, folder


def scored_needs(name: str, folder: Path, trial: Any, about: str, embedder: Any = None) -> Iterator[Any]:
    """What a fitted gate says of a test run, before and after calibration; nothing where it cannot."""
    from knowgate.data.runs.records import RecordedNeeds
    from knowgate.errors import KnowgateError
    from knowgate.gates import load_gate
    from knowgate.gates.artifacts.drift import compute_far_share
    from knowgate.gates.scoring import measure_distances, score_with_raw

    try:
        gate = load_gate(str(folder), plug_in=True)
        if embedder is not None and hasattr(gate, "embedder"):
            gate = replace(gate, embedder=embedder)  # type: ignore[type-var]
        scores = score_with_raw(gate, trial.questions, trial.readings)
        far = compute_far_share(measure_distances(gate, trial.questions, trial.readings))
    except KnowgateError as error:
        print(f"  left out: {name}: {error}")
        return
    ids = [row.id for row in trial.rows]
    raw = {} if scores.raw is None else dict(zip(ids, scores.raw, strict=True))
    yield RecordedNeeds(name, gate.threshold, dict(zip(ids, scores.needs, strict=True)), about, raw=raw, far=far)


def neighbour_needs(train: Path, trial: Any, embedder: Any, scratch: Path) -> list[Any]:
    """SKR with the train run as its log, in both forms."""
    from knowgate.data.history.sqlite_store import SqliteHistory
    from knowgate.data.runs.folder import RunFolder
    from knowgate.data.runs.records import RecordedNeeds
    from knowgate.errors import KnowgateError
    from knowgate.gates.scoring import score_questions
    from knowgate.gates.skr import SkrGate
    from knowgate.labels.history_entries import entries_from_rows, scope_from_settings

    log = SqliteHistory(scratch / f"{train.name}.db", embedder=embedder)
    scope = scope_from_settings(RunFolder(train).manifest()["settings"])
    log.add(list(entries_from_rows(RunFolder(train).rows(), scope)))
    try:
        near = SkrGate(log, scope=scope).find_neighbors(trial.questions)
    except KnowgateError as error:
        print(f"  left out: skr: {error}")
        return []
    readings = [replace(one, neighbors={"skr": found}) for one, found in zip(trial.readings, near, strict=True)]
    ids, recorded = [row.id for row in trial.rows], []
    for name, mode in SKR.items():
        gate = SkrGate(log, scope=scope, mode=mode)  # type: ignore[arg-type]
        needs = score_questions(gate, trial.questions, readings)
        about = f"{mode}, log: {train.name}"
        recorded.append(RecordedNeeds(name, gate.threshold, dict(zip(ids, needs, strict=True)), about))
    return recorded
