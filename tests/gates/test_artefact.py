"""Fitted gates on disk: what is changed, damaged, foreign or made for another LLM is refused with a sentence."""

import hashlib
import json
import os
import pickle

import numpy as np
import pytest
from safetensors.numpy import save

from knowgate.errors import ArtefactError, ModelError, UnknownName
from knowgate.gates import load_fitted, load_gate
from knowgate.gates.fitted.artefact import checksum, is_artefact, read_artefact, write_artefact
from knowgate.models.fake import FakeModel
from knowgate.runs.split import seen_key
from knowgate.types import Question, Reading, Signal, Want

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
    write_artefact(tmp_path / "gate", MANIFEST, TENSORS, "# a card")
    return tmp_path / "gate"


def edit(folder, *, signed=False, **values):
    """Change the manifest by hand; `signed`: with a checksum that fits, as a forger would."""
    manifest = {**json.loads((folder / "gate.json").read_text()), **values}
    sealed = {**manifest, "checksum": checksum(manifest)} if signed else manifest
    (folder / "gate.json").write_text(json.dumps(sealed))


def swap_weights(folder, data):
    """Other weights, with the manifest made to fit them."""
    (folder / "weights.safetensors").write_bytes(data)
    edit(folder, signed=True, weights_sha256=hashlib.sha256(data).hexdigest())


def reading(*state):
    return Reading(hidden={4: np.array(state, dtype=np.float32)})


# --- reading --------------------------------------------------------------------------------------


def test_what_was_written_comes_back(folder):
    artefact = read_artefact(folder)
    assert all(np.array_equal(artefact.tensors[name], block) for name, block in TENSORS.items())
    assert {key: artefact.manifest[key] for key in MANIFEST} == MANIFEST


def test_the_gate_asks_for_what_the_manifest_says(folder):
    gate = load_gate(str(folder))
    assert (gate.name, gate.threshold, gate.needs, gate.want) == ("probe", 0.4, {Signal.HIDDEN}, Want(layers=(4,)))


def test_scores_are_what_the_weights_say(folder):
    needs = load_gate(str(folder)).score([Question("a"), Question("b")], [reading(0.0, 5.0), reading(1.0, 5.0)])
    assert needs == pytest.approx([0.5, 1 / (1 + np.exp(-1))])
    assert load_gate(str(folder)).score([], []) == []


def test_a_state_that_is_not_a_number_is_refused(folder):
    with pytest.raises(ModelError, match="gave NaN"):
        load_gate(str(folder)).score([Question("a")], [reading(np.nan, 0.0)])


def test_a_question_has_one_key_however_it_is_written():
    assert seen_key("Who wrote  Faust?") == seen_key("who wrote faust")
    assert seen_key("who wrote faust") != seen_key("who wrote hamlet")
    assert seen_key("?") != seen_key("!")


# --- changed or damaged ---------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{"threshold": 0.9}, {"prompts": "others"}, {"extra": 1}, {"needs": []}])
def test_a_manifest_edited_by_hand_is_refused(folder, values):
    edit(folder, **values)
    with pytest.raises(ArtefactError, match=r"edited by hand\. Fit the gate again, or use knowgate calibrate"):
        read_artefact(folder)


def test_another_version_is_refused_with_both_numbers(folder):
    edit(folder, signed=True, version=7)
    with pytest.raises(ArtefactError, match=r"has format 7, this knowgate reads 1\. Fit it again"):
        read_artefact(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"version": 1}', "\x00\x01"])
def test_a_broken_manifest_is_refused(folder, text):
    (folder / "gate.json").write_text(text)
    with pytest.raises(ArtefactError, match=r"gate\.json is broken .* Fit the gate again"):
        read_artefact(folder)


def test_damaged_weights_are_refused(folder):
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-1] ^= 1  # one bit
    (folder / "weights.safetensors").write_bytes(bytes(data))
    with pytest.raises(ArtefactError, match=r"were changed or damaged\. Fit it again"):
        read_artefact(folder)


@pytest.mark.parametrize("kept", [0, 20])
def test_weights_that_are_cut_or_missing_are_refused(folder, kept):
    file = folder / "weights.safetensors"
    os.truncate(file, kept) if kept else file.unlink()
    with pytest.raises(ArtefactError, match="were changed or damaged"):
        read_artefact(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused_even_if_the_checksums_fit(folder, bad):
    swap_weights(folder, save({**TENSORS, "0.0.bias": np.array([bad], dtype=np.float32)}))
    with pytest.raises(ArtefactError, match=r"hold NaN\. Fit it again"):
        read_artefact(folder)


# --- foreign --------------------------------------------------------------------------------------


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_pickle_in_place_of_the_weights_is_refused_and_never_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swap_weights(folder, pickle.dumps(Bomb()))
    with pytest.raises(ArtefactError, match="cannot be read"):
        read_artefact(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_folder_with_a_pickle_only_is_no_gate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(Bomb()))
    assert not is_artefact(tmp_path)
    with pytest.raises(ArtefactError, match=r"has no gate\.json\. Make one: knowgate fit"):
        load_fitted(str(tmp_path))
    assert not (tmp_path / "exploded").exists()


def test_another_programs_gate_json_is_refused(tmp_path):
    (tmp_path / "gate.json").write_text('{"name": "garden gate", "height": 1.2}')
    with pytest.raises(ArtefactError, match="is broken"):
        load_gate(str(tmp_path))


def test_a_gate_of_unknown_kind_is_refused_with_those_there_are(folder):
    edit(folder, signed=True, gate="prob")
    with pytest.raises(UnknownName, match=r"unknown fitted gate 'prob'\. Did you mean 'probe'"):
        load_gate(str(folder))


# --- the LLM it belongs to ------------------------------------------------------------------------


def test_its_own_model_and_wording_need_no_word(folder):
    gate = load_gate(str(folder)).bind(MODEL, PROMPTS)
    assert gate.explain([Question("a")], [reading(0.0, 0.0)]) == [""]


@pytest.mark.parametrize(("model", "prompts"), [(FakeModel(name="other"), PROMPTS), (MODEL, "other wording")])
def test_another_model_or_wording_is_refused(folder, model, prompts):
    with pytest.raises(ArtefactError, match=r"fitted on bound \(model .*\), not on this model \(.*--plug-in"):
        load_gate(str(folder)).bind(model, prompts)


def test_as_a_plug_in_it_says_whose_it_is(folder):
    gate = load_gate(str(folder), plug_in=True).bind(FakeModel(name="other"), PROMPTS)
    assert gate.note == "plug-in, fitted on bound"


# --- writing --------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_earlier_gate_as_it_was(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(OSError, match=r"README\.md"):
        write_artefact(folder, {**MANIFEST, "threshold": 0.9}, {}, "# card", {"README.md/x": b""})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["gate"]


def test_files_beside_the_weights_are_kept_in_their_folders(tmp_path):
    write_artefact(tmp_path / "gate", MANIFEST, {}, "# card", {"adapter/config.json": b"{}"})
    assert (tmp_path / "gate" / "adapter" / "config.json").read_bytes() == b"{}"
    assert read_artefact(tmp_path / "gate").tensors == {}
