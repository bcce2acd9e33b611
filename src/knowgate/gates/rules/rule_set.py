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
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from knowgate.core.schema import NumberRange, read_record
from knowgate.core.validation import expand_path, parse_toml, read_text
from knowgate.errors import BadInput, BadSetting

RuleAction = Literal["retrieve", "skip"]
EDGE_PUNCTUATION = re.compile(r"^[\s\"'“”‘’「」.,!?;:~…。，！？；：、]+|[\s\"'“”‘’「」.,!?;:~…。，！？；：、]+$")
INNER_PUNCTUATION = re.compile(
    r"[\s,!;:…，！；：、]+(?=\D)|[\s,!;:…，！；：、]+$"
)  # a comma before a digit belongs to a number


@dataclass(frozen=True)
class RuleMatch:
    """What a rule says of a question."""

    rule: str
    action: RuleAction
    reason: str

    @property
    def retrieve(self) -> bool:
        return self.action == "retrieve"


@dataclass(frozen=True)
class Rule:
    """Fits where one of its patterns does. whole: a pattern must fit all that was said, signs around it aside."""

    name: str
    action: RuleAction
    patterns: tuple[str, ...]
    whole: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.patterns:
            raise BadSetting(f"the rule '{self.name}' has no patterns: give patterns = ['...'] or words = ['...'].")
        _ = self.compiled

    @cached_property
    def compiled(self) -> tuple[re.Pattern[str], ...]:
        return tuple(self._compile(pattern) for pattern in self.patterns)

    def _compile(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern, re.IGNORECASE)
        except (re.error, RecursionError, OverflowError) as error:
            raise BadSetting(
                f"the rule '{self.name}' has a pattern that cannot be read, '{pattern}': {error}."
            ) from None

    def fits(self, text: str) -> bool:
        if not self.whole:
            return any(pattern.search(text) for pattern in self.compiled)
        said = INNER_PUNCTUATION.sub(" ", EDGE_PUNCTUATION.sub("", text)).strip()
        return any(pattern.fullmatch(said) for pattern in self.compiled)

    @property
    def is_small_talk(self) -> bool:
        """Several such things said one after the other need no documents either: "Bye, thanks"."""
        return self.whole and self.action == "skip"

    @property
    def ruling(self) -> RuleMatch:
        return RuleMatch(self.name, self.action, self.reason or f"the rule '{self.name}' says so")


@dataclass(frozen=True)
class CutoffRule:
    """Fits questions about years that the LLM cannot know: after the one its training data end in."""

    year: int
    name: str = "after the cut-off"
    is_small_talk: ClassVar[bool] = False

    def fits(self, text: str) -> bool:
        return any(self.year < int(found) <= LAST_YEAR for found in YEAR_PATTERN.findall(text))

    @property
    def ruling(self) -> RuleMatch:
        return RuleMatch(self.name, "retrieve", f"it is about a year after {self.year}, where the LLM's knowledge ends")


YEAR_PATTERN = re.compile(r"(?<![\d.,])(?:19|20)\d\d(?![\d]|[.,]\d)")
LAST_YEAR = 2099


MAX_FILE_BYTES = 1 << 20  # bytes of a file of rules
# a repeat of what ends in a repeat, (a+)+, can try for ever; a question could be made to hang whoever reads it
NESTED_REPEAT = re.compile(r"\((?:[^()\\]|\\.)*(?<!\\)[+*]\)(?:[+*]|\{\d*,)")
SENTENCE_BREAK = re.compile(r"[.,!?;…。，！？；、\n]+(?!\d)")  # things said one after the other
MAX_SMALL_TALK = 120  # characters of small talk
MAX_QUESTION_CHARS = 4_000  # characters of a question; a rule is about how it begins


@dataclass(frozen=True)
class RuleEntry:
    """A rule as it stands in the file."""

    name: str
    action: RuleAction
    patterns: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    whole: bool = False
    reason: str = ""

    @property
    def rule(self) -> Rule:
        patterns = (*self.patterns, *(_pattern(word) for word in self.words))
        return Rule(self.name, self.action, patterns, self.whole, self.reason)


@dataclass(frozen=True)
class RuleFile:
    """The file."""

    rule: tuple[RuleEntry, ...] = ()
    packaged: bool = True
    cut_off: Annotated[int, NumberRange(1900, 2099)] | None = None


@dataclass(frozen=True)
class RuleSet:
    """Rules in their order: the first that fits decides.

    Example:
        >>> load_rules().judge("Thanks a lot!")
        Ruling(rule='thanks', action='skip', reason='thanks need no documents')
        >>> load_rules().judge("Who wrote Emma?") is None
        True
    """

    rules: tuple[Rule | CutoffRule, ...] = field(default_factory=tuple)

    def judge(self, question: str) -> RuleMatch | None:
        """What is done without asking a gate; None where no rule fits."""
        text = question[:MAX_QUESTION_CHARS]
        return next((rule.ruling for rule in self.rules if rule.fits(text)), None) or self._small_talk(text)

    def _small_talk(self, text: str) -> RuleMatch | None:
        """Things said one after the other, each of which needs no documents: the first of them speaks."""
        if len(text) > MAX_SMALL_TALK:
            return None
        light = [rule for rule in self.rules if rule.is_small_talk]
        parts = [part for part in SENTENCE_BREAK.split(text) if part.strip()]
        found = [next((rule.ruling for rule in light if rule.fits(part)), None) for part in parts]
        return found[0] if len(parts) > 1 and all(found) else None

    def judge_many(self, questions: Sequence[str]) -> list[RuleMatch | None]:
        return [self.judge(question) for question in questions]


def load_rules(file: str | Path | None = None) -> RuleSet:
    """The rules that come with knowgate, after those of this file."""
    if file is None:
        return _packaged()
    path = expand_path(file)
    try:
        text = read_text(path, maximum=MAX_FILE_BYTES)
    except OSError as error:
        raise BadSetting(f"cannot read the rules in '{path}': {error.strerror}. Check --rules.") from None
    book = _read(text, f"the rules in '{path}'")
    for one in book.rule:
        if endless := next((pattern for pattern in one.patterns if NESTED_REPEAT.search(pattern)), None):
            raise BadSetting(
                f"the rule '{one.name}' has a repeat inside a repeat, '{endless}', which can take for ever: write it "
                "without one of them, or use words = ['...']."
            )
    late = (CutoffRule(book.cut_off),) if book.cut_off is not None else ()
    return RuleSet((*(one.rule for one in book.rule), *late, *(_packaged().rules if book.packaged else ())))


@cache
def _packaged() -> RuleSet:
    text = resources.files("knowgate.gates.rules").joinpath("packaged.toml").read_text(encoding="utf-8")
    return RuleSet(tuple(one.rule for one in _read(text, "the packaged rules").rule))


def _read(text: str, what: str) -> RuleFile:
    try:
        return read_record(RuleFile, parse_toml(text, what), what)
    except BadInput as error:
        raise BadSetting(str(error)) from None


def _pattern(word: str) -> str:
    """The word as it is written; Latin letters do not go on at its ends."""
    start, end = (r"(?<![^\W\d_])" if word[:1].isascii() else ""), (r"(?![^\W\d_])" if word[-1:].isascii() else "")
    return f"{start}{re.escape(word)}{end}"
