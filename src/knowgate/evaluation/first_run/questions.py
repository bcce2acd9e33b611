"""The questions of a first run: from a file, or written by an LLM from passages and marked synthetic.

Each question occurs once, in an order that does not depend on answers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from knowgate.core.files import sha256_text
from knowgate.core.text import contains_tokens, tokenize
from knowgate.data.questions import guess_data_spec, load_questions
from knowgate.data.row_folder import RowFolder
from knowgate.data.splits import fingerprint_text_loosely, hash_to_unit
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.first_run.options import FirstRunOptions, ProgressReporter
from knowgate.labels.grading import list_gold_answers, load_grader
from knowgate.labels.local_runner import LocalRunner
from knowgate.labels.run import fingerprint_questions
from knowgate.models.prompts.questions import build_question_prompt, parse_generated_question
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.retrieval.index_folder import IndexedPassage, iterate_passages_by_document
from knowgate.types import SYNTHETIC_KEY, Model, Passage, Question

MIN_WRITTEN_QUESTIONS = 20  # with fewer, nothing can be learned or shown, and the writer is too weak to trust
PASSAGES_PER_QUESTION = 5  # an LLM that needs more is too weak
MIN_PASSAGES = 60
MAX_WRITTEN_TOKENS = 80  # of a question with its answer
MAX_ANSWER_WORDS, MAX_QUESTION_WORDS, MIN_QUESTION_WORDS = 12, 50, 3  # in Chinese, characters count as words
PASSAGE_MENTION = re.compile(
    r"\b(?:the|this|that|these|above|given|following)\s+(?:\w+\s+)?"
    r"(?:passage|text|paragraph|document|article|excerpt|section|author|context|page|sentence)s?\b"
    r"|文中|本文|该文|这段|上文|下文|文章|段落|短文|材料|文字|上述|作者",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class FirstRunQuestions:
    """The questions of a first run.

    Attributes:
        selected: The questions to label: the first ones of `available`, as many as the option `count` asks for.
        available: All questions that the user gave or an LLM wrote, without duplicates.
        source: Fingerprint of where the questions come from. Labels are reused as long as it stays the same.
    """

    selected: list[Question]
    available: list[Question]
    source: str

    @property
    def has_more(self) -> bool:
        """Whether there are more questions than were requested."""
        return len(self.available) > len(self.selected)

    @property
    def n_with_gold(self) -> int:
        """Number of questions with a gold answer."""
        return sum(bool(list_gold_answers(question)) for question in self.selected)

    @property
    def has_gold(self) -> bool:
        """Whether at least half of the questions have a gold answer; otherwise all are graded by agreement."""
        return 2 * self.n_with_gold >= len(self.selected)


def load_first_run_questions(options: FirstRunOptions, reporter: ProgressReporter) -> FirstRunQuestions:
    """Load the user's questions without duplicates, in a fixed random order. A larger `count` only adds questions."""
    loaded = load_questions(guess_data_spec(options.questions))
    distinct: dict[str, Question] = {}
    for question in loaded:
        distinct.setdefault(fingerprint_text_loosely(question.text), question)
    if len(distinct) < len(loaded):
        reporter.say(f"{len(loaded) - len(distinct)} duplicate questions are left out.")
    shuffled_keys = sorted(distinct, key=lambda key: hash_to_unit("first run", str(options.seed), key))
    available = [distinct[key] for key in shuffled_keys]
    questions = FirstRunQuestions(available[: options.count], available, fingerprint_questions(loaded))
    reporter.say(_describe_questions(questions))
    return questions


def _describe_questions(questions: FirstRunQuestions) -> str:
    """Say how many questions there are, and whether they have gold answers."""
    n, total = len(questions.selected), len(questions.available)
    count = f"{n} of {total} questions" if n < total else f"{total} questions"
    with_gold = f"{count}, {questions.n_with_gold} of them with gold answers"
    if questions.has_gold:
        return f"{with_gold}."
    return (
        f"{with_gold}, too few to grade with. Instead, the answer with passages counts as right, so the result will show "
        "how rarely skipping changes the answer."
    )


def write_first_run_questions(
    options: FirstRunOptions, index: str, fingerprint: str, model: Model, reporter: ProgressReporter
) -> FirstRunQuestions:
    """Let an LLM write questions from the passages of an index. An interrupted run continues where it stopped.

    Args:
        options: Options of the first run.
        index: Folder of the index.
        fingerprint: Fingerprint of the index.
        model: The LLM that writes.
        reporter: Receives the progress.

    Raises:
        BadInput: The LLM wrote too few usable questions.
    """
    prompts = load_packaged_templates("write").fingerprint
    settings = {"index": fingerprint, "writer": model.fingerprint, "prompts": prompts, "seed": options.seed}
    source = sha256_text(*map(str, settings.values()))[:16]
    folder = WrittenQuestionFolder(options.out / "written" / source[:8])
    with folder.exclusive():
        folder.start(settings, {})
        _write_rows(folder, model, index, options, reporter)
    reporter.say(_describe_written(folder, model.name))
    _check_written(folder, model.name, min(MIN_WRITTEN_QUESTIONS, options.count))
    available = folder.questions
    return FirstRunQuestions(available[: options.count], available, source)


def _check_written(folder: WrittenQuestionFolder, writer: str, n_needed: int) -> None:
    """Raise BadInput if the LLM wrote fewer usable questions than needed."""
    n_usable = len(folder.questions)
    if n_usable < n_needed:
        raise BadInput(
            f"{writer} wrote only {n_usable} usable questions, but at least {n_needed} are needed (see "
            f"{folder.path / folder.rows_name}). Use a larger LLM as `writer`. Or write questions yourself, one per "
            "line, and set `questions` to that file."
        )


def _describe_written(folder: WrittenQuestionFolder, model: str) -> str:
    """Say how many usable questions the model wrote, and why others were rejected."""
    rejected, n_usable = Counter(row["refused"] for row in folder.written() if row["refused"]), len(folder.questions)
    reasons = "; ".join(f"{count}: {reason}" for reason, count in rejected.most_common())
    result = f"{model} wrote {n_usable} usable questions from {n_usable + rejected.total()} passages"
    note = f" (rejected: {reasons})" if reasons else ""
    return f"{result}{note}. Check some before you trust a figure: {folder.path / folder.rows_name}"


def check_index_is_listable(index: str) -> None:
    """Raise BadSetting for a search endpoint. An endpoint cannot list passages for writing questions."""
    if not Path(index).is_dir():
        raise BadSetting(
            f"no questions can be written for index='{index}': a search endpoint does not list its passages. Set `questions` to "
            "a file of questions."
        )


# --- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenQuestionFolder(RowFolder):
    """Stores written questions, also rejected ones: one row per passage, safe against interruption."""

    version: ClassVar[int] = 1
    manifest_name: ClassVar[str] = "written.json"
    rows_name: ClassVar[str] = "written.jsonl"
    folder_type: ClassVar[str] = "folder of written questions"
    command: ClassVar[str] = "knowgate start"

    def written(self) -> list[dict[str, Any]]:
        """Return all rows."""
        return [record for _, record in self.records()]

    @property
    def questions(self) -> list[Question]:
        """The usable questions, in the order they were written."""
        return [_parse_row(row) for row in self.written() if not row["refused"]]


def _write_rows(
    folder: WrittenQuestionFolder, model: Model, index: str, options: FirstRunOptions, reporter: ProgressReporter
) -> None:
    """Write one question per passage, until enough are usable or too many passages were tried."""
    rows, count = folder.written(), options.count
    # Fingerprints of the usable questions. Writing a batch adds those of its usable questions.
    usable = {fingerprint_text_loosely(row["question"]) for row in rows if not row["refused"]}
    max_passages = max(MIN_PASSAGES, PASSAGES_PER_QUESTION * count)
    n_to_try = max_passages - len(rows) if len(usable) < count else 0
    passages = iterate_passages_by_document(index, options.seed)
    placeholders = _select_passages(passages, {row["id"] for row in rows}, n_to_try)
    done, total = len(rows), len(rows) + len(placeholders)

    def show() -> None:
        reporter.show("writing questions", done, total, "passages", f"{len(usable)} usable questions")

    show()
    for new_rows in LocalRunner(largest=32).run(placeholders, lambda batch: _write_batch(model, batch, usable)):
        folder.append_records(new_rows)
        done += len(new_rows)
        show()
        if len(usable) >= count:
            return


def _write_batch(model: Model, placeholders: Sequence[Question], seen: set[str]) -> list[dict[str, Any]]:
    """Let the LLM write one question for each passage, and return the rows to store.

    Args:
        model: The LLM.
        placeholders: One placeholder per passage: a question whose only context is the passage.
        seen: Fingerprints of the usable questions so far. The new ones are added.
    """
    is_local = model.depth > 0  # a local LLM continues a raw text, others answer a chat message
    prompts = [build_question_prompt(placeholder.contexts[0], raw=is_local) for placeholder in placeholders]
    texts = [samples[0].text for samples in model.generate(prompts, max_tokens=MAX_WRITTEN_TOKENS)]
    return [_make_row(placeholder, text, seen) for placeholder, text in zip(placeholders, texts, strict=True)]


def _select_passages(passages: Iterable[IndexedPassage], done: set[str], limit: int) -> list[Question]:
    """Select the first `limit` passages whose row number is not in `done`, and return a placeholder for each.

    A placeholder is a question whose only context is the passage, because `LocalRunner` accepts only questions.
    """
    selected: list[Question] = []
    for row, passage in passages:
        if len(selected) >= limit:
            break
        if str(row) not in done:
            selected.append(Question(passage.text, id=str(row), contexts=(passage,)))
    return selected


def _make_row(placeholder: Question, text: str, seen: set[str]) -> dict[str, Any]:
    """Parse the question and answer that an LLM wrote, and make the row to store.

    Args:
        placeholder: Holds the passage that the question was written from.
        text: What the LLM wrote.
        seen: Fingerprints of usable questions so far. That of a new usable question is added.

    Returns:
        The row. Its field 'refused' says why the question cannot be used; '' if it can.
    """
    passage = placeholder.contexts[0]
    written = parse_generated_question(text)
    reason = explain_rejection(written.question, written.answer, passage, seen)
    if not reason:
        seen.add(fingerprint_text_loosely(written.question))
    return {"id": placeholder.id, "passage": passage.id, **written._asdict(), "refused": reason}


def explain_rejection(question: str, answer: str, passage: Passage, seen: set[str]) -> str:
    """Return why a written question cannot be used; '' if it can.

    Args:
        question: The question that the LLM wrote.
        answer: Its answer.
        passage: The passage that it was written from.
        seen: Fingerprints of earlier questions, to reject repetitions.
    """
    question_words, answer_words = tokenize(question), tokenize(answer)
    is_question = MIN_QUESTION_WORDS <= len(question_words) <= MAX_QUESTION_WORDS and question.endswith(("?", "？"))
    grades = load_grader("contains").grade([passage.text], [Question(question, answers=(answer,))])
    problems = {
        "no question that ends in '?'": not is_question,
        "no short answer": not 0 < len(answer_words) <= MAX_ANSWER_WORDS,
        "it mentions the passage": PASSAGE_MENTION.search(question),
        "it contains its answer": contains_tokens(question_words, answer_words),
        "its answer is not in the passage": not grades[0].correct,
        "a repeated question": fingerprint_text_loosely(question) in seen,
    }
    return next((problem for problem, applies in problems.items() if applies), "")


def _parse_row(row: dict[str, Any]) -> Question:
    """Make a question, marked as synthetic, from a stored row."""
    meta = {SYNTHETIC_KEY: True, "passage": row["passage"]}
    return Question(row["question"], id=f"written-{row['id']}", answers=(row["answer"],), meta=meta)
