"""A bare model name is an error that suggests a spec."""

import pytest

from knowgate.errors import BadSetting, UnknownName
from knowgate.models import load_model


@pytest.mark.parametrize(
    ("spec", "suggestion"),
    [
        ("gpt-4o", "openai:gpt-4o@https://api.openai.com/v1"),
        ("claude-3-5-sonnet", "openai:claude-3-5-sonnet@"),
        ("Qwen/Qwen2.5-7B-Instruct", "hf:Qwen/Qwen2.5-7B-Instruct"),
        ("models/llama.Q4_K_M.gguf", "gguf:models/llama.Q4_K_M.gguf"),
    ],
)
def test_a_bare_name_gets_a_suggestion(spec, suggestion):
    with pytest.raises(BadSetting) as error:
        load_model(spec)
    assert f"Did you mean {suggestion}" in str(error.value)


def test_other_names_are_unknown():
    with pytest.raises(UnknownName, match="Did you mean 'smollm'"):
        load_model("smolm")
