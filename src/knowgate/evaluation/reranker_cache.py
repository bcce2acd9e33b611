"""A file of values by key that grows as they come, so that work which was stopped, even killed, goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from knowgate.core.files import find_last_line_end, read_jsonl, sha256_text
from knowgate.core.schema import read_record
from knowgate.labels.grading import Grader
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages
from knowgate.retrieval.passages import format_passage
from knowgate.stats.metrics import FloatArray
from knowgate.types import Model, Passage, Prompt, Question, Reranker

CacheRecord = TypeVar("CacheRecord")


def read_cache_file(file: Path, kind: type[CacheRecord]) -> list[CacheRecord]:
    """What is in the file; a line that was being written when the process died is cut off."""
    if not file.is_file():
        return []
    os.truncate(file, find_last_line_end(file))
    return [read_record(kind, record, f"{file} line {line}") for line, record in read_jsonl(file)]


def append_to_cache_file(file: Path, name: str, values: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"key": key, name: value}, ensure_ascii=False) + "\n" for key, value in values.items()]
    with file.open("a", encoding="utf-8", newline="\n") as end:
        end.writelines(lines)


ANSWER_BATCH = 256


@dataclass(frozen=True)
class CachedAnswer:
    key: str
    answer: str


@dataclass(frozen=True)
class CachedAnswerer:
    """An LLM with a grader and a file of answers it has given. Answers are kept as they come, so a run can go on."""

    model: Model
    grader: Grader
    file: Path
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    max_tokens: int = 32
    watch: Callable[[int, int], None] = lambda done, total: None

    def correct(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> FloatArray:
        """1 or 0 for each question, NaN where it has no gold answer."""
        asked = [self._prompt(*pair) for pair in zip(questions, passages, strict=True)]
        self._answer(asked)
        texts = [self.known[self._key(prompt)] for prompt in asked]
        verdicts = [grade.correct for grade in self.grader.grade(texts, questions)]
        return np.array([np.nan if verdict is None else float(verdict) for verdict in verdicts])

    @cached_property
    def known(self) -> dict[str, str]:
        """Answers given so far, by the key of their prompt."""
        return {row.key: row.answer for row in read_cache_file(self.file, CachedAnswer)}

    def _prompt(self, question: Question, passages: Sequence[Passage]) -> Prompt:
        if not passages:
            return self.prompts.closed(question)
        prompt = self.prompts.open(question, passages)
        if self._key(prompt) in self.known or self.model.fits([prompt], self.max_tokens)[0]:
            return prompt
        return self.prompts.open(question, fit_passages(self.model, self.prompts, question, passages, self.max_tokens))

    def _answer(self, prompts: Sequence[Prompt]) -> None:
        waiting = list({self._key(prompt): prompt for prompt in prompts if self._key(prompt) not in self.known}.items())
        for start in range(0, len(waiting), ANSWER_BATCH):
            batch = waiting[start : start + ANSWER_BATCH]
            said = self.model.generate([prompt for _, prompt in batch], max_tokens=self.max_tokens)
            fresh = {key: row[0].text for (key, _), row in zip(batch, said, strict=True)}
            append_to_cache_file(self.file, "answer", fresh)
            self.known.update(fresh)
            self.watch(start + len(batch), len(waiting))

    def _key(self, prompt: Prompt) -> str:
        return sha256_text(self.model.fingerprint, prompt.text, str(self.max_tokens))[:24]


SCORE_BATCH = 64  # questions scored before their scores are written


@dataclass(frozen=True)
class CachedScore:
    key: str
    score: float


@dataclass(frozen=True)
class CachedReranker:
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
        for start in range(0, len(waiting), SCORE_BATCH):
            part = waiting[start : start + SCORE_BATCH]
            fresh = self.reranker.score([questions[place] for place in part], [passages[place] for place in part])
            scores = {
                k: s for place, row in zip(part, fresh, strict=True) for k, s in zip(keys[place], row, strict=True)
            }
            append_to_cache_file(self.file, "score", scores)
            self.known.update(scores)
            self.watch(start + len(part), len(waiting))
        return [[self.known[key] for key in row] for row in keys]

    @cached_property
    def known(self) -> dict[str, float]:
        return {row.key: row.score for row in read_cache_file(self.file, CachedScore)}

    def _key(self, question: str, passage: Passage) -> str:
        return sha256_text(self.fingerprint, question, format_passage(passage))[:24]
