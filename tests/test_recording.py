"""Packed label runs name gates without paths, hold the slices that tables need, and contain no texts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import knowgate as kg
from benchmarks.recording.needs import read_run_needs
from benchmarks.recording.packing import pack, pack_row
from benchmarks.recording.printed_tables import copy_printed_tables
from benchmarks.tables import common, dhicl, kbm, kbm_plugged
from benchmarks.tables.names import recorded_name, rename_gates
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import RecordedNeeds, read_needs, write_needs
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from tests.support.invented import write_invented

KINDS = ("fast-changing", "slow-changing", "never-changing")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("dhicl:k=20,words=true/false,sign=paper", "dhicl"),
        ("dhicl:somewhere/log.db", "dhicl"),
        ("dhicl:k=5,words=true/false,sign=none", "dhicl:k=5,sign=none"),
        ("dhicl:log.db,words=1/2", "dhicl:words=1/2"),
        ("skr:log.db,mode=vote", "skr, vote"),
        ("gates/kbm-mastery,verdict=own", "kbm-mastery, own verdict"),
        ("gates/ik", "ik"),
        ("probe, linear", "probe, linear"),
        ("logprob:min", "logprob:min"),
    ],
)
def test_a_gate_has_one_name_however_it_was_written(written, name):
    assert recorded_name(written) == name
    assert recorded_name(name) == name


def test_a_judge_with_raw_scores_also_decides_by_its_own_verdict():
    named = rename_gates({"w/kbm": RecordedNeeds("w/kbm", 0.7, {"a": 0.9}, raw={"a": 0.4})})
    assert (named["kbm"].needs, named["kbm"].threshold) == ({"a": 0.9}, 0.7)
    assert (named["kbm, own verdict"].needs, named["kbm, own verdict"].threshold) == ({"a": 0.4}, 0.5)


def test_a_verdict_that_was_recorded_itself_is_kept():
    own = RecordedNeeds("kbm,verdict=own", 0.5, {"a": 0.1})
    named = rename_gates({"kbm": RecordedNeeds("kbm", 0.7, {"a": 0.9}, raw={"a": 0.4}), own.gate: own})
    assert named["kbm, own verdict"].needs == {"a": 0.1}


def test_a_packed_row_keeps_its_slices_and_loses_the_texts():
    answer = GradedAnswer("Paris", correct=True, samples=("Paris", "Rome"), sample_correct=(True, False), mastery=0.5)
    meta = {"dataset": "freshqa", "fact_type": "fast-changing", "num_hops": "one-hop", "source": "a text"}
    row = LabelRow("q", "Who?", "en", ("Paris",), meta=meta, closed=answer, mask=answer, iterative=answer)
    small = pack_row(row, foreign=False)
    assert small.meta == {"dataset": "freshqa", "fact_type": "fast-changing", "num_hops": "one-hop"}
    assert (small.question, small.answers) == ("", ())
    for side in (small.closed, small.mask, small.iterative):
        assert (side.samples, side.mastery) == ((), 0.5)


def test_answers_recorded_by_others_are_not_packed():
    row = LabelRow("q", "Who?", "en", closed=GradedAnswer("Paris", correct=True))
    assert pack_row(row, foreign=True).closed == GradedAnswer("", correct=True)


def test_printed_tables_are_copied_without_folder_paths(tmp_path):
    (tmp_path / "latency.md").write_text("| dhicl:/some/where/log.db | 0.1 / 0.2 |\n")
    balanced = {"data": "jsonl:/some/where/kbsat.jsonl", "model": "llm-1", "words": "true/false"}
    swapped = {**balanced, "data": "jsonl:/some/where/kbsat.swapped.jsonl"}
    (tmp_path / "kbsat.jsonl").write_text(f"asking ...\n{json.dumps(balanced)}\n")
    (tmp_path / "kbsat.swapped.jsonl").write_text(f"{json.dumps(swapped)}\n")
    (tmp_path / "out").mkdir()
    copy_printed_tables(tmp_path, tmp_path / "out", "llm-1")
    assert (tmp_path / "out" / "latency.md").read_text() == "| dhicl:log.db | 0.1 / 0.2 |\n"
    records = [json.loads(line) for line in (tmp_path / "out" / "kbsat-llm-1.jsonl").read_text().splitlines()]
    assert [record["data"] for record in records] == ["jsonl:kbsat.jsonl", "jsonl:kbsat.swapped.jsonl"]


# --- tables from runs as they are recorded now ----------------------------------------------------


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An open-book run and a closed-book run of FreshQA, packed and used in place of the committed runs."""
    made = write_invented(tmp_path / "made", 60)
    fresh = [
        replace(one, meta={"dataset": "freshqa", "fact_type": KINDS[number % 3], "num_hops": "one-hop"})
        for number, one in enumerate(made.questions[:30])
    ]
    kg.build_index(str(made.docs), str(tmp_path / "index"))
    kg.label(
        made.questions[30:], model=made.model, index=str(tmp_path / "index"), out=tmp_path / "nq_ctx-test", samples=2
    )
    kg.label(fresh, model=made.model, out=tmp_path / "freshqa-test", samples=2, closed_book=True)
    for name in ("nq_ctx-test", "freshqa-test"):
        ids = {row.id: 0.9 for row in RunFolder(tmp_path / name).rows()}
        needs = [
            RecordedNeeds(spec, 0.5, ids) for spec in ("dhicl:k=20,words=true/false,sign=paper", "dhicl:w/log.db,k=5")
        ]
        raw = dict.fromkeys(ids, 0.2)
        needs += [RecordedNeeds("w/kbm", 0.5, ids, raw=raw)]
        needs += [RecordedNeeds("v/kbm", 0.5, ids, "plug-in, fitted on gguf:v/other-llm", raw=dict.fromkeys(ids, 0.8))]
        write_needs(tmp_path / name, needs)
        pack(tmp_path / name, tmp_path / "runs" / common.QWEN / name, read_run_needs(tmp_path / name))
    for module in (common, dhicl, kbm, kbm_plugged):
        monkeypatch.setattr(module, "RUNS", tmp_path / "runs")
    common.load_test_run.cache_clear()
    yield tmp_path / "runs" / common.QWEN
    common.load_test_run.cache_clear()


def test_recorded_needs_are_packed_under_the_names_of_the_tables(runs):
    assert [record.gate for record in read_needs(runs / "nq_ctx-test")] == [
        "dhicl",
        "dhicl:k=5",
        "kbm",
        "kbm, of other-llm",
    ]


@pytest.mark.slow
def test_the_section_on_kbm_shows_rates_by_how_fast_answers_change(runs):
    text = "\n".join(kbm.kbm_section())
    assert "| gate | fast-changing (10) | slow-changing (10) | never-changing (10) | one-hop (30) |" in text
    assert "| kbm | 100.0 % | 100.0 % | 100.0 % | 100.0 % |" in text
    assert "| kbm, own verdict | 0.0 % | 0.0 % | 0.0 % | 0.0 % |" in text


def test_a_judge_of_another_llm_stands_beside_its_own_in_table_4(runs):
    text = "\n".join(kbm_plugged.plugged_section())
    assert "| qwen2.5-coder-1.5b | nq_ctx | itself |" in text
    assert "| qwen2.5-coder-1.5b | nq_ctx | other-llm |" in text
    assert "Llama3-70B (paper)" in text
    own, other = (line.split(" | ")[5] for line in text.splitlines() if "| nq_ctx | " in line)
    assert own.startswith("0.0 (0 %)") or "(0 %)" in own
    assert "(100 %)" in other


@pytest.mark.slow
def test_the_section_on_dhicl_shows_variants_and_sets_without_passages(runs):
    text = "\n".join(dhicl.dhicl_section())
    assert "| dhicl | 68.5 (50 %) | 32.9 (92 %) | 59.1 (77 %) | 100.0 (100 %) / 100.0 | (100 %) |" in text
    assert "| dhicl:k=5 |" in "\n".join(dhicl.dhicl_details())
