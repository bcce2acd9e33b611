"""What is found out about one gate while it works: what skipping costs, whether a promise is broken, strange questions.

A share of the requests is drawn, whatever was decided on them. A drawn one that was looked up loses nothing. A drawn
one that was skipped is also answered with passages; it is lost where that is another answer. The mean of both is what
skipping costs of all answers, against always retrieving: no weights, and each number is between 0 and 1. By any gold
answer no more is lost, for who says the same is as right.

Distances say how far questions lie from those the gate was fitted on; one in a hundred is far there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from knowgate.statistics import MeanBounds, PromiseTest

FAR = 1.0 + 1e-6
FAR_EXPECTED = 0.05  # share of far questions that is still put up with: one in a hundred is by construction


@dataclass
class Watch:
    """promised: the loss that was promised, None for none; then there is no alarm. delta: of all that is said here."""

    promised: float | None = None
    delta: float = 0.05
    loss: MeanBounds = field(init=False)
    test: PromiseTest | None = field(init=False)
    far: MeanBounds = field(init=False)
    strange: PromiseTest = field(init=False)

    def __post_init__(self) -> None:
        self.begin_again()
        self.far, self.strange = MeanBounds(self.delta), PromiseTest(FAR_EXPECTED, self.delta)

    def begin_again(self) -> None:
        """Forget what was lost, and with it an alarm."""
        self.loss = MeanBounds(self.delta)
        self.test = None if self.promised is None else PromiseTest(self.promised, self.delta)

    def see_loss(self, lost: float) -> None:
        self.loss.add(lost)
        if self.test is not None:
            self.test.add(lost)

    def see_distance(self, distance: float | None) -> None:
        if distance is not None:
            self.far.add(float(distance > FAR))
            self.strange.add(float(distance > FAR))

    @property
    def alarm(self) -> str:
        """Why everything must be looked up; '' where it need not."""
        if self.test is None or not self.test.is_broken or self.promised is None:
            return ""
        sure = f"{100 * (1 - self.delta):g} % sure"
        return f"more than {100 * self.promised:.3g} % of the answers are lost by skipping, {sure}"

    @property
    def record(self) -> dict[str, Any]:
        """As JSON: for the dashboard and `GET /v1/learning`."""
        promise = {
            "promised": self.promised,
            "confidence": 1 - self.delta,
            "evidence": self.test.closeness if self.test else None,
            "alarm": self.alarm,
        }
        loss = {"drawn": self.loss.n, "lost": self.loss.total, **_bounds(self.loss), **promise}
        drift = {"questions": self.far.n, **_bounds(self.far), "drifted": self.strange.is_broken}
        return {"loss": loss, "drift": drift}


def _bounds(bounds: MeanBounds) -> dict[str, float | None]:
    return {"mean": bounds.mean, "low": bounds.low, "high": bounds.high}
