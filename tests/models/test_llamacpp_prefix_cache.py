"""The prefix cache of the llama.cpp engine, on an engine that only records which tokens are in which sequence."""

from __future__ import annotations

import numpy as np
import pytest

from knowgate.models.llamacpp.decoding import (
    FIRST_PROMPT_SEQUENCE,
    MAX_PREFIX_TOKENS,
    MIN_PREFIX_TOKENS,
    EnginePrefixCache,
)
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.prompts.questions import build_self_assessment_prompt
from knowgate.models.tokenization import count_common_tokens, find_common_prefix
from knowgate.types import Question, SignalRequest

pytest.importorskip("xllamacpp", reason="needs the extra 'llamacpp'")


class Rows:
    """An engine that only records which tokens are in which sequence."""

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

    def truncate(self, row, length=0):
        self.rows[row] = self.rows.get(row, [])[:length]
        if not length:
            self.rows.pop(row)

    def feed(self, tokens):
        for token in tokens:
            row = self.rows.setdefault(token.sequence, [])
            assert token.position == len(row)
            row.append(token.token)
            self.computed += 1


def run(cache, engine, *prompts, max_length=10_000):
    """Prefill prompts as a model does; return the number of computed tokens."""
    before, ids = engine.computed, [list(prompt) for prompt in prompts]
    reused = cache.start(engine, ids, n_tokens=sum(map(len, ids)), max_length=max_length)
    for number, tokens in enumerate(ids):
        row = engine.rows.setdefault(FIRST_PROMPT_SEQUENCE + number, [])
        assert row == tokens[:reused]
        row += tokens[reused:]
        engine.computed += len(tokens) - reused
    if len(ids) == 1:
        cache.keep(engine, ids[0], reused)
    assert all(engine.rows[row] == tokens for row, tokens in cache.prefixes.items())
    return engine.computed - before


def kind(number, length=40):
    """Return the prefix of one kind of prompts."""
    return [1000 * number + place for place in range(length)]


def test_a_prompt_reuses_the_prefix_of_an_earlier_one():
    cache, engine = EnginePrefixCache(), Rows()
    assert run(cache, engine, [*kind(1), 1, 2]) == 42
    assert run(cache, engine, [*kind(1), 3, 4, 5]) == 3


def test_alternating_kinds_of_prompts_are_all_cached():
    cache, engine = EnginePrefixCache(), Rows()
    for question in range(3):
        counts = [run(cache, engine, [*kind(number), question, 7]) for number in range(FIRST_PROMPT_SEQUENCE - 1)]
    assert counts == [2] * (FIRST_PROMPT_SEQUENCE - 1)


def test_a_prefix_of_several_prompts_is_computed_once():
    cache, engine = EnginePrefixCache(), Rows()
    assert run(cache, engine, [*kind(1), 1], [*kind(1), 2], [*kind(1), 3]) == 43
    assert run(cache, engine, [*kind(1), 4], [*kind(1), 5]) == 2


def test_the_last_token_of_a_prompt_is_always_computed():
    cache, engine = EnginePrefixCache(), Rows()
    run(cache, engine, kind(1))
    assert run(cache, engine, kind(1)) == 1
    assert run(cache, engine, kind(1), max_length=5) == 35


def test_short_prefixes_are_not_cached():
    cache, engine = EnginePrefixCache(), Rows()
    run(cache, engine, [*kind(1, MIN_PREFIX_TOKENS - 1), 1])
    assert run(cache, engine, [*kind(1, MIN_PREFIX_TOKENS - 1), 2]) == MIN_PREFIX_TOKENS


def test_only_the_beginning_of_a_long_prompt_is_cached():
    cache, engine = EnginePrefixCache(), Rows()
    run(cache, engine, kind(1, 3 * MAX_PREFIX_TOKENS))
    assert [len(tokens) for tokens in cache.prefixes.values()] == [MAX_PREFIX_TOKENS]


def test_prefixes_are_dropped_if_a_prompt_needs_their_cells():
    cache, engine = EnginePrefixCache(), Rows(cells=100)
    run(cache, engine, kind(1))
    assert run(cache, engine, kind(1, 90)) == 90


def test_clearing_the_engine_invalidates_the_cache():
    cache, engine = EnginePrefixCache(), Rows()
    run(cache, engine, kind(1))
    engine.clear()
    assert run(cache, engine, kind(1)) == 40


def test_common_prefix_of_token_sequences():
    assert count_common_tokens([1, 2, 3], [1, 2, 4, 5]) == 2
    assert count_common_tokens([1, 2], [1, 2, 3]) == 2
    assert find_common_prefix([[1, 2, 3], [1, 2], [1, 2, 4]]) == [1]


@pytest.mark.model
def test_readings_and_labels_do_not_depend_on_earlier_calls(smollm_llamacpp):
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
