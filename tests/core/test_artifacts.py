"""Digests of the files of artifact folders."""

from __future__ import annotations

import pytest

from knowgate.core import artifacts
from knowgate.core.artifacts import check_digests, compute_digests
from knowgate.errors import ArtifactError

SIZE = 1 << 20


@pytest.fixture
def large_file(tmp_path, monkeypatch):
    """A file that counts as large, so that only samples of it are hashed."""
    monkeypatch.setattr(artifacts, "LARGE_FILE_BYTES", SIZE - 1)
    monkeypatch.setattr(artifacts, "DIGEST_SAMPLE_BYTES", 1 << 10)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(SIZE))
    return path


def test_an_unchanged_large_file_is_accepted(large_file):
    check_digests(large_file.parent, compute_digests(large_file.parent), ArtifactError)


@pytest.mark.parametrize("position", [0, SIZE - 1])
def test_a_large_file_that_is_changed_at_one_end_is_rejected(large_file, position):
    digests = compute_digests(large_file.parent)
    content = bytearray(SIZE)
    content[position] = 1
    large_file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"'weights\.safetensors' was changed or damaged"):
        check_digests(large_file.parent, digests, ArtifactError)


def test_a_large_file_of_another_length_is_rejected(large_file):
    digests = compute_digests(large_file.parent)
    large_file.write_bytes(bytes(SIZE + 1))
    with pytest.raises(ArtifactError, match="was changed or damaged"):
        check_digests(large_file.parent, digests, ArtifactError)
