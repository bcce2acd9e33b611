"""A planted preference is learnt, and what was learnt is the same in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from knowgate.cli.reranker import FitRerankerOptions
from knowgate.data.preferences import Preference, compute_rank_metrics, hash_preferences, select_passages
from knowgate.errors import ArtifactError, BadInput, BadSetting, WeightsError
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.cross_encoder import read_reranker_manifest
from knowgate.training.reranker import (
    AlignedReranker,
    fit_reranker,
    make_preference_groups,
    make_relevance_groups,
    save_cross_encoder,
    split_dev_rows,
)
from knowgate.training.reranker_artifact import save_reranker
from knowgate.training.reranker_trainer import RerankerTrainingOptions, truncate_groups
from knowgate.types import Passage, Question
from tests.support.planted_preferences import SETTINGS, planted_preferences
from tests.support.tiny_models import save_tiny_cross_encoder

TRAIN, TEST = planted_preferences(96), planted_preferences(60, "test", seed=1)
RESCORE = """
import json, sys
from knowgate.retrieval.rerankers import load_reranker
from knowgate.types import Passage
texts = json.loads(sys.argv[2])
print(json.dumps(load_reranker(sys.argv[1]).score(["what is the apple"], [[Passage("1", text) for text in texts]])[0]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_cross_encoder(tmp_path_factory.mktemp("models") / "tiny", seed=1))


@pytest.fixture(scope="module")
def aligned(tiny: str) -> AlignedReranker:
    return fit_reranker([*TRAIN, *TEST], base=tiny, training=RerankerTrainingOptions(batch=8, rate=3e-3, epochs=2))


@pytest.fixture
def saved(aligned: AlignedReranker, tmp_path: Path) -> Path:
    out = tmp_path / "aligned"
    save_reranker(aligned, out, settings=SETTINGS, data_hash=hash_preferences(TRAIN), command="knowgate fit reranker")
    return out


def test_a_planted_preference_is_learned(aligned: AlignedReranker):
    before, after = aligned.before["P@1"].mean(), aligned.after["P@1"].mean()
    assert 0.2 < before < 0.45  # chance is 1/3
    assert after > 0.95
    assert aligned.alignment.groups == 96
    assert len(aligned.tested) == 60


@pytest.mark.slow
def test_scores_are_the_same_in_another_process(aligned: AlignedReranker, saved: Path):
    texts = ["marker sky tree lamp", "sky tree lamp road", "bird marker rain ship"]
    here = load_reranker(str(saved)).score(["what is the apple"], [[Passage("1", text) for text in texts]])[0]
    command = [sys.executable, "-c", RESCORE, str(saved), json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == here
    assert min(here[0], here[2]) > here[1]


def test_the_folder_explains_itself(saved: Path):
    manifest = read_reranker_manifest(saved)
    assert manifest["aligned_to"]["model_fingerprint"] == "m"
    assert manifest["metrics"]["gain"]["P@1"]["low"] > 0
    assert manifest["training"]["weight_decay"] == 0.01
    card = (saved / "README.md").read_text()
    assert "Measured on 60 held-out questions" in card
    assert not any(path.suffix in (".bin", ".pkl", ".pt") for path in saved.rglob("*"))


def test_changed_weights_are_refused(saved: Path):
    with (saved / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ArtifactError, match="changed or damaged"):
        load_reranker(str(saved)).score(["q"], [[Passage("1", "sky")]])


def test_files_that_could_run_code_are_refused(saved: Path):
    (saved / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ArtifactError, match=r"contains the unexpected file 'pytorch_model\.bin'"):
        load_reranker(str(saved)).score(["q"], [[Passage("1", "sky")]])
    (saved / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"Weights in pickle files are not loaded"):
        load_reranker(str(saved)).score(["q"], [[Passage("1", "sky")]])


def test_another_format_is_refused(saved: Path):
    manifest = json.loads((saved / "reranker.json").read_text())
    (saved / "reranker.json").write_text(json.dumps({**manifest, "version": 9}))
    with pytest.raises(ArtifactError, match="has format version 9"):
        read_reranker_manifest(saved)


def test_groups_hold_each_questions_own_negatives_alone():
    group = make_preference_groups(TRAIN[:1])[0]
    assert group.labels == (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert set(group.passages) == {found.text for found in TRAIN[0].candidates}


def test_texts_beyond_the_limits_are_cut_and_counted(aligned: AlignedReranker):
    from knowgate.training.reranker_trainer import RankingGroup

    groups, cut = truncate_groups(aligned.model, [RankingGroup("sky " * 130, ("tree " * 513, "tree"), (1.0, 0.0))])
    assert cut == {"questions": 1, "passages": 1}
    assert (len(groups[0].question.split()), len(groups[0].passages[0].split())) == (128, 512)


def test_relevance_sets_passages_with_the_answer_against_those_without():
    contexts = tuple(Passage(str(i), text) for i, text in enumerate(["the sky is blue", "red apple", "Blue bird", "x"]))
    question = Question("what colour?", "q", ("blue",), contexts=contexts)
    group = make_relevance_groups([question])[0]
    assert group.passages[:2] == ("the sky is blue", "Blue bird")
    assert group.labels[:4] == (1.0, 1.0, 0.0, 0.0)


def test_nothing_to_learn_from_is_an_error(tiny: str):
    with pytest.raises(BadInput, match="none of the 0 training questions"):
        fit_reranker(TEST, base=tiny)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"epochs": 0}, {"learning_rate": -1.0}])
def test_wrong_training_settings_are_explained(wrong):
    with pytest.raises(BadSetting):
        FitRerankerOptions(**wrong)


def test_a_base_that_does_not_exist_is_named():
    with pytest.raises(WeightsError, match="'no-such-folder' was not found"):
        fit_reranker(TRAIN, base="no-such-folder")


def test_the_order_of_training_follows_the_seed():
    from knowgate.training.reranker_trainer import RankingGroup, shuffle_batches

    groups = [RankingGroup(str(place), ("x",), (1.0,)) for place in range(7)]

    def walk(seed: int) -> list[list[str]]:
        training = RerankerTrainingOptions(batch=3, epochs=2, seed=seed)
        return [[group.question for group in batch] for batch in shuffle_batches(groups, training)]

    assert walk(0) == walk(0) != walk(1)
    assert [len(batch) for batch in walk(0)] == [3, 3, 1, 3, 3, 1]
    assert sorted(name for batch in walk(0)[:3] for name in batch) == list("0123456")


def test_the_rate_rises_and_falls_to_nothing():
    import torch

    from knowgate.training.reranker_trainer import _create_optimizer

    optimizer, schedule = _create_optimizer(torch.nn.Linear(2, 1), RerankerTrainingOptions(rate=1.0, warm_up=0.2), 10)
    rates = []
    for _ in range(11):
        rates += schedule.get_last_lr()[:1]
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0, 0.5, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0])


def test_relevance_alone_makes_a_base_that_can_be_aligned(tiny: str, tmp_path: Path):
    from knowgate.training.reranker import fit_relevance
    from knowgate.training.reranker_artifact import save_relevance

    base = fit_relevance(
        make_preference_groups(TRAIN), base=tiny, training=RerankerTrainingOptions(rate=3e-3, epochs=2)
    )
    save_relevance(base, tmp_path / "base", data="planted")
    save_relevance(base, tmp_path / "base", data="planted again")  # one of ours may be replaced
    assert json.loads((tmp_path / "base" / "relevance.json").read_text())["data"] == "planted again"
    found = fit_reranker([*TRAIN[:8], *TEST], base=str(tmp_path / "base"))
    assert found.before["P@1"].mean() > 0.95


def test_a_control_that_reads_no_question_says_so_and_ignores_it(tiny: str, tmp_path: Path):
    training = RerankerTrainingOptions(batch=8, rate=3e-3, epochs=2)
    found = fit_reranker([*TRAIN, *TEST], base=tiny, training=training, reads_question=False)
    save_reranker(found, tmp_path / "r", settings=SETTINGS, data_hash="h")
    reranker = load_reranker(str(tmp_path / "r"))
    passages = [Passage("1", "marker sky"), Passage("2", "tree lamp")]
    one, other = reranker.score(["what is the apple", "sky sky sky"], [passages, passages])
    assert one == other
    assert one[0] > one[1]
    assert "not read: a control" in (tmp_path / "r" / "README.md").read_text()


def test_relevance_takes_passages_without_the_answer_from_an_index():
    class Found:
        name = fingerprint = "found"

        def search(self, queries, k):
            return [[Passage(f"f{place}", f"stone number {place}") for place in range(9)] for _ in queries]

    question = Question("what colour?", "q", ("blue",), contexts=(Passage("c", "it is blue"),))
    (group,) = make_relevance_groups([question], Found())
    assert group.passages == ("it is blue", *(f"stone number {place}" for place in range(7)))
    assert group.labels == (1.0, *[0.0] * 7)


def test_the_best_weights_on_dev_questions_are_kept(tiny: str):
    dev = planted_preferences(60, "dev", seed=2)
    training = RerankerTrainingOptions(batch=8, rate=3e-3, epochs=2, checks=4)
    fitted = fit_reranker([*TRAIN, *dev, *TEST], base=tiny, training=training)
    selection = fitted.alignment.selection
    assert selection is not None
    assert (selection.questions, [update for update, _ in selection.history]) == (60, [0, 6, 12, 18, 24])
    assert selection.chosen == max(value for _, value in selection.history) > selection.base
    assert fitted.after["P@1"].mean() > 0.95


def test_a_training_that_harms_its_target_leaves_the_base_as_it_is(tiny: str, tmp_path: Path):
    good = fit_reranker(TRAIN, base=tiny, training=RerankerTrainingOptions(batch=8, rate=3e-3, epochs=2))
    save_cross_encoder(good.model, tmp_path / "good")
    swapped = [replace(row, positives=row.negatives, negatives=row.positives) for row in TRAIN]
    dev = planted_preferences(60, "dev", seed=2)
    fitted = fit_reranker(
        [*swapped, *dev, *TEST],
        base=str(tmp_path / "good"),
        training=RerankerTrainingOptions(batch=8, rate=3e-3, epochs=4),
    )
    selection = fitted.alignment.selection
    assert selection is not None
    assert selection.share == 0
    assert min(value for _, value in selection.history) < 0.5  # The training did harm.
    assert (fitted.after["P@1"] == fitted.before["P@1"]).all()
    manifest = save_reranker(fitted, tmp_path / "r", settings=SETTINGS, data_hash="h")
    assert manifest["selection"]["chosen"] == manifest["selection"]["base"] > 0.95
    assert "weights of the base" in (tmp_path / "r" / "README.md").read_text()


def test_without_dev_questions_some_training_questions_choose_the_weights():
    rows = planted_preferences(600)
    train, dev = split_dev_rows(rows, [], RerankerTrainingOptions())
    assert len(train) + len(dev) == 600
    assert 50 <= len(dev) <= 130  # 15 % of 600, give or take
    assert not {row.id for row in train} & {row.id for row in dev}
    assert split_dev_rows(rows, [], RerankerTrainingOptions(checks=0)) == (rows, [])
    assert split_dev_rows(rows[:90], [], RerankerTrainingOptions()) == (rows[:90], [])  # too few to choose by
    other = planted_preferences(60, "dev", seed=2)
    assert split_dev_rows(rows, other, RerankerTrainingOptions()) == (rows, other)


def test_dev_questions_count_if_their_passages_differ_in_effect_though_none_is_harmful():
    rows = [_grade(row, [index in row.positives for index in range(6)]) for row in planted_preferences(60, "dev")]
    level = [_grade(row, [True] * 6) for row in planted_preferences(60, "dev", seed=2)]
    assert all(candidate.shift >= 0 for row in rows for candidate in row.candidates)
    _, dev = split_dev_rows(TRAIN, [*rows, *level], RerankerTrainingOptions())
    assert dev == rows
    scores = [[float(index in row.positives) for index in range(6)] for row in rows]
    assert compute_rank_metrics(dev, scores)["P@1"].mean() == 1


def _grade(row: Preference, correct: list[bool]) -> Preference:
    """Return the row as `prefer --source benefit` measures it if the answer without passages is wrong."""
    shifts = [float(is_right) for is_right in correct]
    chosen = select_passages(shifts, correct)
    candidates = tuple(
        replace(candidate, shift=shift, correct=is_right)
        for candidate, shift, is_right in zip(row.candidates, shifts, correct, strict=True)
    )
    return replace(row, candidates=candidates, positives=chosen.positives, negatives=chosen.negatives)


def test_relevance_examples_are_mixed_into_the_alignment(tiny: str):
    relevance = make_preference_groups(planted_preferences(100, seed=3))
    training = RerankerTrainingOptions(batch=8, rate=3e-3, relevance_mix=0.5)
    fitted = fit_reranker([*TRAIN, *TEST], base=tiny, training=training, relevance=relevance)
    assert fitted.relevance is None  # It was not taught first.
    assert fitted.alignment.groups == 96 + 48
