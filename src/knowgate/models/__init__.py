"""LLM backends, chosen by a string. To add one: a file here that derives from `Backend` and a line in the table, or
an entry point.

Importing this loads none of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from knowgate.errors import BadSetting
from knowgate.lazy import hand_on
from knowgate.registry import Entry, plugins, resolve, split_spec
from knowgate.types import Model

if TYPE_CHECKING:
    from knowgate.models.backend import Backend
    from knowgate.models.gguf import gguf_behind
    from knowgate.models.gguf_writing import GgufKind, check_writable, write_gguf
    from knowgate.models.hf.labels import head_logits, read_labels
    from knowgate.models.hf.load import explained, quiet
    from knowgate.models.hf.memory import is_pressure
    from knowgate.models.hf.model import HFModel
    from knowgate.models.hf.quantised import check_bits
    from knowgate.models.llamacpp import LlamaCpp
    from knowgate.models.marked import MarkedTokens, label_ids
    from knowgate.models.openai.model import OpenAIModel
    from knowgate.models.openai.parts import GatheredReply
    from knowgate.models.openai.reply import read_choices
    from knowgate.models.openai.wire import find_key
    from knowgate.models.replay import RecordingModel
    from knowgate.models.sampling import check_sampling
    from knowgate.models.turns import Turn, turn_of
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Backend",
    "GatheredReply",
    "GgufKind",
    "HFModel",
    "HUB_NAME",
    "LlamaCpp",
    "MODELS",
    "MarkedTokens",
    "OpenAIModel",
    "RecordingModel",
    "SERVED",
    "Turn",
    "VALUE_OPTIONAL",
    "WITHOUT_VALUE",
    "as_model",
    "check_bits",
    "check_sampling",
    "check_writable",
    "explained",
    "find_key",
    "gguf_behind",
    "head_logits",
    "is_pressure",
    "label_ids",
    "load_model",
    "quiet",
    "read_choices",
    "read_labels",
    "turn_of",
    "write_gguf",
]

MODELS = {
    "smollm": Entry(
        "knowgate.models.smollm:open_smollm", "SmolLM2-135M-Instruct, embedded: no key, no hub", extra="local"
    ),
    "hf": Entry("knowgate.models.hf.model:HFModel", "hf:NAME_OR_DIR, any causal LLM in transformers", extra="local"),
    "gguf": Entry("knowgate.models.gguf:open_gguf", "gguf:FILE, converted once to safetensors", extra="local"),
    "llamacpp": Entry(
        "knowgate.models.llama.model:open_llamacpp",
        "llamacpp:FILE.gguf (or smollm), run by llama.cpp in-process",
        extra="llamacpp",
    ),
    "openai": Entry(
        "knowgate.models.openai.model:open_openai",
        "openai:MODEL@URL, any OpenAI-compatible server; behind it #concurrency=32, #layers=15,23&storage=DIR",
    ),
    "langchain": Entry(
        "knowgate.integrations.langchain_parts:open_langchain",
        "langchain:PROVIDER:MODEL, any chat model of LangChain's",
        extra="langchain",
    ),
    "litellm": Entry(
        "knowgate.integrations.litellm_parts:open_litellm", "litellm:MODEL, whatever LiteLLM reaches", extra="litellm"
    ),
    "replay": Entry("knowgate.models.replay:ReplayModel", "replay:DIR, recorded outputs of an earlier run"),
    "fake": Entry("knowgate.models.fake:open_fake", "fake[:FILE], answers from a table; for tests and examples"),
}
WITHOUT_VALUE = {"smollm"}
VALUE_OPTIONAL = {"fake"}
SERVED = ("gpt-", "chatgpt", "o1", "o3", "o4", "claude", "gemini", "mistral-", "deepseek-", "qwen-")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def as_model(model: str | Model) -> Model:
    """The model itself, or the one a spec names."""
    return load_model(model) if isinstance(model, str) else model


def load_model(spec: str) -> Model:
    """The model a spec such as 'smollm' or 'openai:MODEL@URL' names. Heavy weights load on first use."""
    name, value = split_spec(spec)
    if meant := _meant(spec):
        raise BadSetting(f"unknown model '{spec}'. Did you mean {meant}? All kinds: knowgate models")
    factory = resolve(MODELS, "model", name, "knowgate.models")
    if name in WITHOUT_VALUE and value:
        raise BadSetting(f"model '{name}' takes no value; '{spec}' gives one.")
    needs_value = name in MODELS and name not in WITHOUT_VALUE | VALUE_OPTIONAL
    if needs_value and not value:
        raise BadSetting(f"model '{name}' needs a value: {MODELS[name].summary}.")
    model: Model = factory(value) if value else factory()
    return model


def _meant(spec: str) -> str:
    """What someone means who gives the name of a model without saying where it runs; '' where it is no such name."""
    name, _ = split_spec(spec)
    if name in MODELS or name in plugins("knowgate.models"):
        return ""
    if spec.lower().endswith(".gguf"):
        return f"gguf:{spec}"
    if spec.lower().startswith(SERVED):
        return f"openai:{spec}@https://api.openai.com/v1 (with OPENAI_API_KEY), or the URL of whoever serves it"
    return f"hf:{spec}" if HUB_NAME.fullmatch(spec) else ""
