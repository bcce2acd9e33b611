"""kill -9 at random moments, again and again; then the same command to its end: as if nothing had happened.

Forty kills in `make fuzz`, a few in `make test`. Moments are drawn from the touches of the command's own files, and
some of them from the clock.
"""

import random
from pathlib import Path

import pytest

from tests.support.fuzz import MANY, TALLY, tries
from tests.support.mortal import Fate, mortal
from tests.support.workshop import COMMANDS, begin, command, content, left_over

KILLS = {
    "label": (2, 9),
    "index": (1, 6),
    "index, brought up to date": (1, 5),
    "fit": (0, 6),
    "history import": (0, 6),
    "prefer": (1, 6),
}
SMOLLM = ["label", "--data", "jsonl:few.jsonl", "--model", "smollm", "--samples", "1", "--max-tokens", "3", "--out"]


@pytest.mark.parametrize("name", [name for name in KILLS if KILLS[name][MANY]])
def test_a_command_that_was_killed_ends_as_if_it_had_not_been(runner, place, name):
    rng = random.Random(f"{name} {random.random() if MANY else 1}")
    number = list(COMMANDS).index(name)
    whole, touches, seconds = uninterrupted(runner, place, name, f"whole-{number}")
    kills, out = 0, ""
    for round_ in range(100):
        out = f"out-{number}-{round_}"
        begin(runner, place, name, out)
        for _ in range(rng.randint(1, 3)):
            end = runner.run(*command(name, out), cwd=place, fate=moment(rng, out, touches, seconds))
            assert end.was_killed or end.code == 0, end.words
            kills += end.was_killed
            TALLY["kill -9", name, "used"] += end.was_killed
        end = runner.run(*command(name, out), cwd=place)
        assert end.code == 0, end.words
        assert content(place, out) == whole
        assert not left_over(place, out)
        if kills >= tries(*KILLS[name]):
            return
    raise AssertionError("the kills come too late")


def uninterrupted(runner, place, name, out):
    """What the command gives in peace, with how many touches and seconds that takes."""
    begin(runner, place, name, out)
    end = runner.run(*command(name, out), cwd=place, fate=Fate(place=out))
    assert end.code == 0, end.words
    return content(place, out), end.touches, end.seconds


def moment(rng, out, touches, seconds):
    """Mostly right at a touch or a few milliseconds after it, sometimes by the clock."""
    if rng.random() < 0.25:
        return Fate(place=out, kill=0, delay=rng.uniform(0, seconds))
    delay = rng.choice([0.0, 0.0, rng.uniform(0, 0.02), rng.uniform(0, seconds / 2)])
    return Fate(place=out, kill=rng.randint(1, touches), delay=delay)


@pytest.mark.model
@pytest.mark.skipif(not MANY, reason="takes a minute; make fuzz")
def test_the_embedded_model_goes_on_where_it_was_killed(place):
    lines = (place / "q.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:8]
    (place / "few.jsonl").write_text("".join(lines), encoding="utf-8")
    with mortal("knowgate.cli.label", "knowgate.models.hf.model") as running:
        end = running.run(*SMOLLM, "whole", cwd=place, fate=Fate(place="whole"))
        assert end.code == 0, end.words
        for kill in (0.4, 0.8):
            fate = Fate(place="again", kill=max(1, round(kill * end.touches)))
            assert running.run(*SMOLLM, "again", cwd=place, fate=fate).was_killed
            TALLY["kill -9", "label, embedded model", "used"] += 1
        assert running.run(*SMOLLM, "again", cwd=place).code == 0
    assert said(place / "again") == said(place / "whole")


def said(run: Path):
    """What was answered to each question; states may differ in the last digits with what else was in the batch."""
    from knowgate.data.runs.folder import RunFolder

    return [(row.id, row.closed.text, row.closed.samples, row.open.text) for row in RunFolder(run).rows()]
