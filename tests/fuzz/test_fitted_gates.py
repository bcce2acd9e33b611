"""The door for fitted gates: a damaged folder is refused, or gives the needs of the whole one.

A forger who makes the checksums fit may change values; then what comes out must still be needs.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from knowgate.core.artifacts import compute_digests
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.gates import load_gate
from knowgate.gates.artifacts.gate_folder import compute_checksum, read_artifact, revise_artifact
from knowgate.gates.calibration.deployment import Deployment, describe_guarantee
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.offline_scoring import mark_seen_rows
from knowgate.training.examples import load_examples
from knowgate.training.gate import fit
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.uar import fit_uar_heads
from tests.support.fitted_gates import CRITERIA, MODEL, label_facts
from tests.support.fuzz import attempt, tries
from tests.support.hash_embedder import HashEmbedder
from tests.support.mutations import damaged_copies
from tests.support.planted_run import planted_rows, write_run

OLD = Path(__file__).parents[1] / "fixtures" / "old"
MINILM = "898a7b01a60d46b707bd8430b75d75ffd849781b10fbc77fb70be6517e4af61d"  # what two of them were fitted with
NUMPY = ["probe", "probe-mlp", "fusion", "fusion-cheap", "uar", "adaptive", "ik-text", "calibrated-loss"]
JUDGES = ["kbm", "ik-lora"]
FORMS = ["with digests", "of an earlier version"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gates as they were fitted once, and under `sealed` the same as they are written now."""
    home = Path(shutil.copytree(OLD, tmp_path_factory.mktemp("gates") / "old"))
    for name in [*NUMPY, *JUDGES]:
        artifact = read_artifact(home / name)
        revise_artifact(artifact, artifact.manifest, {}, home / "sealed" / name)
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)  # the judges' base is named relative to it


@pytest.fixture(scope="module")
def trial(home: Path) -> LabelTable:
    return load_label_table([home / "run"]).subset(range(12))


def used(folder: Path, trial: LabelTable) -> tuple[list[float], float, list[bool]]:
    """Everything that is done with a gate: needs, threshold, what it has seen; and it is shown."""
    gate = load_gate(str(folder))
    assert isinstance(gate, FittedGate)
    if "embedder" in gate.artifact.options:
        gate = replace(gate, embedder=HashEmbedder(384, MINILM))  # type: ignore[call-arg]
    assert repr(gate)
    assert gate._repr_html_()
    assert isinstance(describe_guarantee(gate, Deployment(retriever="another", k=3)), str)
    assert gate.request.draft_tokens >= 0
    needs = gate.score(trial.questions, trial.readings)
    distances = gate.distances(trial.questions, trial.readings)
    assert all(one is None or 0 <= one < math.inf for one in distances)
    return needs, gate.threshold, mark_seen_rows(trial, folder).tolist()


def sign(folder: Path) -> None:
    """As a forger would: every digest and checksum fits again."""
    manifest = json.loads((folder / "gate.json").read_text())
    weights = folder / "weights.safetensors"
    data = weights.read_bytes() if weights.is_file() else b""
    if "files" in manifest:
        manifest["files"] = compute_digests(folder, exclude=["gate.json", "README.md"])
    manifest["weights_sha256"] = hashlib.sha256(data).hexdigest()
    manifest["checksum"] = compute_checksum(manifest)
    (folder / "gate.json").write_text(json.dumps(manifest))


def try_gate(folder: Path, place: Path, trial: LabelTable, count: int, *, sealed: bool) -> None:
    whole, name = used(folder, trial), folder.name
    for mutation in damaged_copies(folder, place, count, len(name), sign):
        forged = " with checksums that fit" if mutation.signed else ""
        outcome = attempt("fitted gates", f"{mutation.kind}{forged}", lambda: used(place, trial))
        if outcome.refusal:
            continue
        needs, threshold, seen = outcome.value  # type: ignore[misc]
        if mutation.signed:
            assert all(0 <= need <= 1 for need in needs), mutation
            assert math.isfinite(threshold), mutation
        else:
            assert (needs, threshold) == whole[:2], mutation
            assert not sealed or seen == whole[2], mutation
    assert not Path("exploded").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NUMPY)
def test_a_damaged_gate_is_refused_or_the_same(
    name: str, form: str, home: Path, trial: LabelTable, tmp_path: Path
) -> None:
    folder = home / "sealed" / name if form == FORMS[0] else home / name
    try_gate(folder, tmp_path / "gate", trial, tries(4, 60), sealed=form == FORMS[0])


@pytest.mark.parametrize("name", JUDGES)
def test_a_damaged_judge_is_refused_or_the_same(name: str, home: Path, trial: LabelTable, tmp_path: Path) -> None:
    try_gate(home / "sealed" / name, tmp_path / "gate", trial.subset(range(2)), tries(1, 15), sealed=True)


def test_a_damaged_gate_of_uar_as_it_is_fitted_now_is_refused_or_the_same(tmp_path: Path) -> None:
    """Heads with a mean and a scale of their own; the folder of an earlier version has one number for all."""
    run = label_facts(tmp_path / "run")
    examples = load_examples([run], target="known")
    save_fitted(fit_uar_heads(examples, MODEL, CRITERIA), examples, tmp_path / "uar")
    assert "knowledge.mean" in read_artifact(tmp_path / "uar").tensors
    try_gate(tmp_path / "uar", tmp_path / "gate", load_label_table([run]).subset(range(12)), tries(4, 60), sealed=True)


def test_a_damaged_gate_that_knows_distances_is_refused_or_the_same(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", *planted_rows(120))
    fit("probe", [run], out=tmp_path / "probe", kind="linear")
    try_gate(
        tmp_path / "probe", tmp_path / "gate", load_label_table([run]).subset(range(12)), tries(4, 60), sealed=True
    )
