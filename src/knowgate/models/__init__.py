"""LLM backends, chosen by a spec such as 'smollm' or 'openai:MODEL@URL'.

Importing this package does not import any backend. A backend is imported when its spec is loaded.

To add a backend, write a file here with a subclass of `Backend` and add a line to `MODELS`, or register an entry point
in the group 'knowgate.models'.
"""

from __future__ import annotations

import re

from knowgate.core.registry import RegistryEntry, find_plugins, load_entry, split_spec
from knowgate.errors import BadSetting
from knowgate.types import Model

__all__ = ["MODELS", "load_model", "resolve_model"]

MODELS = {
    "smollm": RegistryEntry("knowgate.models.gguf:open_smollm",
        "SmolLM2-135M-Instruct, the embedded LLM; needs no API key and no model hub", extra="local"),
    "hf": RegistryEntry("knowgate.models.hf.model:HFModel", "hf:NAME_OR_DIR, any causal LLM in transformers", extra="local"),
    "gguf": RegistryEntry("knowgate.models.gguf:open_gguf",
        "gguf:FILE, a GGUF file run by transformers; converted to safetensors on first use", extra="local"),
    "llamacpp": RegistryEntry("knowgate.models.llamacpp.model:LlamaCppModel",
        "llamacpp:FILE.gguf or llamacpp:smollm, a GGUF file run by llama.cpp inside this process", extra="llamacpp"),
    "vllm": RegistryEntry("knowgate.models.vllm:VllmModel",
        "vllm:NAME_OR_DIR, any causal LLM run by vLLM inside this process, on a GPU (experimental)", extra="vllm"),
    "openai": RegistryEntry("knowgate.models.openai.model:open_openai",
        "openai:MODEL@URL, any OpenAI-compatible server; options follow a #, as in #concurrency=32&layers=15,23"),
    "langchain": RegistryEntry("knowgate.integrations.langchain:open_langchain",
        "langchain:PROVIDER:MODEL, any LangChain chat model", extra="langchain"),
    "litellm": RegistryEntry("knowgate.integrations.litellm:LiteLLMModel",
        "litellm:MODEL, any model that LiteLLM supports", extra="litellm"),
    "replay": RegistryEntry("knowgate.models.replay:ReplayModel", "replay:DIR, the recorded outputs of an earlier run"),
    "fake": RegistryEntry("knowgate.models.fake:open_fake", "fake[:FILE], answers made-up words, or from a table; for tests"),
}  # fmt: skip
SPECS_WITHOUT_VALUE = {"smollm"}
SPECS_WITH_OPTIONAL_VALUE = {"fake"}
HOSTED_MODEL_PREFIXES = ("gpt-", "chatgpt", "o1", "o3", "o4", "claude", "gemini", "mistral-", "deepseek-", "qwen-")
HUB_NAME_PATTERN = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(model: str | Model) -> Model:
    """Return a model unchanged, or load the model that a spec names."""
    return load_model(model) if isinstance(model, str) else model


def load_model(spec: str) -> Model:
    """Return the model that a spec names. Weights are loaded on first use.

    Args:
        spec: A spec such as 'smollm', 'hf:NAME_OR_DIR', 'openai:MODEL@URL' or 'fake'.

    Raises:
        BadSetting: The spec is unknown or incomplete.
        MissingExtra: A package that the backend needs is not installed.

    Example:
        >>> load_model("fake").name
        'fake'
    """
    name, value = split_spec(spec)
    if suggestion := _suggest_spec(spec):
        raise BadSetting(f"unknown model '{spec}'. Did you mean {suggestion}? To list all models: knowgate models")
    factory = load_entry(MODELS, "model", name, "knowgate.models")
    if name in SPECS_WITHOUT_VALUE and value:
        raise BadSetting(f"model '{name}' takes no value after the colon, but '{spec}' has one. Use '{name}' alone.")
    needs_value = name in MODELS and name not in SPECS_WITHOUT_VALUE | SPECS_WITH_OPTIONAL_VALUE
    if needs_value and not value:
        raise BadSetting(f"model '{name}' needs a value after the colon: {MODELS[name].summary}.")
    model: Model = factory(value) if value else factory()
    return model


def _suggest_spec(spec: str) -> str:
    """Return a spec to suggest for a model name without a prefix, or ''."""
    name, _ = split_spec(spec)
    if name in MODELS or name in find_plugins("knowgate.models"):
        return ""
    if spec.lower().endswith(".gguf"):
        return f"gguf:{spec}"
    if spec.lower().startswith(HOSTED_MODEL_PREFIXES):
        return f"openai:{spec}@https://api.openai.com/v1 (with OPENAI_API_KEY), or the URL of another server"
    return f"hf:{spec}" if HUB_NAME_PATTERN.fullmatch(spec) else ""
