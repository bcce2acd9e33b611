"""Beginnings kept in llama.cpp: what is taken over is what the prompt begins with, whatever came between."""

from __future__ import annotations

import numpy as np
import pytest

from knowgate.models.llamacpp.decoding import (
    MAX_PREFIX_TOKENS,
    MIN_PREFIX_TOKENS,
    PREFIX_ROWS,
    EnginePrefixCache,
    count_common_tokens,
    find_common_prefix,
)
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.prompts.judges import build_self_assessment_prompt
from knowgate.types import Question, SignalRequest

pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")


class Rows:
    """An engine that only knows which tokens are in which row."""

    def __init__(self, cells=10_000):
        self.cells, self.times_cleared, self.rows = cells, 0, {}
        self.computed = 0

    @property
    def filled(self):
        return set(self.rows)

    def clear(self):
        self.rows, self.times_cleared = {}, self.times_cleared + 1

    def copy(self, source, target, length):
        assert len(self.rows[source]) >= length
        assert target not in self.rows
        self.rows[target] = self.rows[source][:length]

    def cut(self, row, length=0):
        self.rows[row] = self.rows.get(row, [])[:length]
        if not length:
            self.rows.pop(row)

    def feed(self, tokens):
        for one in tokens:
            row = self.rows.setdefault(one.row, [])
            assert one.position == len(row)
            row.append(one.token)
            self.computed += 1


def run(beginnings, engine, *prompts, most=10_000):
    """As a model does; gives how many tokens were computed."""
    before, ids = engine.computed, [list(prompt) for prompt in prompts]
    begun = beginnings.start(engine, ids, room=sum(map(len, ids)), most=most)
    for number, tokens in enumerate(ids):
        row = engine.rows.setdefault(PREFIX_ROWS + number, [])
        assert row == tokens[:begun]
        row += tokens[begun:]
        engine.computed += len(tokens) - begun
    if len(ids) == 1:
        beginnings.keep(engine, ids[0], begun)
    assert all(engine.rows[row] == tokens for row, tokens in beginnings.kept.items())
    return engine.computed - before


def kind(number, length=40):
    """The beginning of one kind of prompts."""
    return [1000 * number + place for place in range(length)]


def test_a_prompt_takes_over_what_one_before_it_began_with():
    beginnings, engine = EnginePrefixCache(), Rows()
    assert run(beginnings, engine, [*kind(1), 1, 2]) == 42
    assert run(beginnings, engine, [*kind(1), 3, 4, 5]) == 3


def test_kinds_of_prompts_that_take_turns_are_all_kept():
    beginnings, engine = EnginePrefixCache(), Rows()
    for question in range(3):
        counts = [run(beginnings, engine, [*kind(number), question, 7]) for number in range(PREFIX_ROWS - 1)]
    assert counts == [2] * (PREFIX_ROWS - 1)


def test_what_several_prompts_share_is_computed_once():
    beginnings, engine = EnginePrefixCache(), Rows()
    assert run(beginnings, engine, [*kind(1), 1], [*kind(1), 2], [*kind(1), 3]) == 43
    assert run(beginnings, engine, [*kind(1), 4], [*kind(1), 5]) == 2


def test_the_last_token_of_a_prompt_is_always_computed():
    beginnings, engine = EnginePrefixCache(), Rows()
    run(beginnings, engine, kind(1))
    assert run(beginnings, engine, kind(1)) == 1
    assert run(beginnings, engine, kind(1), most=5) == 35


def test_short_beginnings_are_not_worth_it():
    beginnings, engine = EnginePrefixCache(), Rows()
    run(beginnings, engine, [*kind(1, MIN_PREFIX_TOKENS - 1), 1])
    assert run(beginnings, engine, [*kind(1, MIN_PREFIX_TOKENS - 1), 2]) == MIN_PREFIX_TOKENS


def test_of_a_long_prompt_the_beginning_is_kept():
    beginnings, engine = EnginePrefixCache(), Rows()
    run(beginnings, engine, kind(1, 3 * MAX_PREFIX_TOKENS))
    assert [len(tokens) for tokens in beginnings.kept.values()] == [MAX_PREFIX_TOKENS]


def test_a_prompt_that_needs_the_room_gets_it():
    beginnings, engine = EnginePrefixCache(), Rows(cells=100)
    run(beginnings, engine, kind(1))
    assert run(beginnings, engine, kind(1, 90)) == 90


def test_an_engine_that_was_cleared_holds_nothing():
    beginnings, engine = EnginePrefixCache(), Rows()
    run(beginnings, engine, kind(1))
    engine.clear()
    assert run(beginnings, engine, kind(1)) == 40


def test_tokens_that_prompts_begin_with_alike():
    assert count_common_tokens([1, 2, 3], [1, 2, 4, 5]) == 2
    assert count_common_tokens([1, 2], [1, 2, 3]) == 2
    assert find_common_prefix([[1, 2, 3], [1, 2], [1, 2, 4]]) == [1]


@pytest.mark.model
def test_readings_and_labels_are_the_same_whatever_was_asked_before(smollm_llamacpp):
    """Up to the rounding of activations, which depends on what is computed together."""
    model, prompts, words = smollm_llamacpp, AnswerPrompts(), ("yes", "no")
    questions = [Question(f"What is the capital of {place}?") for place in ("France", "Japan")]
    asked = [prompts.closed(question) for question in questions]
    assessed = [build_self_assessment_prompt(question, *words) for question in questions]
    model.engine.clear()
    alone = [model.read([prompts.closed(questions[1])], SignalRequest(draft_tokens=4))[0].draft]
    labels = [model.label_logits([assessed[1]], words)[0]]
    after = [model.read([prompt], SignalRequest(draft_tokens=4))[0].draft for prompt in asked][1:]
    also = model.label_logits(assessed, words)[1:]
    assert [draft.text for draft in after] == [draft.text for draft in alone]
    assert after[0].tokens[0].logprob == pytest.approx(alone[0].tokens[0].logprob, abs=0.3)
    np.testing.assert_allclose(also[0], labels[0], atol=1.0)
