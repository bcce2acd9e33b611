"""Bad input at a door: what may come out, who counts it, and how much of it is tried.

`make test` tries a small slice, the same one each time. `make fuzz` (KNOWGATE_FUZZ=1) tries many, different ones each time, and
writes how many were tried at each door into the documentation. With KNOWGATE_FUZZ=repeat, as in the release checklist, it tries
as many, but the same ones each time, so that a release is not stopped by chance.

Whatever comes in, one of two things may come out: a right result, or a sentence (a KnowgateError in the library, exit
code 1 or 2 and one line at the command line). Anything else (another exception, a minute without an end, exit code 70)
fails the test.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import HealthCheck, settings

from knowgate.errors import KnowgateError

MANY = bool(os.environ.get("KNOWGATE_FUZZ"))
IS_REPEATABLE = os.environ.get("KNOWGATE_FUZZ", "repeat") == "repeat"
SECONDS = 60  # longer is a hang: the process ends and shows where; tests meet busy machines
TALLY: Counter[tuple[str, str, str]] = Counter()  # (door, kind of input, outcome) -> inputs


@dataclass(frozen=True)
class Outcome:
    """What came out: `value`, or `refusal`, the sentence."""

    value: object = None
    refusal: str = ""


def tries(few: int, many: int) -> int:
    """How many inputs to try: few in `make test`, many in `make fuzz`."""
    return many if MANY else few


def trying(few: int, many: int) -> settings:
    """The same for a test of Hypothesis's: `@trying(20, 1000)` above `@given(...)`."""
    return settings(
        max_examples=tries(few, many),
        derandomize=IS_REPEATABLE,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def attempt(door: str, kind: str, action: Callable[[], object]) -> Outcome:
    """Bring one input to a door. An exception that is no KnowgateError goes through and fails the test."""
    with in_time():
        try:
            outcome = Outcome(value=action())
        except KnowgateError as error:
            outcome = Outcome(refusal=check_sentence(str(error)))
    TALLY[door, kind, "refused" if outcome.refusal else "used"] += 1
    return outcome


def attempt_command(door: str, kind: str, arguments: Sequence[str], stderr: Callable[[], str]) -> int:
    """Bring one input to a command, in this process. stderr: reads what it has printed there (capsys, say)."""
    from knowgate.cli.main import run

    with in_time():
        code = run(list(arguments))
    words = stderr()
    assert code in (0, 1, 2), f"exit code {code}: {words}"
    assert "Traceback" not in words
    if code:
        check_sentence(words.strip().splitlines()[-1])
    TALLY[door, kind, "refused" if code else "used"] += 1
    return code


def check_sentence(message: str) -> str:
    """One line that can be read, and short enough to be: what was wrong, not all of it."""
    assert message.strip(), "an error without words"
    assert "\n" not in message.strip(), f"an error of several lines: {message}"
    assert len(message) < 2000, f"an error of {len(message)} characters: {message[:300]} ..."
    return message


@contextmanager
def in_time() -> Iterator[None]:
    """Ends the process, with its stacks on stderr, when the block hangs; even inside C code, where no signal helps."""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)  # capsys has put another in its place
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
