"""What every gate in the table must do, whatever it measures."""

import doctest
import importlib
import inspect
from dataclasses import replace

import pytest

from knowgate.gates import GATES, load_gate, score_questions
from knowgate.gates.live import bind_gate, read_questions
from knowgate.history.entries import Known, LogEntry, Outcome, Scope
from knowgate.history.sqlite import SqliteHistory
from knowgate.models.fake import FakeModel
from knowgate.prompts.answer import AnswerPrompts
from knowgate.types import Question
from tests.support.hash_embedder import HashEmbedder

QUESTIONS = [Question(f"What is thing {i}?", id=str(i)) for i in range(12)] + [Question("谁写了哈姆雷特?", id="zh")]

every_gate = pytest.mark.parametrize("name", GATES)


@pytest.fixture(scope="module", autouse=True)
def log(tmp_path_factory):
    """A log for the gates that look into one."""
    global LOG
    LOG = SqliteHistory(tmp_path_factory.mktemp("log") / "history.db", HashEmbedder())
    scope = Scope(FakeModel().fingerprint, AnswerPrompts().fingerprint)
    kinds = [(Known.KNOWN, Outcome.WORSE), (Known.UNKNOWN, Outcome.BETTER), (Known.UNKNOWN, Outcome.SAME)]
    LOG.add([LogEntry(f"What was thing {i}?", *kinds[i % 3][:1], scope, outcome=kinds[i % 3][1]) for i in range(30)])


def ready(name):
    gate = load_gate(name)
    gate = replace(gate, history=LOG) if hasattr(gate, "history") else gate
    return bind_gate(gate, FakeModel(), AnswerPrompts())


def needs(name, questions=QUESTIONS):
    gate = ready(name)
    return score_questions(gate, questions, read_questions(FakeModel(), [gate], questions, AnswerPrompts()))


@every_gate
def test_there_is_one_need_for_each_question(name):
    assert len(needs(name)) == len(QUESTIONS)


@every_gate
def test_every_need_is_between_0_and_1(name):
    assert all(0 <= need <= 1 for need in needs(name))


@every_gate
def test_no_questions_give_no_needs(name):
    assert needs(name, []) == []


@every_gate
def test_needs_are_the_same_in_every_run(name):
    assert needs(name) == needs(name)


@every_gate
def test_needs_come_in_the_order_of_the_questions(name):
    assert needs(name, QUESTIONS[::-1]) == needs(name)[::-1]


@every_gate
def test_a_need_does_not_depend_on_the_batch_it_is_in(name):
    alone = [needs(name, [question])[0] for question in QUESTIONS]
    assert alone == pytest.approx(needs(name), abs=1e-6)  # sums of floats differ in the last bit


@every_gate
def test_sharing_a_reading_with_every_other_gate_changes_no_need(name):
    others = [*map(ready, GATES), load_gate("flare:draft_tokens=64")]
    shared = read_questions(FakeModel(), others, QUESTIONS, AnswerPrompts())
    assert score_questions(load_gate(name), QUESTIONS, shared) == needs(name)


@every_gate
def test_its_name_is_that_of_the_table(name):
    assert load_gate(name).name == name


@every_gate
def test_it_needs_what_the_table_says(name):
    assert ", ".join(sorted(load_gate(name).needs)) == GATES[name].needs


@every_gate
def test_its_threshold_is_between_0_and_1(name):
    assert 0 <= load_gate(name).threshold <= 1


@every_gate
def test_its_docstring_says_what_it_needs_and_costs_with_an_example(name):
    text = inspect.getdoc(type(load_gate(name))) or ""
    assert all(f"{part}" in text for part in ("Needs: ", "Cost per question: ", "Example:", ">>> "))
    assert f"Needs: {GATES[name].needs or 'nothing'}." in text


@every_gate
def test_a_paper_in_the_table_is_a_reference_in_the_docstring(name):
    text = inspect.getdoc(type(load_gate(name))) or ""
    assert ("Reference: " in text) == bool(GATES[name].paper)


@every_gate
def test_its_example_runs(name):
    module = importlib.import_module(GATES[name].target.partition(":")[0])
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)
