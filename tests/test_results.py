"""The committed results are what the committed runs say."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.tables.claims import FROM_RECORD, claims_table, list_claims
from benchmarks.tables.ik import draw_histogram
from knowgate.cli.main import run
from knowgate.core.files import read_jsonl

pytestmark = pytest.mark.records
ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGES = [BENCHMARKS / "RESULTS.md", *sorted((BENCHMARKS / "results").glob("*.md"))]


BASELINES = {"never", "always", "oracle"}
# Pages that take longest: they evaluate all gates on all runs, or resample thousands of times.
LONG_PAGES = {
    "kbm.md", "policy.md", "judge.md", "gates-qwen.md", "gates-smollm.md", "guarantee.md", "dh-icl.md", "cbdr.md",
    "recorded-answers.md",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(results.PAGES) - LONG_PAGES))
def test_a_page_of_results_is_what_the_recorded_runs_say(name):
    text = (BENCHMARKS / "results" / name).read_text(encoding="utf-8")
    assert results.render_page(results.PAGES[name]) == text


def test_the_figure_of_ik_is_what_the_record_says(tmp_path):
    draw_histogram(tmp_path)
    assert (tmp_path / "ik.svg").read_text(encoding="utf-8") == (BENCHMARKS / "ik.svg").read_text(encoding="utf-8")


def test_the_page_of_claims_is_what_the_recorded_runs_say():
    name, text = next(results.render_results())
    assert (BENCHMARKS / name).read_text(encoding="utf-8") == text


@pytest.mark.slow
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


def printed(command, record, capsys):
    """The output of a claim's command for one of its records."""
    words = shlex.split(command.replace("RUN", str(BENCHMARKS / "runs" / record)))
    assert words[0] == "knowgate"
    as_json = [word for word in words[1:] if word != "--full"] + ["--json"] if words[1] == "eval" else words[1:]
    assert run(as_json) == 0
    return capsys.readouterr().out


def figure_pairs():
    """(command, figure, record) of each figure that an evaluation of a recorded gate prints."""
    return [
        (claim.command, figure, record)
        for claim in list_claims()
        for figure, record in claim.here
        if claim.command.startswith("knowgate eval") and "best cut" not in figure and record.endswith("-test")
    ]


def test_the_commands_of_the_first_table_print_its_figures(capsys):
    pairs = figure_pairs()
    assert len(pairs) >= 6
    for command, figure, record in pairs:
        [gate] = [row for row in json.loads(printed(command, record, capsys))["gates"] if row["gate"] not in BASELINES]
        rate, loss, gain = (gate[name]["value"] for name in ("rate", "loss", "gain"))
        texts = (
            f"{100 * (1 - rate):.0f} % at {-100 * loss or 0:+.1f}",
            f"{100 * gain:+.1f} at {100 * (1 - rate):.0f} % saved",
            f"{100 * gate['judged']['value']:.1f} %",
        )
        assert any(text in figure for text in texts), (command, figure, texts)


def test_other_commands_of_the_first_table_run_on_the_linked_records(capsys):
    outputs = [
        printed(claim.command, claim.here[0][1], capsys)
        for claim in list_claims()
        if claim.command.startswith("knowgate ") and not claim.command.startswith("knowgate eval")
    ]
    report, beta, examples, words = outputs
    assert "0.65" in report
    assert "69.6 %     37.0 %" in beta  # 30 % saved at -11.8
    assert all(rate in examples for rate in ("28.7 %", "89.7 %", "98.3 %"))  # k = 5, 20, 70
    assert all(f"({rate} %)" in words for rate in ("2.1", "100.0"))


def test_every_other_figure_names_a_way_to_compute_it():
    commands = {claim.command for claim in list_claims() if not claim.command.startswith("knowgate ")}
    modules = ("policy", "tables.closed_book", "tables.ik_transfer", "tables.cbdr_larger_base")
    assert commands == {FROM_RECORD, *(f"python -m benchmarks.{name}" for name in modules)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_page_of_a_paper_is_short():
    for name in ("kbm", "ik", "cbdr", "dh-icl"):
        assert len((BENCHMARKS / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_recorded_runs_hold_no_questions_answers_or_passages():
    folders = sorted(path.parent for path in BENCHMARKS.rglob("labels.jsonl.gz"))
    assert len(folders) >= 24
    for folder in folders:
        for _, row in read_jsonl(folder / "labels.jsonl.gz"):
            assert not any(row.get(field) for field in ("question", "answers", "passages"))
            assert not any(row.get("choices", ()))
