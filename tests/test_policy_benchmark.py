"""The policy benchmark: policies chosen on train rows, from records that hold numbers only."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import policy, policy_evaluation
from benchmarks.policy_fits import list_fitted
from benchmarks.policy_predictions import HOME, MIXED, Predictions, fit_calibration, load_predictions, make_gates
from benchmarks.tables import policy as policy_tables
from knowgate.training.policy import choice
from tools import generated_sections
from tools.structure import ROOT

pytestmark = pytest.mark.records


@pytest.fixture
def printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["policy.py", "--json"])
    policy.main()
    return json.loads(capsys.readouterr().out)


def test_prints_one_object_per_recorded_llm_and_one_for_mixed_traffic(printed):
    assert list(printed) == [
        "llama3_8b", "gpt4_nq", "chatgpt_nq", "davinci3_nq", "gpt3_realtimeqa", "llama4_realtimeqa", MIXED,
        *list_fitted(),
    ]  # fmt: skip
    for result in printed.values():
        assert result["oracle"] >= max(result["never"], result["always"])
        chosen = result["policy"]
        assert 0 <= chosen["searches"] <= 1 <= chosen["llm_calls"] <= 2
        assert chosen["models"] <= 4
        for key, other in (("against_always", "always"), ("against_never", "never")):
            assert chosen[key]["value"] == pytest.approx(chosen["right"] - result[other], abs=2e-5)
            assert chosen[key]["low"] <= chosen[key]["value"] <= chosen[key]["high"]


def test_the_headline_is_what_the_command_chose(printed):
    llama, gpt4 = printed["llama3_8b"], printed["gpt4_nq"]
    assert (llama["policy"]["gate"], llama["policy"]["arbiter"]) == ("judge", "rules")
    assert llama["policy"]["searches"] < 0.65
    assert llama["policy"]["against_random"]["low"] > 0
    assert gpt4["policy"]["gate"] == "always"


def test_the_choices_on_all_train_rows_are_listed_among_the_others(printed):
    own = printed["gpt4_nq"]["others"][0]
    assert own["policy"] == "chosen on all train rows"
    assert own["searches"] < 0.2
    assert own["against_always"]["value"] > 0.01
    assert [each["policy"] for each in printed["chatgpt_nq"]["others"]].count(
        "chosen on all train rows"
    ) == 0  # also always


def test_the_choice_does_not_depend_on_test_rows(monkeypatch):
    expected = policy_evaluation.choose("gpt4_nq").chosen
    rows = load_predictions("gpt4_nq")
    is_test = rows.folds < 0
    changed = dataclasses.replace(
        rows,
        closed=np.where(is_test, ~rows.closed, rows.closed),
        logits=np.where(is_test[:, None, None], 0.0, rows.logits),
    )
    monkeypatch.setattr(policy_evaluation, "load_predictions", lambda name, judge="": changed)
    assert policy_evaluation.choose.__wrapped__("gpt4_nq").chosen == expected


def test_a_policy_that_is_unsafe_on_other_questions_is_chosen_again_with_stricter_limits(monkeypatch):
    chosen = policy_evaluation.choose("llama3_8b").chosen
    assert chosen.gate == "judge, gain"
    assert chosen.loss.mean <= choice.ChoiceOptions().max_loss / 2
    monkeypatch.setattr(choice, "LOSS_SHARES", (1.0,))
    assert policy_evaluation.choose.__wrapped__("llama3_8b").chosen.gate == choice.ALWAYS


def test_stars_are_corrected_for_the_comparisons_of_their_table():
    count = policy_tables.count_comparisons(policy_tables.list_headlines())
    assert count == policy_evaluation.count_headline_comparisons()
    for line in policy_tables.headline_table().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert (cells[7] == "–") == (cells[3] == "always")  # always is not compared with itself


def test_readme_names_every_case_of_the_command_and_counts_those_that_always_search(printed):
    *table, _, sentence = policy_tables.readme_table().splitlines()
    titles = policy_tables.list_fitted_titles()
    assert set(titles) >= {"llama3_8b", "gpt4_nq", "chatgpt_nq", "davinci3_nq"}
    assert "llama4_realtimeqa" not in titles  # its policy was chosen by the benchmark, not by the command
    always = [name for name in titles if policy_tables.is_always(printed[name]["policy"])]
    assert len(table[2:]) + len(always) == len(titles)
    assert f"In {len(always)} of {len(titles)} cases" in sentence
    for name, title in titles.items():
        if name in always:
            assert title.partition(":")[0].partition(",")[0] in sentence
        else:
            assert any(row.startswith(f"| {title} |") for row in table)


def test_the_table_of_readme_is_up_to_date():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert generated_sections.update_sections("README.md") == text, "run `make readme`"


def test_llms_of_one_data_set_are_listed_together():
    titles = ["A, NQ", "B, news (RealTimeQA)", "C, NQ", "mixed: A on NQ, B on news"]
    assert policy_tables.list_by_data_set(titles) == "A, C (Natural Questions); B (news); mixed"


def test_random_retrieves_as_often_with_the_same_arbiter(printed):
    chosen = printed["gpt4_nq"]["policy"]
    never, always = (printed["gpt4_nq"][name] for name in ("never", "always"))
    assert chosen["random"] == pytest.approx(never + chosen["searches"] * (always - never), abs=1e-4)
    assert chosen["against_random"]["value"] == pytest.approx(chosen["right"] - chosen["random"], abs=1e-4)
    rules = next(each for each in printed["llama3_8b"]["others"] if each["policy"] == "always, rules arbiter")
    assert (rules["models"], rules["llm_calls"]) == (0, 2)
    assert printed["llama3_8b"]["policy"]["random"] > 0.359  # with the arbiter; 35.5 % without


@pytest.mark.slow
def test_without_options_tables_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["policy.py"])
    policy.main()
    assert capsys.readouterr().out.startswith("## Policies")


PRINT_LONG_TABLES = """
from benchmarks import policy
policy.policy_tables = lambda: ["## Policies", *["| a row |"] * 100_000]  # more than fits into a pipe
policy.main()
"""


def test_a_closed_pipe_is_no_error():
    command = f'{sys.executable} -c "$0" | head -1'
    arguments = ["sh", "-c", command, PRINT_LONG_TABLES]
    ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout == "## Policies\n"
    assert ended.stderr == ""


def test_gates_of_the_question_cost_no_second_call():
    rows: Predictions = load_predictions("gpt4_nq").train
    gates = {gate.name: gate for gate in make_gates(rows, fit_calibration("gpt4_nq"))}
    assert not gates["question, gain"].reads_draft
    assert gates["judge, gain"].reads_draft
    assert all(((gate.needs >= 0) & (gate.needs <= 1)).all() for gate in gates.values())


def test_a_difference_has_the_interval_of_its_paired_rows():
    same = policy_evaluation.compare(np.ones(100, dtype=bool), np.ones(100, dtype=bool))
    assert (same["value"], same["low"], same["high"], same["excludes_zero_corrected"]) == (0, 0, 0, False)
    better = policy_evaluation.compare(np.ones(100, dtype=bool), np.arange(100) < 50, 14)
    assert better["low"] < better["value"] == 0.5 < better["high"]
    assert better["excludes_zero_corrected"]


def test_records_hold_ids_and_numbers_only():
    for file in sorted(HOME.glob("*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                assert not [key for key, value in row.items() if isinstance(value, str) and key != "id"]
                assert " " not in row["id"]
