"""Rules that decide before the gate: always or never retrieve for questions that match. The first match decides.

Rules are read from a TOML file. The rules of the user come first, then the packaged rules of knowgate. The packaged
patterns take linear time. All patterns of the user together have a time limit, after which they do not match.

cut_off = 2023              # retrieve for questions about years after 2023
packaged = true             # append the packaged rules

[[rule]]
name = "our products"
action = "retrieve"         # or "skip"
words = ["Acme", "Zeta"]    # words to find; patterns = ['...'] are regular expressions
whole = false               # true: a word or pattern must match the whole message

[[topic]]                   # questions similar to the examples; each question costs one embedding
name = "holidays"
action = "retrieve"
examples = ["How many days off do I get?", "When is the office closed?"]
similarity = 0.5            # cosine similarity to the mean of the examples from which on a question matches
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from knowgate.core.limited_log import LimitedLog
from knowgate.core.schema import NumberRange, read_record
from knowgate.core.text import CJK
from knowgate.core.validation import expand_path, parse_toml, read_text
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.rules.topic_rule import RuleAction, RuleMatch, TopicRule
from knowgate.types import Decision, Gate

log = LimitedLog(logging.getLogger(__name__))
Content = TypeVar("Content")

# Rules with whole=true compare messages without punctuation at both ends, and with spaces for punctuation inside.
WHITE_SPACE = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
EDGE_CHARACTERS = WHITE_SPACE + "\"'“”‘’「」.,!?;:~…。，！？；：、"
INNER_PUNCTUATION = re.compile(r"[\s,!;:…，！；：、]+(?=\D)|[\s,!;:…，！；：、]+$")  # not a comma inside a number
SENTENCE_BREAK = re.compile(r"[.,!?;…。，！？；、\n]+(?!\d)")
# A four-digit year that is not part of a longer or decimal number.
YEAR_PATTERN = re.compile(r"(?<![\d.,])(?:19|20)\d\d(?![\d]|[.,]\d)")
LAST_YEAR = 2099  # larger numbers are probably not years
# Matches patterns that repeat a group which itself ends in a repetition, such as (a+)+. They can take exponential time.
NESTED_REPEAT = re.compile(r"\((?:[^()\\]|\\.)*(?<!\\)[+*]\)(?:[+*]|\{\d*,)")
# A letter, digit or underscore of a language with spaces between words: `[^\W...]` is \w without the characters of CJK.
SPACED_CHARACTER = CJK.pattern.replace("[", r"[^\W", 1)
MAX_FILE_BYTES = 1 << 20
MAX_SMALL_TALK = 120  # maximum characters of a message that can consist of several pieces of small talk
MAX_QUESTION_CHARS = 4_000  # rules read only the start of a longer question
PACKAGED_RULE_CHARS = 1_000  # packaged rules read this many characters at both ends of that
USER_RULES_SECONDS = 0.05  # time limit for all patterns of the user together, on one question
LIST_RULES_SECONDS = 0.5  # the same, on all questions of one request
MIN_RULES_SECONDS = 0.001  # the same, on each further question of that request; fast patterns still match


@dataclass
class PatternTimeBudget:
    """Time that the regular expressions of the user may still take, in seconds. Every match uses some of it up."""

    seconds_left: float = USER_RULES_SECONDS


@dataclass(frozen=True)
class Rule:
    """A rule with patterns or words: a `[[rule]]` entry of a rules file.

    Attributes:
        name: Name of the rule.
        action: Whether to retrieve or to skip retrieval.
        patterns: Regular expressions; case is ignored.
        whole: Whether a pattern must match the whole message (without punctuation at both ends) or any part of it.
        reason: Explanation for the user.
        words: Words that are matched literally, as alternatives to the patterns.
    """

    name: str
    action: RuleAction
    patterns: tuple[str, ...] = ()
    whole: bool = False
    reason: str = ""
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise BadSetting if the rule has no pattern, or an invalid one."""
        if not self.patterns and not self.words:
            raise BadSetting(
                f"the rule '{self.name}' has no patterns. Add patterns = ['...'] or words = ['...'] to the rule."
            )
        _ = self.compiled_patterns  # reports an invalid pattern now, not at the first question

    @cached_property
    def compiled_patterns(self) -> tuple[Any, ...]:
        """The compiled regular expressions."""
        patterns = (*self.patterns, *(_build_word_pattern(word) for word in self.words))
        return tuple(self._compile(pattern) for pattern in patterns)

    def _compile(self, pattern: str) -> Any:
        """Compile a pattern with the package `regex`, which can stop slow searches.

        Raises:
            BadSetting: The pattern is invalid, or has a repetition inside a repetition.
        """
        import regex

        self._check_repetition(pattern)
        try:
            re.compile(pattern)  # rejects more patterns than `regex` does, with clearer messages
            return regex.compile(pattern, regex.IGNORECASE)
        except (re.error, regex.error, ValueError, RecursionError, OverflowError) as error:
            raise BadSetting(
                f"the rule '{self.name}' has the invalid regular expression '{pattern}': {error}."
            ) from None

    def _check_repetition(self, pattern: str) -> None:
        """Raise BadSetting if a pattern has a repetition inside a repetition."""
        if NESTED_REPEAT.search(pattern):
            raise BadSetting(
                f"the rule '{self.name}' has a repetition inside a repetition in its pattern '{pattern}'. Matching it can take "
                "forever. Remove one of the repetitions, or use words = ['...'] instead."
            )

    def matches(self, text: str, budget: PatternTimeBudget) -> bool:
        """Return whether any pattern matches a text.

        Args:
            text: The message of the user.
            budget: Maximum time, because a pattern may take very long. The time taken here is subtracted.
        """
        text = self._prepare(text)
        deadline = time.monotonic() + budget.seconds_left
        try:
            for pattern in self.compiled_patterns:
                find = pattern.fullmatch if self.whole else pattern.search
                # The module `regex` releases the GIL, so that other threads run during a long search.
                if find(text, timeout=max(1e-6, deadline - time.monotonic())):
                    return True
        except TimeoutError:
            log.write("The rule '%s' was skipped: its patterns take too long. Simplify them.", self.name)
        finally:
            budget.seconds_left = deadline - time.monotonic()
        return False

    def _prepare(self, text: str) -> str:
        """Remove punctuation from a text if the rule must match the whole text."""
        return INNER_PUNCTUATION.sub(" ", text.strip(EDGE_CHARACTERS)).strip() if self.whole else text

    @property
    def is_small_talk(self) -> bool:
        """Whether the rule recognizes whole messages without need for retrieval, such as "Thanks"."""
        return self.whole and self.action == "skip"

    @property
    def match(self) -> RuleMatch:
        """The decision for questions that match."""
        return RuleMatch(self.name, self.action, self.reason or f"the rule '{self.name}' says so")


@dataclass(frozen=True)
class PackagedRule(Rule):
    """A rule that comes with knowgate. Its patterns are fast, so that no time limit is needed."""

    def _compile(self, pattern: str) -> Any:
        """Compile a pattern with the module `re`."""
        return re.compile(pattern, re.IGNORECASE)

    def matches(self, text: str, budget: PatternTimeBudget) -> bool:
        """Return whether any pattern matches a text. Of a long text, only the start and the end are read."""
        if len(text) > 2 * PACKAGED_RULE_CHARS:
            if self.whole:
                return False  # messages that consist of small talk or arithmetic only are short
            text = f"{text[:PACKAGED_RULE_CHARS]}\n{text[-PACKAGED_RULE_CHARS:]}"
        text = self._prepare(text)
        if self.whole:
            return any(pattern.fullmatch(text) for pattern in self.compiled_patterns)
        return any(pattern.search(text) for pattern in self.compiled_patterns)


@dataclass(frozen=True)
class CutoffRule:
    """Retrieves for questions about years after the end of the LLM's training data."""

    year: int  # the last year of the training data
    name: str = "after the cut-off"  # shown in decisions
    is_small_talk: ClassVar[bool] = False

    def matches(self, text: str, budget: PatternTimeBudget) -> bool:
        """Return whether a text mentions a year after `year`. No time limit is needed: the pattern is linear."""
        return any(self.year < int(year) <= LAST_YEAR for year in YEAR_PATTERN.findall(text))

    @property
    def match(self) -> RuleMatch:
        """The decision for questions that match."""
        reason = f"the question is about a year after {self.year}, where the LLM's knowledge ends"
        return RuleMatch(self.name, "retrieve", reason)


@dataclass(frozen=True)
class RuleSet:
    """Rules in order: the first one that matches decides.

    Example:
        >>> load_rules().decide("Thanks a lot!")
        RuleMatch(rule='thanks', action='skip', reason='thanks need no documents')
        >>> load_rules().decide("Who wrote Emma?") is None
        True
    """

    rules: tuple[Rule | CutoffRule | TopicRule, ...] = field(default_factory=tuple)  # tried in this order

    @property
    def is_fast(self) -> bool:
        """Whether short questions take no noticeable time: there are no rules of the user."""
        return all(isinstance(rule, PackagedRule | CutoffRule) for rule in self.rules)

    def decide(self, question: str, shared_budget: PatternTimeBudget | None = None) -> RuleMatch | None:
        """Return the decision of the first matching rule, or None.

        Several sentences of small talk match, too ("Bye, thanks").

        Args:
            question: The message of the user.
            shared_budget: Time budget for the patterns of the user that is shared by several questions. The time taken
                here is subtracted.
        """
        text = question[:MAX_QUESTION_CHARS]
        seconds = USER_RULES_SECONDS
        if shared_budget is not None:
            seconds = max(MIN_RULES_SECONDS, min(seconds, shared_budget.seconds_left))
        budget = PatternTimeBudget(seconds)
        match = self._find_first_match(text, budget) or self._match_small_talk(text, budget)
        if shared_budget is not None:
            shared_budget.seconds_left -= seconds - budget.seconds_left
        return match

    def make_decision(
        self, question: str, gate: Gate, threshold: float, shared_budget: PatternTimeBudget | None = None
    ) -> Decision | None:
        """Return the decision of the first matching rule, which replaces the decision of the gate.

        Args:
            question: The message of the user.
            gate: The gate, which may ignore rules.
            threshold: The threshold of the pipeline, for the record.
            shared_budget: Time budget for the patterns of the user that is shared by several questions. The time taken
                here is subtracted.

        Returns:
            The decision. Its need for retrieval is 1 if the rule says to retrieve, else 0. None if no rule matches, or
            if the gate ignores rules.
        """
        match = self.decide(question, shared_budget) if gate.obeys_rules else None
        if match is None:
            return None
        reason = f"{match.reason} (rule '{match.rule}')"
        return Decision(match.retrieve, float(match.retrieve), threshold, gate.name, reason, rule=match.rule)

    def _find_first_match(self, text: str, budget: PatternTimeBudget) -> RuleMatch | None:
        """Return the decision of the first rule that matches a text; None if no rule matches."""
        return next((rule.match for rule in self.rules if rule.matches(text, budget)), None)

    def _match_small_talk(self, text: str, budget: PatternTimeBudget) -> RuleMatch | None:
        """Return the match of the first sentence if a short text is several sentences of small talk, else None."""
        sentences = [sentence for sentence in SENTENCE_BREAK.split(text) if sentence.strip()]
        if len(text) > MAX_SMALL_TALK or len(sentences) < 2:
            return None
        small_talk = RuleSet(tuple(rule for rule in self.rules if rule.is_small_talk))
        matches = [small_talk._find_first_match(sentence, budget) for sentence in sentences]
        return matches[0] if all(matches) else None


@dataclass(frozen=True)
class RuleFile:
    """The content of a rules file.

    Attributes:
        rule: The `[[rule]]` entries.
        topic: The `[[topic]]` entries, which are tried last, because they cost an embedding.
        packaged: Whether to append the packaged rules of knowgate.
        cut_off: Last year that the LLM knows about. Questions about later years are retrieved for.
    """

    rule: tuple[Rule, ...] = ()
    topic: tuple[TopicRule, ...] = ()
    packaged: bool = True
    cut_off: Annotated[int, NumberRange(1900, 2099)] | None = None


@dataclass(frozen=True)
class PackagedRuleFile:
    """The content of the file with the packaged rules.

    Attributes:
        rule: The `[[rule]]` entries.
    """

    rule: tuple[PackagedRule, ...]


def load_rules(file: str | Path | None = None) -> RuleSet:
    """Load the rules applied before the gate. Rules of your file come before the packaged rules.

    Args:
        file: TOML file with your own rules. Default: only the packaged rules.

    Raises:
        BadSetting: The file cannot be read, or a rule is invalid.

    Example:
        >>> load_rules().decide("Hello!").action
        'skip'
    """
    if file is None:
        return _load_packaged_rules()
    path = expand_path(file)
    try:
        text = read_text(path, maximum=MAX_FILE_BYTES)
    except OSError as error:
        raise BadSetting(f"cannot read the rules file '{path}': {error.strerror}. Check the path in `rules`.") from None
    content = _parse_rules(RuleFile, text, f"the rules in '{path}'")
    cutoff_rules = (CutoffRule(content.cut_off),) if content.cut_off is not None else ()
    packaged_rules = _load_packaged_rules().rules if content.packaged else ()
    return RuleSet((*content.rule, *cutoff_rules, *packaged_rules, *content.topic))


@cache
def _load_packaged_rules() -> RuleSet:
    """Load the packaged rules of knowgate."""
    text = resources.files("knowgate.gates.rules").joinpath("packaged.toml").read_text(encoding="utf-8")
    return RuleSet(_parse_rules(PackagedRuleFile, text, "the packaged rules").rule)


def _parse_rules(kind: type[Content], text: str, where: str) -> Content:
    """Parse the text of a rules file.

    Args:
        kind: Class of the result, `RuleFile` or `PackagedRuleFile`.
        text: Content of the file, in TOML.
        where: What error messages call the file.

    Raises:
        BadSetting: The text is not valid TOML, or a rule is invalid.
    """
    try:
        return read_record(kind, parse_toml(text, where), where)
    except BadInput as error:
        raise BadSetting(str(error)) from None


def _build_word_pattern(word: str) -> str:
    """Build a regular expression that finds a word, but not inside a longer word.

    Chinese and Japanese put no spaces between words, so there any neighboring characters are allowed.
    """
    begin = "" if CJK.match(word[:1]) else f"(?<!{SPACED_CHARACTER})"
    end = "" if CJK.match(word[-1:]) else f"(?!{SPACED_CHARACTER})"
    return f"{begin}{re.escape(word)}{end}"
