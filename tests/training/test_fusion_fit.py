"""The fusion learns a rule that no single signal shows, and says what each signal is worth."""

import re
from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.signals.features import FEATURES, feature_matrix
from knowgate.data.signals.samples import SEAKR_SAMPLES
from knowgate.errors import ArtifactError, BadInput
from knowgate.gates import load_fitted_gate
from knowgate.stats.metrics import auroc
from knowgate.training.examples import load_examples
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.probe import fit_probe
from knowgate.types import Completion, Sampling, Signal
from tests.support.hash_embedder import HashEmbedder
from tests.support.planted_run import LAYER, SAMPLES, planted_rows, scored_elsewhere, write_run

PROBES = [f"probe-{position}-{LAYER}" for position in ("pre", "post")]
WITHOUT_SEAKR = [name for name in FEATURES if not name.startswith("seakr")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("labels") / "run", *planted_rows(600, token=True))


@pytest.fixture(scope="module")
def examples(run):
    return load_examples([run])


@pytest.fixture(scope="module")
def fusion(examples):
    return fit_fusion(examples)


def on_test(fitted, examples):
    """AUROC on the test split."""
    return auroc(examples.needed[examples.split.test], fitted.raw(examples.split.test.tolist()))


# --- learning -------------------------------------------------------------------------------------


def test_it_learns_a_rule_that_no_single_signal_shows(fusion, examples):
    test, truth = examples.split.test, examples.needed[examples.split.test]
    columns = feature_matrix(WITHOUT_SEAKR, examples.questions, examples.readings)[test]
    alone = [auroc(truth, column) for column in columns.T]
    alone += [on_test(fit_probe(examples, kind="linear", position=p), examples) for p in ("pre", "post")]
    assert all(0.1 < score < 0.9 for score in alone)
    assert on_test(fusion, examples) > 0.95


def test_it_draws_samples_as_those_of_the_run_were_drawn(examples):
    assert fit_fusion(examples).request.sampling == Sampling()
    colder = {**examples.settings, "temperature": 0.6, "top_p": 0.9, "top_k": 50}
    drawn = replace(examples, table=replace(examples.table, settings=colder))
    assert fit_fusion(drawn).request.sampling == Sampling(0.6, 0.9, 50)


def test_it_reads_every_signal_of_the_run(fusion):
    assert fusion.options["features"] == WITHOUT_SEAKR
    assert [probe["name"] for probe in fusion.options["probes"]] == PROBES
    assert fusion.needs == {Signal.LOGPROBS, Signal.HIDDEN, Signal.LABELS, Signal.SAMPLES}
    want = fusion.request
    assert (want.draft_tokens, want.layers, want.after_draft, want.samples) == (8, (LAYER,), True, SAMPLES)


def test_needs_are_probabilities(fusion, examples):
    raw = fusion.raw(range(len(examples.rows)))
    assert raw.min() >= 0
    assert raw.max() <= 1


def test_fitting_again_gives_the_same_weights(fusion, examples):
    again = fit_fusion(examples).tensors
    assert all(np.array_equal(block, again[name]) for name, block in fusion.tensors.items())


def test_without_states_it_makes_do_with_the_rest(tmp_path):
    found = load_examples([write_run(tmp_path / "run", planted_rows(200, token=True)[0])])
    fitted = fit_fusion(found, text=False)
    assert fitted.options["probes"] == []
    assert Signal.HIDDEN not in fitted.needs


def test_without_states_it_reads_the_text_unless_told_not_to(tmp_path):
    found = load_examples([write_run(tmp_path / "run", planted_rows(80, token=True)[0])])
    assert fit_fusion(found, embedder=HashEmbedder()).options["embedder_fingerprint"] == "hash"
    assert "embedder" not in fit_fusion(found, text=False).options


def test_it_reads_the_wording_of_drafts_which_embeddings_may_blur(tmp_path):
    rows = [
        replace(row, closed=replace(row.closed, text=f"{number} {'Johnson' if row.closed.correct else 'Johnston'}"))
        for number, row in enumerate(planted_rows(400, token=True)[0])
    ]
    found = load_examples([write_run(tmp_path / "run", rows)])
    blind = ConstantEmbedder()
    fitted = fit_fusion(found, embedder=blind)
    assert on_test(fitted, found) > 0.99
    save_fitted(fitted, found, tmp_path / "gate")
    gate = replace(load_fitted_gate(str(tmp_path / "gate")), embedder=blind)
    test = found.split.test
    needs = gate.raw([found.questions[index] for index in test], [found.readings[index] for index in test])
    assert needs == pytest.approx(fitted.raw(test.tolist()), abs=1e-6)


class ConstantEmbedder:
    """An embedding model that maps every text to the same vector."""

    fingerprint = "constant"

    def embed(self, texts):
        return np.ones((len(texts), 4), dtype=np.float32)


def test_a_signal_that_one_row_lacks_is_left_out(examples):
    silent = replace(examples.readings[7], draft=Completion("so so"))  # no log-probabilities
    readings = [*examples.readings[:7], silent, *examples.readings[8:]]
    found = replace(examples, table=replace(examples.table, readings=readings))
    assert not {"first", "mean", "min", "entropy", "margin"} & set(fit_fusion(found).options["features"])


# --- cheap and early ------------------------------------------------------------------------------


def test_a_cheap_fusion_needs_no_samples_and_no_pass_of_its_own(examples):
    fitted = fit_fusion(examples, cheap=True)
    assert fitted.needs == {Signal.LOGPROBS, Signal.HIDDEN}
    assert fitted.request.samples == 0
    assert on_test(fitted, examples) > 0.95


def test_an_early_fusion_wants_one_draft_token_only(examples):
    fitted = fit_fusion(examples, early=True)
    assert fitted.options["features"] == ["first", "question_length"]
    assert [probe["name"] for probe in fitted.options["probes"]] == PROBES[:1]
    assert (fitted.request.draft_tokens, fitted.request.after_draft, fitted.request.samples) == (1, False, 0)
    assert on_test(fitted, examples) > 0.95


@pytest.mark.parametrize(("seakr", "fits"), [(SEAKR_SAMPLES, True), (SEAKR_SAMPLES - 1, False)])
@pytest.mark.parametrize("name", ["seakr", "seakr_end"])
def test_seakr_is_read_only_where_the_gate_can_draw_as_many_samples(tmp_path, seakr, fits, name):
    rows = [replace(row, closed=replace(row.closed, samples=()), signals={name: -1.0}) for row in planted_rows(80)[0]]
    run = write_run(tmp_path / "run", rows, samples=0, seakr=seakr, seakr_layer=2)
    fitted = fit_fusion(load_examples([run]), text=False)
    assert (name in fitted.options["features"]) is fits
    assert fitted.request.sample_end is (fits and name == "seakr_end")  # an older run's was read one token earlier
    assert (fitted.request.samples, fitted.request.sample_layer) == ((SEAKR_SAMPLES, 2) if fits else (0, None))


# --- notes ----------------------------------------------------------------------------------------


def test_the_notes_list_each_signals_contribution_and_the_loss_of_a_cheap_fusion(fusion):
    names = [note.split(":")[0] for note in fusion.notes]
    assert names[:-1] == ["all signals", *WITHOUT_SEAKR, *PROBES]
    assert re.fullmatch(r"cheap fusion, without .*: [01]\.\d{3} \([+-]0\.\d{3}\)", fusion.notes[-1])


def test_the_notes_know_which_signals_matter(fusion):
    lost = {note.split(":")[0]: float(note.split()[-1]) for note in fusion.notes[1:-1]}
    alone = {note.split(":")[0]: float(note.split()[2].rstrip(",")) for note in fusion.notes[1:-1]}
    assert alone["first"] > 0.65
    assert alone["unfinished"] == 0.5
    assert abs(lost["unfinished"]) < 0.01


def test_a_cheap_fusion_that_leaves_nothing_out_has_no_such_note(examples):
    assert not any("cheap fusion" in note for note in fit_fusion(examples, cheap=True).notes)


# --- saved and loaded -----------------------------------------------------------------------------


def test_a_saved_fusion_scores_the_same_in_a_new_process(fusion, examples, run, tmp_path):
    manifest = save_fitted(fusion, examples, tmp_path / "fusion")
    gate = load_fitted_gate(str(tmp_path / "fusion"))
    needs = gate.score(examples.questions, examples.readings)
    assert scored_elsewhere(tmp_path / "fusion", run) == needs
    assert all(0 <= need <= 1 for need in needs)
    assert (gate.request, gate.needs) == (fusion.request, fusion.needs)
    test = examples.split.test
    assert auroc(examples.needed[test], np.array(needs)[test]) == pytest.approx(manifest["metrics"]["auroc"]["value"])
    assert gate.raw(examples.questions, examples.readings)[test] == pytest.approx(fusion.raw(test.tolist()), abs=1e-6)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["train", "dev", "calibration", "test"])
def test_nan_among_the_states_is_refused_wherever_it_is(examples, tmp_path, part):
    rows, states = planted_rows(600, token=True)
    states[f"after.{LAYER}"][getattr(examples.split, part)[0], 2] = np.nan
    run = write_run(tmp_path / "run", rows, states)
    with pytest.raises(ArtifactError, match=f"hidden states 'after.{LAYER}' in .* are not a table of finite numbers"):
        load_examples([run])


@pytest.mark.parametrize("part", ["train", "dev", "calibration", "test"])
def test_nan_among_the_tokens_is_refused_wherever_it_is(examples, part):
    place = getattr(examples.split, part)[0]
    reading = examples.readings[place]
    tokens = (replace(reading.draft.tokens[0], logprob=np.nan), *reading.draft.tokens[1:])
    readings = list(examples.readings)
    readings[place] = replace(reading, draft=replace(reading.draft, tokens=tokens))
    with pytest.raises(BadInput, match="contain NaN, infinite or extremely large values"):
        fit_fusion(replace(examples, table=replace(examples.table, readings=readings)))
