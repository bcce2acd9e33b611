"""Read log-probabilities of labels inside a raw prompt from a vLLM, SGLang or llama.cpp server.

Labels are words such as 'true' and 'false'. The prefix and each part of a prompt are tokenized separately, so that a
label is always a separate token. The prompt is sent as token ids. The rest of this text describes the requests that the
servers understand.

vLLM, main branch of 2026 (entrypoints/openai/completion/protocol.py and serving.py, serve/tokenize/protocol.py):
POST /tokenize (beside /v1) {prompt, add_special_tokens} -> {tokens}. POST /v1/completions takes token ids as `prompt`.
choices[0].prompt_logprobs has an entry per prompt token, null for the first, else {"id": {"logprob": ...}} of the top k
and of the actual token, as predicted from the tokens before it. `logprob_token_ids` (0.26, pull request 43463) lists
exactly these tokens where the answer begins; older servers ignore it and list the top k. `return_tokens_as_token_ids`
writes tokens as "token_id:ID".

SGLang, from docs.sglang.io, "Sampling Parameters", openai/serving_tokenize.py and its scheduler's output processor:
POST /v1/tokenize as above. POST /generate (beside /v1) takes `input_ids` and `token_ids_logprob`.
meta_info.input_token_ids_logprobs has an entry per prompt token from `logprob_start_len` on, null for the first of them,
else [[logprob, id, text], ...], as predicted from the tokens before it; output_token_ids_logprobs continues with the
answer.

llama.cpp (server of xllamacpp 2026.10): POST /tokenize (beside /v1) {content, add_special} -> {tokens}.
POST /v1/completions takes token ids and lists as many tokens with their ids as `logprobs` says. It gives none for
prompts, so every position is a request of its own; the server caches what consecutive requests have in common.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from knowgate.errors import BadSetting, ModelError, UnsupportedSignal
from knowgate.models.openai import responses
from knowgate.models.openai.client import StatusError, ignore_refusals
from knowgate.models.openai.server import NEUTRAL_SAMPLING, WIDE_TOP_TOKENS, ModelEndpoint
from knowgate.models.tokenization import LabelPromptTokens, encode_labels, join_label_parts
from knowgate.types import LabelPrompt, Prompt, Vector

LABEL_SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
WHOLE_VOCABULARY = 1 << 18  # more tokens than any vocabulary has
TOKEN_CACHE_SIZE = 512  # texts; instructions and examples occur in many prompts
MAX_CACHED_CHARS = 4_000  # of one of these texts
TOKEN_ID_PREFIX = "token_id:"  # vLLM writes a token as this prefix and its id  # nosec B105
FORMAT_NAME = "log-probabilities"  # what is missing, in error messages about malformed responses


class ServerLabelReader:
    """Reads log-probabilities of labels from one server."""

    def __init__(self, endpoint: ModelEndpoint):
        self._endpoint = endpoint
        self._tokenize_cached = functools.lru_cache(TOKEN_CACHE_SIZE)(endpoint.tokenize_text)

    def check(self, prompt: LabelPrompt) -> None:
        """Check that the server can predict labels, such as 'true', inside the prompt.

        Raises:
            BadSetting: The prompt is a chat prompt. Only raw prompts can have labels inside.
            UnsupportedSignal: The server cannot read labels inside a prompt.
        """
        if not prompt.raw:
            raise BadSetting("a chat prompt with several parts is not supported. Set raw=True on the prompt.")
        if self._endpoint.server not in LABEL_SERVERS:
            raise UnsupportedSignal(
                f"the server of openai:{self._endpoint.model} is '{self._endpoint.server}', which cannot compute the "
                "probabilities of answers such as yes and no at several places of a prompt. Use a server of "
                f"{', '.join(LABEL_SERVERS.values())}, or a local model such as hf:NAME."
            )

    def read_inner_labels(self, prompt: LabelPrompt, labels: Sequence[str], top: int) -> Vector:
        """Return the log-probabilities of the labels after each part of a prompt (parts x labels).

        Args:
            prompt: The prompt.
            labels: The labels, such as 'true' and 'false'.
            top: Number of most probable tokens that a vLLM server lists at each position.
        """
        endpoint = self._endpoint
        label_ids = encode_labels(lambda label: self._tokenize(label, False), labels)
        tokens = self._encode_prompt(prompt, label_ids)
        if endpoint.server == "llamacpp":
            rows = [_read_llamacpp(endpoint, tokens.ids[: end + 1], label_ids) for end in tokens.positions]
        elif endpoint.server == "sglang":
            rows = _parse_sglang(_request_sglang(endpoint, tokens, label_ids), tokens, label_ids)
        else:
            rows = _parse_vllm(_request_vllm(endpoint, tokens, label_ids, top), tokens, label_ids, top)
        return np.array(rows, dtype=np.float32)

    def read_first_labels(self, prompt: Prompt, labels: Sequence[str]) -> list[tuple[str, float]]:
        """Return the log-probability that the answer begins with a label, such as 'true', for each label.

        The API lists only the most probable tokens. This method also returns labels that are improbable.

        Returns:
            Pairs of a label and a log-probability. Empty if the server is too old or hides its tokenizer.
        """
        try:
            labels_by_token = self._find_label_tokens(labels)
        except ModelError:  # a gateway hides the tokenizer
            return []
        read = self._read_first_token_sglang if self._endpoint.server == "sglang" else self._read_first_token_vllm
        logprobs = read(prompt, list(labels_by_token))
        return [(labels_by_token[token], value) for token, value in logprobs.items() if token in labels_by_token]

    def _find_label_tokens(self, labels: Sequence[str]) -> dict[int, str]:
        """Return the label of each token that spells a whole label, with or without a space before it."""
        labels_by_token: dict[int, str] = {}
        for label in (label.strip() for label in labels):
            for spelling in (label, f" {label}"):
                ids = self._tokenize(spelling, False)
                if len(ids) == 1:
                    labels_by_token[ids[0]] = label
        return labels_by_token

    def _read_first_token_sglang(self, prompt: Prompt, ids: list[int]) -> dict[int, float]:
        """Request from SGLang how probable each of the tokens `ids` is as the first token of the answer.

        Returns token -> log-probability; empty if the server does not support this.
        """
        try:
            prompt_ids = [*self._endpoint.tokenize_prompt(prompt)]
            tokens = LabelPromptTokens(prompt_ids, positions=[len(prompt_ids) - 1])  # the answer follows the last token
            response = _request_sglang(self._endpoint, tokens, ids)
        except (UnsupportedSignal, StatusError):  # behind a gateway, or too old to tokenize a chat
            return {}
        with responses.translate_format_errors(FORMAT_NAME):
            logprobs = _get_listed(response["meta_info"]["output_token_ids_logprobs"][0], ids)
        return dict(zip(ids, logprobs, strict=True))

    def _read_first_token_vllm(self, prompt: Prompt, ids: list[int]) -> dict[int, float]:
        """Request from vLLM how probable each of the tokens `ids` is as the first token of the answer.

        Returns token -> log-probability; empty if the server does not support this.
        """
        fields = {
            **NEUTRAL_SAMPLING,
            "max_tokens": 1,
            "logprobs": 1 if prompt.raw else True,  # the completions API takes a number, the chat API a boolean
            "return_tokens_as_token_ids": True,
            "logprob_token_ids": ids,
        }
        tokens = None
        # Servers that do not know `logprob_token_ids` refuse the request. Those that extract hidden states fail (500).
        with ignore_refusals(400, 422, 500):
            tokens = responses.parse_token_logprobs(self._endpoint.complete_prompt(prompt, fields))
        return {_parse_token_id(text): value for text, value in tokens[0].top} if tokens else {}

    def _tokenize(self, text: str, special: bool) -> Sequence[int]:
        """Return the token ids of a text, with special tokens if `special`. Short texts are cached."""
        tokenize = self._tokenize_cached if len(text) <= MAX_CACHED_CHARS else self._endpoint.tokenize_text
        return tokenize(text, special)

    def _encode_prompt(self, prompt: LabelPrompt, label_ids: Sequence[int]) -> LabelPromptTokens:
        """Tokenize a label prompt and find the label positions.

        The parts are tokenized separately, so that no token spans two parts.

        Raises:
            BadSetting: A later part does not begin with a label, or there is no text before the first label.
        """
        prefix = self._tokenize(prompt.prefix, True) if prompt.prefix else ()
        # Special tokens are added only at the beginning of the text: to the prefix or, without one, to the first part.
        parts = [self._tokenize(part, number == 0 and not prompt.prefix) for number, part in enumerate(prompt.parts)]
        tokens = join_label_parts(prefix, parts, label_ids)
        if not tokens.positions or tokens.positions[0] < 0:
            raise BadSetting("the prompt has no text before its first answer label (yes). Put some into `prefix`.")
        return tokens


# --- vLLM -----------------------------------------------------------------------------------------


def _request_vllm(endpoint: ModelEndpoint, tokens: LabelPromptTokens, label_ids: Sequence[int], top: int) -> Any:
    """Request the log-probabilities of labels, such as Yes and No, from vLLM.

    Servers that do not know the field `logprob_token_ids` list the `top` most probable tokens instead.
    """
    logprob_fields = {"logprobs": top, "prompt_logprobs": top, "return_tokens_as_token_ids": True}
    fields = {**NEUTRAL_SAMPLING, "max_tokens": 1, **logprob_fields}
    if endpoint.lists_requested_tokens:
        with ignore_refusals(400, 422):
            return endpoint.complete_ids(tokens.ids, {**fields, "logprob_token_ids": list(label_ids)})
    # Either the server refused the field, or it would crash on it.
    return endpoint.complete_ids(tokens.ids, fields)


@responses.translate_format_errors(FORMAT_NAME)
def _parse_vllm(response: Any, tokens: LabelPromptTokens, label_ids: Sequence[int], top: int) -> list[list[float]]:
    """Return each label's log-probability at each position of the prompt (positions x labels).

    vLLM's entry of a token lists the candidates for this token itself. So the candidates after position p are in entry
    p + 1.
    """
    choice = responses.get_first_choice(response)
    prompt_logprobs = choice["prompt_logprobs"]
    if len(prompt_logprobs) != len(tokens.ids):
        raise _make_alignment_error()
    rows = []
    for position in tokens.positions[:-1]:
        entries = prompt_logprobs[position + 1].items()
        listed = {int(token): responses.check_logprob(entry["logprob"]) for token, entry in entries}
        if tokens.ids[position + 1] not in listed:  # vLLM always lists the prompt's own token
            raise _make_alignment_error()
        rows.append(_get_bounded(listed, label_ids, top))
    first_answer_token = choice["logprobs"]["top_logprobs"][0]
    listed = {_parse_token_id(token): responses.check_logprob(value) for token, value in first_answer_token.items()}
    return [*rows, _get_bounded(listed, label_ids, top)]


def _get_bounded(listed: Mapping[int, float], label_ids: Sequence[int], top: int) -> list[float]:
    """Return the log-probability of each label at one position.

    Labels that the server does not list get an upper bound: the log-probability of the last of the `top` most probable
    tokens.

    Args:
        listed: Token -> log-probability, of the tokens that the server lists.
        label_ids: First tokens of the labels.
        top: Number of most probable tokens that were requested.
    """
    if all(label in listed for label in label_ids):
        return [listed[label] for label in label_ids]
    if len(listed) < top:
        raise ModelError(
            f"the server returned only {len(listed)} of {top} requested token probabilities. Raise its option max-logprobs."
        )
    # There may be one token more, the prompt's own, which is listed even if it is improbable.
    bound = sorted(listed.values(), reverse=True)[top - 1]
    return [listed.get(label, bound) for label in label_ids]


def _parse_token_id(text: str) -> int:
    """Return the token id in vLLM's notation 'token_id:ID'; raises ValueError for other text."""
    if not text.startswith(TOKEN_ID_PREFIX):
        raise ValueError("the server sent a token's text instead of its id")
    return int(text.removeprefix(TOKEN_ID_PREFIX))


# --- SGLang and llama.cpp -------------------------------------------------------------------------


def _request_sglang(endpoint: ModelEndpoint, tokens: LabelPromptTokens, label_ids: Sequence[int]) -> Any:
    """Request the log-probabilities of labels, such as Yes and No, from SGLang."""
    fields = {
        "return_logprob": True,
        # Tokens before the first label need no log-probabilities, so the server can take them from its prefix cache.
        "logprob_start_len": tokens.positions[0],
        "token_ids_logprob": list(label_ids),
    }
    return endpoint.generate_on_sglang(tokens.ids, fields)


@responses.translate_format_errors(FORMAT_NAME)
def _parse_sglang(response: Any, tokens: LabelPromptTokens, label_ids: Sequence[int]) -> list[list[float]]:
    """Return each label's log-probability at each position of the prompt (positions x labels).

    SGLang's entry of a token lists the candidates for this token itself. So the candidates after position p are in entry
    p + 1. The response has entries only from the first label position on.
    """
    meta = response["meta_info"]
    first_position = tokens.positions[0]
    prompt_tokens = meta["input_token_logprobs"]
    label_logprobs = meta["input_token_ids_logprobs"]
    returned_ids = [token[1] for token in prompt_tokens]
    if returned_ids != tokens.ids[first_position:] or len(label_logprobs) != len(prompt_tokens):
        raise _make_alignment_error()
    entries = [label_logprobs[position + 1 - first_position] for position in tokens.positions[:-1]]
    entries.append(meta["output_token_ids_logprobs"][0])  # the last position is followed by the answer
    return [_get_listed(entry, label_ids) for entry in entries]


def _get_listed(entry: Any, label_ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of the labels from SGLang's list [[logprob, id, text], ...]."""
    listed = {item[1]: item[0] for item in entry}
    return [responses.check_logprob(listed[label]) for label in label_ids]


def _read_llamacpp(endpoint: ModelEndpoint, ids: Sequence[int], label_ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of the labels after a prompt, from llama.cpp.

    If a label is missing, the whole vocabulary is requested.
    """
    for size in (WIDE_TOP_TOKENS, WHOLE_VOCABULARY):
        fields = {**NEUTRAL_SAMPLING, "max_tokens": 1, "logprobs": size, "cache_prompt": True}
        response = endpoint.complete_ids(ids, fields)
        with responses.translate_format_errors(FORMAT_NAME):
            top = responses.get_first_choice(response)["logprobs"]["content"][0]["top_logprobs"]
            listed = {int(entry["id"]): responses.check_logprob(entry["logprob"]) for entry in top}
        if all(label in listed for label in label_ids):
            return [listed[label] for label in label_ids]
    raise ModelError(
        "the server lists too few tokens to compute the probabilities of answers such as yes and no. Use vLLM or SGLang."
    )


def _make_alignment_error() -> ModelError:
    return ModelError("the server returned log-probabilities of tokens that are not in the prompt. Update the server.")
