import json
import math

import numpy as np
import pytest

from knowgate.errors import BadInput, BadSetting, UnsupportedSignal
from knowgate.models.fake import FakeModel, open_fake
from knowgate.types import LabelPrompt, Prompt, Sampling, Signal, SignalRequest
from tests.support.counting import CountingModel

CAPITAL = "What is the capital of France?"
TABLE = {
    CAPITAL: {"closed": "the city of Lyon", "open": "Paris", "logprob": math.log(0.55), "known": False},
    "boils": {"closed": "100 degrees", "known": True, "samples": ["100", "90", "80"]},
}


def ask(model, text, **settings):
    return model.generate([Prompt(text)], max_tokens=32, **settings)[0]


def test_it_answers_from_the_table_by_a_part_of_the_prompt():
    assert ask(FakeModel(TABLE), "At what heat water boils?")[0].text == "100 degrees"


def test_the_longest_key_wins():
    model = FakeModel({"capital": "short", "capital of": "long"})
    assert ask(model, "the capital of X")[0].text == "long"


def test_the_open_answer_is_given_when_it_occurs_in_the_prompt():
    assert ask(FakeModel(TABLE), f"Paris is a capital. {CAPITAL}")[0].text == "Paris"
    assert ask(FakeModel(TABLE), f"Rome is a capital. {CAPITAL}")[0].text == "the city of Lyon"


def test_when_selects_the_open_answer():
    model = FakeModel({"Q?": {"closed": "a", "open": "b", "when": "Passages:"}})
    assert ask(model, "Passages: x. Q?")[0].text == "b"
    assert ask(model, "b. Q?")[0].text == "a"


def test_every_token_has_the_logprob_entropy_and_margin_of_a_ten_word_vocabulary():
    draft = FakeModel(TABLE).read([Prompt(CAPITAL)], SignalRequest(draft_tokens=8))[0].draft
    assert [token.text for token in draft.tokens] == ["the", " city", " of", " Lyon"]
    token = draft.tokens[0]
    assert token.logprob == pytest.approx(math.log(0.55))
    assert token.margin == pytest.approx(0.5)  # 0.55 against 0.45 / 9 = 0.05
    assert token.entropy == pytest.approx(-0.55 * math.log(0.55) - 0.45 * math.log(0.05))


def test_a_certain_token_has_no_entropy():
    model = FakeModel({"Q?": {"closed": "a", "logprob": 0.0}})
    token = ask(model, "Q?")[0].tokens[0]
    assert (token.entropy, token.margin) == (0.0, 1.0)


def test_a_draft_stops_at_its_limit_and_can_be_continued():
    model = FakeModel(TABLE)
    reading = model.read([Prompt(CAPITAL)], SignalRequest(draft_tokens=2))[0]
    assert (reading.draft.text, reading.draft.finished, reading.draft.n_tokens) == ("the city", False, 2)
    whole = model.generate([Prompt(CAPITAL)], max_tokens=32, resume=[reading.resume])[0][0]
    assert (whole.text, whole.finished) == ("the city of Lyon", True)


def test_chinese_answers_have_a_token_per_character():
    draft = FakeModel({"首都": "北京"}).read([Prompt("首都?")], SignalRequest(draft_tokens=1))[0].draft
    assert (draft.text, draft.finished) == ("北", False)


def test_a_draft_of_another_model_is_refused():
    with pytest.raises(BadSetting, match=r"Reading\.resume` of this model"):
        ask(FakeModel(), "Q?", resume=["mine"])


def test_samples_repeat_the_table_from_the_seed_on():
    model = FakeModel(TABLE)
    assert [x.text for x in ask(model, "it boils", temperature=1.0, n=4)] == ["100", "90", "80", "100"]
    assert [x.text for x in ask(model, "it boils", temperature=1.0, n=2, seed=2)] == ["80", "100"]


def test_generated_samples_agree_for_known_questions_and_differ_for_unknown_ones():
    model = FakeModel({"K?": {"closed": "a", "known": True}, "U?": {"closed": "a", "known": False}})
    want = SignalRequest(samples=40, seed=1)
    known, unknown = model.read([Prompt("K?"), Prompt("U?")], want)
    assert len({x.text for x in known.samples}) < len({x.text for x in unknown.samples})
    assert model.read([Prompt("K?")], want)[0].samples == known.samples
    assert model.read([Prompt("U?")], SignalRequest(samples=40, seed=2))[0].samples != unknown.samples


def test_top_k_of_one_draws_only_the_most_probable_answer():
    model = FakeModel({"the sky": {"closed": "blue", "logprob": math.log(0.4)}})
    whole, cut = (
        model.read([Prompt("the sky")], SignalRequest(samples=40, sampling=sampling, seed=1))[0].samples
        for sampling in (Sampling(), Sampling(top_k=1))
    )
    assert {sample.text for sample in cut} == {"blue"} < {sample.text for sample in whole}


def test_answers_outside_the_table_are_deterministic():
    first, second = FakeModel(), FakeModel()
    texts = [ask(first, f"question {i}?")[0].text for i in range(20)]
    assert len(set(texts)) == 20
    assert texts == [ask(second, f"question {i}?")[0].text for i in range(20)]


def test_hidden_states_have_the_requested_layers_and_width():
    model = FakeModel(width=8, layers=3)
    reading = model.read([Prompt("Q?")], SignalRequest(draft_tokens=1, layers=(-1, 0, 3), after_draft=True))[0]
    assert set(reading.hidden) == set(reading.hidden_after) == {-1, 0, 3}
    assert reading.hidden[0].shape == (8,)
    assert reading.hidden[0].dtype == np.float32
    assert np.array_equal(reading.hidden[-1], reading.hidden[3])
    assert not np.array_equal(reading.hidden[3], reading.hidden_after[3])


def test_hidden_states_separate_known_and_unknown_questions():
    model = FakeModel({"K": {"known": True}, "U": {"known": False}})
    prompts = [Prompt(f"{side} {i}") for side in "KU" for i in range(50)]
    states = np.stack([reading.hidden[2] for reading in model.read(prompts, SignalRequest(layers=(2,)))])
    direction = states[:50].mean(axis=0) - states[50:].mean(axis=0)
    assert (states[:50] @ direction).mean() > (states[50:] @ direction).mean() + 10


def test_an_unknown_layer_is_refused():
    with pytest.raises(BadSetting, match=r"no layer 5\. Use a layer from 0 to 4"):
        FakeModel().read([Prompt("Q?")], SignalRequest(layers=(5,)))


def test_the_first_label_is_favored_if_the_question_is_known():
    model = FakeModel(TABLE)
    logits = model.label_logits([LabelPrompt(("it boils:", f" yes\n{CAPITAL}:"))], ["yes", "no"])[0]
    assert logits.shape == (2, 2)
    assert logits[0, 0] > logits[0, 1]
    assert logits[1, 0] < logits[1, 1]


def test_signals_that_are_not_offered_are_refused():
    model = FakeModel(TABLE, offers=frozenset({Signal.DRAFT}))
    assert ask(model, CAPITAL)[0].tokens is None
    with pytest.raises(UnsupportedSignal, match="hidden"):
        model.read([Prompt("Q?")], SignalRequest(layers=(0,)))
    with pytest.raises(UnsupportedSignal, match="samples"):
        model.read([Prompt("Q?")], SignalRequest(samples=1))
    with pytest.raises(UnsupportedSignal, match="labels"):
        model.label_logits([], ["a", "b"])


def test_the_fingerprint_depends_on_the_table():
    assert FakeModel(TABLE).fingerprint == FakeModel(TABLE).fingerprint
    assert FakeModel(TABLE).fingerprint != FakeModel().fingerprint


def test_tables_are_read_from_json(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(TABLE))
    assert open_fake(str(tmp_path / "t.json")).fingerprint == FakeModel(TABLE).fingerprint
    assert open_fake().fingerprint == FakeModel().fingerprint


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"close": "x"}, "unknown field 'close'"),
        ({"closed": 3}, "closed is 3, not a text"),
        ({"logprob": 0.1}, "not between"),
        ({"logprob": math.nan}, "not a finite number"),
        ({"samples": "abc"}, "not a list"),
        ({"samples": 3}, "not a list"),
        ({"known": "yes"}, "true or false"),
        (3, "must be a string"),
    ],
)
def test_an_invalid_entry_is_an_error_that_names_its_key(entry, message):
    with pytest.raises(BadInput, match=f"'Q'.*{message}"):
        FakeModel({"Q": entry})


@pytest.mark.parametrize(("name", "text"), [("a.json", "[]"), ("b.json", None)])
def test_an_invalid_table_file_is_an_error_that_names_it(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=name):
        open_fake(str(tmp_path / name))


def test_the_counting_model_sees_every_call():
    model = CountingModel(FakeModel(TABLE))
    model.read([Prompt("a"), Prompt("b")], SignalRequest())
    ask(model, "a")
    assert model.calls == [("read", 2), ("generate", 1)]
