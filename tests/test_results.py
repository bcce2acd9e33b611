"""The committed results are what the committed runs say."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.tables.claims import claims_table

pytestmark = pytest.mark.records
ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGES = [BENCHMARKS / "RESULTS.md", *sorted((BENCHMARKS / "results").glob("*.md"))]


def test_make_results_reproduces_the_committed_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["results.py", "--out", str(tmp_path)])
    results.main()
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.md"))
    assert written == sorted(path.relative_to(BENCHMARKS) for path in PAGES)
    for name in written:
        assert (tmp_path / name).read_text(encoding="utf-8") == (BENCHMARKS / name).read_text(encoding="utf-8"), name


def test_the_first_table_is_short_and_every_figure_names_its_record():
    lines = claims_table().splitlines()
    assert len(lines) <= 27  # two of them are the head
    for line in lines[2:]:
        here = line.split(" | ")[3]
        records = re.findall(r"\]\((runs/[^)]+)\)", here)
        assert records
        assert all((BENCHMARKS / record).exists() for record in records)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_page_of_a_paper_is_short():
    for name in ("kbm", "ik", "cbdr", "dh-icl"):
        assert len((BENCHMARKS / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_recorded_runs_hold_no_questions_answers_or_passages():
    from knowgate.data.runs.folder import RunFolder

    folders = sorted(path.parent for path in BENCHMARKS.rglob("labels.jsonl.gz"))
    assert len(folders) >= 24
    for folder in folders:
        for row in RunFolder(folder).rows():
            assert (row.question, row.answers, row.passages) == ("", (), ())
            assert not any(row.choices)
