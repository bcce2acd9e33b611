"""A gate evaluated on the questions it was fitted on, under other ids and in other clothes, is found out."""

from dataclasses import replace

import pytest

from knowgate.data.runs.table import load_label_table
from knowgate.data.splits import fingerprint_text
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.gate_folder import SEEN_FILE
from knowgate.gates.offline_scoring import drop_seen_rows, mark_seen_rows, score_gate
from knowgate.training.gate import fit
from tests.support.planted_run import planted_rows, write_run

DISGUISES = {
    "other ids": lambda text: text,
    "capitals": str.upper,
    "spaces": lambda text: f"  {text.replace(' ', '   ')}\t",
    "punctuation": lambda text: text.replace("?", " ...?!"),
    "wide letters": lambda text: "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text),
    "unseen characters": lambda text: "\u200b".join(text),
    "accents": lambda text: text.replace("e", "é"),
    "a split accent": lambda text: text.replace("e", "e\u0301"),
}


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    fit("probe", write_run(folder / "run", *planted_rows(80)), out=folder / "gate", target="known", kind="linear")
    return folder / "gate"


def disguised(tmp_path, change):
    rows, states = planted_rows(80)
    changed = [replace(row, id=f"new {i}", question=change(row.question)) for i, row in enumerate(rows)]
    return load_label_table([write_run(tmp_path / "other", changed, states)], layers=None)


@pytest.mark.parametrize("name", DISGUISES)
def test_a_training_question_is_recognized(gate, tmp_path, name):
    trial = disguised(tmp_path, DISGUISES[name])
    plain = load_label_table([gate.parent / "run"], layers=None)
    assert mark_seen_rows(trial, gate).tolist() == mark_seen_rows(plain, gate).tolist()
    assert 0 < sum(mark_seen_rows(trial, gate)) < 80
    with pytest.raises(BadSetting, match="was fitted on"):
        score_gate(trial, str(gate))
    assert drop_seen_rows(trial, [str(gate)]).left_out["seen by a gate"] == sum(mark_seen_rows(plain, gate))


def test_an_older_list_without_loose_keys_still_works(gate, tmp_path):
    trial = disguised(tmp_path, str.upper)
    old = tmp_path / "old"
    old.mkdir()
    (old / SEEN_FILE).write_text(f"{fingerprint_text(trial.questions[3].text.lower())}\n", encoding="utf-8")
    assert [place for place, seen in enumerate(mark_seen_rows(trial, old)) if seen] == [3]
