"""A fitted gate and label runs written by hand: the need of a question is chosen by its first token's probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.signals.samples import retrieval_benefit
from knowgate.data.splits import fingerprint_text
from knowgate.gates.artifacts.gate_folder import SEEN_FILE, write_artifact
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Passage, Token

MODEL, PROMPTS = FakeModel(), AnswerPrompts().fingerprint
SHIFT = 7.0  # need = sigmoid(-logprob - SHIFT), so that every need has a log-probability
SETTINGS = {
    "data": "jsonl:q.jsonl",
    "data_fingerprint": "d",
    "model": MODEL.name,
    "model_fingerprint": MODEL.fingerprint,
    "prompts_fingerprint": PROMPTS,
    "retriever": "bm25",
    "retriever_fingerprint": "index-1",
    "grader": "contains",
    "samples": 0,
    "max_tokens": 8,
    "k": 3,
}


def write_gate(path: Path, seen: Sequence[str] = (), **changes: Any) -> Path:
    """A fusion of one feature. seen: texts of the questions it was fitted on."""
    manifest = {
        "gate": "fusion",
        "options": {"features": ["first"], "probes": []},
        "needs": ["logprobs"],
        "want": {"draft_tokens": 1, "layers": []},
        "model": {"name": MODEL.name, "fingerprint": MODEL.fingerprint},
        "prompts": PROMPTS,
        "calibration": {"kind": "none"},
        "threshold": 0.5,
    }
    tensors = {"fusion.mean": [0.0], "fusion.scale": [1.0], "fusion.0.0.weight": [[-1.0]], "fusion.0.0.bias": [-SHIFT]}
    files = {SEEN_FILE: "".join(f"{fingerprint_text(text)}\n" for text in seen).encode(), "adapter/extra.txt": b"kept"}
    arrays = {name: np.array(value, dtype=np.float64) for name, value in tensors.items()}
    write_artifact(path, {**manifest, **changes}, arrays, "# A gate\n\n## Notes\n\n- one\n", files)
    return path


def graded_row(name: str, need: float, closed: bool | None, opened: bool | None, **values: Any) -> LabelRow:
    """opened None: no open-book answer."""
    first = Token("so", -SHIFT - math.log(need / (1 - need)), entropy=0.5, margin=0.5)
    found: dict[str, Any] = {
        "closed": GradedAnswer("so", (first,), correct=closed),
        "open": None if opened is None else GradedAnswer("so it is", correct=opened),
        "benefit": retrieval_benefit(closed, opened),
        "grader": "contains",
        "passages": (Passage("p", "some words " * 20),),
    }
    return LabelRow(name, values.pop("question", f"question {name}?"), "en", **{**found, **values})


def write_rows(path: Path, rows: Sequence[LabelRow], **settings: Any) -> Path:
    folder = RunFolder(path)
    folder.start({**SETTINGS, **settings}, {})
    folder.append(rows, {})
    return path


def varied_rows(n: int, seed: int = 0) -> list[LabelRow]:
    """The higher the need, the likelier retrieval turns a wrong answer right."""
    rng = np.random.default_rng(seed)
    needs, dice = rng.uniform(0.01, 0.99, n), rng.uniform(size=n)
    return [graded_row(f"{seed}-{i}", float(needs[i]), bool(dice[i] > needs[i]), True) for i in range(n)]
