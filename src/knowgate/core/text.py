"""Normalization and grading of answers. These rules decide which answers count as correct in all reports.

Chinese has no spaces between words, so Chinese text is compared character by character.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from knowgate.types import Question

ARTICLES = frozenset({"a", "an", "the"})
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
SPACE_AT_CJK = re.compile(rf"(?<={CJK.pattern})\s+|\s+(?={CJK.pattern})")
CHOICE_LETTERS = "ABCDEFGHIJ"
CHARS_PER_TOKEN = 4  # rough average for Latin text; a Chinese character is about one token
CACHE_SIZE = 100_000  # normalized answers to cache, because a gold answer is compared with every sampled answer
MAX_CACHED_CHARS = 200  # longer texts are passages, which callers cache themselves
# A single letter that is not part of a word. Before a lowercase word, "A" is the article ("A person ...") and "I" the
# pronoun, so these do not count.
CHOICE_PATTERN = re.compile(r"(?<![A-Za-z])([AI](?!\s+[a-z])|[B-HJ])(?![A-Za-z'])")
LOWERCASE_CHOICE = re.compile(r"\s*\(?([a-j])\)?[.:,]?\s*")
# These patterns start with the character they look for and then look back, which is fast on long texts.
THOUSANDS_SEPARATOR = re.compile(r",(?<=\d,)(?=\d{3}(?!\d))")  # 2,846 is 2846
DECIMAL_POINT = re.compile(r"\.(?<=\w\.)(?=\w)")  # a candidate; callers check that digits surround it
# Combining marks that follow no letter. In a text without punctuation, only marks are neither letters nor spaces.
ISOLATED_MARKS = re.compile(r"(?<!\S)[^\w\s]+")
ASCII_WORD = re.compile(r"[0-9a-z.]+")
MAX_COMBINING_MARKS = 30  # in a row
# Combining marks are neither word characters nor spaces, except for two Japanese ones. Other characters match, too.
LONG_MARK_RUN = re.compile(rf"(?:[^\w\s]|[\uff9e\uff9f]){{{MAX_COMBINING_MARKS + 1}}}")


def normalize(text: str) -> str:
    """Normalize an answer for comparison.

    Applies Unicode NFKC and lower case, replaces punctuation by spaces, removes articles (a, an, the), collapses
    spaces, and removes spaces next to Chinese characters.
    """
    return _normalize_cached(text) if len(text) <= MAX_CACHED_CHARS else _normalize(text)


def _normalize(text: str) -> str:
    """Normalize a text as `normalize` does, without its cache."""
    lowercase = normalize_unicode(text).lower()
    words = _replace_punctuation(THOUSANDS_SEPARATOR.sub("", lowercase)).split()
    without_articles = [word for word in words if word not in ARTICLES]
    joined = " ".join(without_articles or words)  # "A" alone is an answer: a letter, a blood type
    if joined.isascii():
        return joined
    without_cjk_spaces = SPACE_AT_CJK.sub("", joined) if CJK.search(joined) else joined
    return normalize_unicode(without_cjk_spaces)  # lower() can split a composed letter into two


_normalize_cached = functools.lru_cache(maxsize=CACHE_SIZE)(_normalize)


def normalize_unicode(text: str, form: Literal["NFKC", "NFKD"] = "NFKC") -> str:
    """Apply a Unicode normalization form, in a time that grows linearly with the length of the text.

    The time of `unicodedata.normalize` is quadratic in the number of combining marks in a row. So at most 30 in
    a row are kept, as in Unicode's Stream-Safe Text Format. No language needs more than a few.
    """
    if LONG_MARK_RUN.search(text):
        chars: list[str] = []
        for is_mark, run in itertools.groupby(text, _is_combining_mark):
            chars += itertools.islice(run, MAX_COMBINING_MARKS if is_mark else None)
        text = "".join(chars)
    return unicodedata.normalize(form, text)


@functools.lru_cache(maxsize=4096)
def _is_combining_mark(char: str) -> bool:
    """Return whether a character is a combining mark, such as an accent, or becomes one by normalization."""
    return unicodedata.combining(unicodedata.normalize("NFKD", char)[0]) > 0


def _replace_punctuation(text: str) -> str:
    """Replace punctuation, symbols and isolated combining marks by spaces; decimal points stay.

    Each character is replaced by one space, so the positions of the other characters do not change.
    """
    replaced = text.translate(REPLACEMENTS)
    if not text.isascii():
        replaced = ISOLATED_MARKS.sub(lambda match: " " * len(match[0]), replaced)
    points = [match.start() for match in DECIMAL_POINT.finditer(text)]
    decimal_points = [index for index in points if text[index - 1].isdigit() and text[index + 1].isdigit()]
    if not decimal_points:
        return replaced
    chars = list(replaced)
    for index in decimal_points:
        chars[index] = "."
    return "".join(chars)


class _Replacements(dict[int, str]):
    """Maps the code of a character to a space, if it is punctuation or the like, or else to the character itself.

    An entry is computed on first access.
    """

    def __missing__(self, code: int) -> str:
        # Unicode categories: P punctuation, S symbol, Z separator, C control.
        is_replaced = unicodedata.category(chr(code))[0] in "PSZC"
        self[code] = " " if is_replaced else chr(code)
        return self[code]


REPLACEMENTS = _Replacements()


def tokenize(text: str) -> list[str]:
    """Normalize a text and split it into tokens: words, and single Chinese characters.

    'The Eiffel Tower!' gives ['eiffel', 'tower'].
    """
    normalized = normalize(text)
    if not normalized.isascii():
        normalized = CJK.sub(r" \g<0> ", normalized)  # puts spaces around each character
    return normalized.split()


def join_tokens(text: str) -> str:
    """Return the tokens of a text joined by spaces, with a space at both ends: 'New York!' -> ' new york '.

    With `in`, you can then test whether a phrase occurs in a text as whole words.
    """
    normalized = normalize(text)
    if normalized.isascii():
        return f" {normalized} "
    return f" {' '.join(tokenize(text))} "


def find_anchor_words(phrase: str) -> list[str]:
    """Return the ASCII words of a phrase, longest first, to test quickly whether a text may contain the phrase.

    A text that contains the phrase contains all of these words after `fold_text`. Searching for them is several times
    faster than tokenizing the text.
    """
    words = {word for word in tokenize(phrase) if ASCII_WORD.fullmatch(word)}
    return sorted(words, key=lambda word: (-len(word), word))


def fold_text(text: str) -> str:
    """Convert a text to lower case without commas, so that the words of `find_anchor_words` can be searched in it."""
    normalized = text if text.isascii() else normalize_unicode(text)
    return normalized.lower().replace(",", "")


def is_exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Return whether an answer equals one of the gold answers after normalization (exact match, EM)."""
    normalized = normalize(answer)
    return any(normalized == normalize(gold) for gold in golds if normalize(gold))


def contains_tokens(haystack: Sequence[str], needle: Sequence[str]) -> bool:
    """Return whether the tokens of `needle` occur in `haystack` next to each other; False if `needle` is empty."""
    return bool(needle) and f" {' '.join(needle)} " in f" {' '.join(haystack)} "


@dataclass(frozen=True)
class ContainmentGrade:
    """Grade of an answer.

    Attributes:
        correct: Whether the answer is correct.
        guarded: Whether the answer contains a gold answer but was rejected, because it only repeats the question.
    """

    correct: bool
    guarded: bool = False


def grade_contains(answer: str, question: Question) -> ContainmentGrade:
    """Grade an answer as correct if it contains the tokens of a gold answer next to each other.

    If all words of the gold answer already occur in the question, an answer that only repeats the question is rejected.
    """
    return _grade_contains(answer, question.text, tuple(question.answers))


@functools.lru_cache(maxsize=20_000)  # sampled answers to one question are often the same
def _grade_contains(answer: str, question: str, golds: tuple[str, ...]) -> ContainmentGrade:
    """Grade an answer as `grade_contains` does. The arguments are hashable, so that grades can be cached."""
    answer_tokens = join_tokens(answer)
    is_in_question = _prepare_golds(question, golds)  # gold answer -> whether its words are in the question
    contained = [gold for gold in is_in_question if gold in answer_tokens]
    if not contained:
        return ContainmentGrade(correct=False)
    adds_words = any(not is_in_question[gold] for gold in contained)
    if adds_words:
        return ContainmentGrade(correct=True)
    repeats_question = is_echo(tokenize(answer), tokenize(question))
    return ContainmentGrade(correct=not repeats_question, guarded=repeats_question)


@functools.lru_cache(maxsize=8_192)
def _prepare_golds(question: str, golds: tuple[str, ...]) -> dict[str, bool]:
    """Map each gold answer, as `join_tokens` writes it, to whether all of its words occur in the question."""
    words = set(tokenize(question))
    tokenized = [join_tokens(gold) for gold in golds]
    return {gold: set(gold.split()) <= words for gold in tokenized if gold.strip()}


def is_echo(answer: Sequence[str], question: Sequence[str]) -> bool:
    """Return whether an answer repeats a part of the question. Both are lists of tokens.

    A part is five tokens in a row, or half of the question if it has fewer than ten tokens. An answer to a question of
    one or two tokens must equal the whole question.
    """
    half = (len(question) + 1) // 2
    length = min(5, half)  # of a part
    if length <= 1:
        return list(answer) == list(question)
    parts = {tuple(question[start : start + length]) for start in range(len(question) - length + 1)}
    return any(tuple(answer[start : start + length]) in parts for start in range(len(answer) - length + 1))


def render_choices(question: Question) -> str:
    """Render a question with its lettered choices, one per line."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(CHOICE_LETTERS, question.choices, strict=False)]
    return "\n".join([question.text, *lines])


def get_gold_letter(question: Question) -> str | None:
    """Return the letter of the correct choice of a multiple-choice question; None if it is unknown or ambiguous.

    Some data sets name it (`gold_letter`). Otherwise it is the letter of the only choice that equals a gold answer, or
    whose letter is a gold answer.
    """
    letter = question.meta.get("gold_letter")
    if letter:
        return str(letter).strip().upper()
    golds = {normalize(gold) for gold in question.answers}
    matches = [
        letter
        for letter, choice in zip(CHOICE_LETTERS, question.choices, strict=False)
        if normalize(choice) in golds or letter.lower() in golds
    ]
    return matches[0] if len(matches) == 1 else None


def parse_choice_letter(answer: str, choices: Sequence[str] = ()) -> str | None:
    """Return the letter of the choice that an answer names; None if it names none or several.

    The first single capital letter of the answer counts, as in "B. Paris". A lowercase letter counts if it is the whole
    answer. Otherwise the answer must contain the text of exactly one choice.
    """
    allowed = CHOICE_LETTERS[: len(choices) or len(CHOICE_LETTERS)]
    letters = [letter for letter in CHOICE_PATTERN.findall(normalize_unicode(answer)) if letter in allowed]
    if letters:
        return str(letters[0])
    lowercase = LOWERCASE_CHOICE.fullmatch(answer)
    if lowercase and lowercase.group(1).upper() in allowed:
        return lowercase.group(1).upper()
    tokens = tokenize(answer)
    matches = [
        letter
        for letter, choice in zip(CHOICE_LETTERS, choices, strict=False)
        if contains_tokens(tokens, tokenize(choice))
    ]
    return matches[0] if len(matches) == 1 else None


def grade_choice(answer: str, question: Question) -> bool:
    """Return whether an answer names the correct choice; False if the correct choice is unknown."""
    letter = get_gold_letter(question)
    return letter is not None and parse_choice_letter(answer, question.choices) == letter


def estimate_tokens(text: str) -> float:
    """Estimate how many tokens of an LLM a text has; a Chinese, Japanese or Korean character counts as one token."""
    n_cjk = 0 if text.isascii() else len(CJK.findall(text))
    return float(n_cjk + math.ceil((len(text) - n_cjk) / CHARS_PER_TOKEN))


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()
