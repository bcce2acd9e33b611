"""Questions to prompts: closed-book, open-book, multiple choice, in the question's language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from knowgate.core.files import sha256_text
from knowgate.core.text import render_choices
from knowgate.errors import BadSetting
from knowgate.models.prompts.templates import (
    LANGUAGES,
    TemplateSet,
    detect_question_language,
    load_packaged_templates,
    load_template_variant,
    load_templates,
)
from knowgate.types import Model, Passage, Prompt, Question

TEMPLATE_VARIANTS = ("free",)  # beside the usual one: free-form answers, at length
SPECIMEN_PASSAGES = (
    Passage("1", "Text.", "Title"),
    Passage("2", "# More text."),
)  # what a fingerprint shows passages by


@dataclass(frozen=True)
class AnswerPrompts:
    """Renders questions with a template set. `lang` forces a language; else each question's own is used."""

    templates: TemplateSet = field(default_factory=lambda: load_packaged_templates("answer"))
    lang: str | None = None

    def __post_init__(self) -> None:
        if self.lang is not None and self.lang not in LANGUAGES:
            raise BadSetting(f"unknown language '{self.lang}'. Known: {', '.join(LANGUAGES)}.")

    @property
    def fingerprint(self) -> str:
        return self.templates.fingerprint + (f"-{self.lang}" if self.lang else "")

    @property
    def open_fingerprint(self) -> str:
        """Identity of how passages are put to the LLM: templates, and how passages are written out."""
        asked = [Question("?", lang=lang, choices=kind) for lang in LANGUAGES for kind in ((), ("a", "b"))]
        return sha256_text(*(self.open(question, SPECIMEN_PASSAGES).text for question in asked))[:16]

    def language(self, question: Question) -> str:
        return self.lang or detect_question_language(question)

    def closed(self, question: Question) -> Prompt:
        key = "choice_closed" if question.choices else "closed"
        return Prompt(self.templates.fill(key, self.language(question), query=_query(question)))

    def open(self, question: Question, passages: Sequence[Passage]) -> Prompt:
        key = "choice_open" if question.choices else "open"
        lang = self.language(question)
        return Prompt(self.templates.fill(key, lang, query=_query(question), evidence=format_passages(passages)))


def load_answer_prompts(file: Path | None = None, lang: str | None = None) -> AnswerPrompts:
    """The packaged wording, another one by its name, or a user's own from a TOML file; lang forces a language."""
    if file is None:
        return AnswerPrompts(load_packaged_templates("answer"), lang)
    if str(file) in TEMPLATE_VARIANTS:
        return AnswerPrompts(load_template_variant(str(file), like="answer"), lang)
    return AnswerPrompts(load_templates(file, like="answer"), lang)


def format_passages(passages: Sequence[Passage]) -> str:
    """The passages one after another, as in the paper. Numbering them makes small models count instead of answer."""
    return "\n\n".join(_block(passage) for passage in passages)


def _block(passage: Passage) -> str:
    text = passage.text.strip().lstrip("#").strip()
    return text if not passage.title or text.startswith(passage.title) else f"{passage.title}\n{text}"


def _query(question: Question) -> str:
    return render_choices(question) if question.choices else question.text


def fit_passages(
    model: Model, prompts: AnswerPrompts, question: Question, passages: Sequence[Passage], max_tokens: int
) -> tuple[Passage, ...]:
    """As many passages as the context window holds, cut from the end; the first is shortened if it must be."""
    kept = list(passages)
    while kept and not model.fits([prompts.open(question, kept)], max_tokens)[0]:
        if len(kept) > 1:
            kept.pop()
        elif len(kept[0].text) > 1:
            kept[0] = replace(kept[0], text=kept[0].text[: len(kept[0].text) // 2])
        else:
            kept.pop()
    return tuple(kept)


def fit_passages_batch(
    model: Model,
    prompts: AnswerPrompts,
    questions: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    max_tokens: int,
) -> list[tuple[Passage, ...]]:
    """`fit_passages` for many questions: the model is asked once about all, and again only where it must be less."""
    asked = [prompts.open(question, found) for question, found in zip(questions, passages, strict=True)]
    fit = model.fits(asked, max_tokens)
    return [
        tuple(found) if fits or not found else fit_passages(model, prompts, question, found, max_tokens)
        for question, found, fits in zip(questions, passages, fit, strict=True)
    ]
