"""`sweep ik`: tokens, training size and whose labels, each with a judge of its own; a tiny random Llama learns."""

import numpy as np
import pytest

from knowgate.cli.main import run as knowgate
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.errors import BadInput, UnknownName
from knowgate.papers.ik_ablations import IkAblations, compute_needed, sweep_ik
from knowgate.training.examples import load_examples
from knowgate.types import Token
from tests.support.judge_data import quick
from tests.support.planted_run import write_run
from tests.support.tiny_models import save_word_llama


def rows(n=240):
    """Known where the draft begins with an x; the gold answer is held, never equal, so `exact` finds all unknown."""
    rng = np.random.default_rng(0)
    known = rng.random(n) < 0.5
    words = [" ".join(rng.choice(list("bcdefghi"), 5)) for _ in range(n)]
    drafts = [f"x {word}" if truth else word for word, truth in zip(words, known, strict=True)]
    return [
        LabelRow(
            str(i),
            f"{i} {words[i]}?",
            "en",
            answers=("x",),
            closed=GradedAnswer(drafts[i], (Token("x", -1.0),) * 6, correct=bool(known[i])),
        )
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ik")
    base = save_word_llama(folder / "model")
    return write_run(folder / "run", rows(), model=f"hf:{base}", max_tokens=8)


@pytest.mark.slow
def test_the_table_has_a_row_for_each_variant_and_the_majority(run, tmp_path):
    messages = []
    with quick():
        options = {"epochs": 8, "learning_rate": 5e-3}
        ablations = IkAblations(tokens=[0, 4], rows=[120], fit_options=options)
        table = sweep_ik([run], ablations, out=tmp_path, notify=messages.append)
    without, read, majority = (dict(zip(table.columns, line, strict=True)) for line in table.rows)
    assert (without["T"], read["T"], majority["T"]) == ("0", "4", "majority")
    assert read["training rows"] == "120"
    assert float(read["AUROC"]) > 0.9 > float(without["AUROC"])
    assert float(read["own verdict right"].split()[0]) > float(majority["judged right"].split()[0]) >= 50
    assert messages == ["fitting ik-t0-n120-contains on 120 questions", "fitting ik-t4-n120-contains on 120 questions"]
    again = sweep_ik([run], IkAblations(tokens=[4], rows=[120]), out=tmp_path, notify=messages.append)
    assert messages[-1] == "ik-t4-n120-contains is already fitted"
    assert again.rows[0] == table.rows[1]


def test_labels_can_be_made_by_another_grader(run):
    examples = load_examples([run])
    assert compute_needed(examples, "contains", None).tolist() == examples.needed.tolist()
    with pytest.raises(BadInput, match="'exact' grades 0 answers right and 240 wrong"):
        compute_needed(examples, "exact", None)


@pytest.mark.parametrize(
    ("grade", "message"),
    [("judge", "needs `judge`"), ("taste", "unknown grader 'taste'")],
)
def test_an_unavailable_grader_is_rejected_with_advice(run, grade, message):
    with pytest.raises(UnknownName, match=message):
        compute_needed(load_examples([run]), grade, None)


@pytest.mark.parametrize("option", [["--tokens", "8,many"], ["--rows", "none"], ["--tokens", ","]])
def test_invalid_numbers_are_rejected(run, capsys, option):
    assert knowgate(["sweep", "ik", "--labels", str(run), *option]) == 1
    assert "Give whole numbers separated by commas" in capsys.readouterr().err
