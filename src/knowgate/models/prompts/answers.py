"""Prompts for answering questions: closed-book or open-book, free text or multiple choice."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from knowgate.core.files import sha256_text
from knowgate.core.text import render_choices, tokenize
from knowgate.errors import BadSetting
from knowgate.models.prompts.templates import (
    LANGUAGES,
    TemplateSet,
    detect_question_language,
    load_packaged_templates,
    load_templates,
)
from knowgate.types import Model, Passage, Prompt, Question, Reading

# The title of a person, or an initial, does not end a sentence.
_ABBREVIATION = r"(?<!\bDr)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bSt)(?<!\bNo)(?<!\b[A-Z])"
_SENTENCE_END = re.compile(
    rf"{_ABBREVIATION}[.!?][\"'”’)\]]*\s+(?=[A-Z0-9\"'“(])|[。！？；]|\n[^\S\n]*\n\s*|\n(?=[^\S\n]*(?:[-*+•|#]|\d+[.)])\s)|;\s+"
)
_FUNCTION_WORDS = (
    "a an and are be by can did do does far for from get has have how i in is it long many may much must of often on or "
    "should that the there to was we were what when where which who whom whose why will with you answer question this that"
)
_IGNORED = frozenset(_FUNCTION_WORDS.split())
_NUMBER_WORDS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand once twice half quarter every "
    "daily weekly monthly yearly"
)
_NUMBER = re.compile(rf"\d|\b(?:{'|'.join(_NUMBER_WORDS.split())})\b", re.IGNORECASE)
_NAME = re.compile(r"(?<=\w\s)[A-Z][a-z]+")  # a capitalized word after the first word
_ASKS_NUMBER = re.compile(
    r"^\W*(?:how (?:many|much|long|often|far|old|big|large|heavy|tall|high|fast|late|early)|when|at what|what (?:time|year)"
    r"|which (?:year|day|month))\b|\b(?:costs?|price|limit|amount|number|code|fee|percent|rate|deadline)\b|多少|几|何时",
    re.IGNORECASE,
)
_ASKS_NAME = re.compile(r"^\W*(?:who|whose|whom)\b|\b(?:called|named?)\b", re.IGNORECASE)
_BM25_K1, _BM25_B = 1.2, 0.5
_PASSAGE_SHARE = 0.5  # weight of words that are not in the sentence but in its passage: "It was founded in 2003."
_TYPE_BONUS = 1.5  # of a sentence that contains what the question asks for
_RANK_PENALTY = 0.3  # for each passage that the retriever ranked before
_MAX_HEADING_WORDS = 4  # a first line of so few words is a heading, which answers nothing
_SUFFIXES = ("ing", "ed", "es", "s")
_MIN_STEM_LENGTH = 3


class _Sentence(NamedTuple):
    """A sentence of a passage, with its content words and its number of words."""

    passage_index: int
    text: str
    terms: frozenset[str]
    length: int


def select_sentences(question: str, passages: Sequence[Passage], limit: int) -> list[Passage]:
    """Shorten passages to the sentences that fit the question best.

    At most `limit` sentences of all passages together are kept.

    Args:
        question: The question.
        passages: The retrieved passages.
        limit: Number of sentences to keep.

    Example:
        >>> passage = Passage("1", "The canteen opens at noon. Lunch costs 5 euro.")
        >>> select_sentences("What does lunch cost?", [passage], 1)[0].text
        'Lunch costs 5 euro.'
    """
    sentences = []
    for passage_index, passage in enumerate(passages):
        for text in split_sentences(passage.text):
            sentences.append(_Sentence(passage_index, text, frozenset(_find_terms(text)), len(tokenize(text))))
    scores = _score(question, sentences)
    best = sorted(range(len(sentences)), key=lambda index: (-scores[index], index))[:limit]
    selected: dict[int, list[str]] = {}  # index of a passage -> its best sentences, in the order of the text
    for index in sorted(best):
        selected.setdefault(sentences[index].passage_index, []).append(sentences[index].text)
    return [Passage(passages[passage_index].id, " ".join(texts)) for passage_index, texts in selected.items()]


def quote_unless_grounded(question: str, answer: str, passages: Sequence[Passage], n_shown: int = 1) -> str:
    """Replace an answer by the best sentence unless the passages support the answer.

    Off-topic passages leave the answer unchanged.

    Args:
        question: The question.
        answer: The answer that the LLM wrote after reading the best sentences of the passages.
        passages: The retrieved passages.
        n_shown: Number of sentences that the LLM was shown.

    Example:
        >>> passage = Passage("1", "The canteen opens at noon. Lunch costs 5 euro.")
        >>> quote_unless_grounded("What does lunch cost?", "It costs 12 euro.", [passage])
        'Lunch costs 5 euro.'
    """
    shown_sentences = select_sentences(question, passages, n_shown)
    best_sentences = select_sentences(question, passages, 1)
    if _is_grounded(question, answer, shown_sentences) or not best_sentences:
        return answer
    best = best_sentences[0]
    source = next(passage.text for passage in passages if passage.id == best.id)
    question_terms = _find_terms(question)
    is_relevant = len(question_terms & _find_terms(source)) > len(question_terms) / 2
    return best.text if is_relevant else answer


def _is_grounded(question: str, answer: str, sentences: Sequence[Passage]) -> bool:
    """Return whether the answer adds words to the question, all taken from the sentences."""
    answer_terms = _find_terms(answer)
    question_terms = _find_terms(question)
    known_terms = question_terms.union(*(_find_terms(sentence.text) for sentence in sentences))
    return answer_terms <= known_terms and not answer_terms <= question_terms


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, list items and table rows. A heading at the start of the text is left out."""
    bounds = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    lines = [" ".join(piece.lstrip("# \t\n").split()) for piece in pieces]
    sentences = [line for line in lines if line]
    if len(sentences) < 2:
        return sentences
    first = sentences[0]
    is_heading = len(tokenize(first)) <= _MAX_HEADING_WORDS and first[-1].isalnum()  # short, without a full stop
    return sentences[1:] if is_heading else sentences


def _score(question: str, sentences: Sequence[_Sentence]) -> list[float]:
    """Return how well each sentence fits a question. Higher is better.

    The score extends BM25 by context, answer type and passage rank.
    """
    question_terms = _find_terms(question)
    weights = _weigh_terms(sentences)
    mean_length = sum(sentence.length for sentence in sentences) / max(1, len(sentences))
    passage_terms = _collect_passage_terms(sentences)
    # Patterns of what the question asks for: a number, a name, both or neither.
    patterns = [answer for asks, answer in ((_ASKS_NUMBER, _NUMBER), (_ASKS_NAME, _NAME)) if asks.search(question)]
    scores = []
    for sentence in sentences:
        length_norm = 1 + _BM25_K1 * (1 - _BM25_B + _BM25_B * sentence.length / mean_length)
        bm25 = sum(weights[term] for term in question_terms & sentence.terms) * (1 + _BM25_K1) / length_norm
        terms_elsewhere = (question_terms & passage_terms[sentence.passage_index]) - sentence.terms
        context = sum(weights[term] for term in terms_elsewhere)
        n_matches = sum(pattern.search(sentence.text) is not None for pattern in patterns)
        rank_penalty = _RANK_PENALTY * sentence.passage_index
        scores.append(bm25 + _PASSAGE_SHARE * context + _TYPE_BONUS * n_matches - rank_penalty)
    return scores


def _collect_passage_terms(sentences: Sequence[_Sentence]) -> dict[int, set[str]]:
    """Return the terms of all sentences of each passage, by the number of the passage."""
    terms: dict[int, set[str]] = {}
    for sentence in sentences:
        terms.setdefault(sentence.passage_index, set()).update(sentence.terms)
    return terms


def _weigh_terms(sentences: Sequence[_Sentence]) -> dict[str, float]:
    """Return a weight for each term: rare ones weigh more than frequent ones (inverse sentence frequency)."""
    frequencies = Counter(term for sentence in sentences for term in sentence.terms)
    return {term: math.log(1 + len(sentences) / count) for term, count in frequencies.items()}


def _find_terms(text: str) -> set[str]:
    """Return the content words of a text without their endings."""
    return {_strip_ending(word) for word in tokenize(text) if word not in _IGNORED}


def _strip_ending(word: str) -> str:
    """Return a word without an ending such as 'ing' or 's'.

    Example: 'baking' and 'bake' both become 'bak'.
    """
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= _MIN_STEM_LENGTH:
            return word.removesuffix(suffix).removesuffix("e")
    return word.removesuffix("e")


TEMPLATE_VARIANTS = ("free",)  # 'free' asks for long answers in whole sentences
# The embedded LLM (135 million parameters) loses the answer in longer prompts; see benchmarks/handbook.py.
EMBEDDED_MODELS = ("smollm", "llamacpp:smollm")
EMBEDDED_MODEL_SENTENCES = 1
# Passages that `open_book_fingerprint` formats, so that it changes with the format of passages.
EXAMPLE_PASSAGES = (Passage("1", "Text.", "Title"), Passage("2", "# More text."))


@dataclass(frozen=True)
class AnswerPrompts:
    """Builds closed-book and open-book prompts for questions from a set of templates.

    Args:
        templates: The templates; by default those of the package.
        lang: Language of all prompts ('en' or 'zh'); None to use the language of each question.
        max_sentences: For small LLMs, which get lost in long prompts: the maximum number of sentences to show, chosen
            by how well they fit the question. If the LLM's answer is not found in the passages, it is replaced by the
            best sentence. None for other LLMs: whole passages are shown, and no answer is replaced.
    """

    templates: TemplateSet = field(default_factory=lambda: load_packaged_templates("answer"))
    lang: str | None = None
    max_sentences: int | None = None

    def __post_init__(self) -> None:
        if self.lang is not None and self.lang not in LANGUAGES:
            raise BadSetting(f"unknown language '{self.lang}'. Known: {', '.join(LANGUAGES)}.")

    @property
    def fingerprint(self) -> str:
        """Hash of the templates, followed by the language if it is fixed."""
        return self.templates.fingerprint + (f"-{self.lang}" if self.lang else "")

    @property
    def open_book_fingerprint(self) -> str:
        """Hash of example open-book prompts. It changes if the templates or the format of passages change."""
        variants = itertools.product(LANGUAGES, ((), ("a", "b")))  # each language, without and with choices
        questions = [Question("?", lang=lang, choices=choices) for lang, choices in variants]
        texts = [self.open(question, EXAMPLE_PASSAGES).text for question in questions]
        if self.max_sentences is not None:  # then made-up answers are replaced by quotations
            texts.append(f"{self.max_sentences} sentences, quoted")
        return sha256_text(*texts)[:16]

    def language(self, question: Question) -> str:
        """Return the language ('en' or 'zh') in which a question's prompts are written."""
        return self.lang or detect_question_language(question)

    def closed(self, question: Question) -> Prompt:
        """Return the closed-book prompt, which asks the question without passages."""
        key = "choice_closed" if question.choices else "closed"
        return Prompt(self.templates.fill(key, self.language(question), query=render_choices(question)))

    def open(self, question: Question, passages: Sequence[Passage]) -> Prompt:
        """Return the open-book prompt, which shows the passages before the question."""
        if self.max_sentences is not None:
            passages = select_sentences(question.text, passages, self.max_sentences)
        key = "choice_open" if question.choices else "open"
        values = {"query": render_choices(question), "evidence": format_passages(passages)}
        return Prompt(self.templates.fill(key, self.language(question), **values))

    def check_open_answer(self, question: Question, passages: Sequence[Passage], answer: str) -> str:
        """Return the open-book answer, or a sentence of the passages if the answer seems made up.

        Only answers of small LLMs are checked, for which `max_sentences` is set. Chosen options are never checked.
        """
        if self.max_sentences is None or question.choices:
            return answer
        return quote_unless_grounded(question.text, answer, passages, self.max_sentences)

    def check_open_reading(self, question: Question, passages: Sequence[Passage], reading: Reading) -> Reading:
        """Replace a made-up open-book answer in a reading by a sentence of the passages."""
        if self.max_sentences is None or reading.draft is None:
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
        max_sentences = EMBEDDED_MODEL_SENTENCES if is_embedded else None
        return AnswerPrompts(load_packaged_templates("answer"), lang, max_sentences)
    path = Path(__file__).with_name(f"{file}.toml") if str(file) in TEMPLATE_VARIANTS else file
    return AnswerPrompts(load_templates(path, like="answer"), lang)


def format_passages(passages: Sequence[Passage]) -> str:
    """Join passages with blank lines, each preceded by its title.

    Small models would continue numbered passages instead of answering.
    """
    return "\n\n".join(_format_passage(passage) for passage in passages)


def _format_passage(passage: Passage) -> str:
    """Return the title and the text of a passage, without '#' marks.

    The title is not repeated.
    """
    text = passage.text.strip().lstrip("#").strip()
    return text if text.startswith(passage.title) else f"{passage.title}\n{text}"


def fit_passages(
    model: Model, prompts: AnswerPrompts, question: Question, passages: Sequence[Passage], max_tokens: int
) -> tuple[Passage, ...]:
    """Return as many of the first passages as fit the model's context window.

    An overlong first passage is cut.

    Args:
        model: The LLM.
        prompts: Builds the open-book prompts.
        question: The question.
        passages: The retrieved passages, best first.
        max_tokens: Number of tokens to leave free for the answer.
    """
    fitting = list(passages)
    while fitting and not model.fits([prompts.open(question, fitting)], max_tokens)[0]:
        if len(fitting) == 1 and len(fitting[0].text) > 1:
            fitting[0] = replace(fitting[0], text=fitting[0].text[: len(fitting[0].text) // 2])
        else:
            fitting.pop()
    return tuple(fitting)


class OpenPrompt(NamedTuple):
    """An open-book prompt that fits the model's context window, and the passages in it."""

    prompt: Prompt
    passages: tuple[Passage, ...]


def build_fitting_prompts(
    model: Model,
    prompts: AnswerPrompts,
    questions: Sequence[Question],
    passages: Sequence[Sequence[Passage]],
    max_tokens: int,
) -> list[OpenPrompt]:
    """Build the open-book prompt of each question, with as many passages as fit the context window.

    At first, all passages are tried in one call for all questions.
    """
    full_prompts = [prompts.open(question, retrieved) for question, retrieved in zip(questions, passages, strict=True)]
    fitting = []
    for index, fits in enumerate(model.fits(full_prompts, max_tokens)):
        prompt, kept = full_prompts[index], tuple(passages[index])
        if not fits:
            kept = fit_passages(model, prompts, questions[index], kept, max_tokens)
            prompt = prompts.open(questions[index], kept)
        fitting.append(OpenPrompt(prompt, kept))
    return fitting
