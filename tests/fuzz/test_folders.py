"""The doors for everything else that knowgate wrote: a damaged folder is refused, or gives what the whole one gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from knowgate.core.artifacts import compute_digests
from knowgate.data.preferences import PreferenceFolder
from knowgate.data.runs.folder import RunFolder
from knowgate.data.runs.records import RecordedUsefulness, read_needs, read_usefulness, write_usefulness
from knowgate.data.runs.table import load_label_table
from knowgate.models.fake import FakeModel
from knowgate.models.replay import RecordingModel, ReplayModel
from knowgate.retrieval.index import build_index, read_previous_index
from knowgate.retrieval.index_folder import open_hybrid
from knowgate.retrieval.rerankers.cross_encoder import read_reranker_manifest as read_reranker
from knowgate.types import LabelPrompt, Prompt, SignalRequest
from tests.support.fuzz import attempt, tries
from tests.support.mutations import Mutation, Sign, damaged_copies
from tests.support.planted_run import planted_rows, write_run
from tests.support.retrieval_fakes import CountingEmbedder

OLD = Path(__file__).parents[1] / "fixtures" / "old"
PROMPTS = [Prompt("Why is the sky blue?"), Prompt("Who wrote Faust?")]
WANT = SignalRequest(draft_tokens=2, layers=(0, -1), after_draft=True, samples=2, seed=7)
Check = Callable[[Any, Mutation], None]


def bring(
    door: str, folder: Path, place: Path, use: Callable[[Path], Any], check: Check, count: int, sign: Sign | None = None
) -> None:
    """Damaged copies of a folder to a door; what is used goes to `check`."""
    for mutation in damaged_copies(folder, place, count, len(door), sign):
        forged = " with checksums that fit" if mutation.signed else ""
        outcome = attempt(door, f"{mutation.kind}{forged}", lambda: use(place))
        if not outcome.refusal:
            check(outcome.value, mutation)


def anything(value: Any, mutation: Mutation) -> None:
    """It was read as what it should be: the types of a record are checked where it is made."""


# --- indexes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("index") / "index"
    build_index(OLD / "docs", out, kind="hybrid", embedder=CountingEmbedder())
    return out


def searched(folder: Path) -> Any:
    found = open_hybrid(folder, CountingEmbedder()).search(["harbour festival river", "market", "nothing at all"], 3)
    return [[(passage.id, passage.text, passage.score) for passage in passages] for passages in found]


def test_a_damaged_index_is_refused_or_finds_the_same(index: Path, tmp_path: Path):
    whole = searched(index)

    def check(value: Any, mutation: Mutation) -> None:
        assert value == whole, mutation

    bring("indexes", index, tmp_path / "index", searched, check, tries(10, 180))


def unsealed(folder: Path) -> None:
    """As if written by an earlier version, or by a forger."""
    record = json.loads((folder / "index.json").read_text())
    record.pop("files", None)
    (folder / "index.json").write_text(json.dumps(record))


def test_an_index_without_digests_is_refused_or_searched(index: Path, tmp_path: Path):
    old = Path(shutil.copytree(index, tmp_path / "old"))
    unsealed(old)
    bring("indexes", old, tmp_path / "index", searched, anything, tries(6, 120), unsealed)


def test_a_damaged_index_is_built_anew_and_then_finds_the_same(index: Path, tmp_path: Path):
    whole = searched(index)

    def rebuilt(folder: Path) -> Any:
        read_previous_index(folder)
        build_index(OLD / "docs", folder, kind="hybrid", embedder=CountingEmbedder())
        return searched(folder)

    def check(value: Any, mutation: Mutation) -> None:
        assert value == whole, mutation

    bring("indexes", index, tmp_path / "index", rebuilt, check, tries(4, 40))


# --- label runs, needs, preferences ---------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows, states = planted_rows(12)
    run = write_run(tmp_path_factory.mktemp("run") / "run", rows[:5], {name: s[:5] for name, s in states.items()})
    RunFolder(run).append(rows[5:], {name: s[5:] for name, s in states.items()})
    shutil.copy(OLD / "run" / "needs.jsonl", run / "needs.jsonl")
    write_usefulness(run, RecordedUsefulness("kbm", "f1", {row.id: place % 2 == 0 for place, row in enumerate(rows)}))
    return run


def states_of(folder: Path) -> dict[str, Any]:
    """The hidden states that each question of a run has, all of them."""
    run = RunFolder(folder)
    rows, names = list(run.rows()), run.vector_names()
    states = [run.vectors(rows, name) for name in names] if rows else []
    load_label_table([folder])
    read_needs(folder)
    read_usefulness(folder)
    assert repr(run)
    return {row.id: [block[place].tolist() for block in states] for place, row in enumerate(rows)}


def test_rows_of_a_damaged_run_have_their_own_states_or_none(run: Path, tmp_path: Path):
    whole = states_of(run)

    def check(value: Any, mutation: Mutation) -> None:
        assert all(states == whole[name] for name, states in value.items() if states), mutation

    bring("label runs", run, tmp_path / "run", states_of, check, tries(12, 250))


@pytest.mark.parametrize("name", ["run", "run-packed"])
def test_a_damaged_run_of_an_earlier_version_is_refused_or_read(name: str, tmp_path: Path):
    bring("label runs", OLD / name, tmp_path / "run", states_of, anything, tries(4, 80))


def test_damaged_preferences_are_refused_or_read(tmp_path: Path):
    def rows(folder: Path) -> Any:
        kept = [row for row in PreferenceFolder(folder).rows() if row.is_kept]
        return [row.keep_pool().to_question() for row in kept]

    bring("preferences", OLD / "preferences", tmp_path / "preferences", rows, anything, tries(6, 150))


# --- rerankers ------------------------------------------------------------------------------------


def test_a_damaged_reranker_is_refused_or_has_the_same_files(tmp_path: Path):
    sealed = Path(shutil.copytree(OLD / "reranker", tmp_path / "sealed"))
    manifest = json.loads((sealed / "reranker.json").read_text())
    digests = compute_digests(sealed, exclude=["reranker.json", "README.md"])
    (sealed / "reranker.json").write_text(json.dumps({**manifest, "files": digests}))

    def files(folder: Path) -> Any:
        return read_reranker(folder) and compute_digests(folder, exclude=["reranker.json", "README.md"])

    def check(value: Any, mutation: Mutation) -> None:
        assert value == digests or mutation.what.startswith("reranker.json"), mutation

    bring("rerankers", sealed, tmp_path / "reranker", files, check, tries(6, 150))


# --- recordings -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording") / "recording"
    asked(RecordingModel(FakeModel(name="small"), folder))
    return folder


def asked(model: Any) -> Any:
    readings = model.read(PROMPTS, WANT)
    texts = [
        (reading.draft, reading.samples, {k: v.tolist() for k, v in reading.hidden.items()}) for reading in readings
    ]
    logits = [row.tolist() for row in model.label_logits([LabelPrompt(("sky:",))], ["yes", "no"])]
    return texts, logits, model.generate(PROMPTS, max_tokens=4), model.fits(PROMPTS, 4), model.name, model.depth


def test_a_damaged_recording_is_refused_or_answers_the_same(recording: Path, tmp_path: Path):
    whole = asked(ReplayModel(recording))

    def check(value: Any, mutation: Mutation) -> None:
        told = mutation.what.startswith("recording.json")  # whose it is: a name, no result
        assert value[:4] == whole[:4] if told else value == whole, mutation

    bring("recordings", recording, tmp_path / "recording", lambda path: asked(ReplayModel(path)), check, tries(10, 180))


def test_a_damaged_recording_of_an_earlier_version_is_refused_or_read(tmp_path: Path):
    def read(folder: Path) -> Any:
        model = ReplayModel(folder)
        return [model._decode(key, lambda key, value: value) for key in model._offsets], model.name, model.offers

    bring("recordings", OLD / "recording", tmp_path / "recording", read, anything, tries(5, 60))
