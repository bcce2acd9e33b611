"""The example that docs/cost.md works out: its figures are those that its command prints."""

from __future__ import annotations

import re
import shlex

import pytest

from knowgate.cli.main import run
from tools.pages import blocks
from tools.structure import ROOT

PAGE = ROOT / "docs" / "cost.md"
PROSE = " ".join(PAGE.read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def printed() -> str:
    (shown,) = [block.text for block in blocks("text") if block.page == PAGE]
    return " ".join(shown.split())


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None
    return float(found[1].replace(",", ""))


def test_the_command_prints_what_the_page_shows(printed, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (command,) = [block.text for block in blocks("console") if block.page == PAGE and "benchmarks/runs" in block.text]
    assert run(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.splitlines()[0] == printed


def test_what_is_worked_out_follows_from_it(printed):
    searches, calls = number(r"saves ([\d,]+) searches", printed), number(r"makes ([\d,]+) more LLM calls", printed)
    saved = searches * 0.01
    assert f"{searches:,.0f} x $0.01 = ${saved:.2f}" in PROSE
    assert f"${saved:.2f} / {calls:,.0f} = ${saved / calls:.3g}" in PROSE
    assert f"{calls:,.0f} x $0.001 = ${calls * 0.001:.2f}, which is ${calls * 0.001 - saved:.2f} more" in PROSE
    money = round(saved, 2) - round(calls * 0.0005, 2)
    assert f"${saved:.2f} - ${calls * 0.0005:.2f} = ${money:.2f}" in PROSE
    for points in (number(r": -([\d.]+) points", printed), number(r"interval -([\d.]+) to", printed)):
        assert f"${money:.2f} / {1_000 * points:,.0f} = ${money / (1_000 * points):.2f}" in PROSE
