"""Prompts for answering questions: closed-book or open-book, free text or multiple choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from knowgate.core.files import sha256_text
from knowgate.core.text import render_choices
from knowgate.errors import BadSetting
from knowgate.models.prompts.sentence_selection import quote_unless_grounded, select_sentences
from knowgate.models.prompts.templates import (
    LANGUAGES,
    TemplateSet,
    detect_question_language,
    load_packaged_templates,
    load_template_variant,
    load_templates,
)
from knowgate.types import Model, Passage, Prompt, Question, Reading

TEMPLATE_VARIANTS = ("free",)  # 'free' asks for long answers in whole sentences
# The embedded LLM (135 million parameters) loses the answer in longer prompts; see benchmarks/handbook.py.
EMBEDDED_MODELS = ("smollm", "llamacpp:smollm")
EMBEDDED_MODEL_SENTENCES = 1
# Example passages that `open_fingerprint` formats, so that it changes with the format of passages.
SPECIMEN_PASSAGES = (Passage("1", "Text.", "Title"), Passage("2", "# More text."))


@dataclass(frozen=True)
class AnswerPrompts:
    """Builds closed-book and open-book prompts for questions from a set of templates.

    Args:
        templates: The templates; by default those of the package.
        lang: Language of all prompts ('en' or 'zh'); None to use the language of each question.
        sentences: For small LLMs: show only so many sentences of the passages, those that fit the question best, and
            quote the best one if the answer is not grounded in the passages. None to show all and quote nothing.
    """

    templates: TemplateSet = field(default_factory=lambda: load_packaged_templates("answer"))
    lang: str | None = None
    sentences: int | None = None

    def __post_init__(self) -> None:
        if self.lang is not None and self.lang not in LANGUAGES:
            raise BadSetting(f"unknown language '{self.lang}'. Known: {', '.join(LANGUAGES)}.")

    @property
    def fingerprint(self) -> str:
        """Hash of the templates, followed by the language if it is fixed."""
        return self.templates.fingerprint + (f"-{self.lang}" if self.lang else "")

    @property
    def open_fingerprint(self) -> str:
        """Hash of example open-book prompts; changes if the templates or the format of passages change."""
        questions = [Question("?", lang=lang, choices=choices) for lang in LANGUAGES for choices in ((), ("a", "b"))]
        sentences = [] if self.sentences is None else [f"{self.sentences} sentences, quoted"]
        return sha256_text(*(self.open(question, SPECIMEN_PASSAGES).text for question in questions), *sentences)[:16]

    def language(self, question: Question) -> str:
        """Return the language ('en' or 'zh') in which a question's prompts are written."""
        return self.lang or detect_question_language(question)

    def closed(self, question: Question) -> Prompt:
        """Return the closed-book prompt, which asks the question without passages."""
        key = "choice_closed" if question.choices else "closed"
        return Prompt(self.templates.fill(key, self.language(question), query=_format_query(question)))

    def open(self, question: Question, passages: Sequence[Passage]) -> Prompt:
        """Return the open-book prompt, which shows the passages before the question."""
        if self.sentences is not None:
            passages = select_sentences(question.text, passages, self.sentences)
        key = "choice_open" if question.choices else "open"
        values = {"query": _format_query(question), "evidence": format_passages(passages)}
        return Prompt(self.templates.fill(key, self.language(question), **values))

    def check_open_answer(self, question: Question, passages: Sequence[Passage], answer: str) -> str:
        """Return the answer to give after retrieval: the LLM's, or a quotation if a small LLM invented something."""
        if self.sentences is None or question.choices:
            return answer
        return quote_unless_grounded(question.text, answer, passages, self.sentences)

    def check_open_reading(self, question: Question, passages: Sequence[Passage], reading: Reading) -> Reading:
        """Return a reading whose draft is the answer that `check_open_answer` gives."""
        if self.sentences is None or reading.draft is None:
            return reading
        text = self.check_open_answer(question, passages, reading.draft.text)
        return replace(reading, draft=replace(reading.draft, text=text))


def load_answer_prompts(file: Path | None = None, lang: str | None = None, model: Model | None = None) -> AnswerPrompts:
    """Load the prompts for answering questions.

    Args:
        file: A TOML file with templates, or 'free' for the package's variant that asks for long answers. None loads
            the default templates.
        lang: Language of all prompts ('en' or 'zh'); None to use the language of each question.
        model: The LLM. With the default templates, the embedded LLM is shown only the best sentences of the passages.
    """
    if file is None:
        is_embedded = model is not None and model.name in EMBEDDED_MODELS
        sentences = EMBEDDED_MODEL_SENTENCES if is_embedded else None
        return AnswerPrompts(load_packaged_templates("answer"), lang, sentences)
    if str(file) in TEMPLATE_VARIANTS:
        return AnswerPrompts(load_template_variant(str(file), like="answer"), lang)
    return AnswerPrompts(load_templates(file, like="answer"), lang)


def format_passages(passages: Sequence[Passage]) -> str:
    """Join passages with blank lines, each preceded by its title.

    Passages are not numbered, because small models would continue the numbering instead of answering.
    """
    return "\n\n".join(_format_passage(passage) for passage in passages)


def _format_passage(passage: Passage) -> str:
    """Return the text below its title, without leading Markdown heading marks."""
    text = passage.text.strip().lstrip("#").strip()
    return text if not passage.title or text.startswith(passage.title) else f"{passage.title}\n{text}"


def _format_query(question: Question) -> str:
    return render_choices(question) if question.choices else question.text


def fit_passages(
    model: Model, prompts: AnswerPrompts, question: Question, passages: Sequence[Passage], max_tokens: int
) -> tuple[Passage, ...]:
    """Return as many of the first passages as fit the model's context window.

    Passages are dropped from the end. If even one passage is too long, its text is halved until the prompt fits. The
    result is empty if the prompt does not fit without passages.
    """
    fitting = list(passages)
    while fitting and not model.fits([prompts.open(question, fitting)], max_tokens)[0]:
        if len(fitting) == 1 and len(fitting[0].text) > 1:
            fitting[0] = replace(fitting[0], text=fitting[0].text[: len(fitting[0].text) // 2])
        else:
            fitting.pop()
    return tuple(fitting)


def fit_passages_batch(
    model: Model,
    prompts: AnswerPrompts,
    questions: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    max_tokens: int,
) -> list[tuple[Passage, ...]]:
    """Run `fit_passages` for many questions.

    One call of the model checks all questions with all of their passages. Only those that are too long are then
    shortened one by one.
    """
    pairs = list(zip(questions, passages, strict=True))
    fits = model.fits([prompts.open(question, retrieved) for question, retrieved in pairs], max_tokens)
    return [
        tuple(retrieved) if fit or not retrieved else fit_passages(model, prompts, question, retrieved, max_tokens)
        for (question, retrieved), fit in zip(pairs, fits, strict=True)
    ]
