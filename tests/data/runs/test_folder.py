import json

import numpy as np
import pytest

from knowgate.data.runs.folder import RunFolder, hash_settings
from knowgate.data.runs.rows import LabelRow
from knowgate.errors import ArtifactError, BadSetting


def row(name, error=None):
    return LabelRow(name, f"{name}?", "en", error=error)


def states(*values):
    return {"before.2": np.array([[value] for value in values], dtype=np.float32)}


def begun(path):
    folder = RunFolder(path)
    folder.start({"model": "m"}, {})
    return folder


def test_states_belong_to_the_rows_that_did_not_fail(tmp_path):
    folder = begun(tmp_path / "run")
    folder.append([row("a"), row("b", error="no"), row("c")], states(1, 3))
    kept = [one for one in folder.rows() if one.error is None]
    assert folder.vectors(kept, "before.2").ravel().tolist() == [1, 3]


def test_retried_rows_do_not_change_the_states_of_others(tmp_path):
    """With shards named by the number of rows, those of c and d took the place of a's and b's."""
    folder = begun(tmp_path / "run")
    folder.append([row("lost", error="no")], {})
    folder.append([row("a"), row("b")], states(1, 2))
    folder.append([row("c")], states(3))
    assert folder.drop_failed() == 1
    folder.append([row("lost")], states(4))
    rows = list(folder.rows())
    assert {one.id: float(value) for one, [value] in zip(rows, folder.vectors(rows, "before.2"), strict=True)} == {
        "a": 1,
        "b": 2,
        "c": 3,
        "lost": 4,
    }


def test_a_shard_without_rows_is_not_overwritten(tmp_path):
    """What a kill between the shard and its rows leaves."""
    folder = begun(tmp_path / "run")
    folder.append([row("a")], states(1))
    (folder.path / "vectors-0000007.safetensors").write_bytes(b"left over")
    folder.append([row("b")], states(2))
    assert (folder.path / "vectors-0000007.safetensors").read_bytes() == b"left over"
    rows = list(folder.rows())
    assert folder.vectors(rows, "before.2").ravel().tolist() == [1, 2]


def test_the_name_of_a_deleted_shard_is_not_used_again(tmp_path):
    folder = begun(tmp_path / "run")
    folder.append([row("a")], states(1))
    (lost,) = folder.path.glob("vectors-*")
    lost.unlink()
    folder.append([row("b")], states(2))
    assert not lost.exists()
    with pytest.raises(ArtifactError, match=rf"{lost.name} cannot be read.*Make a new one: knowgate label"):
        folder.vectors(list(folder.rows()), "before.2")


def test_states_of_another_question_are_rejected(tmp_path):
    folder = begun(tmp_path / "run")
    folder.append([row("a"), row("b")], states(1, 2))
    lines = [json.loads(line) for line in (folder.path / "labels.jsonl").read_text().splitlines()]
    lines[0]["vector"], lines[1]["vector"] = lines[1]["vector"], lines[0]["vector"]
    (folder.path / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ArtifactError, match=r"the hidden states of row 'a' .* do not match their checksum"):
        folder.vectors(list(folder.rows()), "before.2")


def test_rows_of_an_earlier_version_have_no_digest_and_are_read(tmp_path):
    folder = begun(tmp_path / "run")
    folder.append([row("a")], states(1))
    (record,) = [json.loads(line) for line in (folder.path / "labels.jsonl").read_text().splitlines()]
    del record["states"]
    (folder.path / "labels.jsonl").write_text(json.dumps(record) + "\n")
    assert folder.vectors(list(folder.rows()), "before.2").ravel().tolist() == [1]


@pytest.mark.parametrize(
    "vector",
    [["../vectors-0000000.safetensors", 0], ["/etc/passwd", 0], ["labels.jsonl", 0], ["x", -1], ["x", 1.5]],
)
def test_a_row_that_refers_outside_the_folder_is_rejected(tmp_path, vector):
    folder = begun(tmp_path / "run")
    folder.append_records([{"id": "a", "question": "a?", "lang": "en", "vector": vector}])
    with pytest.raises(ArtifactError):
        folder.vectors(list(folder.rows()), "before.2")


def test_a_row_beyond_its_shard_is_rejected(tmp_path):
    folder = begun(tmp_path / "run")
    folder.append([row("a")], states(1))
    (record,) = [json.loads(line) for line in (folder.path / "labels.jsonl").read_text().splitlines()]
    folder.append_records([{**record, "id": "b", "vector": [record["vector"][0], 5]}])
    with pytest.raises(ArtifactError, match=r"'b' refers to row 5 of .*, which has 1"):
        folder.vectors(list(folder.rows()), "before.2")


def test_failed_rows_are_dropped_from_a_run_with_an_incomplete_line(tmp_path):
    folder = begun(tmp_path / "run")
    folder.append([row("a"), row("b", error="no")], states(1))
    with (folder.path / "labels.jsonl").open("a") as file:
        file.write('{"id": "c", "quest')
    assert folder.drop_failed() == 1
    assert [one.id for one in folder.rows()] == ["a"]


def test_a_folder_with_other_content_is_not_changed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    words = "contains other files and is not a label run. Choose an empty folder for `out`"
    with pytest.raises(BadSetting, match=words), RunFolder(tmp_path).exclusive():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_at_the_path_of_the_folder_is_rejected(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(BadSetting, match=r"is a file, not a folder\. Choose another `out`"):
        begun(tmp_path / "run")


def test_a_long_version_is_shortened_in_the_error(tmp_path):
    folder = begun(tmp_path / "run")
    (folder.path / "run.json").write_text(json.dumps({"version": "long " * 2000}))
    with pytest.raises(ArtifactError, match="another version of knowgate") as error:
        folder.manifest()
    assert len(str(error.value)) < 500


def test_changed_settings_are_rejected(tmp_path):
    settings = {"model": "m", "model_fingerprint": "f", "prompts_fingerprint": "p", "grader": "g"}
    folder = RunFolder(tmp_path / "run")
    folder.start({**settings, "hash": hash_settings(settings)}, {})
    assert folder.settings()["model"] == "m"
    manifest = folder.path / "run.json"
    manifest.write_text(manifest.read_text().replace('"f"', '"g"'))
    with pytest.raises(ArtifactError, match=r"the settings in run\.json were changed or damaged"):
        folder.settings()
