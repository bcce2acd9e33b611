import re
from pathlib import Path

import pytest

from knowgate.errors import BadSetting
from knowgate.models.openai.model import open_openai
from knowgate.models.openai.spec import HiddenStateConfig, OpenAISpec, parse_openai_spec

URL = "http://127.0.0.1:8000/v1"


def test_a_spec_says_nothing_more_than_model_and_url_unless_it_does():
    assert parse_openai_spec(f"Qwen/Qwen3-8B@{URL}") == OpenAISpec("Qwen/Qwen3-8B", URL, 8, None)


def test_options_stand_behind_the_url():
    spec = parse_openai_spec(f"m@{URL}#layers=15,23&storage=/mnt/my%20states&depth=31&concurrency=32")
    assert spec == OpenAISpec("m", URL, 32, HiddenStateConfig((15, 23), 31, Path("/mnt/my states")))


def test_the_depth_follows_from_the_last_layer_unless_it_is_given():
    assert parse_openai_spec(f"m@{URL}#layers=23,15").states == HiddenStateConfig((23, 15), 24, None)


def test_a_model_is_made_as_its_spec_says():
    model = open_openai(f"m@{URL}#layers=1,2&concurrency=3")
    assert (model.name, model.concurrency, model.depth) == ("openai:m", 3, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("layer=3", "is not understood. Give each of concurrency, layers, depth, storage at most once"),
        ("layers=1&layers=2", "is not understood"),
        ("layers=", "layers of a server is ''; it must be a whole number from 0"),
        ("layers=1,x", "layers of a server is 'x'"),
        ("layers=-1", "layers of a server is '-1'"),
        ("layers=2,2", "name one of them twice"),
        ("layers=30&depth=30", "depth=30 is too little for layer 30"),
        ("storage=/tmp", "'storage' of a server is about hidden states: name their layers too"),
        ("concurrency=0", "concurrency of a server is '0'; it must be a whole number from 1 to 1,024"),
        ("concurrency=1e3", "concurrency of a server is '1e3'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(BadSetting, match=re.escape(words)):
        parse_openai_spec(f"m@{URL}#{options}")
