"""Circuit breakers, which stop calls to a component that keeps failing."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from knowgate.core.limited_log import LimitedLog
from knowgate.core.network_deadline import request_deadline
from knowgate.errors import BadInput, RejectionError, get_brief
from knowgate.gates.rules.rule_set import CutoffRule, Rule, RuleSet
from knowgate.gates.rules.topic_rule import TopicRule
from knowgate.retrieval.engines.web import SearchBudgetError

FAILURE_THRESHOLD = 5
RECOVERY_SECONDS = 15.0
TOPIC_SHARE = 0.4  # of the time for a decision: maximum time of the embedding server of a topic rule
log = logging.getLogger(__name__)
limited_log = LimitedLog(log)


@dataclass
class CircuitBreaker:
    """Switch that stops calls to a component after several failures in a row.

    A breaker is "closed" (allows all calls), "open" (rejects all calls for a while), or then "half-open" (allows one call
    as a probe). After a successful probe, it is closed; after a failed one, it is open again.

    Attributes:
        name: Name of the component.
        probes_first: Whether the breaker becomes half-open rather than open after several failures, so that it opens only
            if the probe fails, too.
        failure_threshold: Number of failures in a row after which calls are stopped.
        recovery_seconds: Time for which the breaker stays open.
        clock: Returns a time in seconds.
        failure_count: Number of failures since the last success.
        last_failure: Time of the last failure. An open breaker becomes half-open `recovery_seconds` later.
        last_success: Time of the last success.
        is_probing: Whether a probe is running. A half-open breaker allows no second one.
    """

    name: str
    probes_first: bool = False
    failure_threshold: int = FAILURE_THRESHOLD
    recovery_seconds: float = RECOVERY_SECONDS
    clock: Callable[[], float] = time.monotonic
    failure_count: int = 0
    last_failure: float = 0.0
    last_success: float = float("-inf")
    is_probing: bool = False

    @property
    def state(self) -> str:
        """State of the breaker: "closed", "open" or "half-open"."""
        if self.failure_count < self.failure_threshold:
            return "closed"
        return "open" if self.clock() < self.last_failure + self.recovery_seconds else "half-open"

    @property
    def seconds_until_probe(self) -> float:
        """Seconds until an open breaker allows the next call."""
        return max(0.0, self.last_failure + self.recovery_seconds - self.clock())

    def try_acquire(self) -> bool:
        """Return whether a call is allowed now.

        After an allowed call, report its outcome, for example with `record_success`.
        """
        state = self.state
        if state == "half-open" and not self.is_probing:
            self.is_probing = True
            return True
        return state == "closed"

    def record_success(self) -> None:
        """Report a successful call. This closes the breaker (calls are allowed)."""
        self.failure_count = 0
        self.is_probing = False
        self.last_success = self.clock()

    def record_failure(self, start: float | None = None) -> None:
        """Report a failed call. After several failures in a row, further calls are rejected.

        Args:
            start: Time at which the call started. If another call has succeeded since then, the component works, so this
                failure does not count.
        """
        self.is_probing = False
        if start is not None and start <= self.last_success:
            return
        self.failure_count += 1
        if not self.probes_first:
            self.last_failure = self.clock()
        elif self.failure_count == self.failure_threshold:
            self.last_failure = float("-inf")  # so that the time to stay open is over, and the breaker is half-open

    def trip(self) -> None:
        """Open the breaker now, whatever was reported before."""
        self.failure_count = self.failure_threshold
        self.is_probing = False
        self.last_failure = self.clock()

    def record_cancellation(self) -> None:
        """Report that a call ended without a result about the component. It counts neither as success nor as failure."""
        self.is_probing = False


class BreakersByKey:
    """Circuit breakers of one component, one per API key. Failing requests of one key do not affect others.

    Args:
        name: Name of the component.
    """

    def __init__(self, name: str):
        self.name = name
        self._breakers: dict[str, CircuitBreaker] = {}

    def get(self, owner: str) -> CircuitBreaker:
        """Return the breaker of an API key, given by its name. Without keys, all requests have the owner ""."""
        return self._breakers.setdefault(owner, CircuitBreaker(self.name))

    @property
    def state(self) -> str:
        """Worst state of the breakers: "open", then "half-open", then "closed".

        The breaker of a key is ignored if the component works for other keys, as the requests of this key are at fault then.
        """
        failing = [breaker for breaker in self._breakers.values() if breaker.state != "closed"]
        states = {breaker.state for breaker in failing if not self._works_for_others(breaker)}
        return next((state for state in ("open", "half-open") if state in states), "closed")

    def _works_for_others(self, breaker: CircuitBreaker) -> bool:
        """Return whether another API key had a success shortly before the last failure of this breaker, or later."""
        other_successes = [other.last_success for other in self._breakers.values() if other is not breaker]
        last_other_success = max(other_successes, default=float("-inf"))
        return last_other_success >= breaker.last_failure - RECOVERY_SECONDS


class SearchQueueTimeout(TimeoutError):
    """A search timed out because it had waited for other searches for more than half of its time."""


# The retriever has not failed: a server rejected this question, or the question waited, or there were too many.
HARMLESS_ERRORS = (SearchQueueTimeout, SearchBudgetError, RejectionError, BadInput)


def record_search_error(breaker: CircuitBreaker, error: Exception) -> None:
    """Report a failed search to the circuit breaker of its API key."""
    if isinstance(error, HARMLESS_ERRORS):
        breaker.record_cancellation()
    else:
        breaker.record_failure()


class RetrieverBreakers(BreakersByKey):
    """Circuit breakers of the retriever, one per API key, and others for the searches with a filter of each key.

    A slow filter is no fault of the retriever, so timeouts of filtered searches stop only filtered searches of this key.
    """

    def __init__(self) -> None:
        super().__init__("retriever")
        self._filter_breakers = BreakersByKey("filter")

    def choose(self, owner: str, *, is_filtered: bool) -> CircuitBreaker:
        """Return the breaker that allows the searches of an API key with or without a filter."""
        return self._filter_breakers.get(owner) if is_filtered else self.get(owner)

    def record_success(self, owner: str, *, is_filtered: bool) -> None:
        """Report a successful search, which also shows that the retriever works."""
        self.choose(owner, is_filtered=is_filtered).record_success()
        self.get(owner).record_success()

    def record_error(self, owner: str, error: Exception, *, is_filtered: bool) -> None:
        """Report a failed search."""
        record_search_error(self.choose(owner, is_filtered=is_filtered), error)
        if is_filtered and not isinstance(error, (TimeoutError, *HARMLESS_ERRORS)):
            self.get(owner).record_failure()


@dataclass(frozen=True)
class GuardedTopicRule(TopicRule):
    """Topic rule that matches nothing while its embedding server fails.

    Attributes:
        breaker: Stops calls to the embedding server after several failures.
        timeout: Maximum seconds for a question. A question of another API key may wait for as long.
    """

    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker("rules"), compare=False)
    timeout: float = 4.0

    def load(self) -> None:
        """Embed the examples now, before the first question needs them."""
        try:
            _ = self.center
        except Exception as error:  # noqa: BLE001 - the embedding server may work later
            log.warning("The topic rule '%s' matches nothing for now: %s", self.name, error)

    def matches(self, text: str, budget: object) -> bool:
        """Return whether a question is similar enough to the examples, and False if this cannot be found out."""
        if not self.breaker.try_acquire():
            return False
        end = time.monotonic() + self.timeout
        try:
            with request_deadline(end):
                is_match = super().matches(text, budget)
        except (RejectionError, BadInput):  # the embedding server does not take this question
            self.breaker.record_cancellation()
            return False
        except Exception as error:  # noqa: BLE001 - whatever the embedding model raises, the gate can decide
            if time.monotonic() < end:
                self.breaker.record_failure()
            else:  # the other questions of a batch would take as long
                self.breaker.trip()
            limited_log.write("A topic rule failed, so it matches nothing: %s", get_brief(error))
            return False
        self.breaker.record_success()
        return is_match


def guard_topics(rules: RuleSet, gate_seconds: float) -> RuleSet:
    """Return rules whose topics have time limits, and a circuit breaker for each embedding model. Embeds the examples."""
    breakers: defaultdict[str, CircuitBreaker] = defaultdict(lambda: CircuitBreaker("rules"))
    guarded: list[Rule | CutoffRule | TopicRule] = []
    for rule in rules.rules:
        if isinstance(rule, TopicRule):
            values = {item.name: getattr(rule, item.name) for item in fields(rule)}
            rule = GuardedTopicRule(**values, breaker=breakers[rule.embedder], timeout=TOPIC_SHARE * gate_seconds)
            rule.load()
        guarded.append(rule)
    return RuleSet(tuple(guarded))
