"""A gate evaluated on the questions it was fitted on, under other ids and in other clothes, is found out."""

from dataclasses import replace

import pytest

from knowgate.errors import BadSetting
from knowgate.fitting.fit_gate import fit
from knowgate.gates.fitted.artefact import SEEN
from knowgate.gates.recorded import score_gate, seen_by, without_seen
from knowgate.runs.split import seen_key
from knowgate.runs.trial import load_trial
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
    return load_trial([write_run(tmp_path / "other", changed, states)], layers=None)


@pytest.mark.parametrize("name", DISGUISES)
def test_a_question_that_was_seen_is_known_again(gate, tmp_path, name):
    trial = disguised(tmp_path, DISGUISES[name])
    plain = load_trial([gate.parent / "run"], layers=None)
    assert seen_by(trial, gate) == seen_by(plain, gate)
    assert 0 < sum(seen_by(trial, gate)) < 80
    with pytest.raises(BadSetting, match="was fitted on"):
        score_gate(trial, str(gate))
    assert without_seen(trial, [str(gate)]).left_out["seen by a gate"] == sum(seen_by(plain, gate))


def test_an_older_list_without_loose_keys_still_works(gate, tmp_path):
    trial = disguised(tmp_path, str.upper)
    old = tmp_path / "old"
    old.mkdir()
    (old / SEEN).write_text(f"{seen_key(trial.questions[3].text.lower())}\n", encoding="utf-8")
    assert [place for place, seen in enumerate(seen_by(trial, old)) if seen] == [3]
