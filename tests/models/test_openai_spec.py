import re
from pathlib import Path

import pytest

from knowgate.errors import BadSetting
from knowgate.models.openai.model import open_openai
from knowgate.models.openai.spec import HiddenStateConfig, OpenAISpec, parse_openai_spec

URL = "http://127.0.0.1:8000/v1"


def test_options_have_defaults():
    assert parse_openai_spec(f"Qwen/Qwen3-8B@{URL}") == OpenAISpec("Qwen/Qwen3-8B", URL, 8, None)


def test_options_follow_the_url():
    spec = parse_openai_spec(f"m@{URL}#layers=15,23&storage=/mnt/my%20states&depth=31&concurrency=32")
    assert spec == OpenAISpec("m", URL, 32, HiddenStateConfig((15, 23), 31, Path("/mnt/my states")))


def test_the_depth_defaults_to_the_highest_layer_plus_one():
    assert parse_openai_spec(f"m@{URL}#layers=23,15").hidden_states == HiddenStateConfig((23, 15), 24, None)


def test_a_model_takes_the_options_of_its_spec():
    model = open_openai(f"m@{URL}#layers=1,2&concurrency=3")
    assert (model.name, model.concurrency, model.depth) == ("openai:m", 3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("layer=3", "after the server's URL are not valid. Use concurrency, layers, depth, storage, each at most once"),
        ("layers=1&layers=2", "after the server's URL are not valid"),
        ("layers=", "the option 'layers' after the server's URL must be a whole number from 0 to 100,000, not ''"),
        ("layers=1,x", "not 'x'"),
        ("layers=-1", "not '-1'"),
        ("layers=2,2", "names a layer twice"),
        ("layers=30&depth=30", "depth=30 after the server's URL is too small for layer 30"),
        ("storage=/tmp", "the URL option 'storage' also needs the option 'layers'"),
        (
            "concurrency=0",
            "the option 'concurrency' after the server's URL must be a whole number from 1 to 1,024, not '0'",
        ),
        ("concurrency=1e3", "not '1e3'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(BadSetting, match=re.escape(message)):
        parse_openai_spec(f"m@{URL}#{options}")
