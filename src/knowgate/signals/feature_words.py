"""What the numbers of a fusion say, for people: each with its name in words and its value as one would say it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from knowgate.signals.assessment import SELF_ASSESSMENT
from knowgate.signals.dispersion import SEAKR, SEAKR_END
from knowgate.statistics import sigmoid

PROBE = re.compile(r"probe-(?P<when>pre|post)-(?P<layer>\d+)")
WHEN = {"pre": "before", "post": "after"}
Saying = Callable[[float], str]


def _percent(words: str) -> Saying:
    """Of features that are the logarithm of a share."""
    return lambda value: f"{words} {math.exp(min(value, 0.0)):.0%}"


def _count(words: str) -> Saying:
    return lambda value: f"{words} {math.expm1(value):.0f}"


def _plain(words: str) -> Saying:
    return lambda value: f"{words} {value:.2f}"


SAYINGS: dict[str, Saying] = {
    "first": _percent("first token"),
    "mean": _percent("mean token"),
    "min": _percent("least likely token"),
    "entropy": _percent("sharpness of its choices"),
    "margin": _percent("lead over the second choice"),
    "length": _count("tokens drafted"),
    "unfinished": lambda value: "the draft was cut off" if value else "the draft came to its end",
    "question_length": _count("characters asked"),
    SELF_ASSESSMENT: lambda value: f"it says it {'can' if value > 0 else 'cannot'} answer ({value:+.1f})",
    "certainty": lambda value: f"samples agree {value:.0%}",
    "agreement": lambda value: f"samples say the draft {value:.0%}",
    SEAKR: _plain("spread of the samples"),
    SEAKR_END: _plain("spread of the samples"),
}


def say_feature(name: str, value: float) -> str:
    """A feature's value in words; of a probe, the need it sees."""
    if name in SAYINGS:
        return SAYINGS[name](value)
    probe = PROBE.fullmatch(name)
    place = f"layer {probe['layer']} {WHEN[probe['when']]} the answer" if probe else name
    return f"{place} sees need {sigmoid(value):.0%}"
