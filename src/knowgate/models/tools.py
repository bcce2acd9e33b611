"""The search tool that the gate `tool` offers to an LLM, and how chat templates write the call of a tool."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Any

from knowgate.errors import UnsupportedSignal

TOOL_CALL = "tool_call"  # key of `Reading.signals` that holds the probability of a call
SEARCH_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents for passages that answer a question. Use it if you do not know the answer.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to search for."}},
            "required": ["query"],
        },
    },
}


def render_with_tool(tokenizer: Any, text: str, tool: Mapping[str, Any], model: str) -> str:
    """Return a user message in the chat template with a tool, up to where the answer begins.

    The tool has the format of OpenAI. `model` is a name for the error message.

    Raises:
        UnsupportedSignal: The chat template ignores tools, or there is none.
    """
    messages = [{"role": "user", "content": text}]
    rendered = _render(tokenizer, messages, tool) if tokenizer.chat_template else ""
    if str(tool["function"]["description"]) not in rendered:
        raise UnsupportedSignal(
            f"the chat template of {model} does not support tools. Use an LLM that calls tools, or a gate without tools."
        )
    return rendered


def find_call_token(tokenizer: Any, tool: Mapping[str, Any], model: str) -> int:
    """Return the first token of a model's tool calls, such as '<tool_call>'.

    The chat template is rendered without and with a call. The call begins where the two texts differ.

    Raises:
        UnsupportedSignal: The chat template does not show how a call begins.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    call = {"type": "function", "function": {"name": tool["function"]["name"], "arguments": {"query": "?"}}}
    prompt = _render(tokenizer, messages, tool)
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    with_call = _render(tokenizer, [*messages, reply], tool, add_generation_prompt=False)
    shared = os.path.commonprefix([prompt, with_call])  # noqa: RUF071 - these are texts, not paths
    answer = with_call.removeprefix(shared).lstrip()
    if tool["function"]["name"] not in answer:
        raise UnsupportedSignal(
            f"the chat template of {model} does not show how a tool call begins. Use openai:MODEL@URL, or a gate without tools."
        )
    return int(tokenizer.encode(answer, add_special_tokens=False)[0])


def _render(tokenizer: Any, messages: list[dict[str, Any]], tool: Mapping[str, Any], **options: Any) -> str:
    settings = {"add_generation_prompt": True, **options}
    return str(tokenizer.apply_chat_template(messages, tools=[dict(tool)], tokenize=False, **settings))
