"""Normalising and grading answers: the rules of every table knowgate prints.

Knows strings and questions; not models. Chinese has no word boundaries, so it is compared by characters.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.types import Question

ARTICLES = frozenset({"a", "an", "the"})
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
SPACE_AT_CJK = re.compile(rf"(?<={CJK.pattern})\s+|\s+(?={CJK.pattern})")
CHOICE_LETTERS = "ABCDEFGHIJ"
CHARS_PER_TOKEN = 4  # of Latin text to a token, roughly; a Chinese character is about one
CACHE_SIZE = 100_000  # answers: a gold one is normalised again for every sampled answer it is compared with
MAX_CACHED_CHARS = 200  # characters: what is longer is a passage, and kept by whoever needs it twice
# A free-standing letter; before a small letter "A" is the article ("A person ...") and "I" the pronoun, not a choice.
CHOICE_PATTERN = re.compile(r"(?<![A-Za-z])([AI](?!\s+[a-z])|[B-HJ])(?![A-Za-z'])")


# Patterns begin with the character they look for, and look back afterwards: nothing is tried anywhere else.
THOUSANDS_SEPARATOR = re.compile(r",(?<=\d,)(?=\d{3}(?!\d))")  # 2,846 is 2846
COMBINING_MARK = "\0"  # stands for marks: no other character, as it is a control character itself
DECIMAL_POINT = re.compile(r"\.(?<=\w\.)(?=\w)")  # perhaps a decimal point
ASCII_WORD = re.compile(r"[0-9a-z.]+")
LOWERCASE_CHOICE = re.compile(r"\s*\(?([a-j])\)?[.:,]?\s*")


def normalize(text: str) -> str:
    """NFKC, lower case, punctuation to spaces, articles dropped, spaces collapsed; none between Chinese characters."""
    return _normalize_cached(text) if len(text) <= MAX_CACHED_CHARS else _normalize(text)


def _normalize(text: str) -> str:
    words = _replace_punctuation(THOUSANDS_SEPARATOR.sub("", unicodedata.normalize("NFKC", text).lower())).split()
    kept = [word for word in words if word not in ARTICLES] or words  # "A" alone is an answer: a letter, a blood type
    joined = " ".join(kept)
    if joined.isascii():
        return joined
    closed = SPACE_AT_CJK.sub("", joined) if CJK.search(joined) else joined
    return unicodedata.normalize("NFKC", closed)  # lower() can undo a composed letter


_normalize_cached = functools.lru_cache(maxsize=CACHE_SIZE)(_normalize)


def _replace_punctuation(text: str) -> str:
    """Spaces for punctuation, symbols and marks that have no letter to stand on, one for each; decimal points stay."""
    if text.isascii():
        plain = text.encode().translate(ASCII_REPLACEMENTS).decode()
    else:  # a text has few kinds of characters: several times faster than `str.translate`
        kinds = {char: REPLACEMENTS[char] for char in set(text)}
        if COMBINING_MARK in kinds.values():
            return _replace_punctuation_slowly(text)
        plain = text
        for char in (char for char, kind in kinds.items() if kind != char):
            plain = plain.replace(char, " ")
    points = [found.start() for found in DECIMAL_POINT.finditer(text)]
    decimal = [place for place in points if text[place - 1].isdigit() and text[place + 1].isdigit()]
    if not decimal:
        return plain
    chars = list(plain)
    for place in decimal:
        chars[place] = "."
    return "".join(chars)


def _replace_punctuation_slowly(text: str) -> str:
    """Character by character, where it matters what stands beside one."""
    spaced: list[str] = []
    for place, char in enumerate(text):
        kind = unicodedata.category(char)[0]
        if char == "." and text[place - 1 : place].isdigit() and text[place + 1 : place + 2].isdigit():
            kind = "N"  # a decimal point: 5 is not in 3.5
        is_lone_mark = kind == "M" and spaced[-1:] in ([], [" "])
        spaced.append(" " if kind in "PSZC" or is_lone_mark else char)
    return "".join(spaced)


class _Spaces(dict[str, str]):
    """What stands for a character; its kind is looked up once."""

    def __missing__(self, char: str) -> str:
        kind = unicodedata.category(char)[0]
        self[char] = " " if kind in "PSZC" else COMBINING_MARK if kind == "M" else char
        return self[char]


REPLACEMENTS = _Spaces()
ASCII_REPLACEMENTS = bytes(code if chr(code).isalnum() else ord(" ") for code in range(128)).ljust(
    256
)  # many times faster


def tokenize(text: str) -> list[str]:
    """Words of the normalised text; each Chinese character is a token of its own."""
    plain = normalize(text)
    return plain.split() if plain.isascii() else CJK.sub(r" \g<0> ", plain).split()


def join_tokens(text: str) -> str:
    """Its words, each between spaces: one text's run of words is in another's where this one is in that one."""
    plain = normalize(text)
    if plain.isascii():  # its words are between spaces already
        return f" {plain} "
    return f" {' '.join(tokenize(text))} "


def find_anchor_words(phrase: str) -> list[str]:
    """Words that every text with this phrase has in its `skimmed` characters, the longest first; perhaps none."""
    return sorted(
        {word for word in tokenize(phrase) if ASCII_WORD.fullmatch(word)}, key=lambda word: (-len(word), word)
    )


def fold_text(text: str) -> str:
    """The characters of a text as far as `landmarks` need them: a few times faster than its words."""
    return (text if text.isascii() else unicodedata.normalize("NFKC", text)).lower().replace(",", "")


def is_exact_match(answer: str, golds: Sequence[str]) -> bool:
    """The normalised answer equals a normalised gold answer (EM)."""
    said = normalize(answer)
    return any(said == normalize(gold) for gold in golds if normalize(gold))


def contains_tokens(haystack: Sequence[str], needle: Sequence[str]) -> bool:
    """`needle` occurs in `haystack` as one run. Tokens hold no spaces: a search in a text, in linear time."""
    return bool(needle) and f" {' '.join(needle)} " in f" {' '.join(haystack)} "


@dataclass(frozen=True)
class ContainmentGrade:
    """`correct` after the echo guard; `guarded` says that the guard changed it."""

    correct: bool
    guarded: bool = False


def grade_contains(answer: str, question: Question) -> ContainmentGrade:
    """A gold answer is a token run of the answer. Guarded against answers that merely repeat the question.

    A gold answer whose tokens all stand in the question counts only if the answer is not an echo of it.
    """
    return _contains(answer, question.text, tuple(question.answers))


@functools.lru_cache(maxsize=20_000)
def _contains(answer: str, asked: str, golds: tuple[str, ...]) -> ContainmentGrade:
    """Remembered: sampled answers to one question are often the same, and its gold answers always are."""
    said = join_tokens(answer)
    hits = [gold for gold in _gold_runs(asked, golds) if gold.run in said]
    trusted = [gold for gold in hits if not gold.is_in_question or not is_echo(tokenize(answer), tokenize(asked))]
    return ContainmentGrade(correct=bool(trusted), guarded=bool(hits) and not trusted)


@dataclass(frozen=True)
class _GoldRun:
    """A gold answer as `spaced` has it; is_in_question: all of its words stand there."""

    run: str
    is_in_question: bool


@functools.lru_cache(maxsize=8_192)
def _gold_runs(asked: str, golds: tuple[str, ...]) -> tuple[_GoldRun, ...]:
    words = set(tokenize(asked))
    runs = dict.fromkeys(join_tokens(gold) for gold in golds)
    return tuple(_GoldRun(run, set(run.split()) <= words) for run in runs if run.strip())


def is_echo(answer: Sequence[str], question: Sequence[str]) -> bool:
    """The answer repeats the question: a run of five of its tokens, or half of it, stands in the answer."""
    width = max(1, min(5, (len(question) + 1) // 2))
    runs = {tuple(question[start : start + width]) for start in range(len(question) - width + 1)}
    if width == 1:
        return list(answer) == list(question)
    return any(tuple(answer[start : start + width]) in runs for start in range(len(answer) - width + 1))


def render_choices(question: Question) -> str:
    """The question with its choices, one a line, lettered."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(CHOICE_LETTERS, question.choices, strict=False)]
    return "\n".join([question.text, *lines])


def get_gold_letter(question: Question) -> str | None:
    """The letter of the right choice: from the data set's `gold_letter`, else by finding the gold answer."""
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
    """The letter an answer picks: the first free-standing one, else the only choice whose text it holds."""
    allowed = CHOICE_LETTERS[: len(choices) or len(CHOICE_LETTERS)]
    free = [letter for letter in CHOICE_PATTERN.findall(unicodedata.normalize("NFKC", answer)) if letter in allowed]
    if free:
        return str(free[0])
    small = LOWERCASE_CHOICE.fullmatch(answer)
    if small and small.group(1).upper() in allowed:
        return small.group(1).upper()
    said = tokenize(answer)
    named = [
        letter
        for letter, choice in zip(CHOICE_LETTERS, choices, strict=False)
        if contains_tokens(said, tokenize(choice))
    ]
    return named[0] if len(named) == 1 else None


def grade_choice(answer: str, question: Question) -> bool:
    """The chosen letter equals the gold letter."""
    letter = get_gold_letter(question)
    return letter is not None and parse_choice_letter(answer, question.choices) == letter


def estimate_tokens(text: str) -> float:
    """About how many tokens an LLM reads in it."""
    wide = 0 if text.isascii() else len(CJK.findall(text))
    return float(wide + math.ceil((len(text) - wide) / CHARS_PER_TOKEN))
