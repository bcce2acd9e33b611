"""Open-book answers, graded, each asked once: the same question with the same passages is looked up, not generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from knowgate.evaluation.reranking.kept_values import add_kept, read_kept
from knowgate.files import sha256_text
from knowgate.labels import Grader
from knowgate.prompts import AnswerPrompts, fit_passages
from knowgate.statistics import Floats
from knowgate.types import Model, Passage, Prompt, Question

BATCH = 256


@dataclass(frozen=True)
class KeptAnswer:
    key: str
    answer: str


@dataclass(frozen=True)
class Answering:
    """An LLM with a grader and a file of answers it has given. Answers are kept as they come, so a run can go on."""

    model: Model
    grader: Grader
    file: Path
    prompts: AnswerPrompts = field(default_factory=AnswerPrompts)
    max_tokens: int = 32
    watch: Callable[[int, int], None] = lambda done, total: None

    def correct(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> Floats:
        """1 or 0 for each question, NaN where it has no gold answer."""
        asked = [self._prompt(*pair) for pair in zip(questions, passages, strict=True)]
        self._answer(asked)
        texts = [self.known[self._key(prompt)] for prompt in asked]
        verdicts = [grade.correct for grade in self.grader.grade(texts, questions)]
        return np.array([np.nan if verdict is None else float(verdict) for verdict in verdicts])

    @cached_property
    def known(self) -> dict[str, str]:
        """Answers given so far, by the key of their prompt."""
        return {row.key: row.answer for row in read_kept(self.file, KeptAnswer)}

    def _prompt(self, question: Question, passages: Sequence[Passage]) -> Prompt:
        if not passages:
            return self.prompts.closed(question)
        prompt = self.prompts.open(question, passages)
        if self._key(prompt) in self.known or self.model.fits([prompt], self.max_tokens)[0]:
            return prompt
        return self.prompts.open(question, fit_passages(self.model, self.prompts, question, passages, self.max_tokens))

    def _answer(self, prompts: Sequence[Prompt]) -> None:
        waiting = list({self._key(prompt): prompt for prompt in prompts if self._key(prompt) not in self.known}.items())
        for start in range(0, len(waiting), BATCH):
            batch = waiting[start : start + BATCH]
            said = self.model.generate([prompt for _, prompt in batch], max_tokens=self.max_tokens)
            fresh = {key: row[0].text for (key, _), row in zip(batch, said, strict=True)}
            add_kept(self.file, "answer", fresh)
            self.known.update(fresh)
            self.watch(start + len(batch), len(waiting))

    def _key(self, prompt: Prompt) -> str:
        return sha256_text(self.model.fingerprint, prompt.text, str(self.max_tokens))[:24]
