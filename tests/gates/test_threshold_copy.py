"""Gates at a threshold chosen for them, and which gates rows allow that hold few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import UnsupportedSignal
from knowgate.gates.logprob import LogprobGate
from knowgate.gates.offline_scoring import list_scorable_gates
from knowgate.gates.scoring import copy_with_threshold
from knowgate.labels.labeling import label
from knowgate.models.fake import FakeModel
from knowgate.types import LabelPrompt, Question, Reading, Vector


class Reticent(FakeModel):
    """Shows the top tokens only, so that there are no entropies, and says neither of two labels."""

    def read(self, *args: Any, **settings: Any) -> list[Reading]:
        return [_without_entropy(reading) for reading in super().read(*args, **settings)]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        raise UnsupportedSignal("none of the labels is among the most probable tokens.")


def _without_entropy(reading: Reading) -> Reading:
    assert reading.draft is not None
    tokens = tuple(replace(token, entropy=None) for token in reading.draft.tokens or ())
    return replace(reading, draft=replace(reading.draft, tokens=tokens))


def trial_of(model: FakeModel, out: Path) -> LabelTable:
    label([Question("Who?", id="1", answers=("a",))], out=out, model=model, samples=0, closed_book=True)
    return load_label_table([out])


def test_a_copy_with_another_threshold_leaves_the_gate_unchanged():
    gate = LogprobGate("min")
    held = copy_with_threshold(gate, 0.3, "logprob:min at 0.3")
    assert (held.threshold, held.name) == (0.3, "logprob:min at 0.3")
    assert (gate.threshold, gate.name) == (0.5, "logprob")


def test_an_llm_that_gives_neither_label_keeps_its_answers(tmp_path: Path):
    (row,) = trial_of(Reticent(), tmp_path / "run").rows
    assert (row.error, dict(row.signals)) == (None, {})


def test_gates_without_recorded_signals_are_not_scorable(tmp_path: Path):
    few, all_of_them = trial_of(Reticent(), tmp_path / "few"), trial_of(FakeModel(), tmp_path / "all")
    assert set(list_scorable_gates(all_of_them)) - set(list_scorable_gates(few)) == {"logprob:entropy", "prompt"}
