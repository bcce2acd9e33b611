"""What gates need is put together in the same way, whether a model gives it or a record."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from knowgate.data.runs.rows import GradedAnswer
from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadSetting, UnsupportedSignal
from knowgate.gates.offline_scoring import RunModelIdentity, find_signals, list_scorable_gates, score_gate
from knowgate.gates.scoring import bind_gate, read_questions
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Completion, Gate, LabelPrompt, Neighbor, Question, Reading, Signal, SignalRequest
from tests.support.counting import CountingModel
from tests.support.planted_run import MODEL, SETTINGS, planted_rows, write_run

ASKED = [Question("a", id="a"), Question("b", id="b")]


@dataclass(frozen=True)
class RecallingGate(Gate):
    """Remembers one question for each; asks with it."""

    needs = frozenset({Signal.LABELS})
    labels = ("yes", "no")

    def find_neighbors(self, questions):
        return [(Neighbor(question.text * 2, "known", 1.0),) for question in questions]

    def build_label_prompts(self, questions, readings):
        return [LabelPrompt((reading.neighbors["recalling"][0].question,)) for reading in readings]

    def score(self, questions, readings):
        return [0.5 for _ in questions]


@dataclass(frozen=True)
class DraftGate(Gate):
    draft_tokens: int
    recorded_signal = "told"
    labels = ("yes", "no")
    needs = frozenset({Signal.DRAFT, Signal.LABELS})

    @property
    def request(self):
        return SignalRequest(draft_tokens=self.draft_tokens)

    def build_label_prompts(self, questions, readings):
        return [LabelPrompt((question.text,)) for question in questions]

    def score(self, questions, readings):
        return [0.5 for _ in questions]


@dataclass
class Spying:
    """A model that writes down what it is asked for."""

    told: bool
    asked: list

    def read(self, prompts, request):
        self.asked.append(request)
        signals = {"told": 1.0} if self.told else {}
        return [Reading(Completion(question.text), signals=signals) for question in ASKED]

    def label_logits(self, prompts, labels):
        self.asked.append([prompt.parts[0] for prompt in prompts])
        return [np.array([[1.0, 0.0]], dtype=np.float32) for _ in prompts]


def test_requests_of_all_gates_are_merged_into_one_pass():
    source = Spying(False, [])
    readings = read_questions(source, [DraftGate(3), RecallingGate(), DraftGate(8)], ASKED, AnswerPrompts())
    assert source.asked == [SignalRequest(draft_tokens=8), ["a", "b"], ["aa", "bb"], ["a", "b"]]
    assert [reading.draft.text for reading in readings] == ["a", "b"]
    assert [reading.neighbors["recalling"][0].question for reading in readings] == ["aa", "bb"]
    assert set(readings[0].labels) == {"draft", "recalling"}


def test_the_llm_is_not_asked_if_its_answer_is_recorded():
    source = Spying(True, [])
    assert not read_questions(source, [DraftGate(3)], ASKED, AnswerPrompts())[0].labels
    assert source.asked == [SignalRequest(draft_tokens=3)]


def test_without_questions_nothing_is_read():
    source = Spying(False, [])
    assert read_questions(source, [DraftGate(3), RecallingGate()], [], AnswerPrompts()) == []
    assert source.asked == []


def test_a_gate_that_needs_labels_must_define_them():
    silent = type("SilentGate", (RecallingGate,), {"labels": ()})()
    with pytest.raises(BadSetting, match="gate 'silent' needs the signal 'labels' but defines no labels"):
        read_questions(Spying(False, []), [silent], ASKED, AnswerPrompts())


# --- a model --------------------------------------------------------------------------------------


def test_a_model_is_not_run_for_an_empty_request():
    model = CountingModel(FakeModel())
    assert read_questions(model, [RecallingGate()], ASKED, AnswerPrompts())[0].draft is None
    assert model.calls == [("label_logits", 2)]


def test_a_gate_that_needs_what_the_model_lacks_is_rejected_when_it_is_bound():
    with pytest.raises(UnsupportedSignal, match="needs labels"):
        bind_gate(RecallingGate(), FakeModel(offers=frozenset({Signal.DRAFT})), AnswerPrompts())


def test_a_gate_is_bound_to_the_model_identity():
    seen = []

    class NosyGate(RecallingGate):
        def bind(self, model, prompts):
            seen.append((model.name, model.fingerprint, model.depth, prompts))
            return self

    bind_gate(NosyGate(), FakeModel(), AnswerPrompts())
    assert seen == [("fake", FakeModel().fingerprint, 5, AnswerPrompts().fingerprint)]


# --- a record -------------------------------------------------------------------------------------


def trial(tmp_path, **signals):
    rows, states = planted_rows(4)
    told = [type(row)(**{**vars(row), "signals": signals}) for row in rows]
    return load_label_table([write_run(tmp_path / "run", told, states)])


def test_a_label_table_identifies_its_model(tmp_path):
    identity = RunModelIdentity.from_table(trial(tmp_path))
    assert (identity.name, identity.fingerprint) == (MODEL.name, SETTINGS["model_fingerprint"])


def test_recorded_signals_are_read_back(tmp_path):
    rows = trial(tmp_path, self_assessment=0.25, seakr=-6.0)
    readings = rows.readings
    assert [dict(reading.signals) for reading in readings] == [{"self_assessment": 0.25, "seakr": -6.0}] * 4
    assert [(dict(reading.labels), reading.sample_states) for reading in readings] == [({}, None)] * 4


def test_recorded_values_stand_for_their_signals(tmp_path):
    assert Signal.LABELS not in find_signals(trial(tmp_path / "without"))
    assert Signal.LABELS in find_signals(trial(tmp_path / "with", self_assessment=0.25))


def test_gates_with_recorded_signals_are_scorable(tmp_path):
    assert {"prompt", "seakr"}.isdisjoint(list_scorable_gates(trial(tmp_path / "without")))
    assert {"prompt", "seakr"} <= set(list_scorable_gates(trial(tmp_path / "with", self_assessment=0.25, seakr=-6.0)))


def test_recorded_signals_determine_the_score(tmp_path):
    rows = trial(tmp_path, self_assessment=float(np.log(3)), seakr=-6.0)
    assert score_gate(rows, "prompt").needs == pytest.approx([0.25] * 4, abs=1e-6)
    assert score_gate(rows, "seakr").needs == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(
    ("spec", "message", "brief"),
    [
        (
            "prompt",
            r"needs label logits, which the label run does not contain. Label the questions again with an LLM that "
            r"provides them: `knowgate label` with data=SPEC, model=planted$",
            "the label run has no label logits",
        ),
        ("prompt:yes/no", "sends the LLM a prompt of its own", "sends the LLM a prompt of its own"),
        ("selfrag", "data=SPEC, model=planted, gates=selfrag", "sends the LLM a prompt of its own"),
    ],
)
def test_missing_signals_are_named(tmp_path, spec, message, brief):
    with pytest.raises(UnsupportedSignal, match=message) as caught:
        score_gate(trial(tmp_path), spec)
    assert caught.value.brief == brief


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("prompt", "`knowgate label` with data=jsonl:q.jsonl, model=openai:NAME@URL"),
        ("seakr", "data=jsonl:q.jsonl, model=openai:NAME@URL, layers=mid,late,last, samples=20"),
        ("selfrag", "data=jsonl:q.jsonl, model=openai:NAME@URL, gates=selfrag"),
    ],
)
def test_advice_for_imported_answers_does_not_name_their_model(tmp_path, spec, advice):
    rows, _ = planted_rows(4)
    bare = [replace(row, closed=GradedAnswer("Paris", correct=True), signals={}) for row in rows]
    run = write_run(tmp_path / "run", bare, model="recorded:big", data="jsonl:q.jsonl")
    with pytest.raises(UnsupportedSignal) as caught:
        score_gate(load_label_table([run]), spec)
    assert advice in str(caught.value)
    assert "recorded:big" not in str(caught.value)
