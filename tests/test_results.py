"""The committed results are what the committed runs say."""

import sys
from pathlib import Path

import pytest

from benchmarks import results

pytestmark = pytest.mark.records
ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def test_make_results_reproduces_the_committed_tables(tmp_path, monkeypatch, capsys):
    out = tmp_path / "RESULTS.md"
    monkeypatch.setattr(sys, "argv", ["results.py", "--out", str(out)])
    results.main()
    assert out.read_text(encoding="utf-8") == (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")


def test_the_recorded_runs_hold_no_questions_answers_or_passages():
    from knowgate.data.runs.folder import RunFolder

    folders = sorted(path.parent for path in BENCHMARKS.rglob("labels.jsonl.gz"))
    assert len(folders) >= 24
    for folder in folders:
        for row in RunFolder(folder).rows():
            assert (row.question, row.answers, row.passages) == ("", (), ())
            assert not any(row.choices)
