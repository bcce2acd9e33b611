import pytest

from knowgate.data.questions import DATASETS, load_questions
from knowgate.errors import BadSetting, UnknownName


def test_a_source_without_a_value_is_rejected():
    with pytest.raises(BadSetting, match="data source 'jsonl' needs a value after the colon: jsonl:FILE"):
        load_questions("jsonl")


def test_an_unknown_source_error_lists_the_known_ones():
    with pytest.raises(UnknownName, match=rf"unknown data source 'xlsx'\. Known: {', '.join(sorted(DATASETS))}"):
        load_questions("xlsx:x")
