"""Send requests for one model to one server: find out what it supports, complete prompts, and tokenize text."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.core.redaction import redact_message
from knowgate.errors import KnowgateError, ModelError, ServerError, UnsupportedSignal
from knowgate.models.backend import RemoteDraft
from knowgate.models.openai.client import ApiClient, StatusError, ignore_refusals
from knowgate.models.openai.responses import has_tool_call, parse_completions, parse_token_logprobs
from knowgate.models.tokenization import REPLACEMENT_CHARACTER
from knowgate.types import Completion, Prompt, Result

TOOL_CALL_TOKENS = 64  # enough for a call with a query; servers detect a call only when it is complete
PROBE_PROMPT = Prompt("Hi")  # a request with it finds out what a server supports
PROBE_FIELDS: Mapping[str, Any] = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0}  # what every server supports
# Parameters to probe, and the values to try, best first. top_k=-1 means no limit in vLLM, SGLang and llama.cpp, but some
# gateways expect 0.
PROBED_PARAMETERS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "logprobs": ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 5}, {"logprobs": True}),
    "n": ({"n": 2},),
    "seed": ({"seed": 0},),
    "sampling": ({"top_k": -1, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0}),
}
# Number of tokens to request from servers that have no low limit. Enough for entropies, and 100 kB per position.
WIDE_TOP_TOKENS = 2_000
REFUSAL_STATUSES = (400, 422, 500, 501)  # some servers crash on parameters that they do not know
MISSING_STATUSES = (404, 405, 501)  # returned for endpoints that a server does not have
MAX_SHOWN_MODELS = 20  # maximum number of model names in an error message
NO_DRAFT = Completion("", tokens=(), finished=False, n_tokens=0)  # a new answer begins with it
# Server -> the fields that make it continue the last message instead of replying to it.
CONTINUATION_FIELDS: Mapping[str, Mapping[str, bool]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
    "llamacpp": {},
}
# Explicit values, because servers otherwise take them from the model's generation_config.json.
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
class ServerCapabilities:
    """What a server supports, as found out by a test request.

    Args:
        logprobs: Whether the server returns log-probabilities.
        max_top_tokens: Number of most probable tokens that the server lists at each position.
        returns_several: Whether the server can return several completions per request (field `n`).
        accepts_seed: Whether the server accepts a seed.
        neutral_sampling: Request fields that switch off the server's own top_k and min_p, if the server accepts them.
    """

    logprobs: bool
    max_top_tokens: int
    returns_several: bool
    accepts_seed: bool
    neutral_sampling: Mapping[str, Any]


class ModelEndpoint:
    """Sends requests for one model to one server.

    Args:
        model: Name of the model on the server.
        client: HTTP client of the server.
    """

    def __init__(self, model: str, client: ApiClient):
        self.model = model
        self.client = client
        self._probe_lock = threading.Lock()
        self._capabilities: ServerCapabilities | None = None
        self.refuses_drafts = False  # set when the server refuses to continue a draft
        self.on_response: Callable[[str], None] | None = None  # called with the id of each finished response

    @property
    def capabilities(self) -> ServerCapabilities:
        """What the server supports. The first use sends test requests, once for all threads."""
        with self._probe_lock:
            if self._capabilities is None:
                self._capabilities = self._probe()
            return self._capabilities

    def _probe(self) -> ServerCapabilities:
        """Find out by test requests which optional parameters the server supports.

        Some servers ignore a parameter silently, so the response is checked.
        """
        fields = dict(PROBE_FIELDS)
        for values_to_try in PROBED_PARAMETERS.values():
            fields |= values_to_try[0]  # the best ones
        response = self._try_fields(fields)
        if response is None:
            fields, response = self._probe_one_by_one()
        tokens = parse_token_logprobs(response) or []
        return ServerCapabilities(
            logprobs=bool(tokens),
            max_top_tokens=min((len(token.top) for token in tokens), default=0),
            returns_several="n" in fields and len(parse_completions(response)) == fields["n"],
            accepts_seed="seed" in fields,
            neutral_sampling={key: fields[key] for key in ("top_k", "min_p") if key in fields},
        )

    def _probe_one_by_one(self) -> tuple[dict[str, Any], Any]:
        """Add optional parameters to a test request one by one, and keep the accepted ones.

        Returns:
            The fields of the last accepted request, and its response.
        """
        fields = dict(PROBE_FIELDS)
        response = self.complete_prompt(PROBE_PROMPT, fields)
        for values_to_try in PROBED_PARAMETERS.values():
            for values in values_to_try:  # best first
                more_fields = fields | values
                attempt = self._try_fields(more_fields)
                if attempt is not None:
                    fields = more_fields
                    response = attempt
                    break
        return fields, response

    def _try_fields(self, fields: dict[str, Any]) -> Any:
        """Send a short chat request with these fields.

        Returns None if the server refuses the fields.
        """
        with ignore_refusals(*REFUSAL_STATUSES):
            return self.complete_prompt(PROBE_PROMPT, fields)
        return None

    @functools.cached_property
    def lists_wide_logprobs(self) -> bool:
        """Whether the server returns the log-probabilities of thousands of tokens per position."""
        if self.capabilities.max_top_tokens <= 1:
            return False
        fields = {"max_tokens": 1, "temperature": 0.0, **make_logprob_fields(PROBE_PROMPT, WIDE_TOP_TOKENS)}
        response = self._try_fields(fields)
        tokens = None if response is None else parse_token_logprobs(response)
        return tokens is not None and len(tokens) > 0 and len(tokens[0].top) == WIDE_TOP_TOKENS

    @property
    def lists_requested_tokens(self) -> bool:
        """Whether a request can ask for the log-probabilities of given tokens.

        vLLM crashes on this if it also returns hidden states.
        """
        gives_hidden_states = self.on_response is not None
        return self.server == "sglang" or (self.server == "vllm" and not gives_hidden_states)

    def complete_prompt(self, prompt: Prompt, fields: dict[str, Any], draft: str = "") -> Any:
        """Send a prompt and return the server's response as JSON.

        Args:
            prompt: A chat message, or raw text.
            fields: Other fields of the request.
            draft: The beginning of the answer, for the server to continue; empty for a new answer.
        """
        path, body = self._make_request(prompt, fields, draft)
        return self._post(path, body)

    def stream_prompt(self, prompt: Prompt, fields: dict[str, Any], draft: str = "") -> Generator[Any, None, None]:
        """Send a prompt and return the streamed response as a generator of JSON chunks.

        Args:
            prompt: A chat message, or raw text.
            fields: Other fields of the request.
            draft: The beginning of the answer, for the server to continue; empty for a new answer.
        """
        path, body = self._make_request(prompt, {**fields, "stream": True}, draft)
        with self._explain_missing_model():
            chunks = self.client.stream(path, body)
        return chunks if self.on_response is None else self._report_at_end(chunks)

    def calls_tool(self, prompt: Prompt, tool: Mapping[str, Any]) -> bool:
        """Return whether the LLM replies to a prompt with a call of the tool.

        Raises:
            UnsupportedSignal: The server refuses the field `tools`.
        """
        fields = {"max_tokens": TOOL_CALL_TOKENS, "temperature": 0.0, "tools": [dict(tool)], "tool_choice": "auto"}
        try:
            response = self.complete_prompt(prompt, fields)
        except StatusError as error:
            if error.status not in REFUSAL_STATUSES:
                raise
            raise UnsupportedSignal(
                f"the server {self.client.url} refuses tools for '{self.model}': {str(error).rstrip('.')}. Start vLLM with its "
                "option enable-auto-tool-choice, or use another LLM.",
                brief=error.brief,
            ) from None
        return has_tool_call(response)

    def complete_ids(self, ids: Sequence[int], fields: dict[str, Any], *, report: bool = True) -> Any:
        """Send a raw prompt as token ids and return the response.

        Args:
            ids: Token ids of the prompt.
            fields: Other fields of the request.
            report: Whether to call the callback `on_response` with the id of the response.
        """
        return self._post("/completions", {"model": self.model, **fields, "prompt": list(ids)}, report=report)

    def _make_request(self, prompt: Prompt, fields: dict[str, Any], draft: str) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a request. `draft` is the beginning of the answer."""
        body = {"model": self.model, **fields}
        if prompt.raw:
            return "/completions", {**body, "prompt": prompt.text + draft}
        messages = [{"role": "user", "content": prompt.text}]
        if draft:
            messages.append({"role": "assistant", "content": draft})
            body |= CONTINUATION_FIELDS[self.server]
        return "/chat/completions", {**body, "messages": messages}

    def _post(self, path: str, body: dict[str, Any], *, report: bool = True) -> Any:
        """Send a POST request and return its JSON response.

        With `report`, the callback `on_response` is called.
        """
        with self._explain_missing_model():
            response = self.client.post(path, body)
        if report:
            self._report(response)
        return response

    def _report(self, response: Any) -> None:
        if self.on_response is not None and isinstance(response, dict) and isinstance(response.get("id"), str):
            self.on_response(response["id"])

    def _report_at_end(self, chunks: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield the chunks of a stream, then call `on_response` with the response id."""
        last: Any = None
        with contextlib.closing(chunks):
            for chunk in chunks:
                last = chunk if isinstance(chunk, dict) else last
                yield chunk
        self._report(last)

    # --- continuing a draft -----------------------------------------------------------------------
    # vLLM and SGLang continue the last message if the request sets `continue_final_message`. llama.cpp always does so if
    # the last message is the assistant's. Other servers would treat the draft as an earlier message of the chat.

    def can_continue(self, draft: RemoteDraft) -> bool:
        """Return whether the server can continue a draft seamlessly.

        The draft is sent as text, which must give the same tokens.
        """
        answer = draft.completion
        if answer is None or not answer.text or REPLACEMENT_CHARACTER in answer.text:
            return False
        if answer.tokens is not None and "".join(token.text for token in answer.tokens) != answer.text:
            return False
        if draft.prompt.raw:  # the draft is simply appended to the prompt
            return True
        has_outer_spaces = answer.text != answer.text.strip()  # chat templates may remove these
        return not has_outer_spaces and not self.refuses_drafts and self.server in CONTINUATION_FIELDS

    def continue_draft(self, draft: RemoteDraft, request: Callable[[Completion], Result]) -> tuple[Completion, Result]:
        """Request the rest of an answer that begins with a draft.

        If the server cannot continue the draft, request a new answer.

        Args:
            draft: The draft.
            request: Takes the beginning of an answer, which is NO_DRAFT for a new answer, and requests the rest.

        Returns:
            The beginning that was sent, which is the draft or NO_DRAFT, and what `request` returned for it.
        """
        if draft.completion is not None and self.can_continue(draft):
            with ignore_refusals(*REFUSAL_STATUSES):
                return draft.completion, request(draft.completion)
            self.refuses_drafts = True  # only reached after a refusal
        return NO_DRAFT, request(NO_DRAFT)

    # --- model cards ------------------------------------------------------------------------------

    @functools.cached_property
    def card(self) -> dict[str, Any]:
        """The server's entry for the model in GET /models, or else the first entry."""
        cards = self.list_models()
        return next((card for card in cards if card.get("id") == self.model), cards[0] if cards else {})

    @property
    def server(self) -> str:
        """The kind of server, such as 'vllm', 'sglang', 'llamacpp' or 'unknown'."""
        return str(self.card.get("owned_by") or "unknown")

    @property
    def adapter(self) -> str:
        """Name of the LoRA adapter on SGLang, or ''.

        A model whose entry in the server's list names a parent is an adapter itself. Otherwise, the model 'base:style'
        stands for the adapter 'style'.
        """
        return self.model if self.card.get("parent") else self.model.partition(":")[2]

    def list_models(self) -> list[dict[str, Any]]:
        """Return the server's list of models (GET /models), or an empty list if it has no such endpoint."""
        response = None
        with ignore_refusals(*MISSING_STATUSES):
            response = self.client.get("/models")
        cards = response.get("data") if isinstance(response, dict) else None
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    @contextlib.contextmanager
    def _explain_missing_model(self) -> Iterator[None]:
        """List the server's models in the error if a request fails with status 404."""
        try:
            yield
        except StatusError as error:
            if error.status != 404:
                raise
            raise self._make_missing_error(error) from None

    def _make_missing_error(self, error: StatusError) -> ServerError:
        """Return the error for status 404, with the models that the server has."""
        try:
            # One name more than is shown, to know whether the list is cut.
            names = [redact_message(str(card.get("id"))) for card in self.list_models()[: MAX_SHOWN_MODELS + 1]]
        except KnowgateError:
            names = []
        if not names:
            message = str(error).rstrip(".")
            advice = f"Check the URL, which often ends in /v1, and the model name '{self.model}'."
            return ServerError(f"{message}. {advice}", brief=error.brief)
        if self.model in names:  # the model exists, so the server means something else by 404
            return error
        more = ", ..." if len(names) > MAX_SHOWN_MODELS else ""
        return ServerError(
            f"the server {self.client.url} has no model '{self.model}'. Use one of its models: "
            f"{', '.join(names[:MAX_SHOWN_MODELS])}{more}."
        )

    # --- endpoints that OpenAI does not have ------------------------------------------------------

    def tokenize_text(self, text: str, special: bool) -> tuple[int, ...]:
        """Tokenize text with the server's tokenizer. `special` adds special tokens at the start."""
        if self.server == "llamacpp":
            return self._tokenize({"content": text, "add_special": special})
        return self._tokenize({"model": self.model, "prompt": text, "add_special_tokens": special})

    def tokenize_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokenize a prompt on vLLM or SGLang.

        Unless it is raw, the prompt is put into the chat template.
        """
        if prompt.raw:
            return self.tokenize_text(prompt.text, True)
        messages = [{"role": "user", "content": prompt.text}]
        return self._tokenize({"model": self.model, "messages": messages, "add_generation_prompt": True})

    def _tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Call the server's tokenizer endpoint."""
        response = self._call_native_endpoint("/tokenize", body, outside_v1=self.server != "sglang")
        tokens = response.get("tokens") if isinstance(response, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ModelError(f"the server {self.client.url} did not return a list of token ids. Update the server.")
        return tuple(tokens)

    def generate_on_sglang(self, ids: Sequence[int], fields: dict[str, Any]) -> Any:
        """Send token ids to SGLang's /generate and return the response. The answer has one token."""
        body = {"input_ids": list(ids), "sampling_params": {**NEUTRAL_SAMPLING, "max_new_tokens": 1}, **fields}
        if self.adapter:  # /generate does not take a model name
            body["lora_path"] = self.adapter
        return self._call_native_endpoint("/generate", body, outside_v1=True)

    def _call_native_endpoint(self, path: str, body: dict[str, Any], *, outside_v1: bool) -> Any:
        """Call an endpoint that is not part of the OpenAI API, such as /tokenize.

        Raises:
            UnsupportedSignal: The server does not have the endpoint, or a gateway in front of it hides it.
        """
        try:
            return self.client.post(path, body, outside_v1=outside_v1)
        except StatusError as error:
            if error.status not in MISSING_STATUSES:
                raise
            raise UnsupportedSignal(
                f"{str(error).rstrip('.')}. Hidden states and the probabilities of answers such as yes and no are read from "
                f"the server's endpoint {path}. Use the server's own URL instead of a gateway's, or update the server.",
                brief=error.brief,
            ) from None


def make_logprob_fields(prompt: Prompt, top: int) -> dict[str, Any]:
    """Return the request fields for log-probabilities of the `top` most probable tokens."""
    if prompt.raw:
        return {"logprobs": top}
    return {"logprobs": True, "top_logprobs": top} if top else {"logprobs": True}
