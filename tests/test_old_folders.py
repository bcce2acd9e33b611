"""Folders made before the modules were moved load and give the numbers they gave then (see fixtures/old/README.md)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knowgate.cli.main import run as command
from knowgate.core.files import sha256_file
from knowgate.core.validation import read_json
from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope
from knowgate.data.preferences import PreferenceFolder
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.evaluation.traffic_log import read_traffic_log
from knowgate.gates import PACKAGED_GATES, load_gate
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.gates.offline_scoring import score_gate
from knowgate.models import load_model
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.retrieval import load_retriever
from knowgate.retrieval.rerankers import load_reranker
from knowgate.types import Passage

HOME = Path(__file__).parent / "fixtures" / "old"
EXPECTED = read_json(HOME / "expected.json")
BY_MEANING = {"dense", "hybrid", "adaptive", "ik-text"}  # these need MiniLM
Say = Callable[..., str]


def named(names: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.model] if name in BY_MEANING else []) for name in names]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of them are written to when they are opened: locks, the log's journal."""
    return Path(shutil.copytree(HOME, tmp_path_factory.mktemp("old") / "old"))


@pytest.fixture(autouse=True)
def old(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All names inside are relative to this folder."""
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture(scope="module")
def trials(copy: Path) -> dict[str, LabelTable]:
    return {name: load_label_table([copy / name]) for name in ("run", "run-packed")}


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command prints; it must end well."""

    def invoke(*arguments: str) -> str:
        code = command(list(arguments))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return invoke


def near(value: Any, *, network: bool = False) -> Any:
    return pytest.approx(value, abs=1e-3 if network else 2e-5)


# --- models, prompts, the packaged gate -----------------------------------------------------------


def test_the_fake_model_is_still_the_one_they_were_made_with():
    assert load_model("fake:table.json").fingerprint == EXPECTED["model_fingerprint"]


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [
        ("answer", "28ce6c18b849a5f3"),
        ("history", "5e328baacd248502"),
        ("ik", "4b54633438913883"),
        ("judge", "7db1bc09c5eb85ba"),
        ("kbm", "5de756d21d0fa8cb"),
        ("self", "8e336509d6331cf4"),
    ],
)
def test_the_wording_of_the_prompts_is_unchanged(name: str, fingerprint: str):
    assert load_packaged_templates(name).fingerprint == fingerprint


def test_the_packaged_gate_is_unchanged():
    folder = PACKAGED_GATES / "smollm"
    assert {name: sha256_file(folder / name)[:16] for name in ("gate.json", "weights.safetensors")} == {
        "gate.json": "44d5b2356b2bd807",
        "weights.safetensors": "e32c4cd82d585d8a",
    }
    made = read_artifact(folder).manifest
    assert (made["model"]["fingerprint"], made["prompts"]) == (
        "b179c9523d0e6a0f",
        load_packaged_templates("answer").fingerprint,
    )


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "run-packed"])
def test_a_label_run_has_its_rows_and_what_is_on_record(name: str, trials: dict[str, LabelTable]):
    expected = EXPECTED[name]
    rows = list(RunFolder(Path(name)).rows())
    assert [row.id for row in rows] == expected["ids"]
    assert len(trials[name].rows) == expected["rows"]
    assert sorted(trials[name].recorded_needs) == expected["recorded"]


def test_a_label_run_has_its_verdicts(trials: dict[str, LabelTable]):
    trial, accuracy = trials["run"], EXPECTED["run"]["accuracy"]
    assert trial.open_book_right is not None
    assert (trial.closed_book_right.mean(), trial.open_book_right.mean()) == near(
        (accuracy["closed"], accuracy["open"])
    )


def test_a_label_run_has_its_hidden_states():
    folder, expected = RunFolder(Path("run")), EXPECTED["run"]
    assert folder.vector_names() == expected["vectors"]
    first = list(folder.rows())[:3]
    sums = {name: folder.vectors(first, name).astype(np.float64).sum(axis=1) for name in expected["vectors"]}
    for name, values in expected["vector_sums"].items():
        assert sums[name] == pytest.approx(values, abs=1e-3)


def test_a_label_run_is_reported(say: Say):
    (shown,) = json.loads(say("report", "run", "--no-html", "--json"))["runs"]
    closed, opened = shown["accuracy"]["closed"], shown["accuracy"]["open"]
    assert (closed["hits"], closed["n"], opened["hits"], opened["n"]) == (26, 60, 47, 58)  # counted in labels.jsonl


# --- gates ----------------------------------------------------------------------------------------


def check_scores(trial: LabelTable, spec: str, expected: Mapping[str, Any], *, network: bool = False) -> None:
    scores = score_gate(trial, spec)
    needs = {row.id: float(need) for row, need in zip(trial.rows, scores.needs, strict=True)}
    assert scores.threshold == near(expected["threshold"])
    assert {name: needs[name] for name in expected["needs"]} == near(expected["needs"], network=network)


@pytest.mark.parametrize("name", named(EXPECTED["gates"]))
def test_a_gate_decides_as_before(name: str, trials: dict[str, LabelTable]):
    check_scores(trials["run"], name, EXPECTED["gates"][name], network=name not in ("probe", "fusion-cheap"))


@pytest.mark.parametrize("spec", EXPECTED["plain_gates"])
def test_rows_give_plain_gates_the_same_needs(spec: str, trials: dict[str, LabelTable]):
    check_scores(trials["run"], spec, EXPECTED["plain_gates"][spec])


@pytest.mark.parametrize("spec", EXPECTED["packed_gates"])
def test_packed_rows_give_the_same_needs(spec: str, trials: dict[str, LabelTable]):
    check_scores(trials["run-packed"], spec, EXPECTED["packed_gates"][spec])


@pytest.mark.parametrize("name", ["calibrated-loss", "calibrated-rate"])
def test_a_calibrated_gate_keeps_its_threshold_and_evidence(name: str):
    assert load_gate(name).threshold == near(EXPECTED["gates"][name]["threshold"])
    assert read_artifact(Path(name)).manifest["calibration"]


def test_gates_are_compared_on_a_run(say: Say, trials: dict[str, LabelTable]):
    options = ["--gates", "probe,fusion-cheap", "--resamples", "0", "--no-html", "--json"]
    shown = {one["gate"]: one for one in json.loads(say("eval", "--labels", "run", *options))["gates"]}
    accuracy = EXPECTED["run"]["accuracy"]
    assert shown["never"]["accuracy"]["value"] == near(accuracy["closed"])
    assert shown["always"]["accuracy"]["value"] == near(accuracy["open"])
    assert shown["probe"]["rate"]["value"] == near((score_gate(trials["run"], "probe").needs > 0.5).mean())


# --- indexes, history, preferences, rerankers -----------------------------------------------------


@pytest.mark.parametrize("kind", named(EXPECTED["index"]))
def test_an_index_finds_what_it_found(kind: str):
    (found,) = load_retriever(f"index-{kind}").search([EXPECTED["query"]], 2)
    assert [passage.id.partition("#")[0] for passage in found] == [one["id"] for one in EXPECTED["index"][kind]]
    scores = [one["score"] for one in EXPECTED["index"][kind]]
    assert [passage.score for passage in found] == near(scores, network=kind == "dense")


@pytest.mark.model
def test_a_history_finds_what_it_found(say: Say):
    expected = EXPECTED["history"]
    history = open_history("history.db")
    (found,) = history.search([expected["question"]], 3, HistoryScope(**expected["scope"]))
    assert [one.question for one in found] == [one["question"] for one in expected["found"]]
    assert [one.label for one in found] == [one["label"] for one in expected["found"]]
    assert [one.similarity for one in found] == near([one["similarity"] for one in expected["found"]], network=True)
    assert len(say("history", "export", "--history", "history.db").splitlines()) == expected["entries"]


def test_preferences_are_read_as_they_were():
    rows = list(PreferenceFolder(Path("preferences")).rows())
    assert len(rows) == len(EXPECTED["preferences"])
    for row, expected in zip(rows, EXPECTED["preferences"], strict=True):
        assert (row.id, row.split, list(row.positives), list(row.negatives)) == tuple(
            expected[name] for name in ("id", "split", "positives", "negatives")
        )
        assert [row.base, *(one.shift for one in row.candidates)] == near([expected["base"], *expected["shifts"]])


def test_a_reranker_gives_its_scores():
    expected = EXPECTED["reranker"]
    passages = [Passage(str(place), text) for place, text in enumerate(expected["passages"])]
    (scores,) = load_reranker("reranker").score([expected["question"]], [passages])
    assert scores == near(expected["scores"], network=True)


def test_a_reranker_is_compared_on_preferences(say: Say, tmp_path: Path):
    say(
        "eval-rerank", "--pref", "preferences", "--rerank", "reranker", "--split", "dev", "--out", str(tmp_path / "out")
    )
    assert (tmp_path / "out" / "rerank.md").is_file()


# --- traffic, recordings, settings ----------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED["traffic"])
def test_a_traffic_log_is_replayed(name: str, say: Say):
    expected = EXPECTED["traffic"][name]
    events = read_traffic_log(Path(name)).events
    assert [event.need for event in events] == near(expected["needs"])
    assert sum(event.retrieved for event in events) == expected["retrieved"]
    assert json.loads(say("replay", name, "--json"))


def test_a_recording_answers_for_its_model(say: Say):
    expected = EXPECTED["recording"]
    model = ["--model", "replay:recording", "--gate", expected["gate"], "--index", "index-bm25", "--k", "2"]
    said = [json.loads(line) for line in say("ask", *expected["questions"], *model, "--json").splitlines()]
    assert [one["need"] for one in said] == near(expected["needs"])
    logged = [json.loads(line)["answer"] for line in Path("traffic.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["answer"] for one in said] == logged


def test_a_config_file_decides_as_before(say: Say):
    expected = EXPECTED["config"]
    said = json.loads(say("decide", expected["question"], "--config", "config.toml", "--json"))
    assert {name: said[name] for name in expected} == {
        **expected,
        "need": near(expected["need"]),
        "threshold": near(expected["threshold"]),
    }
