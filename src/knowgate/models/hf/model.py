"""Any causal LLM that transformers can load, on CPU or CUDA, with everything a gate can ask for.

`local` holds weights and tokenizer, `decoding` generates; here prompts become batches and rows become readings.
Knows nothing of gates or retrieval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from knowgate.errors import BadInput, BadSetting, ModelError
from knowgate.models.backend import Backend, check_sampling, draw_uniforms
from knowgate.models.hf import decoding as hf_stream
from knowgate.models.hf import shared_decoding as growing
from knowgate.models.hf.decoding import DecodedRow, DecodingBatch
from knowgate.models.hf.forward_pass import supports_partial_pass
from knowgate.models.hf.local_model import AnsweredPrompt, LocalModel, compute_mean_logprobs, read_label_logits
from knowgate.models.tokenization import REPLACEMENT_CHARACTER, IncrementalDecoder, encode_label_prompts, encode_labels
from knowgate.types import (
    Completion,
    LabelPrompt,
    Prompt,
    Reading,
    Sampling,
    Signal,
    SignalRequest,
    TextStream,
    Token,
    Vector,
)


@dataclass(frozen=True)
class HFResumeHandle:
    """Where the draft of one prompt stopped. Continuing copies; the handle can be used again."""

    stream: DecodingBatch = field(repr=False)
    place: int | None  # row in the stream; None when the draft had finished
    row: DecodedRow

    def copy_row(self) -> DecodedRow:
        """The draft, to go on with."""
        return DecodedRow(list(self.row.steps), list(self.row.tokens), self.row.finished)

    def copy(self) -> HFResumeHandle:
        """The same draft alone in a stream of its own."""
        if self.place is None:
            return HFResumeHandle(self.stream, None, self.copy_row())
        return HFResumeHandle(self.stream.copy([self.place]), 0, self.copy_row())


@dataclass(frozen=True)
class HFModel(LocalModel, Backend):
    """A transformers model from a hub name or a folder (`hf:NAME_OR_DIR`).

    For one thread at a time: all calls share the tokenizer and the beginnings kept of prompts. Streams that are under
    way have caches of their own, so other calls may come between two of their pieces; so may a judge that lives in the
    same weights, whose adapter is on while it is asked and at no other time.

    Example:
        >>> model = HFModel("HuggingFaceTB/SmolLM2-135M-Instruct")  # nothing is loaded yet
        >>> sorted(model.offers)
        ['draft', 'hidden', 'labels', 'logprobs', 'samples']
    """

    @property
    def offers(self) -> frozenset[Signal]:
        return frozenset(Signal)

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        layers = self._layers(want.layers)
        names = dict(zip(layers, want.layers, strict=True))
        room = want.draft_tokens if not want.samples else max(want.draft_tokens, want.sample_tokens)
        ids = self._encode(prompts, room)
        limit = 1 if not want.samples else want.samples
        return self.run_batched(ids, lambda places: self._read(prompts, ids, places, want, names), limit)

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
        if resume is not None:
            if temperature > 0 or n != 1:
                raise BadSetting("going on from a draft is greedy: use temperature 0 and n 1 with resume.")
            return [[completion] for completion in self._go_on(resume, max_tokens)]
        ids = self._encode(prompts, max_tokens)
        if temperature == 0:
            want = SignalRequest(draft_tokens=max_tokens, resumable=False)
            drafts = self.run_batched(ids, lambda places: self._read(prompts, ids, places, want, {}))
            return [[reading.draft or Completion("")] * n for reading in drafts]
        drawn = Sampling(temperature)
        want = SignalRequest(samples=n, sample_tokens=max_tokens, sampling=drawn, seed=seed, resumable=False)
        sampled = self.run_batched(ids, lambda places: self._read(prompts, ids, places, want, {}), n)
        return [list(reading.samples) for reading in sampled]

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """A piece per token, as soon as its characters are whole; of a draft that goes on, first the draft."""
        own = self._begin(prompt, max_tokens) if resume is None else self.run_alone(self._handle(resume).copy)
        row, text = own.row, IncrementalDecoder(self.loaded.tokenizer)
        if piece := text.take(row.tokens):
            yield piece
        for _ in self._grow(own, max_tokens):
            if piece := text.take(row.tokens):
                yield piece
        completion = self._completion(row, measured=True)
        if rest := text.finish(completion.text):
            yield rest
        return completion

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        columns = encode_labels(self, labels)
        cut = encode_label_prompts(self, prompts, columns)
        return self.run_batched(
            [prompt.ids for prompt in cut],
            lambda places: read_label_logits(self, [cut[place] for place in places], columns),
        )

    def answer_logprobs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        said = [self.tokenize(answer.strip()) for answer in answers]
        if not all(said):
            raise BadInput("an answer to be scored is empty.")
        asked = self._encode(prompts, max(map(len, said), default=0))
        rows = [AnsweredPrompt([*ids, *answer], len(answer)) for ids, answer in zip(asked, said, strict=True)]
        return self.run_batched(
            [row.ids for row in rows], lambda places: compute_mean_logprobs(self, [rows[place] for place in places])
        )

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        return [len(ids) + max_tokens <= self.window for ids in self.encode_all(prompts)]

    def _encode(self, prompts: Sequence[Prompt], room: int) -> list[list[int]]:
        ids = self.encode_all(prompts)
        for row in ids:
            if not row:
                raise BadInput("the prompt is empty: ask something.")
            self.check_length(len(row), room)
        return ids

    # --- the pass ---------------------------------------------------------------------------------

    def _read(
        self,
        prompts: Sequence[Prompt],
        ids: list[list[int]],
        places: list[int],
        want: SignalRequest,
        names: dict[int, int],
    ) -> list[Reading]:
        batch = [ids[place] for place in places]
        layers, ends = sorted(names), self._sample_layers(want)
        kept = sorted({*layers, *ends})
        states_only = not (want.draft_tokens or want.samples) and supports_partial_pass(self.loaded.model)
        stream = hf_stream.prefill(
            self.loaded.model, batch, self.pad, self.loaded.device, kept, self.prefixes, states_only=states_only
        )
        blocks = {x: _vector(stream.hidden[x]) for x in layers}  # off the device in one piece
        before = [{names[x]: blocks[x][i].copy() for x in layers} for i in range(len(places))]
        rows, alive, drawn = self._answer(stream, [prompts[place] for place in places], want, layers, ends)
        samples, states = self._per_prompt(drawn, len(places), ends)
        return [
            Reading(
                draft=self._completion(row, measured=True) if want.draft_tokens else None,
                hidden=before[i],
                hidden_after={names[x]: _vector(state) for x, state in row.after.items() if x in names},
                samples=samples[i],
                resume=HFResumeHandle(stream, alive.index(i) if i in alive else None, row) if want.resumable else None,
                sample_states=states[i],
            )
            for i, row in enumerate(rows)
        ]

    def _answer(
        self, stream: DecodingBatch, prompts: list[Prompt], want: SignalRequest, layers: list[int], ends: list[int]
    ) -> tuple[list[DecodedRow], list[int], list[DecodedRow]]:
        """Drafts, which of them the stream still holds for who goes on from there, and all samples."""
        after = layers if want.after_draft else []
        # a single draft gains nothing, and is to the last bit what a stream gives
        shared = self.shares and not want.resumable and (len(prompts) > 1 or want.samples > 0)
        if want.samples:
            check_sampling(want.sampling)
        if shared and want.samples and not ends and want.sample_tokens == want.draft_tokens:
            grown = growing.draft_and_sample_shared(
                stream,
                np.concatenate([draw_uniforms(prompt, want) for prompt in prompts]),
                want.sampling,
                self.stop,
                after,
            )
            return grown.drafts, [], grown.samples
        drawn = self._sample(stream, prompts, want, ends) if want.samples else []
        if shared:
            return growing.draft_shared(stream, want.draft_tokens, self.stop, after), [], drawn
        rows = [DecodedRow() for _ in prompts]
        return rows, hf_stream.decode_greedily(stream, rows, want.draft_tokens, self.stop, after), drawn

    def _sample_layers(self, want: SignalRequest) -> list[int]:
        return self._layers([want.sample_layer]) if want.samples and want.sample_layer is not None else []

    def _sample(
        self, stream: DecodingBatch, prompts: list[Prompt], want: SignalRequest, ends: list[int]
    ) -> list[DecodedRow]:
        source = stream if self.shares else stream.copy(range(len(prompts)), repeat=want.samples)
        draw = growing.sample_shared if self.shares else hf_stream.sample_rows
        uniforms = np.concatenate([draw_uniforms(prompt, want) for prompt in prompts])
        return draw(source, uniforms, want.sampling, self.stop, ends, past_end=want.sample_end)

    def _per_prompt(
        self, drawn: list[DecodedRow], prompts: int, ends: list[int]
    ) -> tuple[list[tuple[Completion, ...]], list[Vector | None]]:
        """Each prompt's samples, and the states at their ends if a layer is given."""
        known = {(tuple(row.tokens), row.finished): row for row in drawn}  # many are drawn more than once
        texts = {key: self._completion(row, measured=False) for key, row in known.items()}
        said, each = [texts[tuple(row.tokens), row.finished] for row in drawn], len(drawn) // prompts
        parts = [slice(i * each, (i + 1) * each) for i in range(prompts)]
        states = [_vector(torch.stack([row.after[ends[0]] for row in drawn[part]])) if ends else None for part in parts]
        return [tuple(said[part]) for part in parts], states

    def _go_on(self, resume: Sequence[object], max_tokens: int) -> list[Completion]:
        """Continue drafts; those that came from one pass go on side by side."""
        handles = [self._handle(item) for item in resume]
        rows = [handle.copy_row() for handle in handles]
        groups: dict[int, list[int]] = {}
        for i, handle in enumerate(handles):
            if handle.place is not None and len(rows[i].tokens) < max_tokens:
                groups.setdefault(id(handle.stream), []).append(i)
        for members in groups.values():
            stream = handles[members[0]].stream

            def extend(members: list[int] = members, stream: DecodingBatch = stream) -> list[int]:
                part = stream.copy([handles[i].place or 0 for i in members])
                return hf_stream.decode_greedily(part, [rows[i] for i in members], max_tokens, self.stop)

            self.run_alone(extend)
        return [self._completion(row, measured=True) for row in rows]

    def _begin(self, prompt: Prompt, max_tokens: int) -> HFResumeHandle:
        """A prompt that was run and has no answer yet."""
        ids, loaded = self._encode([prompt], max_tokens), self.loaded
        stream = self.run_alone(
            lambda: hf_stream.prefill(loaded.model, ids, self.pad, loaded.device, (), self.prefixes)
        )
        return HFResumeHandle(stream, 0, DecodedRow())

    def _grow(self, own: HFResumeHandle, max_tokens: int) -> Iterator[None]:
        """Extend the handle's own row, pausing after each token."""
        if own.place is None or len(own.row.tokens) >= max_tokens:
            return
        growing = hf_stream.iter_greedy_steps(own.stream, [own.row], max_tokens, self.stop)
        while self.run_alone(lambda: next(growing, False)) is None:
            yield

    def _handle(self, item: object) -> HFResumeHandle:
        if not isinstance(item, HFResumeHandle):
            raise BadSetting("resume takes the handles of this model's own readings.")
        return item

    def _completion(self, row: DecodedRow, *, measured: bool) -> Completion:
        tokenizer = self.loaded.tokenizer
        text = str(tokenizer.decode(row.tokens, skip_special_tokens=True)).strip()
        if not row.finished:
            text = text.rstrip(REPLACEMENT_CHARACTER)  # cut off in the middle of a character
        tokens = None
        if measured:
            tokens = tuple(
                Token(self.token_text(step.token), step.logprob, step.entropy, step.margin) for step in row.steps
            )
        return Completion(text, tokens, row.finished, len(row.tokens))

    def _layers(self, asked: Sequence[int]) -> list[int]:
        """Layer numbers counted from the front."""
        for layer in asked:
            if not -self.depth <= layer < self.depth:
                raise BadSetting(f"{self.name} has hidden states 0 to {self.depth - 1}; layer {layer} was asked.")
        return [layer % self.depth for layer in asked]


def _vector(state: torch.Tensor) -> Vector:
    values: Vector = state.float().cpu().numpy().copy()
    if not np.isfinite(values).all():
        raise ModelError("the model gave NaN or infinite hidden states: its weights or number format are bad.")
    return values
