"""Fit gates on a train run and score a test run with them, without an LLM.

SKR needs no fit: it uses the train run as its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

SKR = {"skr": "smooth", "skr, vote": "vote"}  # name in the tables -> mode; the paper uses the majority vote


class CachedEmbedder:
    """The embedding model, with a cache: each text is embedded once."""

    def __init__(self) -> None:
        from knowgate.retrieval.embeddings import SentenceEmbedder

        self.inner, self.cache = SentenceEmbedder(), {}  # type: ignore[var-annotated]

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the embedding model."""
        return self.inner.fingerprint

    def embed(self, texts: Sequence[str]) -> Any:
        """Return one embedding per text."""
        new = [text for text in dict.fromkeys(texts) if text not in self.cache]
        if new:
            self.cache.update(zip(new, self.inner.embed(new), strict=True))
        return np.stack([self.cache[text] for text in texts])


def list_fits(embedder: Any) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Return the gates to fit: name -> (target, function that fits the gate to examples)."""
    from knowgate.training.adaptive import fit_adaptive
    from knowgate.training.fusion import fit_fusion
    from knowgate.training.judges.ik import fit_ik_text
    from knowgate.training.probe import fit_probe

    return {
        "probe": ("known", lambda examples: fit_probe(examples, layer="mid", kind="mlp")),
        "probe, balanced": ("known", lambda examples: fit_probe(examples, layer="mid", kind="mlp", balanced=True)),
        "probe, linear": ("known", lambda examples: fit_probe(examples, layer="late", kind="linear")),
        "probe after draft": (
            "known",
            lambda examples: fit_probe(examples, layer="late", position="post", kind="linear"),
        ),
        "ik, text": ("known", lambda examples: fit_ik_text(examples, embedder=embedder)),
        "adaptive": ("known", lambda examples: fit_adaptive(examples, embedder=embedder)),
        "fusion": ("known", lambda examples: fit_fusion(examples)),
        "fusion, cheap": ("known", lambda examples: fit_fusion(examples, cheap=True)),
        "fusion, early": ("known", lambda examples: fit_fusion(examples, early=True)),
        "fusion + text": ("known", lambda examples: fit_fusion(examples, text=True, embedder=embedder)),
        "fusion on benefit": ("benefit", lambda examples: fit_fusion(examples)),
    }


@dataclass
class GateFits:
    """Gates fitted on train runs. Each train run is used once, even if several test runs need its gates.

    Attributes:
        embedder: Embedding model for gates that read text.
        scratch: Folder for the fitted gates.
        folders: Train run -> name of each gate -> folder of the fitted gate.
    """

    embedder: Any
    scratch: Path
    folders: dict[Path, dict[str, Path]] = field(default_factory=dict)

    def score(self, train: Path, test_table: Any) -> Iterator[Any]:
        """Fit all gates on a train run, if not done yet, and yield their needs on a test run."""
        if train not in self.folders:
            self.folders[train] = dict(self._fit(train))
        for name, folder in self.folders[train].items():
            yield from score_fitted_gate(name, folder, test_table, f"fitted on {train.name}", self.embedder)

    def _fit(self, train: Path) -> Iterator[tuple[str, Path]]:
        from knowgate.errors import KnowgateError
        from knowgate.training.examples import load_examples
        from knowgate.training.gate_artifact import save_fitted

        for name, (target, fit) in list_fits(self.embedder).items():
            start, folder = time.perf_counter(), self.scratch / train.name / name
            try:
                examples = load_examples([train], target=target)  # type: ignore[arg-type]
                save_fitted(fit(examples), examples, folder)
            except (KnowgateError, TypeError) as error:
                print(f"  skipped: {name}: {error}")
                continue
            print(f"  {name}: {time.perf_counter() - start:.0f} s", flush=True)
            yield name, folder


def score_fitted_gate(name: str, folder: Path, test_table: Any, about: str, embedder: Any = None) -> Iterator[Any]:
    """Yield the needs of a fitted gate on a test run, raw and calibrated; nothing if the gate cannot score it."""
    from knowgate.data.runs.records import RecordedNeeds
    from knowgate.errors import KnowgateError
    from knowgate.gates import load_gate
    from knowgate.gates.artifacts.drift import compute_far_share
    from knowgate.gates.scoring import measure_distances, score_with_raw

    try:
        gate = load_gate(str(folder), plug_in=True)
        if embedder is not None and hasattr(gate, "embedder"):
            gate = replace(gate, embedder=embedder)  # type: ignore[type-var]
        scores = score_with_raw(gate, test_table.questions, test_table.readings)
        far = compute_far_share(measure_distances(gate, test_table.questions, test_table.readings))
    except KnowgateError as error:
        print(f"  skipped: {name}: {error}")
        return
    ids = [row.id for row in test_table.rows]
    raw = {} if scores.raw is None else dict(zip(ids, scores.raw, strict=True))
    yield RecordedNeeds(name, gate.threshold, dict(zip(ids, scores.needs, strict=True)), about, raw=raw, far=far)


def score_skr(train: Path, test_table: Any, embedder: Any, scratch: Path) -> list[Any]:
    """Return the needs of SKR on a test run, in both modes, with the train run as its log."""
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
        neighbors = SkrGate(log, scope=scope).find_neighbors(test_table.questions)
    except KnowgateError as error:
        print(f"  skipped: skr: {error}")
        return []
    readings = [
        replace(reading, neighbors={"skr": nearest})
        for reading, nearest in zip(test_table.readings, neighbors, strict=True)
    ]
    ids, records = [row.id for row in test_table.rows], []
    for name, mode in SKR.items():
        gate = SkrGate(log, scope=scope, mode=mode)  # type: ignore[arg-type]
        needs = score_questions(gate, test_table.questions, readings)
        about = f"{mode}, log: {train.name}"
        records.append(RecordedNeeds(name, gate.threshold, dict(zip(ids, needs, strict=True)), about))
    return records
