"""The fine-tuned arbiter: answers with an x in them are right, and it learns that of both; saved, loaded, refused."""

import numpy as np
import pytest

from knowgate.data.splits import fingerprint_text
from knowgate.errors import BadSetting
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.artifacts.gate_folder import SEEN_FILE
from knowgate.stats.metrics import auroc
from knowgate.training.arbiter import fit_arbiter
from tests.support.hand_gate import write_rows
from tests.support.judge_data import LETTERS, quick
from tests.support.pairs_by_hand import both, pair_row
from tests.support.tiny_models import save_word_llama

N = 320


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


def answers(rng):
    """Two answers of letters, and whether each has an x."""
    right = rng.random(2) < 0.5
    words = [" ".join(rng.choice(list(LETTERS), 3)) for _ in right]
    return ["x " + word if truth else word for word, truth in zip(words, right, strict=True)], right.tolist()


def make_rows(n):
    rng = np.random.default_rng(0)
    pairs = [answers(rng) for _ in range(n)]
    return [pair_row(str(i), 0.5, *right, texts=tuple(texts)) for i, (texts, right) in enumerate(pairs)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("run") / "run", make_rows(N))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return f"hf:{save_word_llama(tmp_path_factory.mktemp('model'))}"


@pytest.fixture(scope="module")
def fitted(run, base, tmp_path_factory):
    out = tmp_path_factory.mktemp("arbiter") / "arbiter"
    return fit_arbiter(run, out=out, mode="lora", base=base, epochs=8, learning_rate=5e-3)


def test_it_learns_whether_each_answer_is_right(fitted):
    measured = fitted.artifact.manifest["metrics"]
    assert measured["auroc_closed"]["value"] > 0.9
    assert measured["auroc_open"]["value"] > 0.9


def test_a_loaded_arbiter_believes_the_right_answer(fitted):
    loaded = load_arbiter(str(fitted.artifact.path))
    rng = np.random.default_rng(1)
    asked = [answers(rng) for _ in range(40)]
    beliefs = loaded.estimate([both(*texts) for texts, _ in asked])
    truth = np.array([right[0] for _, right in asked])
    assert auroc(truth, np.array([belief.closed for belief in beliefs])) > 0.9


def test_it_reads_no_passages_unless_it_was_fitted_with_them(fitted, base, tmp_path):
    assert (fitted.needs_passages, fitted.needs) == (False, frozenset())
    few_rows = write_rows(tmp_path / "few", make_rows(60))
    assert fit_arbiter(few_rows, out=tmp_path / "a", mode="lora", base=base, epochs=1, passages=1).needs_passages


@pytest.mark.parametrize(
    ("wrong", "said"), [({"tokens": 0}, "tokens=0 is not allowed"), ({"passages": -1}, "passages=-1 is not allowed")]
)
def test_numbers_out_of_range_are_rejected(run, base, tmp_path, wrong, said):
    with pytest.raises(BadSetting, match=said):
        fit_arbiter(run, out=tmp_path / "a", mode="lora", base=base, **wrong)


@pytest.mark.slow
def test_with_folds_every_pair_is_measured_by_a_judge_that_did_not_see_it(run, base, tmp_path):
    folded = fit_arbiter(run, out=tmp_path / "a", mode="lora", base=base, epochs=12, learning_rate=5e-3, folds=2)
    assert folded.artifact.manifest["metrics"]["auroc_open"]["value"] > 0.85
    seen = (folded.artifact.path / SEEN_FILE).read_text().split()
    assert all(fingerprint_text(f"id:{i}") in seen for i in range(N))


def test_seeds_and_folds_together_are_rejected(run, base, tmp_path):
    with pytest.raises(BadSetting, match="`seeds` and `folds` are mutually exclusive"):
        fit_arbiter(run, out=tmp_path / "a", mode="lora", base=base, seeds=2, folds=2)
