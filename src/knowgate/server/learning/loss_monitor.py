"""Measures how many answers a gate changes by skipping retrieval, and raises an alarm if there are too many.

A random sample of requests is audited. A request counts as 1 if the answer that was sent differs from the answer with
passages, otherwise as 0. Requests that retrieved count as 1 only if an arbiter sent a different draft instead.

The alarm tests the share of changed answers against a limit. Each API key has its own test, which can only stop this
key. The alarm for all keys needs evidence that remains if the audits of any single key are left out, so that one client
cannot switch the gate off for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from knowgate.gates.artifacts.drift import FAR_DISTANCE, MIN_REPORTED_SHARE
from knowgate.stats.confidence_sequences import GuaranteeTest, GuaranteeTests, MeanConfidenceSequence


@dataclass
class KeyAudits:
    """Results of the audits of one API key. An audit checks whether skipping retrieval changed an answer.

    Attributes:
        number: Number of the key: 0 for the first one.
        own_test: Tests whether too many answers of this key change. None if there is no limit.
        count: Number of audits of this key.
        changed: Number of changed answers of this key.
    """

    number: int
    own_test: GuaranteeTest | None
    count: int = 0
    changed: float = 0.0


@dataclass
class LossMonitor:
    """Statistics of one gate: changed answers and unusual questions.

    Skipping retrieval may change an answer, right or wrong.

    Args:
        max_changed: Maximum share of answers that skipping may change. None means that there is no alarm.
        delta: Probability that a bound is ever wrong.
        test_delta: Probability that there is ever a false alarm while the share is at most `max_changed`.
            Default: `delta`.

    Attributes:
        loss: Share of changed answers in all audits that have a result.
        drift: Share of questions that are far from the training questions of the gate.
        drift_test: Tests whether this share is too large.
        failed: Number of audits without a result.
    """

    max_changed: float | None = None
    delta: float = 0.05
    test_delta: float | None = None

    def __post_init__(self) -> None:
        self.reset_loss()
        self.drift = MeanConfidenceSequence(self.delta)
        self.drift_test = GuaranteeTest(MIN_REPORTED_SHARE, self.delta)
        self._drift_tests: dict[str, GuaranteeTest] = {}  # by the name of the API key

    def reset_loss(self) -> None:
        """Discard the results of all audits, and clear the alarms."""
        self.loss = MeanConfidenceSequence(self.delta)
        self.failed = 0
        self._highest = MeanConfidenceSequence(self.delta)  # counts failed audits as changed answers
        self._lowest = MeanConfidenceSequence(self.delta)  # counts failed audits as unchanged answers
        self._test = self._create_test()
        self._keys: dict[str, KeyAudits] = {}
        self._tests_without_key = GuaranteeTests()  # for each key, whether too many answers of all other keys change

    def _create_test(self) -> GuaranteeTest | None:
        """Create a test whether more than `max_changed` of the answers change. None if there is no such limit."""
        return None if self.max_changed is None else GuaranteeTest(self.max_changed, self.test_delta or self.delta)

    def add_audit(self, changed: float, owner: str = "") -> None:
        """Add the result of an audit to the statistics and tests. Each test looks for too many changed answers.

        Args:
            changed: 1 if the answer that was sent differs from the answer with passages, otherwise 0.
            owner: Name of the API key of the request.
        """
        for sequence in (self.loss, self._highest, self._lowest):
            sequence.add(changed)
        if owner not in self._keys:
            self._keys[owner] = KeyAudits(len(self._keys), self._create_test())
            if self._test is not None:  # all audits so far belong to other keys
                self._tests_without_key.append(self._test)
        audits = self._keys[owner]
        audits.count += 1
        audits.changed += changed
        if self._test is not None and audits.own_test is not None:
            self._test.add(changed)
            audits.own_test.add(changed)
            self._tests_without_key.add(changed, self._test, exception=audits.number)

    def add_failure(self) -> None:
        """Count a failed audit: as a changed answer for the upper bound, as an unchanged one for the lower bound."""
        self.failed += 1
        self._highest.add(1.0)
        self._lowest.add(0.0)

    def add_distance(self, distance: float | None, owner: str = "") -> None:
        """Count a question, and whether it is far from the training questions of the gate.

        Args:
            distance: Distance to the training questions. Only 1 % of the training questions themselves are farther away
                than FAR_DISTANCE. None if the gate does not compute a distance; then the question is not counted.
            owner: Name of the API key of the request.
        """
        if distance is not None:
            key_test = self._drift_tests.setdefault(owner, GuaranteeTest(MIN_REPORTED_SHARE, self.delta))
            for sequence in (self.drift, self.drift_test, key_test):
                sequence.add(float(distance > FAR_DISTANCE))

    # --- bounds -----------------------------------------------------------------------------------

    @property
    def low(self) -> float:
        """Lower bound of the share of changed answers, if all failed audits had found unchanged answers."""
        return self._lowest.low

    @property
    def high(self) -> float:
        """Upper bound of the share of changed answers, if all failed audits had found changed answers."""
        return self._highest.high

    # --- alarms -----------------------------------------------------------------------------------

    @property
    def is_violated(self) -> bool:
        """Whether all audits together show that too many answers change."""
        return self._test is not None and self._test.is_violated

    @property
    def alarm(self) -> str:
        """Reason why all requests must retrieve, or "". One API key alone cannot cause this alarm."""
        if not self.is_violated or not self._is_confirmed_by_others():
            return ""
        return self._describe_violation()

    @property
    def alarm_with_key(self) -> str:
        """The alarm for all requests and the API key with the most changed answers. Only for administrators."""
        return f"{self.alarm}{self._describe_main_key()}" if self.alarm else ""

    def _is_confirmed_by_others(self) -> bool:
        """Return whether too many answers still change if any single API key is left out."""
        # Audits without a key ("") are those of all clients of a server without keys, so they are never left out.
        are_violated = self._tests_without_key.are_violated
        return all(are_violated[audits.number] for name, audits in self._keys.items() if name)

    def _describe_violation(self, subject: str = "") -> str:
        """Return the message about too many changed answers.

        `subject` may name one API key, such as " for key 'anna'".
        """
        limit, confidence = 100 * (self.max_changed or 0.0), 100 * (1 - self.delta)
        return f"skipping changes more than {limit:.3g} % of the answers{subject}, with {confidence:g} % confidence"

    def _describe_main_key(self) -> str:
        """Name the API key with the most changed answers. Example: " (most of them for key 'anna': 7 of 9)"."""
        name = max(self._keys, key=lambda key: self._keys[key].changed)
        if not name:  # requests without a key
            return ""
        return f" (most of them for key '{name}': {self._keys[name].changed:g} of {self.loss.total:g})"

    def get_alarm(self, owner: str) -> str:
        """Return why an API key must retrieve, or "". Its own alarm comes first, then the alarm for all."""
        return self._get_own_alarm(owner) or self.alarm

    def _get_own_alarm(self, owner: str) -> str:
        """Return the alarm of an API key, or "". The alarm for all requests is left out."""
        own_test = self._keys[owner].own_test if owner in self._keys else None
        has_alarm = owner and own_test is not None and own_test.is_violated
        return self._describe_violation(f" for key '{owner}'") if has_alarm else ""

    @property
    def key_alarms(self) -> dict[str, str]:
        """Alarms of single API keys: name -> reason. The alarm for all requests is left out."""
        return {owner: reason for owner in self._keys if (reason := self._get_own_alarm(owner))}

    def list_alarms(self) -> list[str]:
        """Return the alarms that are on, without names of API keys, because anyone can read GET /ready."""
        count, violation = len(self.key_alarms), self._describe_violation(" of each of them")
        alarm_for_all = [f"all requests retrieve: {self._describe_violation()}"] if self.alarm else []
        key_alarms = [f"API keys whose requests all retrieve: {count} ({violation})"] if count else []
        return alarm_for_all + key_alarms

    def to_json(self) -> dict[str, Any]:
        """Return the shares of changed answers (`loss`) and of unusual questions (`drift`)."""
        return {"loss": self._describe_loss(), "drift": self._describe_drift()}

    def _describe_loss(self) -> dict[str, Any]:
        """Return how many answers were audited (`drawn`) and changed (`lost`), the bounds, and the alarm."""
        return {
            "drawn": self.loss.n,
            "lost": self.loss.total,
            "failed": self.failed,
            "mean": self.loss.mean,
            "low": self.low,
            "high": self.high,
            "promised": self.max_changed,
            "confidence": 1 - self.delta,
            "evidence": self._test.evidence_share if self._test else None,
            "alarm": self.alarm_with_key,
            "keys": self._describe_keys(),
        }

    def _describe_keys(self) -> dict[str, Any]:
        """Return how many answers of each API key were audited (`drawn`) and changed (`lost`), and its alarm."""
        key_alarms = self.key_alarms
        return {
            name: {"drawn": audits.count, "lost": audits.changed, "alarm": key_alarms.get(name, "")}
            for name, audits in self._keys.items()
            if name  # "" stands for requests without a key
        }

    def _describe_drift(self) -> dict[str, Any]:
        """Return the share of unusual questions with its bounds, and the API keys that send too many of them."""
        return {
            "questions": self.drift.n,
            "mean": self.drift.mean,
            "low": self.drift.low,
            "high": self.drift.high,
            "drifted": self.drift_test.is_violated,
            "keys": sorted(name for name, test in self._drift_tests.items() if name and test.is_violated),
        }
