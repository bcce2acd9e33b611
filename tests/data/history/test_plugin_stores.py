"""History stores that other packages register as entry points."""

from __future__ import annotations

from knowgate.data.history import open_history
from knowgate.data.history.sqlite_store import SqliteHistory
from tests.support import entry_points

MODULE = "class MemoryHistory:\n    def __init__(self, value, embedder):\n        self.value = value\n"


def test_a_store_of_a_plugin_is_opened_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "outside_history.py").write_text(MODULE, encoding="utf-8")
    points = {"knowgate.history": {"memory": "outside_history:MemoryHistory"}}
    entry_points.install(tmp_path / "installed", points, tmp_path, monkeypatch)
    assert open_history("memory:notes").value == "notes"


def test_an_unknown_name_before_a_colon_is_part_of_a_file_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = open_history("nobody:notes")
    assert isinstance(log, SqliteHistory)
    assert log.path.name == "nobody:notes"
