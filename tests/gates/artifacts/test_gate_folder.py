"""Fitted gates on disk: what is changed, damaged, foreign or made for another LLM is refused with a sentence."""

import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from knowgate.core.artifacts import compute_digests
from knowgate.data.splits import fingerprint_text
from knowgate.errors import ArtifactError, BadInput, ModelError, UnknownName
from knowgate.gates import load_fitted_gate, load_gate
from knowgate.gates.artifacts.gate_folder import (
    compute_checksum,
    is_artifact,
    read_artifact,
    revise_artifact,
    write_artifact,
)
from knowgate.models.fake import FakeModel
from knowgate.server.upstream.draft import UpstreamDraftModel
from knowgate.types import Question, Reading, Sampling, Signal, SignalRequest

OLD = Path(__file__).parents[2] / "fixtures" / "old"
MODEL, PROMPTS = FakeModel(name="bound"), "wording"
TENSORS = {
    "mean": np.zeros(2, dtype=np.float32),
    "scale": np.ones(2, dtype=np.float32),
    "0.0.weight": np.array([[1.0, 0.0]], dtype=np.float32),
    "0.0.bias": np.zeros(1, dtype=np.float32),
}
MANIFEST = {
    "gate": "probe",
    "options": {"layer": 4, "position": "pre", "kind": "linear"},
    "needs": ["hidden"],
    "want": {"layers": [4]},
    "model": {"name": "bound", "fingerprint": MODEL.fingerprint},
    "prompts": PROMPTS,
    "calibration": {"kind": "none"},
    "threshold": 0.4,
}


@pytest.fixture
def folder(tmp_path):
    write_artifact(tmp_path / "gate", MANIFEST, TENSORS, "# a card")
    return tmp_path / "gate"


def edit(folder, *, signed=False, **values):
    """Change the manifest by hand; `signed`: with a checksum that fits, as a forger would."""
    manifest = {**json.loads((folder / "gate.json").read_text()), **values}
    sealed = {**manifest, "checksum": compute_checksum(manifest)} if signed else manifest
    (folder / "gate.json").write_text(json.dumps(sealed))


def swap_weights(folder, data):
    """Other weights, with the manifest made to fit them."""
    (folder / "weights.safetensors").write_bytes(data)
    digests = compute_digests(folder, exclude=["gate.json", "README.md"])
    edit(folder, signed=True, weights_sha256=hashlib.sha256(data).hexdigest(), files=digests)


def reading(*state):
    return Reading(hidden={4: np.array(state, dtype=np.float32)})


# --- reading --------------------------------------------------------------------------------------


def test_a_written_artifact_is_read_back(folder):
    artifact = read_artifact(folder)
    assert all(np.array_equal(artifact.tensors[name], block) for name, block in TENSORS.items())
    assert {key: artifact.manifest[key] for key in MANIFEST} == MANIFEST


def test_the_gate_requests_what_the_manifest_says(folder):
    gate = load_gate(str(folder))
    assert (gate.name, gate.threshold, gate.needs, gate.request) == (
        "probe",
        0.4,
        {Signal.HIDDEN},
        SignalRequest(layers=(4,)),
    )


def test_scores_follow_from_the_weights(folder):
    needs = load_gate(str(folder)).score([Question("a"), Question("b")], [reading(0.0, 5.0), reading(1.0, 5.0)])
    assert needs == pytest.approx([0.5, 1 / (1 + np.exp(-1))])
    assert load_gate(str(folder)).score([], []) == []


def test_a_nan_state_is_rejected(folder):
    with pytest.raises(ModelError, match="computed a score that is NaN or infinite"):
        load_gate(str(folder)).score([Question("a")], [reading(np.nan, 0.0)])


def test_a_question_has_one_key_whatever_its_spelling():
    assert fingerprint_text("Who wrote  Faust?") == fingerprint_text("who wrote faust")
    assert fingerprint_text("who wrote faust") != fingerprint_text("who wrote hamlet")
    assert fingerprint_text("?") != fingerprint_text("!")


# --- changed or damaged ---------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{"threshold": 0.9}, {"prompts": "others"}, {"extra": 1}, {"needs": []}])
def test_a_manifest_edited_by_hand_is_rejected(folder, values):
    edit(folder, **values)
    with pytest.raises(
        ArtifactError, match=r"edited by hand \(to change the threshold, use `knowgate calibrate`\)\. Fit it again"
    ):
        read_artifact(folder)


def test_another_format_version_is_rejected_with_both_numbers(folder):
    edit(folder, signed=True, version=7)
    with pytest.raises(
        ArtifactError, match=r"has format version 7, but this version of knowgate reads 1\. Fit it again"
    ):
        read_artifact(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"version": 1}', "\x00\x01"])
def test_a_broken_manifest_is_rejected(folder, text):
    (folder / "gate.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"gate\.json is broken.* Fit it again"):
        read_artifact(folder)


def test_damaged_weights_are_rejected(folder):
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-1] ^= 1  # one bit
    (folder / "weights.safetensors").write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match=r"were changed or damaged\. Fit it again"):
        read_artifact(folder)


@pytest.mark.parametrize("kept", [0, 20])
def test_weights_that_are_cut_or_missing_are_rejected(folder, kept):
    file = folder / "weights.safetensors"
    os.truncate(file, kept) if kept else file.unlink()
    with pytest.raises(ArtifactError, match="were changed or damaged"):
        read_artifact(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_rejected_even_if_the_checksums_fit(folder, bad):
    swap_weights(folder, save({**TENSORS, "0.0.bias": np.array([bad], dtype=np.float32)}))
    with pytest.raises(ArtifactError, match=r"contain NaN or infinite numbers\. Fit it again"):
        read_artifact(folder)


# --- tensors that are not the gate's, with checksums that fit ---------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mean": None}, "the tensor 'mean' is missing"),
        ({"0.0.weight": None}, "the tensor '0.0.weight' is missing"),
        ({"mean": np.zeros(0, np.float32)}, "'mean' has the shape 0, not any"),
        ({"scale": np.ones(3, np.float32)}, "'scale' has the shape 3, not 2"),
        ({"0.0.bias": np.array(1.0, np.float32)}, "'0.0.bias' has the shape of a single number, not 1"),
        ({"0.0.weight": np.ones((2, 1), np.float32)}, "'0.0.weight' has the shape 2 x 1, not any x 2"),
        ({"0.0.weight": np.ones((1, 2), np.int64)}, "'0.0.weight' holds int64, not floating-point numbers"),
        ({"scale": np.zeros(2, np.float32)}, "'scale' contains numbers that are too large or too small"),
        ({"extra": np.ones(2, np.float32)}, "unknown tensor 'extra'"),
        ({"0.0.weight": np.ones((3, 2), np.float32), "0.0.bias": np.ones(3, np.float32)}, "one or two outputs, not 3"),
    ],
)
def test_unexpected_tensors_are_rejected_by_name(folder, changes, words):
    kept = {name: block for name, block in {**TENSORS, **changes}.items() if block is not None}
    swap_weights(folder, save(kept))
    with pytest.raises(ArtifactError, match=rf"cannot be used: .*{re.escape(words)}.*Fit it again"):
        load_gate(str(folder))


def test_a_tensor_of_a_probe_inside_a_fusion_is_rejected_by_name(tmp_path):
    shutil.copytree(OLD / "fusion", tmp_path / "fusion")
    tensors = load_file(tmp_path / "fusion" / "weights.safetensors")
    swap_weights(tmp_path / "fusion", save({**tensors, "probe-pre-2.mean": np.zeros(3, np.float32)}))
    with pytest.raises(ArtifactError, match=r"'probe-pre-2\.scale' has the shape 16, not 3\. Fit it again"):
        load_gate(str(tmp_path / "fusion"))


def test_weights_for_states_of_another_width_are_rejected(folder):
    wider = Reading(hidden={4: np.zeros(3, np.float32)})
    with pytest.raises(ArtifactError, match="expects 2 features but got 3"):
        load_gate(str(folder)).score([Question("a")], [wider])


# --- a manifest that is not one, with checksums that fit ----------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"threshold": "high"}, "threshold is 'high', not a number"),
        ({"threshold": 1e9}, "threshold is 1000000000.0, not between -1 and 2"),
        ({"needs": ["telepathy"]}, "needs.0 is 'telepathy', not one of"),
        ({"want": {"layers": [4.5]}}, "want.layers.0 is 4.5, not a whole number"),
        ({"want": {"samples": -1}}, "want.samples is -1, not between 0"),
        ({"model": "bound"}, "model is 'bound', not an object"),
        ({"options": {"layer": "../4", "position": "pre"}}, "layer is '../4', not a whole number"),
        ({"options": {"position": "pre"}}, "has no field 'layer'"),
        ({"calibration": {"kind": "platt", "b": 0.5}}, "lacks its slope `a` or its offset `b`"),
        ({"calibration": {"kind": "isotonic", "x": [0.0, 1.0], "y": [1.0]}}, "as many x values as y values"),
        ({"metrics": {"auroc": {"value": []}}}, "metrics.auroc.value is [], not a number"),
        ({"files": {"../../outside.txt": "0"}}, "'../../outside.txt' is not a file name inside '"),
        ({"files": {"/etc/passwd": "0"}}, "'/etc/passwd' is not a file name inside '"),
    ],
)
def test_an_invalid_field_is_rejected_by_name(folder, values, words):
    edit(folder, signed=True, **values)
    with pytest.raises(ArtifactError, match=rf"cannot be used: .*{re.escape(words)}.*Fit it again"):
        load_gate(str(folder))


# --- files beside the manifest --------------------------------------------------------------------


@pytest.fixture
def gate_with_files(tmp_path):
    files = {"seen.txt": b"a\n", "adapter/config.json": b"{}"}
    write_artifact(tmp_path / "gate", MANIFEST, TENSORS, "# a card", files)
    return tmp_path / "gate"


@pytest.mark.parametrize("name", ["seen.txt", "adapter/config.json"])
def test_a_changed_file_is_named(gate_with_files, name):
    (gate_with_files / name).write_bytes(b"other")
    with pytest.raises(ArtifactError, match=rf"gate' cannot be used: '{name}' was changed or damaged\. Fit it again"):
        read_artifact(gate_with_files)


def test_a_missing_file_is_named(gate_with_files):
    (gate_with_files / "seen.txt").unlink()
    with pytest.raises(ArtifactError, match=r"'seen\.txt' is missing\. Fit it again"):
        read_artifact(gate_with_files)


def test_the_card_may_be_edited(gate_with_files):
    (gate_with_files / "README.md").write_text("# our own words")
    assert read_artifact(gate_with_files).manifest["gate"] == "probe"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter/adapter_model.bin", "x.pkl"])
def test_a_planted_pickle_is_rejected_and_never_run(gate_with_files, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (gate_with_files / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ArtifactError, match=rf"'{name}' may be a pickle file"):
        load_gate(str(gate_with_files))
    assert not (tmp_path / "exploded").exists()


def test_a_link_out_of_the_folder_is_rejected(gate_with_files, tmp_path):
    (gate_with_files / "seen.txt").rename(tmp_path / "elsewhere.txt")
    (gate_with_files / "seen.txt").symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(ArtifactError, match=r"'seen\.txt' is a link to a file outside the folder"):
        read_artifact(gate_with_files)


def test_a_gate_of_an_earlier_version_without_digests_loads(gate_with_files):
    manifest = json.loads((gate_with_files / "gate.json").read_text())
    del manifest["files"]
    (gate_with_files / "gate.json").write_text(json.dumps({**manifest, "checksum": compute_checksum(manifest)}))
    assert load_gate(str(gate_with_files)).threshold == 0.4


@pytest.mark.parametrize("out", ["gate", "copy"])
def test_another_threshold_keeps_the_digests_right(gate_with_files, out):
    artifact = read_artifact(gate_with_files)
    target = gate_with_files.with_name(out)
    revise_artifact(artifact, {**artifact.manifest, "threshold": 0.7}, {"calibrated.txt": "b\n"}, target)
    assert load_gate(str(target)).threshold == 0.7
    assert set(read_artifact(target).manifest["files"]) == {
        "weights.safetensors", "seen.txt", "calibrated.txt", "adapter/config.json",
    }  # fmt: skip


# --- foreign --------------------------------------------------------------------------------------


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_pickle_in_place_of_the_weights_is_rejected_and_never_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swap_weights(folder, pickle.dumps(Bomb()))
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_artifact(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_folder_with_a_pickle_only_is_no_gate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(Bomb()))
    assert not is_artifact(tmp_path)
    with pytest.raises(ArtifactError, match=r"has no gate\.json\. Create one with `knowgate fit`"):
        load_fitted_gate(str(tmp_path))
    assert not (tmp_path / "exploded").exists()


def test_another_programs_gate_json_is_rejected(tmp_path):
    (tmp_path / "gate.json").write_text('{"name": "garden gate", "height": 1.2}')
    with pytest.raises(ArtifactError, match="is broken"):
        load_gate(str(tmp_path))


def test_an_unknown_kind_of_gate_is_rejected_with_the_known_ones(folder):
    edit(folder, signed=True, gate="prob")
    with pytest.raises(UnknownName, match=r"unknown fitted gate 'prob'\. Did you mean 'probe'"):
        load_gate(str(folder))


def test_a_gate_can_define_its_sampling(folder):
    edit(folder, signed=True, want={"samples": 3, "temperature": 0.5, "sample_end": True})
    want = load_gate(str(folder)).request
    assert (want.samples, want.sampling, want.sample_end) == (3, Sampling(0.5), True)


# --- the LLM it belongs to ------------------------------------------------------------------------


def test_its_own_model_and_prompts_add_no_note(folder):
    gate = load_gate(str(folder)).bind(MODEL, PROMPTS)
    assert gate.explain([Question("a")], [reading(0.0, 0.0)]) == [""]


@pytest.mark.parametrize(("model", "prompts"), [(FakeModel(name="other"), PROMPTS), (MODEL, "other wording")])
def test_another_model_or_wording_is_rejected(folder, model, prompts):
    with pytest.raises(ArtifactError, match=r"fitted on bound \(model .*\)\. Your LLM is .*plug_in=True"):
        load_gate(str(folder)).bind(model, prompts)


@pytest.fixture
def recorded(tmp_path):
    made = {**MANIFEST, "model": {"name": "recorded:my-llm", "fingerprint": "x"}, "prompts": "recorded"}
    write_artifact(tmp_path / "judge", made, TENSORS, "# a card")
    return str(tmp_path / "judge")


def test_a_gate_fitted_on_imported_answers_rejects_an_llm_with_another_name(recorded):
    message = r"fitted on recorded:my-llm \(.*\. Your LLM is bound \(.* or set plug_in=True\.$"
    with pytest.raises(ArtifactError, match=message):
        load_gate(recorded).bind(MODEL, PROMPTS)
    assert load_gate(recorded, plug_in=True).bind(MODEL, PROMPTS).note == "plug-in, fitted on recorded:my-llm"


@pytest.mark.parametrize("name", ["my-llm", "openai:my-llm", "litellm:my-llm", "openai:my-llm@http://localhost/v1"])
def test_a_gate_fitted_on_imported_answers_accepts_an_llm_with_the_same_name(recorded, name):
    assert load_gate(recorded).bind(FakeModel(name=name), PROMPTS).note == ""


def test_a_gate_fitted_on_imported_answers_accepts_an_upstream_without_a_model_name(recorded):
    model = UpstreamDraftModel("http://localhost:1/v1", None)
    assert load_gate(recorded).bind(model, PROMPTS).note == ""


def test_a_gate_fitted_on_another_run_needs_the_model_name_of_the_upstream(folder):
    model = UpstreamDraftModel("http://localhost:1/v1", None)
    with pytest.raises(ArtifactError, match=r"Set `upstream_model` to the name of the upstream's LLM\.$"):
        load_gate(str(folder)).bind(model, PROMPTS)


def test_as_a_plug_in_it_names_the_original_model(folder):
    gate = load_gate(str(folder), plug_in=True).bind(FakeModel(name="other"), PROMPTS)
    assert gate.note == "plug-in, fitted on bound"


# --- writing --------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_earlier_gate_unchanged(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(BadInput, match=r"README\.md"):
        write_artifact(folder, {**MANIFEST, "threshold": 0.9}, {}, "# card", {"README.md/x": b""})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["gate"]


def test_files_beside_the_weights_are_kept_in_their_folders(tmp_path):
    write_artifact(tmp_path / "gate", MANIFEST, {}, "# card", {"adapter/config.json": b"{}"})
    assert (tmp_path / "gate" / "adapter" / "config.json").read_bytes() == b"{}"
    assert read_artifact(tmp_path / "gate").tensors == {}
