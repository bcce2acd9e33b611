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
BETWEEN_CJK = re.compile(rf"(?<={CJK.pattern})\s+|\s+(?={CJK.pattern})")
LETTERS = "ABCDEFGHIJ"
CHARACTERS = 4  # of Latin text to a token, roughly; a Chinese character is about one
REMEMBERED = 100_000  # answers: a gold one is normalised again for every sampled answer it is compared with
ANSWER = 200  # characters: what is longer is a passage, and kept by whoever needs it twice
# A free-standing letter; before a small letter "A" is the article ("A person ...") and "I" the pronoun, not a choice.
CHOSEN = re.compile(r"(?<![A-Za-z])([AI](?!\s+[a-z])|[B-HJ])(?![A-Za-z'])")


# Patterns begin with the character they look for, and look back afterwards: nothing is tried anywhere else.
THOUSANDS = re.compile(r",(?<=\d,)(?=\d{3}(?!\d))")  # 2,846 is 2846
MARK = "\0"  # stands for marks: no other character, as it is a control character itself
POINT = re.compile(r"\.(?<=\w\.)(?=\w)")  # perhaps a decimal point
PLAIN = re.compile(r"[0-9a-z.]+")
SMALL_LETTER = re.compile(r"\s*\(?([a-j])\)?[.:,]?\s*")


def normalise(text: str) -> str:
    """NFKC, lower case, punctuation to spaces, articles dropped, spaces collapsed; none between Chinese characters."""
    return _remembered(text) if len(text) <= ANSWER else _normalised(text)


def _normalised(text: str) -> str:
    words = _spaced(THOUSANDS.sub("", unicodedata.normalize("NFKC", text).lower())).split()
    kept = [word for word in words if word not in ARTICLES] or words  # "A" alone is an answer: a letter, a blood type
    joined = " ".join(kept)
    if joined.isascii():
        return joined
    closed = BETWEEN_CJK.sub("", joined) if CJK.search(joined) else joined
    return unicodedata.normalize("NFKC", closed)  # lower() can undo a composed letter


_remembered = functools.lru_cache(maxsize=REMEMBERED)(_normalised)


def _spaced(text: str) -> str:
    """Spaces for punctuation, symbols and marks that have no letter to stand on, one for each; decimal points stay."""
    if text.isascii():
        plain = text.encode().translate(ASCII_SPACES).decode()
    else:  # a text has few kinds of characters: several times faster than `str.translate`
        kinds = {char: SPACES[char] for char in set(text)}
        if MARK in kinds.values():
            return _spaced_with_care(text)
        plain = text
        for char in (char for char, kind in kinds.items() if kind != char):
            plain = plain.replace(char, " ")
    points = [found.start() for found in POINT.finditer(text)]
    decimal = [place for place in points if text[place - 1].isdigit() and text[place + 1].isdigit()]
    if not decimal:
        return plain
    chars = list(plain)
    for place in decimal:
        chars[place] = "."
    return "".join(chars)


def _spaced_with_care(text: str) -> str:
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
        self[char] = " " if kind in "PSZC" else MARK if kind == "M" else char
        return self[char]


SPACES = _Spaces()
ASCII_SPACES = bytes(code if chr(code).isalnum() else ord(" ") for code in range(128)).ljust(256)  # many times faster


def tokens(text: str) -> list[str]:
    """Words of the normalised text; each Chinese character is a token of its own."""
    plain = normalise(text)
    return plain.split() if plain.isascii() else CJK.sub(r" \g<0> ", plain).split()


def spaced(text: str) -> str:
    """Its words, each between spaces: one text's run of words is in another's where this one is in that one."""
    plain = normalise(text)
    if plain.isascii():  # its words are between spaces already
        return f" {plain} "
    return f" {' '.join(tokens(text))} "


def landmarks(phrase: str) -> list[str]:
    """Words that every text with this phrase has in its `skimmed` characters, the longest first; perhaps none."""
    return sorted({word for word in tokens(phrase) if PLAIN.fullmatch(word)}, key=lambda word: (-len(word), word))


def skimmed(text: str) -> str:
    """The characters of a text as far as `landmarks` need them: a few times faster than its words."""
    return (text if text.isascii() else unicodedata.normalize("NFKC", text)).lower().replace(",", "")


def is_exact(answer: str, golds: Sequence[str]) -> bool:
    """The normalised answer equals a normalised gold answer (EM)."""
    said = normalise(answer)
    return any(said == normalise(gold) for gold in golds if normalise(gold))


def contains_tokens(haystack: Sequence[str], needle: Sequence[str]) -> bool:
    """`needle` occurs in `haystack` as one run. Tokens hold no spaces: a search in a text, in linear time."""
    return bool(needle) and f" {' '.join(needle)} " in f" {' '.join(haystack)} "


@dataclass(frozen=True)
class Verdict:
    """`correct` after the echo guard; `guarded` says that the guard changed it."""

    correct: bool
    guarded: bool = False


def grade_contains(answer: str, question: Question) -> Verdict:
    """A gold answer is a token run of the answer. Guarded against answers that merely repeat the question.

    A gold answer whose tokens all stand in the question counts only if the answer is not an echo of it.
    """
    return _contains(answer, question.text, tuple(question.answers))


@functools.lru_cache(maxsize=20_000)
def _contains(answer: str, asked: str, golds: tuple[str, ...]) -> Verdict:
    """Remembered: sampled answers to one question are often the same, and its gold answers always are."""
    said = spaced(answer)
    hits = [gold for gold in _gold_runs(asked, golds) if gold.run in said]
    trusted = [gold for gold in hits if not gold.is_in_question or not is_echo(tokens(answer), tokens(asked))]
    return Verdict(correct=bool(trusted), guarded=bool(hits) and not trusted)


@dataclass(frozen=True)
class _GoldRun:
    """A gold answer as `spaced` has it; is_in_question: all of its words stand there."""

    run: str
    is_in_question: bool


@functools.lru_cache(maxsize=8_192)
def _gold_runs(asked: str, golds: tuple[str, ...]) -> tuple[_GoldRun, ...]:
    words = set(tokens(asked))
    runs = dict.fromkeys(spaced(gold) for gold in golds)
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
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=False)]
    return "\n".join([question.text, *lines])


def gold_letter(question: Question) -> str | None:
    """The letter of the right choice: from the data set's `gold_letter`, else by finding the gold answer."""
    letter = question.meta.get("gold_letter")
    if letter:
        return str(letter).strip().upper()
    golds = {normalise(gold) for gold in question.answers}
    matches = [
        letter
        for letter, choice in zip(LETTERS, question.choices, strict=False)
        if normalise(choice) in golds or letter.lower() in golds
    ]
    return matches[0] if len(matches) == 1 else None


def chosen_letter(answer: str, choices: Sequence[str] = ()) -> str | None:
    """The letter an answer picks: the first free-standing one, else the only choice whose text it holds."""
    allowed = LETTERS[: len(choices) or len(LETTERS)]
    free = [letter for letter in CHOSEN.findall(unicodedata.normalize("NFKC", answer)) if letter in allowed]
    if free:
        return str(free[0])
    small = SMALL_LETTER.fullmatch(answer)
    if small and small.group(1).upper() in allowed:
        return small.group(1).upper()
    said = tokens(answer)
    named = [letter for letter, choice in zip(LETTERS, choices, strict=False) if contains_tokens(said, tokens(choice))]
    return named[0] if len(named) == 1 else None


def grade_choice(answer: str, question: Question) -> bool:
    """The chosen letter equals the gold letter."""
    letter = gold_letter(question)
    return letter is not None and chosen_letter(answer, question.choices) == letter


def estimate_tokens(text: str) -> float:
    """About how many tokens an LLM reads in it."""
    wide = 0 if text.isascii() else len(CJK.findall(text))
    return float(wide + math.ceil((len(text) - wide) / CHARACTERS))
