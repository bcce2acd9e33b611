"""Any OpenAI-compatible server: vLLM, SGLang, llama.cpp, Ollama, OpenAI itself. Sees text, never weights.

Offers what the server turns out to give: drafts and samples always, log-probabilities and labels where token
log-probabilities come back, entropies where thousands of tokens are listed (llama.cpp), hidden states where its
spec says that it was started for them (`states`). The key comes from KNOWGATE_API_KEY, else OPENAI_API_KEY.

A draft that ended by itself is the answer and costs no second call. Any other goes on where the server can (see
`going_on`); elsewhere it is generated anew in full, so its text may differ from the draft.

The fingerprint is only as good as what the server says of itself: weights changed under the same name go
unnoticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np

from knowgate.core.files import sha256_text
from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.models.backend import Backend, check_sampling
from knowgate.models.openai.client import ApiClient, RetryPolicy, StatusError
from knowgate.models.openai.continuation import ServerDraft, check_draft_handle, continue_draft, stream_continuation
from knowgate.models.openai.hidden_states import HiddenStateReader, StatesAroundDraft
from knowgate.models.openai.labels import LABEL_SERVERS, WHOLE_VOCABULARY, ServerLabelReader
from knowgate.models.openai.responses import (
    assemble_stream,
    compute_label_logprobs,
    is_label_missing,
    parse_answer_ids,
    parse_completions,
    parse_token_logprobs,
)
from knowgate.models.openai.server import REFUSAL_STATUSES, WIDE_TOP_TOKENS, ServedModel, tokenize_text
from knowgate.models.openai.spec import DEFAULT_CONCURRENCY, HiddenStateConfig, check_server_url, parse_openai_spec
from knowgate.types import Completion, LabelPrompt, Prompt, Reading, Sampling, Signal, SignalRequest, TextStream, Vector

Item = TypeVar("Item")
Result = TypeVar("Result")
MARGIN_TOP_TOKENS = 2  # tokens listed for the margin of a draft's tokens
MAX_CHOICES = 128  # OpenAI's limit of `n`


def open_openai(value: str) -> OpenAIModel:
    """`MODEL@URL`, such as 'Qwen/Qwen3-8B@http://127.0.0.1:8000/v1', with options behind a #: see `spec`."""
    spec = parse_openai_spec(value)
    return OpenAIModel(spec.model, spec.url, concurrency=spec.concurrency, states=spec.states)


class DraftResponse(NamedTuple):
    """A draft, None where none was asked for, and its token ids, where they were."""

    completion: Completion | None
    ids: Sequence[int] = ()


class OpenAIModel(Backend):
    """`model` on the server at `url`. Requests of one batch go out `concurrency` at a time.

    Safe to use from several threads; `concurrency` of them at once have a connection each.
    """

    def __init__(
        self,
        model: str,
        url: str,
        *,
        patience: RetryPolicy | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        transport: httpx.BaseTransport | None = None,
        states: HiddenStateConfig | None = None,
    ):
        check_server_url(url)
        self._concurrency = concurrency
        self._wire = ApiClient(url, patience=patience or RetryPolicy(), connections=concurrency, transport=transport)
        self._server = ServedModel(model, self._wire)
        self._inside = ServerLabelReader(self._server)
        self._states = HiddenStateReader(self._server, states) if states else None
        if self._states is not None:
            self._server.extracts, self._server.forget = True, self._states.forget

    @property
    def name(self) -> str:
        return f"openai:{self._server.model}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """From the model's name and what GET /models says of it.

        `created` is left out: vLLM and llama.cpp give the time of the request there.
        """
        model = self._server.model
        card = next((card for card in self._server.cards() if card.get("id") == model), {})
        facts = [str(card.get(field, "")) for field in ("id", "owned_by", "root")]
        return "openai-" + sha256_text("openai", model, *facts)[:16]

    @property
    def offers(self) -> frozenset[Signal]:
        offered = {Signal.DRAFT, Signal.SAMPLES}
        if self._server.abilities.logprobs:
            offered.add(Signal.LOGPROBS)
        if self._server.abilities.top > 1:
            offered.add(Signal.LABELS)
        if self._states is not None:
            offered.add(Signal.HIDDEN)
        return frozenset(offered)

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def has_entropies(self) -> bool:
        """Whether the server lists enough tokens at each place to work out their entropy."""
        return self._server.is_wide

    @property
    def reads_inner_labels(self) -> bool:
        """Whether labels can be read inside a prompt, and not only at its end."""
        return self._server.maker in LABEL_SERVERS

    def count_tokens(self, text: str) -> int | None:
        """Of how many tokens a text is, where the server tells."""
        try:
            return len(tokenize_text(self._server, text, False)) if self.reads_inner_labels else None
        except NotOffered:  # behind a gateway
            return None

    def close(self) -> None:
        """Drop the connections; the model can still be used."""
        self._wire.close()

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        self.check_request(want)
        drafts = self._drafts(prompts, want)
        samples = self._sample(prompts, want.sample_tokens, want.sampling, want.samples, want.seed)
        around = self._around(prompts, drafts, want)
        return [
            Reading(
                draft=draft.completion,
                hidden=states.before,
                hidden_after=states.after,
                samples=tuple(drawn),
                resume=ServerDraft(prompt, draft.completion),
            )
            for prompt, draft, drawn, states in zip(prompts, drafts, samples, around, strict=True)
        ]

    def check_request(self, want: SignalRequest) -> None:
        """Refuse what this server cannot give, before anything is asked."""
        if want.sample_layer is not None or (want.layers and self._states is None):
            of = "sampled answers" if want.sample_layer is not None else "prompts"
            raise NotOffered(f"a server gives no hidden states of {of}; use an hf: model for them.")
        if want.layers and self._states is not None:
            self._states.check(want.layers)
        if want.entropies and not self.has_entropies:
            raise NotOffered(
                "the server lists too few tokens for their entropies. Use another statistic (logprob:first, "
                "logprob:mean, logprob:min or logprob:margin), or start vLLM with --max-logprobs 2000."
            )

    def _around(
        self, prompts: Sequence[Prompt], drafts: Sequence[DraftResponse], want: SignalRequest
    ) -> list[StatesAroundDraft]:
        states = self._states
        if states is None or not want.layers:
            return [StatesAroundDraft({}, {}) for _ in prompts]
        pairs = list(zip(prompts, drafts, strict=True))
        return self._each(lambda pair: states.around(pair[0], pair[1].ids, want), pairs)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]:
        """`max_tokens` counts the draft too. Samples carry no log-probabilities."""
        if resume is not None:
            if temperature > 0 or n != 1:
                raise BadSetting("going on from a draft is greedy: use temperature 0 and n 1 with resume.")
            handles = [check_draft_handle(item) for _, item in zip(prompts, resume, strict=True)]
            return [[completion] for completion in self._go_on(handles, max_tokens)]
        if temperature == 0:
            return self._greedy_answers(prompts, max_tokens, n, seed)
        return self._sample(prompts, max_tokens, Sampling(temperature), n, seed)

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """As the server sends it. A draft is given as it is; where it cannot go on it is not shown: see above."""
        draft = ServerDraft(prompt, None) if resume is None else check_draft_handle(resume)
        if draft.completion is None or not draft.is_enough(max_tokens):
            fields = self._missing(draft, max_tokens)
            going = stream_continuation(self._server, draft, lambda text: self._parts(draft.prompt, fields, text))
            completion = yield from going or self._draft_in_parts(draft.prompt, max_tokens)
            return self._checked(completion)
        if draft.completion.text:
            yield draft.completion.text
        return draft.completion

    @property
    def depth(self) -> int:
        return self._states.depth if self._states else 0

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """A server does not tell its window; it refuses what is too long."""
        return [True for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Log-probabilities of the labels; see `label_logprobs` and `openai_labels` for unlisted ones."""
        for prompt in prompts:
            if len(prompt.parts) != 1:
                self._inside.check(prompt)
        if prompts and Signal.LABELS not in self.offers:
            raise NotOffered(f"{self.name} does not list the most probable tokens, so labels cannot be read.")
        return self._each(lambda prompt: self._label_row(prompt, labels), prompts)

    def _drafts(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[DraftResponse]:
        if want.draft_tokens == 0:
            return [DraftResponse(None) for _ in prompts]
        top = WIDE_TOP_TOKENS if want.entropies and self.has_entropies else MARGIN_TOP_TOKENS
        with_ids = bool(want.layers and want.after_draft)
        return self._each(lambda prompt: self._drafted(prompt, want.draft_tokens, top, with_ids), prompts)

    def _drafted(self, prompt: Prompt, max_tokens: int, top: int, with_ids: bool) -> DraftResponse:
        fields = self._greedy(prompt, max_tokens, None, top) | ({"return_token_ids": True} if with_ids else {})
        reply = self._server.ask(prompt, fields)
        return DraftResponse(self._checked(parse_completions(reply)[0]), parse_answer_ids(reply) if with_ids else ())

    def _go_on(self, handles: Sequence[ServerDraft], max_tokens: int) -> list[Completion]:
        return self._each(lambda handle: self._finish(handle, max_tokens), handles)

    def _finish(self, draft: ServerDraft, max_tokens: int) -> Completion:
        if draft.completion is not None and draft.is_enough(max_tokens):
            return draft.completion
        if max_tokens == 0:
            return Completion("")
        going = continue_draft(self._server, draft, self._missing(draft, max_tokens))
        return self._draft(draft.prompt, max_tokens, None) if going is None else self._checked(going)

    def _missing(self, draft: ServerDraft, max_tokens: int) -> dict[str, Any]:
        """What to ask for after the draft."""
        begun = draft.completion.n_tokens if draft.completion else 0
        return self._greedy(draft.prompt, max_tokens - begun, None)

    def _greedy_answers(
        self, prompts: Sequence[Prompt], max_tokens: int, n: int, seed: int | None
    ) -> list[list[Completion]]:
        """They are all alike (and vLLM refuses n > 1 for them): one is asked for and repeated."""
        if n == 0:
            return [[] for _ in prompts]
        drafts = self._each(lambda prompt: self._draft(prompt, max_tokens, seed), prompts)
        return [[draft] * n for draft in drafts]

    def _sample(
        self, prompts: Sequence[Prompt], max_tokens: int, sampling: Sampling, n: int, seed: int | None
    ) -> list[list[Completion]]:
        """`n` per prompt: in one request where the server honours `n`, else in `n` requests."""
        if not prompts or n == 0:
            return [[] for _ in prompts]
        check_sampling(sampling)
        fields = {"max_tokens": max_tokens, "temperature": sampling.temperature, **self._cut(sampling)}
        size = n if self._server.abilities.n else 1
        jobs = [(prompt, start) for prompt in prompts for start in range(0, n, size)]
        drawn = self._each(lambda job: self._fill(job[0], fields, size, seed, job[1]), jobs)
        flat = [completion for part in drawn for completion in part]
        return [flat[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _draft(self, prompt: Prompt, max_tokens: int, seed: int | None) -> Completion:
        fields = self._greedy(prompt, max_tokens, seed)
        return self._checked(parse_completions(self._server.ask(prompt, fields))[0])

    def _greedy(
        self, prompt: Prompt, max_tokens: int, seed: int | None, top: int = MARGIN_TOP_TOKENS
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, **self._seed(seed)}
        if self._server.abilities.logprobs:
            fields |= _logprob_fields(prompt, top if top > MARGIN_TOP_TOKENS else min(top, self._server.abilities.top))
        return fields

    def _checked(self, completion: Completion) -> Completion:
        if self._server.abilities.logprobs and completion.tokens is None and completion.text:
            raise ModelError(f"{self.name} left out the log-probabilities that it gave when it was probed.")
        return completion

    def _draft_in_parts(self, prompt: Prompt, max_tokens: int) -> TextStream:
        reply = yield from assemble_stream(self._parts(prompt, self._greedy(prompt, max_tokens, None)))
        return parse_completions(reply)[0]

    def _parts(self, prompt: Prompt, fields: dict[str, Any], draft: str = "") -> Generator[Any, None, None]:
        """Tokens are counted by their log-probabilities; without them the server is asked to count, if it knows how."""
        if not self._server.abilities.logprobs:
            try:
                return self._server.ask_in_parts(prompt, {**fields, "stream_options": {"include_usage": True}}, draft)
            except StatusError as error:
                if error.status not in (400, 422):
                    raise
        return self._server.ask_in_parts(prompt, fields, draft)

    def _cut(self, sampling: Sampling) -> dict[str, Any]:
        """What is cut off: what `sampling` says and nothing of the server's own."""
        fields = {"top_p": sampling.top_p, **self._server.abilities.sampling}
        if sampling.top_k and "top_k" not in fields:
            raise NotOffered(f"{self.name} takes no top_k: leave it out, or use a server that does (vLLM, SGLang).")
        return {**fields, "top_k": sampling.top_k} if sampling.top_k else fields

    def _fill(
        self, prompt: Prompt, fields: dict[str, Any], size: int, seed: int | None, start: int
    ) -> list[Completion]:
        """`size` samples, asking again while a server gives fewer; each request has a seed of its own."""
        drawn: list[Completion] = []
        while len(drawn) < size:
            n = min(size - len(drawn), MAX_CHOICES)
            own = self._seed(None if seed is None else seed + start + len(drawn)) | ({"n": n} if n > 1 else {})
            drawn += parse_completions(self._server.ask(prompt, fields | own))[:n]
        return drawn

    def _seed(self, seed: int | None) -> dict[str, int]:
        return {} if seed is None or not self._server.abilities.seed else {"seed": seed}

    def _label_row(self, prompt: LabelPrompt, labels: Sequence[str]) -> Vector:
        if len(prompt.parts) != 1:
            return self._inside.read(prompt, labels, self._server.abilities.top)
        turn = Prompt(prompt.prefix + prompt.parts[0], prompt.raw)
        top = self._listed(turn, _logprob_fields(turn, self._server.abilities.top))
        if is_label_missing(top, labels):
            top = self._listed_further(turn, labels, top)
        return np.array([compute_label_logprobs(top, labels)], dtype=np.float32)

    def _listed(self, turn: Prompt, fields: dict[str, Any]) -> tuple[tuple[str, float], ...]:
        """The tokens that may come next, as far as the server lists them."""
        listed = parse_token_logprobs(self._server.ask(turn, {"max_tokens": 1, "temperature": 0.0, **fields}))
        if not listed or not listed[0].top:
            raise ModelError(f"{self.name} did not list the most probable tokens, so labels cannot be read.")
        return listed[0].top

    def _listed_further(
        self, turn: Prompt, labels: Sequence[str], top: tuple[tuple[str, float], ...]
    ) -> tuple[tuple[str, float], ...]:
        """A label that is not among the usual few is asked for: by name on vLLM and SGLang, with a longer
        list on llama.cpp.

        Elsewhere it stays with the most it can have.
        """
        if self._server.names_tokens:
            return top + tuple(pair for pair in self._inside.named(turn, labels) if pair not in top)
        for size in (WIDE_TOP_TOKENS, WHOLE_VOCABULARY) if self._server.is_wide else ():
            try:
                top = self._listed(turn, _logprob_fields(turn, size))
            except StatusError as error:
                if error.status not in REFUSAL_STATUSES:
                    raise
                break  # vLLM with a larger --max-logprobs, but not the whole vocabulary
            if not is_label_missing(top, labels):
                break
        return top

    def _each(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """`work` on each item, side by side, in order. The first failure ends it."""
        if not items:
            return []
        _ = self._server.abilities  # probed before the threads start
        with ThreadPoolExecutor(max_workers=min(self._concurrency, len(items))) as pool:
            return list(pool.map(work, items))


def _logprob_fields(prompt: Prompt, top: int) -> dict[str, Any]:
    """The two endpoints ask for log-probabilities in different words."""
    if prompt.raw:
        return {"logprobs": top}
    return {"logprobs": True, "top_logprobs": top} if top else {"logprobs": True}
