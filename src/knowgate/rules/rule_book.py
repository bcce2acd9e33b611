"""Rules in their order, read from TOML: the user's own first, then those that come with knowgate.

cut_off = 2023              # years after it are looked up
packaged = true             # the rules that come with knowgate, after these

[[rule]]
name = "our products"
action = "retrieve"         # or "skip"
words = ["Acme", "Zeta"]    # or patterns = ['...']; whole = true: all that was said
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

from knowgate.doors import parse_toml, read_text, user_path
from knowgate.errors import BadInput, BadSetting
from knowgate.rules.rule import Action, AfterCutOff, Rule, Ruling
from knowgate.typed import Between, read_record

LARGEST = 1 << 20  # bytes of a file of rules
# a repeat of what ends in a repeat, (a+)+, can try for ever; a question could be made to hang whoever reads it
ENDLESS = re.compile(r"\((?:[^()\\]|\\.)*(?<!\\)[+*]\)(?:[+*]|\{\d*,)")
BETWEEN = re.compile(r"[.,!?;…。，！？；、\n]+(?!\d)")  # things said one after the other
LONGEST_TALK = 120  # characters of small talk
READ = 4_000  # characters of a question; a rule is about how it begins


@dataclass(frozen=True)
class WrittenRule:
    """A rule as it stands in the file."""

    name: str
    action: Action
    patterns: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    whole: bool = False
    reason: str = ""

    @property
    def rule(self) -> Rule:
        patterns = (*self.patterns, *(_pattern(word) for word in self.words))
        return Rule(self.name, self.action, patterns, self.whole, self.reason)


@dataclass(frozen=True)
class WrittenBook:
    """The file."""

    rule: tuple[WrittenRule, ...] = ()
    packaged: bool = True
    cut_off: Annotated[int, Between(1900, 2099)] | None = None


@dataclass(frozen=True)
class RuleBook:
    """Rules in their order: the first that fits decides.

    Example:
        >>> load_rules().judge("Thanks a lot!")
        Ruling(rule='thanks', action='skip', reason='thanks need no documents')
        >>> load_rules().judge("Who wrote Emma?") is None
        True
    """

    rules: tuple[Rule | AfterCutOff, ...] = field(default_factory=tuple)

    def judge(self, question: str) -> Ruling | None:
        """What is done without asking a gate; None where no rule fits."""
        text = question[:READ]
        return next((rule.ruling for rule in self.rules if rule.fits(text)), None) or self._small_talk(text)

    def _small_talk(self, text: str) -> Ruling | None:
        """Things said one after the other, each of which needs no documents: the first of them speaks."""
        if len(text) > LONGEST_TALK:
            return None
        light = [rule for rule in self.rules if rule.is_small_talk]
        parts = [part for part in BETWEEN.split(text) if part.strip()]
        found = [next((rule.ruling for rule in light if rule.fits(part)), None) for part in parts]
        return found[0] if len(parts) > 1 and all(found) else None

    def judge_many(self, questions: Sequence[str]) -> list[Ruling | None]:
        return [self.judge(question) for question in questions]


def load_rules(file: str | Path | None = None) -> RuleBook:
    """The rules that come with knowgate, after those of this file."""
    if file is None:
        return _packaged()
    path = user_path(file)
    try:
        text = read_text(path, most=LARGEST)
    except OSError as error:
        raise BadSetting(f"cannot read the rules in '{path}': {error.strerror}. Check --rules.") from None
    book = _read(text, f"the rules in '{path}'")
    for one in book.rule:
        if endless := next((pattern for pattern in one.patterns if ENDLESS.search(pattern)), None):
            raise BadSetting(
                f"the rule '{one.name}' has a repeat inside a repeat, '{endless}', which can take for ever: write it "
                "without one of them, or use words = ['...']."
            )
    late = (AfterCutOff(book.cut_off),) if book.cut_off is not None else ()
    return RuleBook((*(one.rule for one in book.rule), *late, *(_packaged().rules if book.packaged else ())))


@cache
def _packaged() -> RuleBook:
    text = resources.files("knowgate.rules").joinpath("packaged.toml").read_text(encoding="utf-8")
    return RuleBook(tuple(one.rule for one in _read(text, "the packaged rules").rule))


def _read(text: str, what: str) -> WrittenBook:
    try:
        return read_record(WrittenBook, parse_toml(text, what), what)
    except BadInput as error:
        raise BadSetting(str(error)) from None


def _pattern(word: str) -> str:
    """The word as it is written; Latin letters do not go on at its ends."""
    start, end = (r"(?<![^\W\d_])" if word[:1].isascii() else ""), (r"(?![^\W\d_])" if word[-1:].isascii() else "")
    return f"{start}{re.escape(word)}{end}"
