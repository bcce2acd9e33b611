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
CJK_RUN = re.compile(f"{CJK.pattern}+")
SPACE_AT_CJK = re.compile(rf"(?<={CJK.pattern})\s+|\s+(?={CJK.pattern})")
CHOICE_LETTERS = "ABCDEFGHIJ"
MAX_ANSWER_CHARS = 20_000  # what gates and arbiters read of an answer; megabytes would hold up all requests of a server
MAX_ESTIMATE_CHARS = 100_000  # length of the beginning from which tokens are estimated
CHARS_PER_TOKEN = 4  # rough average for Latin text; a Chinese character is about one token
CACHE_SIZE = 10_000  # normalized answers to cache, because a gold answer is compared with every sampled answer
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
# Only the beginning of a run is tried, so that the search takes linear time.
# The lookahead changes nothing, but rules out most positions fast.
LONG_MARK_RUN = re.compile(
    rf"(?=[^\w\s]|[\uff9e\uff9f])(?<![^\w\s])(?<![\uff9e\uff9f])(?:[^\w\s]|[\uff9e\uff9f]){{{MAX_COMBINING_MARKS + 1}}}"
)


def normalize(text: str) -> str:
    """Normalize an answer for comparison. Example: 'The Eiffel-Tower!' becomes 'eiffel tower'."""
    composed = text if text.isascii() else normalize_unicode(text)  # can be 18 times as long as `text`
    return _normalize_cached(composed) if len(composed) <= MAX_CACHED_CHARS else _normalize(composed)


def _normalize(composed: str) -> str:
    """Normalize a text after `normalize_unicode`, without the cache."""
    lowercase = composed.lower()
    words = _replace_punctuation(THOUSANDS_SEPARATOR.sub("", lowercase)).split()
    without_articles = [word for word in words if word not in ARTICLES]
    joined = " ".join(without_articles or words)  # "A" alone is an answer: a letter, a blood type
    if joined.isascii():
        return joined
    without_cjk_spaces = SPACE_AT_CJK.sub("", joined) if CJK.search(joined) else joined
    return normalize_unicode(without_cjk_spaces)  # lower() can split a composed letter into two


_normalize_cached = functools.lru_cache(maxsize=CACHE_SIZE)(_normalize)


def normalize_unicode(text: str, form: Literal["NFKC", "NFKD"] = "NFKC") -> str:
    """Apply a Unicode normalization form. Only 30 combining marks in a row are kept, because more would be slow."""
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


def cut_answer(answer: str) -> str:
    """Return the beginning of an answer, which is what gates and arbiters read.

    Neither the text nor its normalized form has more than MAX_ANSWER_CHARS characters. A character can become 18.
    """
    beginning = answer[:MAX_ANSWER_CHARS]
    normalized = beginning if beginning.isascii() else normalize_unicode(beginning)
    return beginning if len(normalized) <= MAX_ANSWER_CHARS else normalized[:MAX_ANSWER_CHARS]


def _replace_punctuation(text: str) -> str:
    """Replace punctuation, symbols and isolated combining marks by spaces. Decimal points are kept.

    The text keeps its length, so that a position means the same character before and after.
    """
    replaced = text.translate(REPLACEMENTS)
    if not text.isascii():
        replaced = ISOLATED_MARKS.sub(lambda match: " " * len(match[0]), replaced)
    # DECIMAL_POINT also matches the point in "a.b".
    points = [match.start() for match in DECIMAL_POINT.finditer(text)]
    decimal_points = [index for index in points if text[index - 1].isdigit() and text[index + 1].isdigit()]
    if not decimal_points:
        return replaced
    chars = list(replaced)
    for index in decimal_points:
        chars[index] = "."
    return "".join(chars)


class _Replacements(dict[int, str]):
    """Table from characters to their replacements.

    Punctuation and the like become spaces. Entries are made on first access.
    """

    def __missing__(self, code: int) -> str:
        # Unicode categories: P punctuation, S symbol, Z separator, C control.
        is_replaced = unicodedata.category(chr(code))[0] in "PSZC"
        self[code] = " " if is_replaced else chr(code)
        return self[code]


REPLACEMENTS = _Replacements()


def tokenize(text: str) -> list[str]:
    """Split a text into normalized words and single Chinese characters.

    Example: 'The Eiffel Tower!' gives ['eiffel', 'tower'].
    """
    normalized = normalize(text)
    if not normalized.isascii():
        normalized = CJK.sub(r" \g<0> ", normalized)  # puts spaces around each character
    return normalized.split()


def join_tokens(text: str) -> str:
    """Join the tokens of a text by spaces, with a space at both ends. Example: 'New York!' becomes ' new york '."""
    normalized = normalize(text)
    if normalized.isascii():
        return f" {normalized} "
    return f" {' '.join(tokenize(text))} "


def find_anchor_words(phrase: str) -> list[str]:
    """Return the ASCII words of a phrase, longest first. A text without these words cannot contain the phrase."""
    words = {word for word in tokenize(phrase) if ASCII_WORD.fullmatch(word)}
    return sorted(words, key=lambda word: (-len(word), word))


def fold_text(text: str) -> str:
    """Convert a text to lower case without commas, for a search with `find_anchor_words`."""
    normalized = text if text.isascii() else normalize_unicode(text)
    return normalized.lower().replace(",", "")


def is_exact_match(answer: str, golds: Sequence[str]) -> bool:
    """Return whether an answer equals a gold answer after normalization."""
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
        guarded: Whether a guard rejected the answer: it contains a gold answer only because it repeats the question.
    """

    correct: bool
    guarded: bool = False


def grade_contains(answer: str, question: Question) -> ContainmentGrade:
    """Grade an answer as correct if it contains a gold answer. Merely repeating the question does not count."""
    return _grade_contains(answer, question.text, tuple(question.answers))


@functools.lru_cache(maxsize=20_000)  # sampled answers to one question are often the same
def _grade_contains(answer: str, question: str, golds: tuple[str, ...]) -> ContainmentGrade:
    """Grade an answer as `grade_contains` does. The arguments are hashable, for caching.

    The question itself may contain a gold answer, as in "Is a whale a fish or a mammal?". Then an answer that merely
    repeats the question is wrong, and its grade is marked as `guarded`.
    """
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
    """Return, for each gold answer in the normal form of `join_tokens`, whether all its words are in the question."""
    words = set(tokenize(question))
    tokenized = [join_tokens(gold) for gold in golds]
    return {gold: set(gold.split()) <= words for gold in tokenized if gold.strip()}


def is_echo(answer: Sequence[str], question: Sequence[str]) -> bool:
    """Return whether an answer repeats a part of the question. A part is five tokens, or half of a short question."""
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
    """Return the letter of the correct choice, or None if unknown or ambiguous."""
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
    """Return the letter of the choice in an answer, or None. Example: "B. Paris" gives "B"."""
    allowed = CHOICE_LETTERS[: len(choices) or len(CHOICE_LETTERS)]
    letters = [letter for letter in CHOICE_PATTERN.findall(normalize_unicode(answer)) if letter in allowed]
    if letters:
        return str(letters[0])
    lowercase = LOWERCASE_CHOICE.fullmatch(answer)
    if lowercase and lowercase.group(1).upper() in allowed:
        return lowercase.group(1).upper()
    return _find_mentioned_choice(answer, choices)


def _find_mentioned_choice(answer: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the only choice whose text is in an answer, or None."""
    tokens = tokenize(answer)
    lettered = zip(CHOICE_LETTERS, choices, strict=False)
    mentioned = [letter for letter, choice in lettered if contains_tokens(tokens, tokenize(choice))]
    return mentioned[0] if len(mentioned) == 1 else None


def grade_choice(answer: str, question: Question) -> bool:
    """Return whether an answer names the correct choice. An unknown correct choice gives False."""
    letter = get_gold_letter(question)
    return letter is not None and parse_choice_letter(answer, question.choices) == letter


def estimate_tokens(text: str) -> float:
    """Estimate how many LLM tokens a text has. A Chinese, Japanese or Korean character counts as one.

    Only the beginning of a long text is read, because other threads wait meanwhile.
    """
    if len(text) > MAX_ESTIMATE_CHARS:
        return float(math.ceil(estimate_tokens(text[:MAX_ESTIMATE_CHARS]) * len(text) / MAX_ESTIMATE_CHARS))
    n_cjk = 0 if text.isascii() else sum(map(len, CJK_RUN.findall(text)))
    return float(n_cjk + math.ceil((len(text) - n_cjk) / CHARS_PER_TOKEN))


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
    return text.encode("utf-8", "replace").decode()
