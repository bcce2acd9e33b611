"""A full disk at any write: a sentence, nothing lost, and with room again the same command comes to its end.

Full is a disk on which nothing more can be written from some moment on (ENOSPC), and one on which no file may grow
beyond some bytes (a file-size limit), which ends a write in the middle of a line.
"""

import json
import random

import pytest

from tests.support.fuzz import TALLY, check_sentence, tries
from tests.support.mortal import Fate
from tests.support.workshop import COMMANDS, begin, command, content, left_over

QUICK = ("label", "index", "calibrate", "report")  # in `make test`; the rest has to fit or to measure first
LARGEST = 60_000  # bytes; more than most of the files here have


@pytest.mark.parametrize("name", [name for name in COMMANDS if name in QUICK or tries(0, 1)])
def test_a_full_disk_is_a_sentence_and_costs_nothing_but_time(runner, place, name):
    rng, number = random.Random(name), list(COMMANDS).index(name)
    out = f"whole-{number}"
    begin(runner, place, name, out)
    whole_end = runner.run(*command(name, out), cwd=place, fate=Fate(place=out))
    whole = content(place, out)
    for attempt in range(tries(2, 12)):
        out = f"out-{number}-{attempt}"
        begin(runner, place, name, out)
        fate = fullness(rng, out, whole_end.touches)
        end = runner.run(*command(name, out), cwd=place, fate=fate)
        check(end, f"{name}: {fate}")
        check_rows(place / out, whole)
        end = runner.run(*command(name, out), cwd=place)
        assert end.code == 0, f"{name} after {fate}: {end.words}"
        assert content(place, out) == whole
        assert not left_over(place, out)


def fullness(rng, out, touches):
    if rng.random() < 0.5:
        return Fate(place=out, full=rng.randint(1, touches))
    return Fate(place=out, largest=rng.choice([0, 1, 100, rng.randint(1, 3000), rng.randint(1, LARGEST)]))


def check(end, what):
    assert end.code in (0, 1), f"{what}: exit code {end.code}: {end.words}"
    assert "Traceback" not in end.words, f"{what}: {end.words}"
    if end.code:
        last = end.words.strip().splitlines()[-1]
        assert check_sentence(last).startswith("Error: "), f"{what}: {end.words}"
    TALLY["full disk", what.split(":")[0], "refused" if end.code else "used"] += 1


def check_rows(path, whole):
    """Rows that were finished stay, in order."""
    if (path / "labels.jsonl").is_file():
        lines = (path / "labels.jsonl").read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half a line
        ids = [json.loads(line)["id"] for line in lines]
        assert ids == [row["id"] for row, _ in whole][: len(ids)]
