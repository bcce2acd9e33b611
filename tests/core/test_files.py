import gzip
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.core.files import (
    atomic_file,
    atomic_folder,
    cache_dir,
    file_lock,
    read_jsonl,
    sha256_file,
    sha256_text,
    write_bytes,
    write_json,
    write_text,
)
from knowgate.core.validation import read_json
from knowgate.errors import BadInput, BadSetting
from tests.support.processes import PATIENCE, child


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- one file -------------------------------------------------------------------------------------


def test_parent_folders_are_created(tmp_path):
    write_text(tmp_path / "a" / "b.txt", "häßlich 北京")
    assert (tmp_path / "a" / "b.txt").read_text(encoding="utf-8") == "häßlich 北京"


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")  # half a pair has no UTF-8 form
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_written_files_are_readable_by_others(tmp_path):
    write_text(tmp_path / "a.txt", "x")
    with atomic_folder(tmp_path / "b"):
        pass
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o755


FAILURES = [
    ("os.fsync", OSError(28, "No space left on device")),
    ("pathlib.Path.chmod", PermissionError(1, "Operation not permitted")),
    ("pathlib.Path.replace", OSError(5, "Input/output error")),
    ("os.fsync", KeyboardInterrupt()),
]


@given(old=st.none() | st.binary(max_size=50), new=st.binary(max_size=50), failure=st.sampled_from(FAILURES))
def test_any_failure_keeps_the_old_file(old, new, failure):
    step, error = failure
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a.bin"
        if old is not None:
            path.write_bytes(old)
        with patch(step, side_effect=error), pytest.raises(type(error)):
            write_bytes(path, new)
        assert (path.read_bytes() if path.is_file() else None) == old
        assert names(path.parent) == (["a.bin"] if old is not None else [])


def torn(data):
    yield data
    raise ValueError("enough")


@given(old=st.none() | st.binary(max_size=50), new=st.binary(max_size=50), after=st.integers(0, 50))
def test_a_failed_atomic_file_keeps_the_old_file(old, new, after):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a.bin"
        if old is not None:
            path.write_bytes(old)
        with pytest.raises(ValueError, match="enough"), atomic_file(path) as file:
            file.writelines(torn(new[:after]))
        assert (path.read_bytes() if path.is_file() else None) == old
        assert names(path.parent) == (["a.bin"] if old is not None else [])


@given(old=st.binary(max_size=50), new=st.binary(max_size=50))
def test_a_write_replaces_the_whole_file(old, new):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a.bin"
        write_bytes(path, old)
        write_bytes(path, new)
        assert path.read_bytes() == new
        assert names(path.parent) == ["a.bin"]


def test_line_ends_are_written_as_they_are(tmp_path):
    write_text(tmp_path / "a.txt", "one\ntwo\r\n")
    assert (tmp_path / "a.txt").read_bytes() == b"one\ntwo\r\n"


def test_json_round_trips_and_keeps_unicode(tmp_path):
    write_json(tmp_path / "a.json", {"城": [1, 2.5, None]})
    assert read_json(tmp_path / "a.json") == {"城": [1, 2.5, None]}
    assert "城" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"])
def test_a_file_that_is_not_json_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.json is not (valid JSON|UTF-8 text)"):
        read_json(tmp_path / "a.json")


# --- a folder -------------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    return folder


def test_an_atomic_folder_appears_when_its_block_succeeds(tmp_path):
    with atomic_folder(tmp_path / "deep" / "target") as partial:
        (partial / "new.txt").write_text("new")
        assert not (tmp_path / "deep" / "target").exists()
    assert names(tmp_path / "deep") == ["target"]
    assert names(tmp_path / "deep" / "target") == ["new.txt"]


def test_an_atomic_folder_replaces_the_old_one_completely(target):
    with atomic_folder(target) as partial:
        (partial / "new.txt").write_text("new")
        assert names(target) == ["old.txt"]
    assert names(target) == ["new.txt"]
    assert names(target.parent) == ["target"]


def fill_and_fail(target, error):
    with atomic_folder(target) as partial:
        (partial / "new.txt").write_text("new")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_block_keeps_the_old_folder_and_leaves_nothing_else(target, error):
    with pytest.raises(error):
        fill_and_fail(target, error)
    assert names(target) == ["old.txt"]
    assert names(target.parent) == ["target"]


# --- JSON lines -----------------------------------------------------------------------------------


def test_lines_are_numbered_as_an_editor_does_and_empty_ones_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n  \n{"x": "城"}\n', encoding="utf-8")
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [(1, {"x": 1}), (4, {"x": "城"})]


def test_gzip_is_unpacked(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write('{"x": "城"}\n')
    assert list(read_jsonl(tmp_path / "a.jsonl.gz")) == [(1, {"x": "城"})]


@pytest.mark.parametrize(
    ("line", "message"), [("{x}", "line 3 is not valid JSON"), ("[1]", "line 3 is not a JSON object")]
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"x": 1}}\n\n{line}\n')
    with pytest.raises(BadInput, match=message):
        list(read_jsonl(tmp_path / "a.jsonl"))


def test_the_lines_before_a_broken_one_are_given(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{\n')
    assert next(read_jsonl(tmp_path / "a.jsonl")) == (1, {"x": 1})


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"x": "ä"}'.encode("latin-1"))
    with pytest.raises(BadInput, match=r"a\.jsonl line 1 is not UTF-8 text"):
        list(read_jsonl(tmp_path / "a.jsonl"))


def whole_gzip() -> bytes:
    return gzip.compress(b'{"x": 1}\n' * 100)


@pytest.mark.parametrize(
    "content",
    [b"plain text", whole_gzip()[:-12], whole_gzip()[:14] + b"\xff\xff\xff\xff" + whole_gzip()[18:]],
    ids=["not gzip", "cut off", "damaged inside"],
)
def test_a_broken_gzip_file_is_named(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.jsonl\.gz is not a complete gzip file"):
        list(read_jsonl(tmp_path / "a.jsonl.gz"))


# --- locks, hashes, the cache ---------------------------------------------------------------------

TAKER = """
    import sys, pathlib
    from knowgate.core.files import file_lock
    print("ready", flush=True)
    with file_lock(pathlib.Path(sys.argv[1])):
        print("held", flush=True)
        pathlib.Path(sys.argv[2]).touch()
        sys.stdin.readline()
"""


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")
def test_a_lock_blocks_another_process_until_it_is_released(tmp_path):
    lock, entered = tmp_path / "x.lock", tmp_path / "entered"
    command = [sys.executable, "-c", textwrap.dedent(TAKER), str(lock), str(entered)]
    with ExitStack() as stack:
        with file_lock(lock):
            taker = stack.enter_context(child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert taker.stdout.readline() == "ready\n"
            time.sleep(0.1)  # it would be quicker than that
            assert not entered.exists()
        assert taker.stdout.readline() == "held\n"
        taker.communicate("go\n", timeout=PATIENCE)


def test_a_lock_is_released_when_its_block_fails(tmp_path):
    with pytest.raises(ValueError), file_lock(tmp_path / "x.lock"):
        raise ValueError
    with file_lock(tmp_path / "x.lock"):
        pass


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX's")
def test_a_lock_without_wait_raises_if_it_is_held(tmp_path):
    with file_lock(tmp_path / "x.lock"), pytest.raises(BlockingIOError), file_lock(tmp_path / "x.lock", wait=False):
        pass
    with file_lock(tmp_path / "x.lock", wait=False):
        pass


WITHOUT_FCNTL = """
    import sys
    sys.modules["fcntl"] = None  # as on Windows
    import knowgate.cli.main, knowgate.labels.run, knowgate.training.preference_run
    from pathlib import Path
    from knowgate.data.runs.folder import RunFolder
    with RunFolder(Path(sys.argv[1])).exclusive():
        print("written")
"""


def test_the_package_works_without_posix_locks(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_FCNTL), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("written\n", 0), done.stderr


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()


def test_boundaries_between_texts_count_in_the_hash():
    assert len({sha256_text("ab", "c"), sha256_text("a", "bc"), sha256_text("abc"), sha256_text("abc", "")}) == 4


def test_half_a_surrogate_pair_can_be_hashed():
    assert sha256_text("\ud800") != sha256_text("\ud801")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"KNOWGATE_CACHE": "/k", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/k"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/knowgate"),
        ({"HOME": "/h"}, "/h/.cache/knowgate"),
        ({"KNOWGATE_CACHE": "~/mine", "HOME": "/h"}, "/h/mine"),
    ],
)
def test_the_cache_folder_comes_from_the_environment(monkeypatch, variables, expected):
    for name in ("KNOWGATE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_dir()) == expected


def test_a_file_cannot_replace_a_folder(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(BadInput, match="there': a folder with this name exists"):
        write_text(tmp_path / "there", "text")


def test_a_full_disk_error_names_the_target_file(tmp_path):
    with pytest.raises(OSError) as caught, atomic_file(tmp_path / "big"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "big")
    assert list(tmp_path.iterdir()) == []


def test_an_os_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, atomic_folder(tmp_path / "made"):
        (tmp_path / "absent").read_text(encoding="utf-8")
    assert caught.value.filename == str(tmp_path / "absent")


def test_two_processes_cannot_write_one_folder_at_once(tmp_path):
    refused = pytest.raises(BadSetting, match="another process is writing to")
    with atomic_folder(tmp_path / "made"), refused, atomic_folder(tmp_path / "made"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_leftovers_of_a_killed_process_are_removed_and_its_backup_restored(tmp_path):
    (tmp_path / ".made.x.part").mkdir()
    (tmp_path / ".made.old.part").mkdir()
    (tmp_path / ".made.old.part" / "kept").write_text("kept", encoding="utf-8")
    with pytest.raises(KeyError), atomic_folder(tmp_path / "made"):
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "kept"]


def test_a_failed_copy_raises_os_error_with_the_target(tmp_path):
    with pytest.raises(OSError) as caught, atomic_folder(tmp_path / "made"):
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device")])
    assert (caught.value.filename, caught.value.strerror) == (
        str(tmp_path / "made"),
        "[Errno 28] No space left on device",
    )


def test_a_lock_is_acquired_again_if_its_file_was_removed(tmp_path):
    with file_lock(tmp_path / "lock"):
        (tmp_path / "lock").unlink()
        with file_lock(tmp_path / "lock", wait=False):
            assert (tmp_path / "lock").is_file()
