"""Questions that an LLM writes from passages, one each, and what is refused of them. All of them are marked synthetic.

Knows passages and prompts; not how many questions anybody needs, nor what is done with them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from knowgate.labels import LocalRunner, load_grader
from knowgate.prompts import read_written, write_prompt
from knowgate.retrieval import Placed
from knowgate.runs import RowFolder, loose_key
from knowgate.text import contains_tokens, tokens
from knowgate.types import SYNTHETIC, Model, Passage, Question

TOKENS = 80  # of a question with its answer
LONGEST_ANSWER, LONGEST_QUESTION, SHORTEST_QUESTION = 12, 50, 3  # words; characters count as words in Chinese
SPEAKS_OF_TEXT = re.compile(
    r"\b(?:the|this|that|these|above|given|following)\s+(?:\w+\s+)?"
    r"(?:passage|text|paragraph|document|article|excerpt|section|author|context|page|sentence)s?\b"
    r"|文中|本文|该文|这段|上文|下文|文章|段落|短文|材料|文字|上述|作者",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class WrittenFolder(RowFolder):
    """Where written questions are kept, refused ones too: a row per passage, safe against being killed."""

    version: ClassVar[int] = 1
    manifest_name: ClassVar[str] = "written.json"
    rows_name: ClassVar[str] = "written.jsonl"
    what: ClassVar[str] = "folder of written questions"
    command: ClassVar[str] = "knowgate start"

    def written(self) -> list[dict[str, Any]]:
        return [record for _, record in self.records()]

    @property
    def questions(self) -> list[Question]:
        """Those that are of use, in the order they were written."""
        return [_question(row) for row in self.written() if not row["refused"]]

    @property
    def refused(self) -> Counter[str]:
        """Why the others are not."""
        return Counter(row["refused"] for row in self.written() if row["refused"])


@dataclass(frozen=True)
class Writer:
    """Lets the model write, a batch at a time, until there are enough questions."""

    model: Model
    folder: WrittenFolder
    on_progress: Callable[[int, int, int], None]  # passages read, all that will be at most, questions of use

    def write(self, passages: Iterable[Placed], enough: int, most: int) -> None:
        """Goes on where it was. most: passages that are tried."""
        rows = self.folder.written()
        seen = {loose_key(row["question"]) for row in rows if not row["refused"]}
        waiting = _waiting(passages, {row["id"] for row in rows}, most - len(rows)) if len(seen) < enough else []
        tried, total = len(rows), len(rows) + len(waiting)
        self.on_progress(tried, total, len(seen))
        for batch in LocalRunner(largest=32).run(waiting, lambda questions: self._batch(questions, seen)):
            self.folder.append_records(batch)
            tried += len(batch)
            self.on_progress(tried, total, len(seen))
            if len(seen) >= enough:
                return

    def _batch(self, questions: Sequence[Question], seen: set[str]) -> list[dict[str, Any]]:
        """Each stands for a passage: its one context."""
        is_local = self.model.depth > 0
        asked = [write_prompt(question.contexts[0], raw=is_local) for question in questions]
        said = self.model.generate(asked, max_tokens=TOKENS)
        return [
            _row(question, completions[0].text, seen) for question, completions in zip(questions, said, strict=True)
        ]


def _waiting(passages: Iterable[Placed], done: set[str], most: int) -> list[Question]:
    found: list[Question] = []
    for row, passage in passages:
        if len(found) >= most:
            break
        if str(row) not in done:
            found.append(Question(passage.text, id=str(row), contexts=(passage,)))
    return found


def _row(about: Question, said: str, seen: set[str]) -> dict[str, Any]:
    passage = about.contexts[0]
    written = read_written(said)
    why = refusal(written.question, written.answer, passage, seen)
    if not why:
        seen.add(loose_key(written.question))
    return {"id": about.id, "passage": passage.id, **written._asdict(), "refused": why}


def refusal(question: str, answer: str, passage: Passage, seen: set[str]) -> str:
    """Why a written question is of no use; '' where it is. seen: loose keys of those asked before."""
    return next(_refusals(question, answer, passage, seen), "")


def _refusals(question: str, answer: str, passage: Passage, seen: set[str]) -> Iterator[str]:
    asked, answered = tokens(question), tokens(answer)
    if not SHORTEST_QUESTION <= len(asked) <= LONGEST_QUESTION or not question.endswith(("?", "？")):
        yield "no question that ends in '?'"
    if not answered or len(answered) > LONGEST_ANSWER:
        yield "no short answer"
    if SPEAKS_OF_TEXT.search(question):
        yield "it speaks of the passage"
    if contains_tokens(asked, answered):
        yield "it gives its answer away"
    graded = load_grader("contains").grade([passage.text], [Question(question, answers=(answer,))])
    if not graded[0].correct:
        yield "its answer is not in the passage"
    if loose_key(question) in seen:
        yield "asked before"


def _question(row: dict[str, Any]) -> Question:
    about = {SYNTHETIC: True, "passage": row["passage"]}
    return Question(row["question"], id=f"written-{row['id']}", answers=(row["answer"],), meta=about)
