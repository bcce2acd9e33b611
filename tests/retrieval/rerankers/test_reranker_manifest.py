"""What an aligned reranker's folder may hold, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from knowgate.core.files import sha256_file, write_json
from knowgate.errors import ArtifactError, WeightsError
from knowgate.retrieval.rerankers.cross_encoder import (
    RERANKER_MANIFEST,
    RERANKER_WEIGHTS,
    check_reranker_files,
    is_aligned_reranker,
    read_reranker_manifest,
)


@pytest.fixture
def aligned(tmp_path: Path) -> Path:
    (tmp_path / RERANKER_WEIGHTS).write_bytes(b"weights")
    write_json(tmp_path / RERANKER_MANIFEST, {"version": 1, "weights_sha256": sha256_file(tmp_path / RERANKER_WEIGHTS)})
    return tmp_path


def test_a_manifest_that_matches_its_weights_is_read(aligned: Path):
    assert is_aligned_reranker(aligned)
    check_reranker_files(aligned)
    assert read_reranker_manifest(aligned)["version"] == 1


def test_changed_weights_are_an_error(aligned: Path):
    (aligned / RERANKER_WEIGHTS).write_bytes(b"Weights")
    with pytest.raises(ArtifactError, match="were changed or damaged"):
        read_reranker_manifest(aligned)


def test_another_format_version_is_an_error(aligned: Path):
    write_json(aligned / RERANKER_MANIFEST, {"version": 9, "weights_sha256": "x"})
    with pytest.raises(ArtifactError, match="has format version 9, but this knowgate reads version 1"):
        read_reranker_manifest(aligned)


def test_an_incomplete_manifest_is_an_error(aligned: Path):
    write_json(aligned / RERANKER_MANIFEST, {"version": 1})
    with pytest.raises(ArtifactError, match="is damaged"):
        read_reranker_manifest(aligned)


def test_a_folder_without_a_manifest_explains_how_to_train_one(tmp_path: Path):
    with pytest.raises(ArtifactError, match="Train one with `knowgate fit reranker`"):
        read_reranker_manifest(tmp_path)


def test_an_unexpected_file_beside_the_weights_is_an_error(aligned: Path):
    (aligned / "code.py").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"contains the unexpected file 'code\.py'"):
        check_reranker_files(aligned)


def test_pickled_weights_are_an_error(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"no safetensors weights\. Weights in pickle files are not loaded"):
        check_reranker_files(tmp_path)
