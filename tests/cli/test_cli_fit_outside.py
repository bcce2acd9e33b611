"""A gate of another package is fitted, saved, loaded and evaluated through the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from knowgate.training.gate import fit
from tests.cli.conftest import Call
from tests.support.outside_package import write_package
from tests.support.planted_run import planted_rows, write_run


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = write_package(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.startswith("outside_gate")]:
        del sys.modules[name]


def labelled(path: Path, seed: int) -> Path:
    """Every question the LLM does not know has two words more: what the outside gate looks at."""
    rows, _ = planted_rows(120, seed=seed)
    longer = [row if row.closed.correct else replace(row, question=f"so very {row.question}") for row in rows]
    return write_run(path, longer)


def test_it_is_fitted_saved_loaded_and_evaluated(call: Call, site: Path, tmp_path: Path):
    train, test = labelled(tmp_path / "train", 0), labelled(tmp_path / "test", 1)
    fitted = call("fit", "outside", "--labels", train, "--out", "gate", "--words", "3", "--seed", "7")
    assert (fitted.code, "spirit calm, seed 7, unused None, layers 0" in fitted.err) == (0, True)
    assert "auroc" in fitted.out
    evaluated = call("eval", "--labels", test, "--gates", "gate", "--resamples", "5", "--json")
    assert evaluated.code == 0
    assert json.loads(evaluated.out)["gates"][0]["auroc"]["value"] == 1.0
    decided = call(
        "decide", "one two three", "one two three four", "--gate", "gate", "--plug-in", "--model", "fake", "--json"
    )
    assert [json.loads(line)["retrieve"] for line in decided.out.splitlines()] == [False, True]


def test_its_options_and_its_first_words_are_in_the_help(call: Call, site: Path):
    shown = call("fit", "outside", "--help").out
    assert "Long questions are not known." in shown
    assert "More that" not in shown
    for words in ("--words", "Longest question that is known.", "calm|bold", "--labels", "--target"):
        assert words in shown
    assert "--unused" not in shown


def test_the_list_of_gates_has_it_and_says_what_cannot_be_loaded(call: Call, site: Path):
    shown = " ".join(call("fit", "--help").out.split())
    assert "Long questions are not known." in shown
    assert "(outside_gate.nothing:fit_nothing) cannot be loaded: No module named 'outside_gate.nothing'" in shown


def test_the_list_of_all_gates_names_it_without_loading_it(call: Call, site: Path):
    assert "from another package: outside_gate.gate:LengthGate" in call("gates").out
    assert "outside_gate" not in sys.modules


def test_one_that_cannot_be_loaded_is_a_sentence_and_hinders_no_other(call: Call, site: Path):
    broken = call("fit", "broken", "--labels", "run", "--out", "x")
    assert (broken.code, len(broken.err.splitlines())) == (1, 1)
    assert "the fit function of 'broken' (outside_gate.nothing:fit_nothing) cannot be loaded" in broken.err
    assert call("fit", "probe", "--help").code == 0
    assert "outside_gate.fit" not in sys.modules


def test_its_values_are_checked(call: Call, site: Path, tmp_path: Path):
    run = labelled(tmp_path / "run", 0)
    said = call("fit", "outside", "--labels", run, "--out", "gate", "--spirit", "mad").err
    assert "--spirit 'mad' is not allowed: it must be 'calm' or 'bold'." in said


def test_the_library_fits_it_too(site: Path, tmp_path: Path):
    gate = fit("outside", labelled(tmp_path / "run", 0), out=tmp_path / "gate", words=4)
    assert gate.artifact.options == {"words": 4}
