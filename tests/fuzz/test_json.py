"""The door for JSON: what passes is what the standard allows, equal to what Python's own parser reads."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from knowgate.core.validation import MAX_DEPTH, parse_json
from tests.support.fuzz import attempt, trying

ODD = ["NaN", "-Infinity", "1e999", "9" * 5000, '"\\ud800"', '{"\\udfff": 1}', "[" * 900 + "]" * 900, "[" * 100_000, ""]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
TEXTS = VALUES.map(json.dumps) | st.text(alphabet='{}[]",:\\ud8019eE-.+ntf\n', max_size=40) | st.sampled_from(ODD)


@trying(60, 1500)
@given(TEXTS)
def test_what_passes_is_finite_whole_and_the_same_as_python_reads(text):
    outcome = attempt("JSON", "texts, values and numbers at random", lambda: parse_json(text, "a row"))
    if not outcome.refusal:
        assert outcome.value == json.loads(text)
        assert math.isfinite(sum(len(part) for part in json.dumps(outcome.value, allow_nan=False)))


def test_nesting_is_read_to_its_limit_and_refused_beyond():
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "a row")
    assert attempt("JSON", "nesting", lambda: parse_json("[" * 65 + "]" * 65, "a row")).refusal
