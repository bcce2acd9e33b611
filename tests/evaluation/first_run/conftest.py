"""A small world for first runs: lamps in halls, a handbook of them, and an LLM that knows every third."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from knowgate.evaluation.first_run.options import FirstRunOptions
from knowgate.evaluation.first_run.runner import FirstRunResult, first_run
from knowgate.models.fake import FakeModel
from knowgate.types import Completion, Prompt, Reading, Signal, SignalRequest
from tests.support.hand_gate import write_gate

N = 100
FEW: dict[str, Any] = {"count": 60, "max_loss": 0.1}  # too few to learn from, enough to prove that: it takes 29


def asked(i: int) -> str:
    return f"What is the colour of lamp number n{i}?"


def hue(i: int) -> str:
    return f"hue{i}x"


def said(i: int) -> str:
    return f"Lamp number n{i} stands in hall {i} and has the colour {hue(i)}."


def table(n: int = N) -> dict[str, Any]:
    """What it answers: from memory, with the passage, and when it is to write a question from one."""
    known = {asked(i): {"closed": hue(i) if i % 3 == 0 else "beige", "open": hue(i), "known": i % 3 == 0}
             for i in range(n)}  # fmt: skip
    writes = {f"{said(i)}\nQuestion:": {"closed": f" {asked(i)}\nAnswer: {hue(i)}"} for i in range(n)}
    return {**known, **writes}


class Counted(FakeModel):
    """Counts the prompts it was given, and dies where it is told to."""

    def __init__(self, *args: Any, dies_at: int | None = None, **settings: Any):
        super().__init__(*args, **settings)
        self.read_prompts, self.written, self.dies_at = 0, 0, dies_at

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        self._count(len(prompts))
        return super().read(prompts, want)

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[list[Completion]]:
        writing = sum("Write one question" in prompt.text for prompt in prompts)
        self.written += writing
        self._count(writing)
        return super().generate(prompts, **settings)

    def _count(self, n: int) -> None:
        self.read_prompts += n
        if self.dies_at is not None and self.read_prompts > self.dies_at:
            raise KeyboardInterrupt


@dataclass
class Heard:
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    warn = say

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        pass


@dataclass(frozen=True)
class World:
    """Files of the world, and first runs in it."""

    folder: Path
    heard: Heard = field(default_factory=Heard)

    def run(self, model: FakeModel | None = None, **wishes: Any) -> FirstRunResult:
        given = {"docs": "docs", "questions": "q.jsonl", **FEW, **wishes}
        return first_run(FirstRunOptions(**given), self.heard, model=model or Counted(table()))

    def runs(self) -> list[Path]:
        return sorted(path.parent for path in (self.folder / "knowgate-start" / "labels").rglob("run.json"))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def make_world(tmp_path: Path) -> World:
    lines = [json.dumps({"id": f"q{i}", "question": asked(i), "answers": [hue(i)]}) for i in range(N)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "q.txt").write_text("\n".join(asked(i) for i in range(N)), encoding="utf-8")
    (tmp_path / "t.json").write_text(json.dumps(table()), encoding="utf-8")
    (tmp_path / "docs").mkdir()
    for i in range(N):
        (tmp_path / "docs" / f"lamp{i}.txt").write_text(said(i), encoding="utf-8")
    return World(tmp_path)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gate that comes with knowgate for the LLM of the table; where it lies."""
    place = tmp_path / "site-packages" / "packaged"
    write_gate(place / "lamps", model={"name": "fake", "fingerprint": Counted(table()).fingerprint})
    for module in ("knowgate.gates", "knowgate.evaluation.first_run.runner"):
        monkeypatch.setattr(f"{module}.PACKAGED_GATES", place)
    return place / "lamps"


@pytest.fixture
def text_only() -> Callable[[], FakeModel]:
    """An LLM of which only text comes back."""
    return lambda: Counted(table(), layers=0, offers=frozenset({Signal.DRAFT}))
