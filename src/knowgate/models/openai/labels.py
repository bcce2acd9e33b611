"""Log-probabilities of labels at marked places inside a raw prompt: vLLM, SGLang and llama.cpp only.

Knows tokenisation in place, as `hf_labels` does for local models: the prefix and each part are tokenised apart by
the server, so that a label is a token of its own, and the prompt goes out as token ids. Nothing here looks at text.

Which server it is stands in `owned_by` of GET /v1/models: both write their own name there. (GET /version would not
do: other servers have it too. GET /server_info is for developers only on vLLM.)

vLLM, main branch of 2026 (entrypoints/openai/completion/protocol.py and serving.py, serve/tokenize/protocol.py):
POST /tokenize (beside /v1) {prompt, add_special_tokens} -> {tokens}. POST /v1/completions takes token ids as `prompt`;
choices[0].prompt_logprobs has an entry per prompt token, null for the first, else {"id": {"logprob": ...}} of the
top k and of the token that stands there, as predicted from the tokens before it. `logprob_token_ids` (0.26, pull
request 43463) lists exactly these tokens where the answer begins, older servers ignore it and list the top k;
`return_tokens_as_token_ids` writes them as "token_id:ID".

SGLang, from docs.sglang.io, "Sampling Parameters", openai/serving_tokenize.py and its scheduler's output processor:
POST /v1/tokenize as above. POST /generate (beside /v1) takes `input_ids` and `token_ids_logprob`;
meta_info.input_token_ids_logprobs has an entry per prompt token from `logprob_start_len` on, null for the first
of them, else [[logprob, id, text], ...], as predicted from the tokens before it; output_token_ids_logprobs goes on
with the answer.

llama.cpp (server of xllamacpp 2026.10): POST /tokenize (beside /v1) {content, add_special} -> {tokens}. POST
/v1/completions takes token ids and lists as many tokens with their ids as `logprobs` says; prompts have none, so there
is a request for each place, each with what the one before began with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.models.openai.client import StatusError
from knowgate.models.openai.responses import check_logprob, get_first_choice, parse_token_logprobs
from knowgate.models.openai.server import (
    WIDE_TOP_TOKENS,
    ServedModel,
    call_native_endpoint,
    tokenize_prompt,
    tokenize_text,
)
from knowgate.types import LabelPrompt, Prompt, Vector

LABEL_SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
WHOLE_VOCABULARY = 1 << 18  # tokens: more than any vocabulary has
TOKEN_CACHE_SIZE = 4096  # tokenised texts: the instruction and the neighbours' questions come back in many prompts
# Spelled out, because both servers else take them from the model's generation_config.json.
NEUTRAL_SAMPLING: Mapping[str, float] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True)
class ServerPromptTokens:
    """Token ids of a prompt, and the positions from which each label is predicted; the last one ends the prompt."""

    ids: list[int]
    positions: list[int]


class ServerLabelReader:
    """Reads labels inside the prompts of one model on one server."""

    def __init__(self, server: ServedModel):
        self._server = server
        self._tokens = functools.lru_cache(TOKEN_CACHE_SIZE)(functools.partial(tokenize_text, server))

    def check(self, prompt: LabelPrompt) -> None:
        """Refuse what cannot be read, before anything is computed."""
        if not prompt.raw:
            raise BadSetting("a user turn has one label position, at its end; use raw=True for several.")
        if self._server.maker not in LABEL_SERVERS:
            raise NotOffered(
                f"openai:{self._server.model} reads labels only at the end of a prompt, not inside it: its server "
                f"calls itself '{self._server.maker}'. Servers of {', '.join(LABEL_SERVERS.values())} and hf: models can."
            )

    def label_ids(self, labels: Sequence[str]) -> list[int]:
        """First token of each label as it stands in place; labels that begin alike cannot be told apart."""
        ids = [token for label in labels if label for token in self._tokens(label, False)[:1]]
        if len(ids) < len(labels) or len(set(ids)) < len(ids):
            raise BadSetting(f"the labels {', '.join(map(repr, labels))} do not begin with different tokens.")
        return ids

    def read(self, prompt: LabelPrompt, labels: Sequence[str], top: int) -> Vector:
        """Array (marked positions x labels); `top` is how many tokens a vLLM server lists at each place."""
        columns = self.label_ids(labels)
        cut = self._cut(prompt, labels, columns)
        if self._server.maker == "llamacpp":
            rows = [_llamacpp_row(self._server, cut.ids[: mark + 1], columns) for mark in cut.positions]
            return np.array(rows, dtype=np.float32)
        if self._server.maker == "sglang":
            reply = _ask_sglang(self._server, cut, columns)
            return _checked_form(lambda: _sglang_rows(reply, cut, columns))
        reply = _ask_vllm(self._server, cut, columns, top)
        return _checked_form(lambda: _vllm_rows(reply, cut, columns, top))

    def named(self, turn: Prompt, labels: Sequence[str]) -> list[tuple[str, float]]:
        """The labels where the answer to a turn begins, asked for by their tokens; [] where a server is too old for it.

        A label counts with and without a space before it, where each is one token.
        """
        spelled = {label: [label, f" {label}"] for label in (label.strip() for label in labels)}
        try:
            ids = {self._tokens(text, False): label for label, both in spelled.items() for text in both}
        except ModelError:  # a gateway hides the tokeniser
            return []
        single = {tokens[0]: label for tokens, label in ids.items() if len(tokens) == 1}
        listed = self._named_by_sglang if self._server.maker == "sglang" else self._named_by_vllm
        return [(single[token], value) for token, value in listed(turn, list(single)) if token in single]

    def _named_by_sglang(self, turn: Prompt, ids: list[int]) -> list[tuple[int, float]]:
        try:
            prompt = [*tokenize_prompt(self._server, turn)]
            reply = _ask_sglang(self._server, ServerPromptTokens(prompt, [len(prompt) - 1]), ids)
        except (NotOffered, StatusError):  # behind a gateway, or too old to tokenize a turn
            return []
        row = _checked_form(lambda: [_exact_row(reply["meta_info"]["output_token_ids_logprobs"][0], ids)])[0]
        return list(zip(ids, map(float, row), strict=True))

    def _named_by_vllm(self, turn: Prompt, ids: list[int]) -> list[tuple[int, float]]:
        fields = {
            **NEUTRAL_SAMPLING,
            "max_tokens": 1,
            "logprobs": True if not turn.raw else 1,
            "return_tokens_as_token_ids": True,
        }
        try:
            reply = self._server.ask(turn, {**fields, "logprob_token_ids": ids})
        except StatusError as error:
            if error.status not in (400, 422, 500):  # 500: where it also extracts hidden states
                raise
            return []
        listed = parse_token_logprobs(reply)
        return [(_token_id(text), value) for text, value in (listed[0].top if listed else ())]

    def _cut(self, prompt: LabelPrompt, labels: Sequence[str], columns: Sequence[int]) -> ServerPromptTokens:
        ids = [*self._tokens(prompt.prefix, True)] if prompt.prefix else []
        marks: list[int] = []
        for number, part in enumerate(prompt.parts):
            tokens = self._tokens(part, number == 0 and not prompt.prefix)
            if number and (not tokens or tokens[0] not in columns):
                raise BadSetting(
                    f"part {number + 1} of a prompt does not begin with one of the labels "
                    f"{', '.join(map(repr, labels))} as a token of its own."
                )
            ids += tokens
            marks.append(len(ids) - 1)
        if not marks or marks[0] < 0:
            raise BadSetting("a label can be read only after some text; the prompt begins with none.")
        return ServerPromptTokens(ids, marks)


def _ask_vllm(server: ServedModel, cut: ServerPromptTokens, columns: Sequence[int], top: int) -> Any:
    fields = {
        **NEUTRAL_SAMPLING,
        "max_tokens": 1,
        "logprobs": top,
        "prompt_logprobs": top,
        "return_tokens_as_token_ids": True,
    }
    if not server.names_tokens:
        return server.complete(cut.ids, fields)
    try:
        return server.complete(cut.ids, {**fields, "logprob_token_ids": list(columns)})
    except StatusError as error:
        if error.status not in (400, 422):
            raise
        return server.complete(cut.ids, fields)


def _vllm_rows(reply: Any, cut: ServerPromptTokens, columns: Sequence[int], top: int) -> list[list[float]]:
    choice = get_first_choice(reply)
    inside = choice["prompt_logprobs"]
    if len(inside) != len(cut.ids):
        raise _misaligned()
    rows = []
    for place in (mark + 1 for mark in cut.positions[:-1]):
        listed = {int(token): check_logprob(entry["logprob"]) for token, entry in inside[place].items()}
        if cut.ids[place] not in listed:
            raise _misaligned()
        rows.append(_listed_row(listed, columns, top))
    end = choice["logprobs"]["top_logprobs"][0]
    listed = {_token_id(token): check_logprob(value) for token, value in end.items()}
    return [*rows, _listed_row(listed, columns, top)]


def _listed_row(listed: Mapping[int, float], columns: Sequence[int], top: int) -> list[float]:
    """A label that is not listed gets the most it can have: the k-th best of the top k, never zero probability. Where
    none is listed all have the same, which says nothing.

    Not the smallest of all that are listed: the token that stands in the prompt is listed even if it is far less
    probable than the top k, and says nothing about other tokens.
    """
    if all(column in listed for column in columns):
        return [listed[column] for column in columns]
    if len(listed) < top:
        raise ModelError(f"the server listed {len(listed)} tokens where {top} were asked for, and left out a label.")
    bound = sorted(listed.values(), reverse=True)[top - 1]
    return [listed.get(column, bound) for column in columns]


def _token_id(text: str) -> int:
    if not text.startswith("token_id:"):
        raise ValueError("the token's text instead of its id")
    return int(text.removeprefix("token_id:"))


def _ask_sglang(server: ServedModel, cut: ServerPromptTokens, columns: Sequence[int]) -> Any:
    body = {
        "input_ids": cut.ids,
        "sampling_params": {**NEUTRAL_SAMPLING, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": cut.positions[0],  # what is before may come from the server's prefix cache
        "token_ids_logprob": list(columns),
    }
    adapter = {"lora_path": server.adapter} if server.adapter else {}  # /generate knows no `model`
    return call_native_endpoint(server.wire.post_beside, "/generate", {**body, **adapter})


def _sglang_rows(reply: Any, cut: ServerPromptTokens, columns: Sequence[int]) -> list[list[float]]:
    meta, start = reply["meta_info"], cut.positions[0]
    tokens, inside = meta["input_token_logprobs"], meta["input_token_ids_logprobs"]
    if [token[1] for token in tokens] != cut.ids[start:] or len(inside) != len(tokens):
        raise _misaligned()
    places = [inside[mark + 1 - start] for mark in cut.positions[:-1]]
    return [_exact_row(place, columns) for place in [*places, meta["output_token_ids_logprobs"][0]]]


def _exact_row(place: Any, columns: Sequence[int]) -> list[float]:
    listed = {entry[1]: entry[0] for entry in place}
    return [check_logprob(listed[column]) for column in columns]


def _llamacpp_row(server: ServedModel, ids: Sequence[int], columns: Sequence[int]) -> list[float]:
    """The labels after these tokens, from a list that is long enough; the server keeps what the last prompt began with.

    It has no log-probabilities inside a prompt, so every place is a request of its own.
    """
    for size in (WIDE_TOP_TOKENS, WHOLE_VOCABULARY):
        fields = {**NEUTRAL_SAMPLING, "max_tokens": 1, "logprobs": size, "cache_prompt": True}
        reply = server.complete(ids, fields)
        try:
            top = get_first_choice(reply)["logprobs"]["content"][0]["top_logprobs"]
            listed = {int(entry["id"]): check_logprob(entry["logprob"]) for entry in top}
        except (KeyError, IndexError, TypeError, ValueError):
            raise ModelError("the server's reply has log-probabilities of an unknown form.") from None
        if all(column in listed for column in columns):
            return [listed[column] for column in columns]
    raise ModelError("the server does not list its whole vocabulary, so labels inside a prompt cannot be read.")


def _misaligned() -> ModelError:
    return ModelError("the server's log-probabilities do not line up with the tokens of the prompt.")


def _checked_form(rows: Callable[[], list[list[float]]]) -> Vector:
    try:
        return np.array(rows(), dtype=np.float32)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise ModelError("the server's reply has log-probabilities of an unknown form.") from None
