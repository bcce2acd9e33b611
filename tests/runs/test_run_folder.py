import numpy as np

from knowgate.runs.rows import LabelRow
from knowgate.runs.run_folder import RunFolder


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


def test_rows_tried_again_leave_the_states_of_the_others_alone(tmp_path):
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
