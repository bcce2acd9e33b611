"""Normalising and grading answers: the rules of every table knowgate prints.

Knows strings and questions; not models. Chinese has no word boundaries, so it is compared by characters.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from knowgate.types import Question

ARTICLES = frozenset({"a", "an", "the"})
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
BETWEEN_CJK = re.compile(rf"(?<={CJK.pattern})\s+|\s+(?={CJK.pattern})")
LETTERS = "ABCDEFGHIJ"
REMEMBERED = 20_000  # texts: a gold answer is normalised again for every sampled answer it is compared with
# A free-standing letter; before a small letter "A" is the article ("A person ...") and "I" the pronoun, not a choice.
CHOSEN = re.compile(r"(?<![A-Za-z])([AI](?!\s+[a-z])|[B-HJ])(?![A-Za-z'])")


THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # 2,846 is 2846
NO_WORD = re.compile(r"[^0-9A-Za-z.]|(?<![0-9])\.|\.(?![0-9])")  # ASCII without letters, digits, decimal points
SMALL_LETTER = re.compile(r"\s*\(?([a-j])\)?[.:,]?\s*")


@functools.lru_cache(maxsize=REMEMBERED)
def normalise(text: str) -> str:
    """NFKC, lower case, punctuation to spaces, articles dropped, spaces collapsed; none between Chinese characters."""
    words = _spaced(THOUSANDS.sub("", unicodedata.normalize("NFKC", text).lower())).split()
    kept = [word for word in words if word not in ARTICLES] or words  # "A" alone is an answer: a letter, a blood type
    return unicodedata.normalize("NFKC", BETWEEN_CJK.sub("", " ".join(kept)))  # lower() can undo a composed letter


def _spaced(text: str) -> str:
    """Spaces for punctuation, symbols and marks that have no letter to stand on."""
    if text.isascii():
        return NO_WORD.sub(" ", text)
    spaced: list[str] = []
    for place, char in enumerate(text):
        kind = unicodedata.category(char)[0]
        if char == "." and text[place - 1 : place].isdigit() and text[place + 1 : place + 2].isdigit():
            kind = "N"  # a decimal point: 5 is not in 3.5
        is_lone_mark = kind == "M" and spaced[-1:] in ([], [" "])
        spaced.append(" " if kind in "PSZC" or is_lone_mark else char)
    return "".join(spaced)


def tokens(text: str) -> list[str]:
    """Words of the normalised text; each Chinese character is a token of its own."""
    return CJK.sub(lambda match: f" {match.group()} ", normalise(text)).split()


def spaced(text: str) -> str:
    """Its words, each between spaces: one text's run of words is in another's where this one is in that one."""
    return f" {' '.join(tokens(text))} "


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
    said = tokens(answer)
    asked = tokens(question.text)
    hits = [gold for gold in map(tokens, question.answers) if contains_tokens(said, gold)]
    trusted = [gold for gold in hits if not set(gold) <= set(asked) or not is_echo(said, asked)]
    return Verdict(correct=bool(trusted), guarded=bool(hits) and not trusted)


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
