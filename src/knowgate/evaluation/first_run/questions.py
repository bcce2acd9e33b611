"""The questions of a first run: from a file, or written by an LLM. Each once, in an order that depends on no answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from knowgate.core.files import sha256_text
from knowgate.core.text import contains_tokens, tokenize
from knowgate.data.questions import guess_data_spec, load_questions
from knowgate.data.row_folder import RowFolder
from knowgate.data.splits import fingerprint_text_loosely, hash_to_unit
from knowgate.errors import BadInput
from knowgate.evaluation.first_run.options import FirstRunOptions, ProgressReporter
from knowgate.labels.grading import list_gold_answers, load_grader
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.run import fingerprint_questions
from knowgate.models.prompts.questions import build_question_prompt, parse_generated_question
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.retrieval.index_folder import IndexedPassage, iterate_passages_by_document
from knowgate.types import SYNTHETIC_KEY, Model, Passage, Question

MAX_WRITTEN_TOKENS = 80  # of a question with its answer
MAX_ANSWER_WORDS, MAX_QUESTION_WORDS, MIN_QUESTION_WORDS = 12, 50, 3  # words; characters count as words in Chinese
PASSAGE_MENTION = re.compile(
    r"\b(?:the|this|that|these|above|given|following)\s+(?:\w+\s+)?"
    r"(?:passage|text|paragraph|document|article|excerpt|section|author|context|page|sentence)s?\b"
    r"|文中|本文|该文|这段|上文|下文|文章|段落|短文|材料|文字|上述|作者",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class WrittenQuestionFolder(RowFolder):
    """Where written questions are kept, refused ones too: a row per passage, safe against being killed."""

    version: ClassVar[int] = 1
    manifest_name: ClassVar[str] = "written.json"
    rows_name: ClassVar[str] = "written.jsonl"
    folder_type: ClassVar[str] = "folder of written questions"
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
class QuestionWriter:
    """Lets the model write, a batch at a time, until there are enough questions."""

    model: Model
    folder: WrittenQuestionFolder
    on_progress: Callable[[int, int, int], None]  # passages read, all that will be at most, questions of use

    def write(self, passages: Iterable[IndexedPassage], enough: int, most: int) -> None:
        """Goes on where it was. most: passages that are tried."""
        rows = self.folder.written()
        seen = {fingerprint_text_loosely(row["question"]) for row in rows if not row["refused"]}
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
        asked = [build_question_prompt(question.contexts[0], raw=is_local) for question in questions]
        said = self.model.generate(asked, max_tokens=MAX_WRITTEN_TOKENS)
        return [
            _row(question, completions[0].text, seen) for question, completions in zip(questions, said, strict=True)
        ]


def _waiting(passages: Iterable[IndexedPassage], done: set[str], most: int) -> list[Question]:
    found: list[Question] = []
    for row, passage in passages:
        if len(found) >= most:
            break
        if str(row) not in done:
            found.append(Question(passage.text, id=str(row), contexts=(passage,)))
    return found


def _row(about: Question, said: str, seen: set[str]) -> dict[str, Any]:
    passage = about.contexts[0]
    written = parse_generated_question(said)
    why = explain_rejection(written.question, written.answer, passage, seen)
    if not why:
        seen.add(fingerprint_text_loosely(written.question))
    return {"id": about.id, "passage": passage.id, **written._asdict(), "refused": why}


def explain_rejection(question: str, answer: str, passage: Passage, seen: set[str]) -> str:
    """Why a written question is of no use; '' where it is. seen: loose keys of those asked before."""
    return next(_refusals(question, answer, passage, seen), "")


def _refusals(question: str, answer: str, passage: Passage, seen: set[str]) -> Iterator[str]:
    asked, answered = tokenize(question), tokenize(answer)
    if not MIN_QUESTION_WORDS <= len(asked) <= MAX_QUESTION_WORDS or not question.endswith(("?", "？")):
        yield "no question that ends in '?'"
    if not answered or len(answered) > MAX_ANSWER_WORDS:
        yield "no short answer"
    if PASSAGE_MENTION.search(question):
        yield "it speaks of the passage"
    if contains_tokens(asked, answered):
        yield "it gives its answer away"
    graded = load_grader("contains").grade([passage.text], [Question(question, answers=(answer,))])
    if not graded[0].correct:
        yield "its answer is not in the passage"
    if fingerprint_text_loosely(question) in seen:
        yield "asked before"


def _question(row: dict[str, Any]) -> Question:
    about = {SYNTHETIC_KEY: True, "passage": row["passage"]}
    return Question(row["question"], id=f"written-{row['id']}", answers=(row["answer"],), meta=about)


MIN_WRITTEN_QUESTIONS = 20  # below, nothing can be learnt or shown, and the LLM that wrote them is better not trusted
PASSAGES_PER_QUESTION = 5  # passages per question that is wanted; who writes one of use in five will not do
MIN_PASSAGES = 60


@dataclass(frozen=True)
class FirstRunQuestions:
    """questions: as many as are wanted, or all there are. every: those beyond, too. source: names all of them."""

    questions: list[Question]
    every: list[Question]
    source: str

    @property
    def has_more(self) -> bool:
        """As many as were wanted were found, so there may be more."""
        return len(self.every) > len(self.questions)

    @property
    def with_gold(self) -> int:
        return sum(bool(list_gold_answers(question)) for question in self.questions)

    @property
    def has_gold(self) -> bool:
        """Most of them can be graded; else they are graded by agreement, all of them."""
        return 2 * self.with_gold >= len(self.questions)


def load_first_run_questions(wishes: FirstRunOptions, tell: ProgressReporter) -> FirstRunQuestions:
    """Those of a file: in the order of hashes, so that more of them leave the first ones first."""
    every = load_questions(guess_data_spec(wishes.questions))
    first: dict[str, Question] = {}
    for question in every:
        first.setdefault(fingerprint_text_loosely(question.text), question)
    if len(first) < len(every):
        tell.say(f"{len(every) - len(first)} questions are asked twice and left out.")
    ordered = sorted(first.items(), key=lambda item: hash_to_unit("first run", str(wishes.seed), item[0]))
    each = [question for _, question in ordered]
    asked = FirstRunQuestions(each[: wishes.count], each, fingerprint_questions(every))
    tell.say(_about(asked, len(first)))
    return asked


def _about(asked: FirstRunQuestions, there: int) -> str:
    taken = f"{len(asked.questions)} of {there} questions" if len(asked.questions) < there else f"{there} questions"
    if asked.has_gold:
        without = len(asked.questions) - asked.with_gold
        return f"{taken}, with gold answers" + (f"; {without} have none and cannot be graded." if without else ".")
    some = f" ({asked.with_gold} have one, too few to go by)" if asked.with_gold else ""
    return (
        f"{taken}, without gold answers{some}: what the LLM says with passages is taken for right, so what is proven "
        "is how seldom skipping changes the answer."
    )


def write_first_run_questions(
    wishes: FirstRunOptions, index: str, fingerprint: str, model: Model, tell: ProgressReporter
) -> FirstRunQuestions:
    """Those the LLM writes; goes on where it was, and writes more where more are wanted."""
    settings = {"index": fingerprint, "writer": model.fingerprint, "prompts": load_packaged_templates("write").fingerprint,
                "seed": wishes.seed}  # fmt: skip
    source = sha256_text(*map(str, settings.values()))[:16]
    folder = WrittenQuestionFolder(wishes.out / "written" / source[:8])
    most = max(MIN_PASSAGES, PASSAGES_PER_QUESTION * wishes.count)
    with folder.exclusive():
        folder.start(settings, {})
        writer = QuestionWriter(model, folder, _showing(tell))
        writer.write(iterate_passages_by_document(index, wishes.seed), wishes.count, most)
    questions = folder.questions[: wishes.count]
    tell.say(_left(folder, model.name))
    if len(questions) < min(MIN_WRITTEN_QUESTIONS, wishes.count):
        raise BadInput(_too_few(wishes, folder, model))
    return FirstRunQuestions(questions, folder.questions, source)


def _showing(tell: ProgressReporter) -> Callable[[int, int, int], None]:
    def show(tried: int, total: int, of_use: int) -> None:
        tell.show("writing questions", tried, total, "passages", f"{of_use} questions of use")

    return show


def _left(folder: WrittenQuestionFolder, name: str) -> str:
    refused = folder.refused
    reasons = "; ".join(f"{count}: {why}" for why, count in refused.most_common())
    of_use = len(folder.questions)
    said = f"{name} wrote {of_use} questions of use from {of_use + refused.total()} passages"
    look = f"Look at some before you trust a figure: {folder.path / folder.rows_name}"
    return f"{said}{f' (refused: {reasons})' if reasons else ''}. {look}"


def _too_few(wishes: FirstRunOptions, folder: WrittenQuestionFolder, model: Model) -> str:
    passages = len(folder.written())
    return (
        f"from {passages} passages {model.name} wrote {len(folder.questions)} questions of use; {MIN_WRITTEN_QUESTIONS} are "
        f"the fewest to go on with (all are in {folder.path / folder.rows_name}). Write some yourself, one per "
        f"line: {wishes.command(questions='questions.txt')} - or let a larger LLM write: "
        f"{wishes.command(writer='openai:MODEL@URL')}"
    )


def explain_unlisted_index(index: str, wishes: FirstRunOptions) -> str:
    """Why no questions can be written; '' where they can."""
    if Path(index).is_dir():
        return ""
    return (
        f"no questions can be written from '{index}': a search endpoint does not list its passages. Give questions: "
        f"{wishes.command(questions='questions.txt')}"
    )
