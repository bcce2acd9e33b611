"""A GGUF file run by llama.cpp in this process (`llamacpp:FILE.gguf`), with everything a gate can ask for.

`engine` holds weights and rows, `rows` generates; here prompts become rows and rows become readings. The fingerprint is
not that of `gguf:FILE`: llama.cpp computes with the quantised weights, transformers with what they stand for, so a gate
fitted on one meets slightly other numbers on the other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from knowgate.core.validation import expand_path
from knowgate.errors import BadInput, BadSetting, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.models.backend import Backend, check_sampling, draw_uniforms
from knowgate.models.llamacpp.decoding import (
    PREFIX_ROWS,
    EnginePrefixCache,
    SequenceState,
    choose_tokens,
    feed_last_tokens,
    iter_decoding_steps,
)
from knowgate.models.llamacpp.engine import (
    MAX_SEQUENCES,
    EngineTokenizer,
    InputToken,
    LlamaEngine,
    check_engine,
    compute_file_digest,
    log_softmax,
)
from knowgate.models.tokenization import (
    REPLACEMENT_CHARACTER,
    IncrementalDecoder,
    LabelPromptTokens,
    encode_label_prompts,
    encode_labels,
)
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

EMBEDDED_MODEL = "smollm"  # stands for the file of the embedded model
MAX_CONCURRENT_TOKENS = 2_048  # tokens of prompts and answers side by side: every row looks through all of them


@dataclass(frozen=True)
class LlamaCppResumeHandle:
    """Where the draft of one prompt stopped. Its row stays in the engine until something else needs the room."""

    ids: list[int] = field(repr=False)
    row: SequenceState = field(repr=False)
    time: int  # of the engine's memory in which the row is

    def copy_row(self, limit: int) -> SequenceState:
        row = self.row
        return SequenceState(
            row.place, len(self.ids), limit, tokens=list(row.tokens), steps=list(row.steps), end=row.end
        )


@dataclass
class EngineMemory:
    """What is in the engine. time: goes on whenever rows are thrown away."""

    time: int = 0
    beginnings: EnginePrefixCache = field(default_factory=EnginePrefixCache)


def open_llamacpp(value: str) -> LlamaCppModel:
    return LlamaCppModel(value)


@dataclass(frozen=True)
class LlamaCppModel(Backend):
    """The model in a GGUF file. Nothing is loaded before it is used; for one thread at a time."""

    source: str
    turn: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)
    memory: EngineMemory = field(default_factory=EngineMemory, repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"llamacpp:{self.source}"

    @property
    def offers(self) -> frozenset[Signal]:
        return frozenset(Signal)

    @functools.cached_property
    def file(self) -> Path:
        file = (
            weights.fetch_verified_file(EMBEDDED_MODEL) if self.source == EMBEDDED_MODEL else expand_path(self.source)
        )
        if not file.is_file():
            raise WeightsError(f"there is no GGUF file '{file}'. Check the path; all kinds of models: knowgate models")
        return file

    @functools.cached_property
    def fingerprint(self) -> str:
        return f"llamacpp-{compute_file_digest(self.file)[:16]}"

    @functools.cached_property
    def engine(self) -> LlamaEngine:
        """Loaded, and found to compute the same in one pass as token by token."""
        engine = LlamaEngine(self.file)
        check_engine(engine, self.file)
        return engine

    @functools.cached_property
    def vocabulary(self) -> EngineTokenizer:
        return EngineTokenizer(self.engine)

    @property
    def depth(self) -> int:
        return self.engine.depth

    @property
    def window(self) -> int:
        return self.engine.cells

    # --- text -------------------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        return bool(self.vocabulary.template)

    def render(self, text: str) -> str:
        return self.vocabulary.render(text)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        return self.engine.tokenize(text, special=special)

    def tokenize_all(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        return [self.tokenize(text, special=special) for text in texts]

    def encode(self, prompt: Prompt) -> list[int]:
        chat = not prompt.raw and self.has_template
        return self.tokenize(self.render(prompt.text) if chat else prompt.text, special=not chat)

    def check_length(self, n_tokens: int, room: int) -> None:
        if n_tokens + room > self.window:
            raise BadInput(
                f"the prompt has {n_tokens} tokens and the answer may take {room}, but {self.name} sees only "
                f"{self.window}. Shorten the question, or use fewer or shorter passages."
            )

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        return [len(self.encode(prompt)) + max_tokens <= self.window for prompt in prompts]

    def _encode(self, prompts: Sequence[Prompt], room: int) -> list[list[int]]:
        ids = [self.encode(prompt) for prompt in prompts]
        for row in ids:
            if not row:
                raise BadInput("the prompt is empty: ask something.")
            self.check_length(len(row), room)
        return ids

    # --- what a model does ------------------------------------------------------------------------

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        if want.samples:
            check_sampling(want.sampling)
        room = max(want.draft_tokens, want.sample_tokens if want.samples else 0)
        with self.turn:
            ids = self._encode(prompts, room)
            readings: dict[int, Reading] = {}
            for places in self._groups([len(row) for row in ids], want, room):
                got = self._pass([prompts[place] for place in places], [ids[place] for place in places], want)
                readings |= dict(zip(places, got, strict=True))
        return [readings[place] for place in range(len(prompts))]

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
            handles = [_handle(item) for _, item in zip(prompts, resume, strict=True)]
            return [[self._finish(handle, max_tokens)] for handle in handles]
        if temperature == 0:
            drafts = self.read(prompts, SignalRequest(draft_tokens=max_tokens, resumable=False))
            return [[reading.draft or Completion("")] * n for reading in drafts]
        want = SignalRequest(
            samples=n, sample_tokens=max_tokens, sampling=Sampling(temperature), seed=seed, resumable=False
        )
        return [list(reading.samples) for reading in self.read(prompts, want)]

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """A piece per token, as soon as its characters are whole; of a draft that goes on, first the draft."""
        handle = self._begin(prompt, max_tokens) if resume is None else _handle(resume)
        row, text = handle.copy_row(max_tokens), IncrementalDecoder(self.vocabulary)
        if piece := text.take(row.tokens):
            yield piece
        for _ in self._growing(handle, row):
            if piece := text.take(row.tokens):
                yield piece
        completion = self._completion(row, measured=True)
        if rest := text.finish(completion.text):
            yield rest
        return completion

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        with self.turn:
            columns = encode_labels(self, labels)
            cut = encode_label_prompts(self, prompts, columns)
            found: dict[int, Vector] = {}
            for places in self._groups([len(prompt.ids) for prompt in cut], SignalRequest(), 1):
                found |= dict(zip(places, self._labels([cut[place] for place in places], columns), strict=True))
        return [found[place] for place in range(len(prompts))]

    def answer_logprobs(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """Mean log-probability per token of each answer after its prompt."""
        with self.turn:
            said = [self.tokenize(answer.strip()) for answer in answers]
            if not all(said):
                raise BadInput("an answer to be scored is empty.")
            asked = self._encode(prompts, max(map(len, said), default=0))
            return [self._score(ids, answer) for ids, answer in zip(asked, said, strict=True)]

    # --- one pass ---------------------------------------------------------------------------------

    def _groups(self, lengths: Sequence[int], want: SignalRequest, room: int) -> list[list[int]]:
        """Prompts that are run side by side: as rows and memory allow, those of like length together."""
        rows, free = 1 + want.samples, MAX_SEQUENCES - PREFIX_ROWS
        if rows > free:
            raise BadSetting(
                f"llamacpp: draws at most {free - 1} samples of a prompt at once; {want.samples} were asked."
            )
        groups: list[list[int]] = []
        used = self.window
        for place in sorted(range(len(lengths)), key=lambda number: lengths[number]):
            size = lengths[place] + rows * room
            most = max(size, min(MAX_CONCURRENT_TOKENS, self.window))
            if used + size > most or (len(groups[-1]) + 1) * rows > free:
                groups.append([])
                used = 0
            groups[-1].append(place)
            used += size
        return groups

    def _pass(self, prompts: Sequence[Prompt], ids: Sequence[list[int]], want: SignalRequest) -> list[Reading]:
        layers, ends = (
            self._layers(want.layers),
            self._layers([want.sample_layer] if want.sample_layer is not None else []),
        )
        kept = sorted({*layers, *ends}) if want.samples else sorted(set(layers))
        room = sum(map(len, ids)) + len(ids) * (want.draft_tokens + want.samples * want.sample_tokens)
        logits, before = self._prefill(ids, kept, room)
        states = [{layer: before[layer][i] for layer in kept} for i in range(len(ids))]
        drafts = [
            SequenceState(PREFIX_ROWS + i, len(row), want.draft_tokens, states=states[i]) for i, row in enumerate(ids)
        ]
        samples = self._sample_rows(prompts, ids, want, states)
        flat = [row for rows in samples for row in rows]
        origin = [i for i, rows in enumerate(samples) for _ in rows]
        watched = sorted({*(layers if want.after_draft else ()), *(ends if flat else ())})
        for _ in iter_decoding_steps(
            self.engine, [*drafts, *flat], np.concatenate([logits, logits[origin]]), want.sampling, watched
        ):
            pass
        if want.after_draft and layers:
            self._see_ends(drafts, watched, ends=False)
        if ends and flat:
            self._see_ends(flat, watched, ends=want.sample_end)
        return [
            Reading(
                draft=self._completion(draft, measured=True) if want.draft_tokens else None,
                hidden={name: states[i][layer] for name, layer in zip(want.layers, layers, strict=True)},
                hidden_after={name: draft.states[layer] for name, layer in zip(want.layers, layers, strict=True)}
                if want.after_draft
                else {},
                samples=tuple(self._completion(row, measured=False) for row in samples[i]),
                resume=LlamaCppResumeHandle(ids[i], draft, self.memory.time) if want.resumable else None,
                sample_states=np.stack([row.states[ends[0]] for row in samples[i]]) if ends and samples[i] else None,
            )
            for i, draft in enumerate(drafts)
        ]

    def _prefill(
        self, ids: Sequence[list[int]], layers: Sequence[int], room: int, marks: Sequence[Sequence[int]] = ()
    ) -> tuple[Vector, dict[int, Vector]]:
        """Run prompts side by side, from row KEPT on; what they begin with alike only once, or not at all where it was
        computed before. room: cells to be kept free. marks: whose logits are wanted; else those of the last tokens."""
        self.memory.time += 1
        wanted = [set(places) for places in marks] or [{len(tokens) - 1} for tokens in ids]
        begun = self.memory.beginnings.start(self.engine, ids, room=room, most=min(map(min, wanted)))
        fed = [
            InputToken(tokens[place], place, PREFIX_ROWS + row, wanted=place in wanted[row])
            for row, tokens in enumerate(ids)
            for place in range(begun, len(tokens))
        ]
        found = self.engine.feed(fed, layers)
        if len(ids) == 1:
            self.memory.beginnings.keep(self.engine, ids[0], begun)
        return found

    def _sample_rows(
        self,
        prompts: Sequence[Prompt],
        ids: Sequence[list[int]],
        want: SignalRequest,
        states: Sequence[dict[int, Vector]],
    ) -> list[list[SequenceState]]:
        """Rows that begin as copies of their prompt's."""
        free = iter(range(PREFIX_ROWS + len(ids), MAX_SEQUENCES))
        made: list[list[SequenceState]] = []
        for i, prompt in enumerate(prompts):
            uniforms = list(draw_uniforms(prompt, want)) if want.samples else []
            made.append(
                [SequenceState(next(free), len(ids[i]), want.sample_tokens, u, states=states[i]) for u in uniforms]
            )
            for row in made[-1]:
                self.engine.copy(PREFIX_ROWS + i, row.place, len(ids[i]))
        return made

    def _see_ends(self, rows: Sequence[SequenceState], layers: Sequence[int], *, ends: bool) -> None:
        """States at the last token of each row, or at the one that ended it; those without any keep their prompt's."""
        unfed = [row for row in rows if (row.finished and ends) or (not row.finished and row.tokens)]
        if unfed:
            feed_last_tokens(self.engine, unfed, layers, ends=ends)

    def _labels(self, prompts: Sequence[LabelPromptTokens], columns: Sequence[int]) -> list[Vector]:
        ids = [prompt.ids for prompt in prompts]
        logits, _ = self._prefill(ids, (), sum(map(len, ids)), [prompt.positions for prompt in prompts])
        ends = np.cumsum([len(prompt.positions) for prompt in prompts])[:-1]
        return np.split(logits[:, list(columns)], ends)

    def _score(self, ids: list[int], answer: list[int]) -> float:
        tokens = [*ids, *answer[:-1]]
        logp = log_softmax(self._prefill([tokens], (), len(tokens), [range(len(ids) - 1, len(tokens))])[0])
        return float(np.mean([logp[place, token] for place, token in enumerate(answer)]))

    # --- going on ---------------------------------------------------------------------------------

    def _begin(self, prompt: Prompt, max_tokens: int) -> LlamaCppResumeHandle:
        with self.turn:
            ids = self._encode([prompt], max_tokens)[0]
        return LlamaCppResumeHandle(ids, SequenceState(PREFIX_ROWS, len(ids), 0), time=-1)

    def _finish(self, handle: LlamaCppResumeHandle, max_tokens: int) -> Completion:
        row = handle.copy_row(max_tokens)
        for _ in self._growing(handle, row):
            pass
        return self._completion(row, measured=True)

    def _growing(self, handle: LlamaCppResumeHandle, row: SequenceState) -> Iterator[None]:
        """Extend a copy of the handle's row. Whatever ran in between, it is put back where it was."""
        time = handle.time
        while not row.is_over:
            with self.turn:
                logits = self._at(handle, row, time)
                time = self.memory.time
                choose_tokens([row], logits, Sampling(), self.engine)
            yield

    def _at(self, handle: LlamaCppResumeHandle, row: SequenceState, time: int) -> Vector:
        """Logits of the row's next token."""
        before = [*handle.ids, *row.tokens[:-1]] if row.tokens else handle.ids
        if time != self.memory.time or not row.tokens:
            logits, _ = self._prefill([[*handle.ids, *row.tokens]], (), len(handle.ids) + row.limit)
            row.place = PREFIX_ROWS
            return logits
        row.length = len(before)
        self.engine.cut(row.place, row.length)
        return feed_last_tokens(self.engine, [row])

    def _completion(self, row: SequenceState, *, measured: bool) -> Completion:
        text = self.vocabulary.decode(row.tokens, skip_special_tokens=True).strip()
        if not row.finished:
            text = text.rstrip(REPLACEMENT_CHARACTER)  # cut off in the middle of a character
        tokens = None
        if measured:
            spelled = [self.vocabulary.decode([step.token], skip_special_tokens=False) for step in row.steps]
            steps = zip(spelled, row.steps, strict=True)
            tokens = tuple(Token(word, step.logprob, step.entropy, step.margin) for word, step in steps)
        return Completion(text, tokens, row.finished, len(row.tokens))

    def _layers(self, asked: Sequence[int]) -> list[int]:
        """Layer numbers counted from the front."""
        for layer in asked:
            if not -self.depth <= layer < self.depth:
                raise BadSetting(f"{self.name} has hidden states 0 to {self.depth - 1}; layer {layer} was asked.")
        return [layer % self.depth for layer in asked]


def _handle(item: object) -> LlamaCppResumeHandle:
    if not isinstance(item, LlamaCppResumeHandle):
        raise BadSetting("resume takes the handles of this model's own readings.")
    return item
