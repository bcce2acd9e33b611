"""A reranker's scores kept in a file as they come: a comparison that was stopped goes on, and no pair is read twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from knowgate.evaluation.reranking.kept_values import add_kept, read_kept
from knowgate.files import sha256_text
from knowgate.rerank import shown
from knowgate.types import Passage, Reranker

PORTION = 64  # questions scored before their scores are written


@dataclass(frozen=True)
class KeptScore:
    key: str
    score: float


@dataclass(frozen=True)
class KeptScores:
    """`reranker` with a memory. The key of a score holds the reranker's fingerprint, so several may share a file."""

    reranker: Reranker
    file: Path
    watch: Callable[[int, int], None] = lambda done, total: None

    @property
    def name(self) -> str:
        return self.reranker.name

    @cached_property
    def fingerprint(self) -> str:
        return self.reranker.fingerprint

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        keys = [[self._key(q, one) for one in found] for q, found in zip(questions, passages, strict=True)]
        waiting = [place for place, row in enumerate(keys) if any(key not in self.known for key in row)]
        for start in range(0, len(waiting), PORTION):
            part = waiting[start : start + PORTION]
            fresh = self.reranker.score([questions[place] for place in part], [passages[place] for place in part])
            scores = {
                k: s for place, row in zip(part, fresh, strict=True) for k, s in zip(keys[place], row, strict=True)
            }
            add_kept(self.file, "score", scores)
            self.known.update(scores)
            self.watch(start + len(part), len(waiting))
        return [[self.known[key] for key in row] for row in keys]

    @cached_property
    def known(self) -> dict[str, float]:
        return {row.key: row.score for row in read_kept(self.file, KeptScore)}

    def _key(self, question: str, passage: Passage) -> str:
        return sha256_text(self.fingerprint, question, shown(passage))[:24]
