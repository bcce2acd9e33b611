"""A recipe whose workers die and fail over some questions. Sent to other processes, which import this file alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from knowgate.labels.labeling import LabelJobSpec
from knowgate.types import Question

KILLED, POISON, BROKEN = "q7", "q11", "q13"


@dataclass(frozen=True)
class Trouble:
    """Made on the other side, where it writes down which machine and which index it has."""

    recipe: LabelJobSpec
    folder: str

    @property
    def index(self):
        return self.recipe.index

    def create(self, retriever):
        import ray

        node = ray.get_runtime_context().get_node_id()
        shelf = retriever._index._actor_id.hex() if retriever is not None else "-"
        (Path(self.folder) / f"worker-{os.getpid()}").write_text(f"{node} {shelf}")
        return TroubledWork(self.recipe.create(retriever), Path(self.folder))


@dataclass(frozen=True)
class TroubledWork:
    work: object
    folder: Path

    @property
    def identity(self):
        return self.work.identity

    def __call__(self, asked: Sequence[Question]):
        ids = {question.id for question in asked}
        if POISON in ids or (KILLED in ids and not (self.folder / "killed").exists()):
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if BROKEN in ids:
            raise RuntimeError("an unforeseen fault")
        return self.work(asked)
