"""The `openai:` backend: any OpenAI-compatible server, such as vLLM, SGLang, llama.cpp, Ollama or OpenAI itself.

The first request probes which signals the server supports. Drafts and samples always work. Log-probabilities and labels
need a server that returns token log-probabilities, and entropies need one that returns thousands of them per token (such
as llama.cpp). Hidden states work if the spec says that the server was started with them. The API key is read from the
environment variable KNOWGATE_API_KEY or, if that is not set, OPENAI_API_KEY.

If a draft is already complete, it is used as the answer without a second request. Other drafts are continued if the
server supports that. Otherwise the answer is generated again, and may differ from the draft.

The fingerprint is computed from what the server reports about the model. If the weights change under the same name, the
fingerprint does not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from knowgate.core.files import sha256_text
from knowgate.core.http_client import RetryPolicy
from knowgate.errors import ModelError, UnsupportedSignal
from knowgate.models import backend
from knowgate.models.backend import RemoteDraft, SinglePromptBackend, check_resume_handle
from knowgate.models.openai import responses
from knowgate.models.openai.client import ApiClient, ignore_refusals
from knowgate.models.openai.hidden_states import HiddenStateReader
from knowgate.models.openai.labels import LABEL_SERVERS, WHOLE_VOCABULARY, ServerLabelReader
from knowgate.models.openai.server import REFUSAL_STATUSES, WIDE_TOP_TOKENS, ModelEndpoint, make_logprob_fields
from knowgate.models.openai.spec import DEFAULT_CONCURRENCY, HiddenStateConfig, check_server_url, parse_openai_spec
from knowgate.types import Completion, LabelPrompt, Prompt, Reading, Sampling, Signal, SignalRequest, TextStream, Vector

MARGIN_TOP_TOKENS = 2  # number of tokens to list for the margin, the difference between the two most probable ones
DRAFT_REPEATING_SERVER = "llamacpp"  # the server whose responses begin with the draft that was sent
MAX_CHOICES = 128  # maximum `n` of a request, as OpenAI limits it


def open_openai(value: str) -> OpenAIModel:
    """Return the model for a spec such as 'openai:Qwen/Qwen3-8B@http://127.0.0.1:8000/v1'."""
    spec = parse_openai_spec(value)
    return OpenAIModel(spec.model, spec.url, concurrency=spec.concurrency, hidden_states=spec.hidden_states)


class OpenAIModel(SinglePromptBackend):
    """A model on an OpenAI-compatible server, safe to use from several threads.

    Args:
        model: Name of the model on the server.
        url: Base URL of the server, which usually ends in /v1.
        retry: Timeouts and retries.
        concurrency: Maximum number of simultaneous requests.
        transport: An httpx transport that replaces the network in tests.
        hidden_states: The hidden states that the server was started with; None if it returns none.
    """

    def __init__(
        self,
        model: str,
        url: str,
        *,
        retry: RetryPolicy | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        transport: httpx.BaseTransport | None = None,
        hidden_states: HiddenStateConfig | None = None,
    ):
        check_server_url(url)
        self.name = f"openai:{model}"  # without the URL
        self.depth = hidden_states.depth if hidden_states else 0
        self._concurrency = concurrency
        self._client = ApiClient(url, retry=retry or RetryPolicy(), connections=concurrency, transport=transport)
        self._endpoint = ModelEndpoint(model, self._client)
        self._label_reader = ServerLabelReader(self._endpoint)
        self._state_reader = HiddenStateReader(self._endpoint, hidden_states) if hidden_states else None
        if self._state_reader is not None:
            self._endpoint.on_response = self._state_reader.discard

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the model's name and of the server's facts about the model."""
        model = self._endpoint.model
        card = next((card for card in self._endpoint.list_models() if card.get("id") == model), {})
        facts = [str(card.get(field, "")) for field in ("id", "owned_by", "root")]
        return "openai-" + sha256_text("openai", model, *facts)[:16]

    @property
    def offers(self) -> frozenset[Signal]:
        """The signals that the server supports. The first use sends a request to find out."""
        offered = {Signal.DRAFT, Signal.SAMPLES, Signal.TOOLS}
        if self._endpoint.capabilities.logprobs:
            offered.add(Signal.LOGPROBS)
        if self._endpoint.capabilities.max_top_tokens > 1:
            offered.add(Signal.LABELS)
        if self._state_reader is not None:
            offered.add(Signal.HIDDEN)
        return frozenset(offered)

    @property
    def concurrency(self) -> int:
        """Number of threads that may use the model at once."""
        return self._concurrency

    @property
    def has_entropies(self) -> bool:
        """Whether the server returns enough log-probabilities per token to compute an entropy."""
        return self._endpoint.lists_wide_logprobs

    @property
    def reads_inner_labels(self) -> bool:
        """Whether the server can read labels (such as 'true') inside a prompt, not only at its end."""
        return self._endpoint.server in LABEL_SERVERS

    def count_tokens(self, text: str) -> int | None:
        """Return the number of tokens of a text, or None if the server does not offer its tokenizer."""
        if not self.reads_inner_labels:  # only these kinds of servers have an endpoint for it
            return None
        try:
            return len(self._endpoint.tokenize_text(text, False))
        except UnsupportedSignal:  # a gateway hides the endpoint
            return None

    def close(self) -> None:
        """Close all connections; the model can still be used."""
        self._client.close()

    def check_request(self, request: SignalRequest) -> None:
        """Raise UnsupportedSignal if this server does not support a requested signal."""
        if request.sample_layer is not None:
            raise UnsupportedSignal("this server does not return hidden states of sampled answers. Use an hf: model.")
        if request.layers and self._state_reader is None:
            raise UnsupportedSignal("this server does not return hidden states of prompts. Use an hf: model.")
        if request.layers and self._state_reader is not None:
            self._state_reader.check(request.layers)
        if request.entropies and not self.has_entropies:
            raise UnsupportedSignal(
                "the server returns too few log-probabilities per token to compute entropies. Use a gate such as logprob:mean, "
                "or start vLLM with max-logprobs 2000."
            )

    # --- reading and generating -------------------------------------------------------------------

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return the requested signals of each prompt, such as its draft, samples and hidden states."""
        self.check_request(request)
        readings = self._map(lambda prompt: self._read_draft(prompt, request), prompts)
        samples = self._sample(prompts, request)
        return [replace(reading, samples=tuple(drawn)) for reading, drawn in zip(readings, samples, strict=True)]

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Yield the greedy answer as the server sends it, then return a `Completion`.

        With `resume`, the draft's text comes first if possible.
        """
        draft = RemoteDraft(prompt, None) if resume is None else check_resume_handle(resume, RemoteDraft)
        if (answer := draft.get_answer(max_tokens)) is not None:
            if answer.text:
                yield answer.text
            return answer

        def stream_rest(start: Completion) -> Generator[Any, None, None]:
            fields = self._make_greedy_fields(draft.prompt, max_tokens - start.n_tokens)
            return self._open_stream(draft.prompt, fields, start.text)

        # `start` is the part of the answer that the server continues: the draft, or nothing.
        start, chunks = self._endpoint.continue_draft(draft, stream_rest)
        if start.text:
            yield start.text
        response = yield from responses.assemble_stream(chunks)
        rest = responses.parse_completions(response)[0]
        return self._check_logprobs(responses.join_completions(start, rest))

    def _read_draft(self, prompt: Prompt, request: SignalRequest) -> Reading:
        """Return the draft of one prompt and the requested hidden states.

        Draft and states come from separate requests.
        """
        completion = None
        draft_ids: list[int] = []
        if request.draft_tokens:
            completion, draft_ids = self._request_draft(prompt, request)
        reading = Reading(completion, resume=RemoteDraft(prompt, completion))
        if not request.layers or self._state_reader is None:
            return reading
        prompt_ids = self._endpoint.tokenize_prompt(prompt)
        hidden = self._state_reader.read(prompt_ids, request.layers)
        hidden_after = hidden if request.after_draft else {}  # after an empty draft, the states are those before it
        if draft_ids:
            hidden_after = self._state_reader.read([*prompt_ids, *draft_ids], request.layers)
        return replace(reading, hidden=hidden, hidden_after=hidden_after)

    def _request_draft(self, prompt: Prompt, request: SignalRequest) -> tuple[Completion, list[int]]:
        """Request a draft. Its token ids are returned only if hidden states after it are needed."""
        needs_ids = bool(request.layers) and request.after_draft
        top = WIDE_TOP_TOKENS if request.entropies else None
        fields = self._make_greedy_fields(prompt, request.draft_tokens, top=top)
        if needs_ids:
            fields["return_token_ids"] = True
        response = self._endpoint.complete_prompt(prompt, fields)
        completion = self._check_logprobs(responses.parse_completions(response)[0])
        return completion, responses.parse_answer_ids(response) if needs_ids else []

    def _complete_draft(self, draft: RemoteDraft, max_tokens: int, seed: int | None = None) -> Completion:
        """Return the whole greedy answer for a draft.

        A new answer is generated if the server cannot continue the draft.
        """
        if (answer := draft.get_answer(max_tokens)) is not None:
            return answer
        if max_tokens == 0:
            return Completion("")
        prompt = draft.prompt

        def request_rest(start: Completion) -> Any:
            fields = self._make_greedy_fields(prompt, max_tokens - start.n_tokens, seed)
            return self._endpoint.complete_prompt(prompt, fields, start.text)

        # `start` is the part of the answer that the server continues: the draft, or nothing.
        start, response = self._endpoint.continue_draft(draft, request_rest)
        rest = responses.parse_completions(response)[0]
        if self._endpoint.server == DRAFT_REPEATING_SERVER and not prompt.raw:  # the response begins with `start`
            rest = replace(rest, text=rest.text.removeprefix(start.text))
        return self._check_logprobs(responses.join_completions(start, rest))

    def _make_greedy_fields(
        self, prompt: Prompt, max_tokens: int, seed: int | None = None, top: int | None = None
    ) -> dict[str, Any]:
        """Return the request fields for a greedy answer, with log-probabilities if the server supports them.

        Args:
            prompt: The prompt.
            max_tokens: Maximum number of tokens of the answer.
            seed: Seed to send, if the server accepts one.
            top: Number of most probable tokens that the server shall list at each position. It is sent unchecked, so pass
                it only if `has_entropies` is true. None for as many as the margin needs, or fewer if the server lists fewer.
        """
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, **self._make_seed_field(seed)}
        capabilities = self._endpoint.capabilities
        if capabilities.logprobs:
            n_listed = min(MARGIN_TOP_TOKENS, capabilities.max_top_tokens) if top is None else top
            fields |= make_logprob_fields(prompt, n_listed)
        return fields

    def _make_seed_field(self, seed: int | None) -> dict[str, int]:
        return {} if seed is None or not self._endpoint.capabilities.accepts_seed else {"seed": seed}

    def _check_logprobs(self, completion: Completion) -> Completion:
        """Return the completion, or raise ModelError if it lacks expected log-probabilities."""
        if self._endpoint.capabilities.logprobs and completion.tokens is None and completion.text:
            raise ModelError(f"{self.name} returned an answer without log-probabilities. Check the server's log.")
        return completion

    def _open_stream(self, prompt: Prompt, fields: dict[str, Any], draft: str = "") -> Generator[Any, None, None]:
        """Request a streamed answer and return its chunks.

        A server without log-probabilities is asked for the number of tokens, unless it refuses such a request.
        """
        if not self._endpoint.capabilities.logprobs:
            usage = {"stream_options": {"include_usage": True}}
            with ignore_refusals(400, 422):
                return self._endpoint.stream_prompt(prompt, {**fields, **usage}, draft)
        # With log-probabilities, the tokens can be counted. Servers that refused the first request get this one, too.
        return self._endpoint.stream_prompt(prompt, fields, draft)

    # --- samples ----------------------------------------------------------------------------------

    def _sample(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[list[Completion]]:
        """Draw the sampled answers to each prompt, with one request per prompt if possible."""
        n, seed = request.samples, request.seed
        if not prompts or n == 0:
            return [[] for _ in prompts]
        sampling = request.sampling
        backend.check_sampling(sampling)
        limits = {"max_tokens": request.sample_tokens, "temperature": sampling.temperature}
        fields = {**limits, **self._make_cutoff_fields(sampling)}
        if self._endpoint.capabilities.returns_several:  # one request can return all samples of a prompt
            return self._map(lambda prompt: self._draw_samples(prompt, fields, n, seed), prompts)
        seeds = [None] * n if seed is None else range(seed, seed + n)
        pairs = [(prompt, own_seed) for prompt in prompts for own_seed in seeds]  # one request for each sample
        samples = self._map(lambda pair: self._draw_samples(pair[0], fields, 1, pair[1])[0], pairs)
        return [samples[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _draw_samples(self, prompt: Prompt, fields: dict[str, Any], n: int, seed: int | None) -> list[Completion]:
        """Draw `n` sampled answers to one prompt.

        A server may return fewer per request, so requests are repeated.
        """
        drawn: list[Completion] = []
        while len(drawn) < n:
            count = min(n - len(drawn), MAX_CHOICES)
            own_seed = None if seed is None else seed + len(drawn)
            request_fields = fields | self._make_seed_field(own_seed)
            if count > 1:
                request_fields["n"] = count
            drawn += responses.parse_completions(self._endpoint.complete_prompt(prompt, request_fields))[:count]
        return drawn

    def _make_cutoff_fields(self, sampling: Sampling) -> dict[str, Any]:
        """Return the request fields for top_p and top_k.

        They also switch off the server's own defaults of top_k and min_p.

        Raises:
            UnsupportedSignal: top_k is requested, but the server does not accept it.
        """
        fields = {"top_p": sampling.top_p, **self._endpoint.capabilities.neutral_sampling}
        if not sampling.top_k:
            return fields
        if "top_k" not in fields:  # the server does not accept it
            raise UnsupportedSignal(f"{self.name} does not support top_k={sampling.top_k}. Set top_k=0, or use vLLM.")
        return {**fields, "top_k": sampling.top_k}

    # --- labels -----------------------------------------------------------------------------------

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Return the log-probabilities of the labels after each part of each prompt.

        Labels that are not among the most probable tokens, which the server lists, get an upper bound.
        """
        for prompt in prompts:
            if len(prompt.parts) != 1:  # only some servers return log-probabilities inside a prompt
                self._label_reader.check(prompt)
        if prompts and Signal.LABELS not in self.offers:
            raise UnsupportedSignal(
                f"{self.name} cannot compute the probabilities of answers such as yes and no: it does not list the most probable "
                "tokens. Use another server, or a local model such as hf:NAME."
            )
        return self._map(lambda prompt: self._read_labels(prompt, labels), prompts)

    def _read_labels(self, prompt: LabelPrompt, labels: Sequence[str]) -> Vector:
        """Return the log-probabilities of the labels after each part of a prompt (parts x labels)."""
        n_listed = self._endpoint.capabilities.max_top_tokens
        if len(prompt.parts) != 1:  # there are labels inside the prompt, not only at its end
            return self._label_reader.read_inner_labels(prompt, labels, n_listed)
        plain = Prompt(prompt.prefix + prompt.parts[0], prompt.raw)
        top_tokens = self._list_first_tokens(plain, n_listed)
        if responses.is_label_missing(top_tokens, labels):
            top_tokens = self._add_labels(plain, labels, top_tokens)
        return np.array([responses.compute_label_logprobs(top_tokens, labels)], dtype=np.float32)

    def _list_first_tokens(self, prompt: Prompt, n: int) -> responses.TopTokens:
        """Return the `n` most probable first tokens of the answer, with their log-probabilities."""
        fields = {"max_tokens": 1, "temperature": 0.0, **make_logprob_fields(prompt, n)}
        tokens = responses.parse_token_logprobs(self._endpoint.complete_prompt(prompt, fields))
        if not tokens or not tokens[0].top:
            raise ModelError(
                f"{self.name} cannot compute the probabilities of answers such as yes and no: it returned no top_logprobs. "
                "Check the server's log."
            )
        return tokens[0].top

    def _add_labels(self, prompt: Prompt, labels: Sequence[str], top: responses.TopTokens) -> responses.TopTokens:
        """Add the labels that are missing in `top`, the list of the most probable first tokens of the answer.

        Returns `top` if the server cannot list more tokens.
        """
        if self._endpoint.lists_requested_tokens:
            requested = self._label_reader.read_first_labels(prompt, labels)
            return top + tuple(pair for pair in requested if pair not in top)
        if not self._endpoint.lists_wide_logprobs:
            return top
        # vLLM refuses the whole vocabulary if its max-logprobs is smaller.
        with ignore_refusals(*REFUSAL_STATUSES):
            for size in (WIDE_TOP_TOKENS, WHOLE_VOCABULARY):
                top = self._list_first_tokens(prompt, size)
                if not responses.is_label_missing(top, labels):
                    break
        return top

    def tool_call_probabilities(self, prompts: Sequence[Prompt], tool: Mapping[str, Any]) -> list[float]:
        """Return 1 for prompts to which the LLM replies with a tool call, otherwise 0."""
        return self._map(lambda prompt: float(self._endpoint.calls_tool(prompt, tool)), prompts)

    def _map(self, work: Callable[[backend.Item], backend.Value], items: Sequence[backend.Item]) -> list[backend.Value]:
        """Call `work` with each item in parallel threads, and return the results in order."""
        if items:
            _ = self._endpoint.capabilities  # so that the test requests are sent before the threads start
        return super()._map(work, items)
