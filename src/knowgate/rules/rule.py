"""One rule: what it fits, and what is then done. Knows patterns and texts; no gates, no files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from knowgate.errors import BadSetting

Action = Literal["retrieve", "skip"]
AROUND = re.compile(r"^[\s\"'“”‘’「」.,!?;:~…。，！？；：、]+|[\s\"'“”‘’「」.,!?;:~…。，！？；：、]+$")
INSIDE = re.compile(r"[\s,!;:…，！；：、]+(?=\D)|[\s,!;:…，！；：、]+$")  # a comma before a digit belongs to a number


@dataclass(frozen=True)
class Ruling:
    """What a rule says of a question."""

    rule: str
    action: Action
    reason: str

    @property
    def retrieve(self) -> bool:
        return self.action == "retrieve"


@dataclass(frozen=True)
class Rule:
    """Fits where one of its patterns does. whole: a pattern must fit all that was said, signs around it aside."""

    name: str
    action: Action
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
        said = INSIDE.sub(" ", AROUND.sub("", text)).strip()
        return any(pattern.fullmatch(said) for pattern in self.compiled)

    @property
    def is_small_talk(self) -> bool:
        """Several such things said one after the other need no documents either: "Bye, thanks"."""
        return self.whole and self.action == "skip"

    @property
    def ruling(self) -> Ruling:
        return Ruling(self.name, self.action, self.reason or f"the rule '{self.name}' says so")


@dataclass(frozen=True)
class AfterCutOff:
    """Fits questions about years that the LLM cannot know: after the one its training data end in."""

    year: int
    name: str = "after the cut-off"
    is_small_talk: ClassVar[bool] = False

    def fits(self, text: str) -> bool:
        return any(self.year < int(found) <= LAST_YEAR for found in YEAR.findall(text))

    @property
    def ruling(self) -> Ruling:
        return Ruling(self.name, "retrieve", f"it is about a year after {self.year}, where the LLM's knowledge ends")


YEAR = re.compile(r"(?<![\d.,])(?:19|20)\d\d(?![\d]|[.,]\d)")
LAST_YEAR = 2099
