"""What every gate must do, whatever it measures: those of the table, fitted ones, and one from an outside package."""

import doctest
import functools
import importlib
import inspect
from dataclasses import fields, replace

import pytest

from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry, RetrievalOutcome
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.errors import ArtifactError, BadSetting
from knowgate.gates import FITTED_GATES, GATES, load_gate
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Gate, Question, Signal
from tests.support.fitted_gates import FITS, MODEL, TABLE, fit_every_gate, open_fitted
from tests.support.gate_from_outside import SHORT_GATE, installed
from tests.support.hash_embedder import HashEmbedder

QUESTIONS = [Question(f"What is thing {i}?", id=str(i)) for i in range(12)] + [Question("谁写了哈姆雷特?", id="zh")]
OUTSIDE = "short"
LOGGED = ("dhicl", "skr")  # gates that look into a log
ENTRIES = {**GATES, **FITTED_GATES}

every_gate = pytest.mark.parametrize("name", [*ENTRIES, OUTSIDE])
every_entry = pytest.mark.parametrize("name", ENTRIES)
plain_gates = pytest.mark.parametrize("name", GATES)
fitted_gates = pytest.mark.parametrize("name", FITTED_GATES)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A log for the gates that look into one, the fitted gates, and a package with one of its own."""
    global LOG, FOLDER
    FOLDER = fit_every_gate(tmp_path_factory.mktemp("fitted"))
    LOG = SqliteHistory(tmp_path_factory.mktemp("log") / "history.db", HashEmbedder())
    scope = HistoryScope(MODEL.fingerprint, AnswerPrompts().fingerprint)
    kinds = [
        (KnowledgeLabel.KNOWN, RetrievalOutcome.WORSE),
        (KnowledgeLabel.UNKNOWN, RetrievalOutcome.BETTER),
        (KnowledgeLabel.UNKNOWN, RetrievalOutcome.SAME),
    ]
    LOG.add([LogEntry(f"What was thing {i}?", *kinds[i % 3][:1], scope, outcome=kinds[i % 3][1]) for i in range(30)])
    points = f"[knowgate.gates]\n{OUTSIDE} = gates_from_outside:ShortGate\nnone = gates_from_outside:NoGate\n"
    with installed(tmp_path_factory.mktemp("outside"), "gates_from_outside", SHORT_GATE, points):
        yield


def loaded(name):
    if name in FITTED_GATES:
        return open_fitted(FOLDER / name)
    gate = load_gate(name)
    if name == "consistency":
        return replace(gate, embedder=HashEmbedder())  # the packaged embedding model is slow to load
    return replace(gate, history=LOG) if name in LOGGED else gate


def ready(name):
    return bind_gate(loaded(name), MODEL, AnswerPrompts())


def read(gate, questions=QUESTIONS, model=MODEL):
    return read_questions(model, [gate], questions, AnswerPrompts())


def needs(name, questions=QUESTIONS):
    gate = ready(name)
    return score_questions(gate, questions, read(gate, questions))


@functools.cache
def expected(name):
    """The needs of all questions, computed once."""
    return needs(name)


@functools.cache
def read_for_every_gate():
    """One reading for all gates together."""
    gates = [*map(ready, [*ENTRIES, OUTSIDE]), load_gate("flare:draft_tokens=64")]
    return read_questions(MODEL, gates, QUESTIONS, AnswerPrompts())


# --- scores ---------------------------------------------------------------------------------------


@every_gate
def test_there_is_one_need_for_each_question(name):
    assert len(expected(name)) == len(QUESTIONS)


@every_gate
def test_every_need_is_between_0_and_1(name):
    assert all(0 <= need <= 1 for need in expected(name))


@every_gate
def test_no_questions_give_no_needs(name):
    assert needs(name, []) == []


@every_gate
def test_needs_are_the_same_in_every_run(name):
    assert needs(name) == expected(name)


@every_gate
def test_needs_come_in_the_order_of_the_questions(name):
    assert needs(name, QUESTIONS[::-1]) == pytest.approx(expected(name)[::-1], abs=1e-6)


@every_gate
def test_a_need_does_not_depend_on_the_batch_it_is_in(name):
    alone = [needs(name, [question])[0] for question in QUESTIONS[::4]]
    assert alone == pytest.approx(expected(name)[::4], abs=1e-6)  # sums of floats differ in the last bit


@every_gate
def test_sharing_a_reading_with_every_other_gate_changes_no_need(name):
    assert score_questions(ready(name), QUESTIONS, read_for_every_gate()) == pytest.approx(expected(name), abs=1e-6)


@every_gate
def test_scoring_does_not_change_a_gate(name):
    gate = ready(name)
    before = frozen(gate)
    readings = read(gate)
    gate.score(QUESTIONS, readings), gate.explain(QUESTIONS, readings), gate.count_rounds(QUESTIONS, readings)
    assert frozen(gate) == before


def frozen(gate):
    """Everything that decides how it scores."""
    weights = gate.artifact.tensors if isinstance(gate, FittedGate) else {}
    options = {field.name: repr(getattr(gate, field.name)) for field in fields(gate)}
    return options, {name: block.tobytes() for name, block in weights.items()}


# --- what else it says ----------------------------------------------------------------------------


@every_gate
@pytest.mark.parametrize("questions", [QUESTIONS, []], ids=["some", "none"])
def test_there_is_one_explanation_and_one_number_of_rounds_for_each_question(name, questions):
    gate = ready(name)
    readings = read(gate, questions)
    words, rounds = gate.explain(questions, readings), gate.count_rounds(questions, readings)
    assert [type(text) for text in words] == [str] * len(questions)
    assert len(rounds) == len(questions)
    assert all(number >= 1 for number in rounds)


@every_gate
def test_it_finds_neighbors_for_each_question_or_none(name):
    assert len(ready(name).find_neighbors(QUESTIONS)) == len(QUESTIONS)


@every_gate
def test_it_builds_one_label_prompt_per_question_or_none(name):
    gate = ready(name)
    asked = gate.build_label_prompts(QUESTIONS, read(gate))
    assert len(asked) in ((len(QUESTIONS),) if Signal.LABELS in gate.needs else (0, len(QUESTIONS)))
    assert bool(gate.labels) >= (Signal.LABELS in gate.needs)


@every_gate
def test_only_kbm_filters_passages(name):
    assert (ready(name).passage_filter is not None) == (name == "kbm")


@every_gate
def test_its_threshold_is_between_0_and_1_or_means_always(name):
    threshold = loaded(name).threshold
    assert 0 <= threshold <= 1 or threshold == ALWAYS_RETRIEVE


# --- needs and wants ------------------------------------------------------------------------------


@every_gate
def test_its_request_matches_its_needs(name):
    gate = ready(name)
    assert (gate.request.draft_tokens > 0) >= bool(gate.needs & {Signal.DRAFT, Signal.LOGPROBS})
    assert (gate.request.samples > 0) == (Signal.SAMPLES in gate.needs)
    assert (bool(gate.request.layers) or gate.request.sample_layer is not None) == (Signal.HIDDEN in gate.needs)


@every_gate
def test_a_model_with_exactly_the_needed_signals_is_enough(name):
    gate = ready(name)
    frugal = FakeModel(TABLE, offers=gate.needs)
    assert score_questions(gate, QUESTIONS, read(gate, model=frugal)) == pytest.approx(expected(name), abs=1e-6)


# --- the table ------------------------------------------------------------------------------------


def test_every_fitted_gate_is_fitted_here():
    assert set(FITS) == set(FITTED_GATES)


@every_gate
def test_its_name_is_that_of_the_table(name):
    assert loaded(name).name.partition(":")[0] == name


@every_entry
def test_it_needs_what_the_table_says(name):
    assert ENTRIES[name].needs in (", ".join(sorted(loaded(name).needs)), "as fitted")


@every_entry
def test_its_docstring_says_what_it_needs_and_costs_with_an_example(name):
    text = inspect.getdoc(type(loaded(name))) or ""
    assert all(part in text for part in ("Needs: ", "Cost per question: ", "Example:", ">>> "))


@plain_gates
def test_its_docstring_needs_what_the_table_says(name):
    assert f"Needs: {GATES[name].needs or 'nothing'}." in (inspect.getdoc(type(loaded(name))) or "")


@every_entry
def test_a_paper_in_the_table_is_a_reference_in_the_docstring(name):
    text = inspect.getdoc(type(loaded(name))) or ""
    assert ("Reference: " in text) == bool(ENTRIES[name].paper)


@plain_gates
def test_its_example_runs(name):
    module = importlib.import_module(GATES[name].target.partition(":")[0])
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


# --- fitted gates ---------------------------------------------------------------------------------


@fitted_gates
@pytest.mark.parametrize("other", ["model", "prompts"])
def test_a_fitted_gate_rejects_another_model_and_another_wording(name, other):
    model = FakeModel(name="other") if other == "model" else MODEL
    prompts = "other" if other == "prompts" else AnswerPrompts().fingerprint
    with pytest.raises(ArtifactError, match="was fitted on fake"):
        loaded(name).bind(model, prompts)


@fitted_gates
def test_as_a_plug_in_it_decides_the_same_with_a_note(name):
    gate = open_fitted(FOLDER / name, plug_in=True).bind(FakeModel(name="other"), AnswerPrompts().fingerprint)
    assert gate.note == "plug-in, fitted on fake"
    assert ready(name).note == ""
    assert score_questions(gate, QUESTIONS, read(gate)) == expected(name)


# --- other packages -------------------------------------------------------------------------------


def test_a_gate_from_outside_is_a_class_with_one_method():
    gate = loaded(OUTSIDE)
    assert isinstance(gate, Gate)
    assert [name for name in vars(type(gate)) if not name.startswith("_")] == ["needs", "score"]


def test_an_entry_point_that_is_no_gate_is_rejected():
    with pytest.raises(
        BadSetting, match=r"gate 'none' provides .*NoGate'>, not a gate class\. Make it a subclass of knowgate\.Gate"
    ):
        load_gate("none")
