"""File caches of LLM answers and reranker scores, so that an interrupted comparison can continue.

Values are appended to a JSONL file as they are computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import find_last_line_end, read_jsonl, sha256_text
from knowgate.errors import BadInput
from knowgate.labels.grading import Grader
from knowgate.models.prompts.answers import AnswerPrompts, fit_passages
from knowgate.retrieval.passages import format_passage
from knowgate.stats.metrics import FloatArray
from knowgate.types import Model, Passage, Prompt, Question, Reranker

SCORE_BATCH = 64  # questions scored before their scores are written
ANSWER_BATCH = 256  # answers generated before they are written
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class ValueCache:
    """Key-value cache in a JSONL file with lines such as {"key": "...", "score": 0.5}.

    Attributes:
        file: The JSONL file. It is created with the first value.
        value_name: Name of the value in each line, such as 'score'.
    """

    file: Path
    value_name: str

    @cached_property
    def values(self) -> dict[str, Any]:
        """All values by key, read from the file once.

        An incomplete last line, which an interrupted run may leave, is removed from the file first.

        Raises:
            BadInput: A line is not a cached value.
        """
        if not self.file.is_file():
            return {}
        os.truncate(self.file, find_last_line_end(self.file))
        values = {}
        for number, record in read_jsonl(self.file):
            if not isinstance(record, dict) or not {"key", self.value_name} <= record.keys():
                raise BadInput(
                    f"line {number} of {self.file} is not a cached {self.value_name}. Delete the file to start over."
                )
            values[record["key"]] = record[self.value_name]
        return values

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values and append them to the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        records = ({"key": key, self.value_name: value} for key, value in values.items())
        with self.file.open("a", encoding="utf-8", newline="\n") as stream:
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        self.values.update(values)


@dataclass(frozen=True)
class CachedAnswerer:
    """Lets an LLM answer questions with given passages, and grades the answers. Answers are cached in a file.

    Attributes:
        model: The LLM.
        grader: Grader of the answers.
        file: Cache file of the answers.
        prompts: Prompts of the answers.
        max_tokens: Maximum length of an answer.
        on_progress: Called with the number of answers generated so far, and how many have to be generated.
    """

    model: Model
    grader: Grader
    file: Path
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    max_tokens: int = 32
    on_progress: ProgressCallback = lambda done, total: None

    def grade_answers(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> FloatArray:
        """Answer and grade questions. Answers in the cache are not generated again.

        Args:
            questions: The questions.
            passages: Passages to show for each question; an empty list for an answer without passages.

        Returns:
            For each question, 1 if the answer is correct, 0 if it is wrong, NaN if there is no gold answer.
        """
        prompts = self._make_prompts(questions, passages)
        self._generate_missing(prompts)
        answers = [self.cache.values[self._make_key(prompt)] for prompt in prompts]
        verdicts = [grade.correct for grade in self.grader.grade(answers, questions)]
        return np.array([np.nan if verdict is None else float(verdict) for verdict in verdicts])

    @cached_property
    def cache(self) -> ValueCache:
        """Answers by the key of their prompt."""
        return ValueCache(self.file, "answer")

    def _make_prompts(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[Prompt]:
        """Make the prompt of each question, with its passages. Passages too long for the LLM are shortened."""
        prompts = []
        for question, shown in zip(questions, passages, strict=True):
            prompts.append(self.prompts.open(question, shown) if shown else self.prompts.closed(question))
        # A prompt with an answer in the cache was short enough. The others are checked, all at once.
        unchecked = [index for index, prompt in enumerate(prompts) if self._make_key(prompt) not in self.cache.values]
        fits = self.model.fits([prompts[index] for index in unchecked], self.max_tokens) if unchecked else []
        for index, is_short_enough in zip(unchecked, fits, strict=True):
            if passages[index] and not is_short_enough:
                fitted = fit_passages(self.model, self.prompts, questions[index], passages[index], self.max_tokens)
                prompts[index] = self.prompts.open(questions[index], fitted)
        return prompts

    def _generate_missing(self, prompts: Sequence[Prompt]) -> None:
        """Generate and cache the answers to prompts that are not in the cache."""
        by_key = {self._make_key(prompt): prompt for prompt in prompts}
        missing = [key for key in by_key if key not in self.cache.values]
        for start in range(0, len(missing), ANSWER_BATCH):
            keys = missing[start : start + ANSWER_BATCH]
            completions = self.model.generate([by_key[key] for key in keys], max_tokens=self.max_tokens)
            texts = [samples[0].text for samples in completions]  # there is one sample per prompt
            self.cache.add(dict(zip(keys, texts, strict=True)))
            self.on_progress(start + len(keys), len(missing))

    def _make_key(self, prompt: Prompt) -> str:
        """Return the cache key of an answer, from LLM, prompt and maximum length."""
        return sha256_text(self.model.fingerprint, prompt.text, str(self.max_tokens))[:24]


@dataclass(frozen=True)
class CachedReranker:
    """A reranker with scores cached in a file. Several rerankers can share the file.

    Attributes:
        reranker: The reranker that computes missing scores.
        file: Cache file of the scores.
        on_progress: Called with the number of questions scored so far, and how many have to be scored.
    """

    reranker: Reranker
    file: Path
    on_progress: ProgressCallback = lambda done, total: None

    @property
    def name(self) -> str:
        """Name of the reranker."""
        return self.reranker.name

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the reranker."""
        return self.reranker.fingerprint

    @cached_property
    def cache(self) -> ValueCache:
        """Scores by the key of reranker, question and passage."""
        return ValueCache(self.file, "score")

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Score the passages of each question. Cached scores are reused."""
        keys = [self._make_keys(question, shown) for question, shown in zip(questions, passages, strict=True)]
        unscored = [index for index, row in enumerate(keys) if not set(row) <= self.cache.values.keys()]
        for start in range(0, len(unscored), SCORE_BATCH):
            batch = unscored[start : start + SCORE_BATCH]  # indexes of questions
            scores = self.reranker.score([questions[index] for index in batch], [passages[index] for index in batch])
            new_scores: dict[str, float] = {}
            for index, question_scores in zip(batch, scores, strict=True):
                new_scores.update(zip(keys[index], question_scores, strict=True))
            self.cache.add(new_scores)
            self.on_progress(start + len(batch), len(unscored))
        return [[self.cache.values[key] for key in row] for row in keys]

    def _make_keys(self, question: str, passages: Sequence[Passage]) -> list[str]:
        """Return the cache keys of the scores, from reranker, question and passage."""
        return [sha256_text(self.fingerprint, question, format_passage(passage))[:24] for passage in passages]
