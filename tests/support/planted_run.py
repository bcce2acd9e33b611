"""Label runs written by hand, with a rule planted in the hidden states and the draft's first token. No LLM.

A question is known where `state + token > 0`; both are drawn anew for each question. With `token=False` the rule is
in the states alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Token

MODEL = FakeModel(name="planted")
PROMPTS = AnswerPrompts().fingerprint
LAYER, WIDTH, SAMPLES = 4, 6, 4
SETTINGS = {
    "model": MODEL.name,
    "model_fingerprint": MODEL.fingerprint,
    "prompts_fingerprint": PROMPTS,
    "grader": "contains",
    "data_fingerprint": "d",
    "samples": SAMPLES,
    "max_tokens": 8,
}
RESCORE = """
import json, sys
from pathlib import Path
from knowgate.training.examples import load_examples
from knowgate.gates import load_gate
examples = load_examples([Path(sys.argv[2])])
print(json.dumps(load_gate(sys.argv[1]).score(examples.questions, examples.readings)))
"""


def planted_rows(n: int, *, token: bool = False, seed: int = 0) -> tuple[list[LabelRow], dict[str, Any]]:
    """Rows and their states: the rule lies in column 0 before the answer, in column 1 after the draft."""
    rng = np.random.default_rng(seed)
    states = {name: rng.standard_normal((n, WIDTH)) for name in (f"before.{LAYER}", f"after.{LAYER}")}
    states[f"after.{LAYER}"][:, 1] = states[f"before.{LAYER}"][:, 0]
    hints = rng.standard_normal(n)
    known = states[f"before.{LAYER}"][:, 0] + token * hints > 0
    rows = [planted_row(f"{seed}-{i}", bool(known[i]), float(hints[i])) for i in range(n)]
    return rows, {name: block.astype(np.float32) for name, block in states.items()}


def planted_row(name: str, known: bool, hint: float) -> LabelRow:
    """The first token's log-probability is the hint, shifted below zero; samples and self-assessment say nothing."""
    tokens = (Token("so", min(0.0, hint - 5), entropy=0.5, margin=0.5), Token("so", -5.0, entropy=0.5, margin=0.5))
    samples = tuple(f"guess {place % 2}" for place in range(SAMPLES))
    side = GradedAnswer("so so", tokens, correct=known, samples=samples)
    return LabelRow(name, f"question {name}?", "en", closed=side, signals={"self_assessment": 0.0})


def write_run(path: Path, rows: list[LabelRow], states: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A run folder with these rows; `states` has one line for each of them."""
    folder = RunFolder(path)
    folder.start({**SETTINGS, **settings}, {"depth": 2 * LAYER})
    kept = [row.error is None for row in rows]
    folder.append(rows, {name: block[kept] for name, block in (states or {}).items()})
    return path


def scored_elsewhere(gate: Path, run: Path) -> list[float]:
    """The needs of a run's questions, from a process that did not fit the gate."""
    code = [sys.executable, "-c", RESCORE, str(gate), str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(code, capture_output=True, text=True, check=True, env=environment)
    return [float(need) for need in json.loads(done.stdout)]
