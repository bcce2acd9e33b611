"""The guard of speed: a ratio that is worse than the record by more than a third fails the check."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import speed
from benchmarks.speed import Figure, list_worse

RECORD = {"figures": [{"what": "ask", "compared_with": "plain", "ratio": 1.2}]}


def figure(ratio, what="ask"):
    return Figure(what, "plain", ratio, 1.0)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Sets the ratios that the check measures, one after another, against a record of 1.2."""
    file = tmp_path / "speed.json"
    file.write_text(json.dumps(RECORD))
    monkeypatch.setattr(speed, "RECORD", file)
    monkeypatch.setattr(sys, "argv", ["speed.py", "--check"])

    def use(*ratios):
        remaining = iter(ratios)
        monkeypatch.setattr(speed, "MEASUREMENTS", (lambda: [figure(next(remaining))],))

    return use


@pytest.mark.parametrize(("ratio", "is_worse"), [(1.0, False), (1.59, False), (1.61, True), (5.0, True)])
def test_a_ratio_worse_by_more_than_a_third_is_listed(ratio, is_worse):
    assert bool(list_worse([figure(ratio)], RECORD)) is is_worse


def test_a_figure_without_a_record_is_not_checked():
    assert list_worse([figure(100.0, what="new")], RECORD) == []


def test_the_check_fails_if_a_ratio_is_worse_twice(measured, capsys):
    measured(1.7, 1.8)
    assert speed.main() == 1
    assert "ask, compared with plain: 1.80, recorded 1.20" in capsys.readouterr().out


def test_the_check_passes_if_a_ratio_is_worse_only_once(measured, capsys):
    measured(1.7, 1.3)
    assert speed.main() == 0
    assert capsys.readouterr().out == "No ratio is worse.\n"


def test_the_committed_record_fails_the_check_if_any_of_its_ratios_worsens_by_half():
    record = json.loads(speed.RECORD.read_text(encoding="utf-8"))
    assert len(record["figures"]) >= 10
    for row in record["figures"]:
        worse = Figure(row["what"], row["compared_with"], 1.5 * row["ratio"], 1.0)
        assert len(list_worse([worse], record)) == 1
        assert list_worse([worse._replace(seconds=row["ratio"])], record) == []
