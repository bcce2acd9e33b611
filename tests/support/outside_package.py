"""A package of somebody else with a fitted gate in it: two files and two entry points, put on the path by hand."""

from __future__ import annotations

from pathlib import Path

GATE = '''
from dataclasses import dataclass

import numpy as np

from knowgate.gates.fitted_gate import FittedGate


@dataclass(frozen=True)
class LengthGate(FittedGate):
    """need: questions of more words than a limit."""

    def raw(self, questions, readings):
        limit = self.artifact.options["words"]
        return np.array([0.9 if len(question.text.split()) > limit else 0.1 for question in questions])
'''
FIT = '''
from typing import Annotated, Literal

import numpy as np

from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitResult, FitProgress
from knowgate.types import SignalRequest


def fit_length(
    examples: Annotated[Examples, ExampleRequirements(target="known", reads_states=False)],
    *,
    words: Annotated[int, "Longest question that is known."] = 3,
    spirit: Annotated[Literal["calm", "bold"], "calm or bold."] = "calm",
    watch,
    seed=None,
    unused=None,
) -> FitResult:
    """Long questions are not known.

    More that the help does not show.
    """
    watch(FitProgress(1, 1))
    lengths = np.array([len(question.text.split()) for question in examples.questions])

    def raw(places):
        return np.where(lengths[list(places)] > words, 0.9, 0.1)

    notes = [f"spirit {spirit}, seed {seed}, unused {unused}, layers {len(examples.readings[0].hidden)}"]
    return FitResult("outside", {"words": words}, frozenset(), SignalRequest(), {}, raw, notes)
'''
ENTRY_POINTS = """
[knowgate.fitted_gates]
outside = outside_gate.gate:LengthGate

[knowgate.fits]
outside = outside_gate.fit:fit_length
broken = outside_gate.nothing:fit_nothing
"""


def write_package(site: Path) -> Path:
    """The package and its metadata, as an installer leaves them in a folder of `sys.path`."""
    code, about = site / "outside_gate", site / "outside_gate-1.0.dist-info"
    for folder in (code, about):
        folder.mkdir(parents=True)
    (code / "__init__.py").write_text("", encoding="utf-8")
    (code / "gate.py").write_text(GATE, encoding="utf-8")
    (code / "fit.py").write_text(FIT, encoding="utf-8")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-gate\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    return site
