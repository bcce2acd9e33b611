"""The `fake` backend: a model that answers from a table, for tests and examples.

The table maps keys (questions, or parts of prompts) to entries. An entry applies to a prompt if its key equals the
prompt or occurs in it. If several keys occur in a prompt, the longest one is used.

| field   | meaning | default |
|---|---|---|
| closed  | the closed-book answer (without passages) | a made-up word |
| open    | the open-book answer (with passages) | `closed` |
| when    | text whose presence in the prompt selects the `open` answer | the `open` answer |
| known   | whether the model knows the answer; changes hidden states and label logits | true or false by a hash |
| logprob | log-probability of every answer token | near 0 if known, well below if not |
| samples | the sampled closed-book answers, repeated in order, starting at `seed` | closed answer and guesses |

A string in place of an entry is short for {"closed": string}. All values that the table does not set are computed from
a hash of the prompt. They are the same in every run and differ between questions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.schema import NumberRange, read_record
from knowgate.core.validation import format_value, read_json
from knowgate.errors import BadInput, BadSetting, UnsupportedSignal
from knowgate.models import backend
from knowgate.types import Completion, LabelPrompt, Prompt, Reading, Sampling, Signal, SignalRequest, Token, Vector

WRONG_ANSWER_COUNT = 100  # number of distinct wrong answers that an uncertain model may sample
VOCABULARY_SIZE = 10  # tokens in the made-up distribution that entropy and margin are computed from
LOGPROB_LIMIT = 1e30  # largest absolute log-probability that a table may contain


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeEntry:
    """The answers of the fake model (for tests) to one question.

    Missing values are computed from a hash of the prompt.

    Args:
        closed: The closed-book answer, given to a prompt without passages.
        open: The open-book answer, given to a prompt with passages; by default the closed-book answer.
        when: A prompt that contains this text counts as a prompt with passages. By default, this is the text of `open`,
            which passages usually contain.
        known: Whether the model knows the answer. Hidden states and label logits depend on it.
        logprob: Log-probability of every answer token.
        samples: The sampled closed-book answers, used in turn and over again. The seed of a request is the index of its
            first sample.
    """

    closed: str | None = None
    open: str | None = None
    when: str | None = None
    known: bool | None = None
    logprob: Annotated[float, NumberRange(-LOGPROB_LIMIT, 0)] | None = None
    samples: tuple[str, ...] = ()

    def gives_open_answer(self, text: str) -> bool:
        """Return whether the prompt `text` gets the open-book answer: whether it contains `when` or, by default, `open`."""
        if self.open is None:
            return False
        trigger = self.open if self.when is None else self.when
        return trigger in text


def read_fake_table(path: Path) -> dict[str, Any]:
    """Read the table of a fake model, a JSON object of question -> entry."""
    if not path.is_file():
        raise BadInput(f"the answer table of the fake model does not exist: {path}. Check the path after 'fake:'.")
    table = read_json(path)
    if not isinstance(table, dict):
        raise BadInput(f'the answer table {path} is not a JSON object. Write it as {{"question": "answer", ...}}.')
    return table


def parse_fake_entry(key: str, value: object) -> FakeEntry:
    """Parse the fake model's answers to one question.

    Args:
        key: The question. Errors name it.
        value: The answer without passages or, as an object, any fields of `FakeEntry`.

    Raises:
        BadInput: The value is neither, or a field is wrong.
    """
    where = f"table entry {format_value(key)}"
    if isinstance(value, str):
        return FakeEntry(closed=value)
    if not isinstance(value, Mapping):
        raise BadInput(f"{where} must be a string (the answer) or a JSON object, not {format_value(value)}.")
    return read_record(FakeEntry, dict(value), where)


# --- the model ------------------------------------------------------------------------------------


def open_fake(file: str = "") -> FakeModel:
    """Return the model for the spec `fake` or `fake:FILE`."""
    return FakeModel(read_fake_table(Path(file)) if file else None)


class FakeModel(backend.SinglePromptBackend):
    """A model that answers from a table.

    Args:
        table: Maps a question, or any part of a prompt, to its entry or closed-book answer.
        name: Name of the model.
        width: Number of values in a hidden state.
        layers: Number of layers, not counting the embeddings.
        offers: The signals that the model supports. Requests for other signals raise UnsupportedSignal.

    Example:
        >>> model = FakeModel({"capital of France": "Paris"})
        >>> model.generate([Prompt("What is the capital of France?")], max_tokens=5)[0][0].text
        'Paris'
    """

    def __init__(
        self,
        table: Mapping[str, Mapping[str, Any] | str] | None = None,
        *,
        name: str = "fake",
        width: int = 16,
        layers: int = 4,
        offers: frozenset[Signal] = frozenset(Signal),
    ):
        self.name = name
        self.offers = offers
        self.depth = layers + 1  # the embeddings and each layer's output
        self._width = width
        self._table = {key: parse_fake_entry(key, value) for key, value in (table or {}).items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the table and the other settings. Gates and label runs store it to recognize the model."""
        table = {key: asdict(entry) for key, entry in self._table.items()}
        # Version 0.1 had no signal TOOLS. It is left out, so that fingerprints of that version stay valid.
        offers = sorted(self.offers - {Signal.TOOLS})
        return "fake-" + _digest(self.name, table, self._width, self.depth - 1, offers).hex()[:16]

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return the requested signals of each prompt, such as drafts and samples."""
        self._check_offered(Signal.HIDDEN, bool(request.layers) or request.sample_layer is not None)
        self._check_offered(Signal.SAMPLES, request.samples > 0)
        backend.check_sampling(request.sampling)
        return [self._read(prompt, request) for prompt in prompts]

    def _complete_draft(self, draft: backend.RemoteDraft, max_tokens: int, seed: int | None = None) -> Completion:
        """Return the answer to the prompt of a draft. It is never shorter than the draft."""
        n_draft_tokens = draft.completion.n_tokens if draft.completion else 0
        return self._complete(draft.prompt, self._answer(draft.prompt), max(max_tokens, n_draft_tokens))

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Return made-up logits of the labels, such as 'yes' and 'no', after each part of a prompt."""
        self._check_offered(Signal.LABELS, True)
        return [
            np.array([self._label_row(part, len(labels)) for part in prompt.parts], dtype=np.float32)
            for prompt in prompts
        ]

    def tool_call_probabilities(self, prompts: Sequence[Prompt], tool: Mapping[str, Any]) -> list[float]:
        """Return made-up tool call probabilities, low for known answers and high for unknown ones."""
        self._check_offered(Signal.TOOLS, True)
        logits = [self._label_row(prompt.text, 2) for prompt in prompts]
        # A softmax over the logits of two labels, known and unknown, gives the probability of unknown.
        return [1 / (1 + math.exp(known - unknown)) for known, unknown in logits]

    def _check_offered(self, signal: Signal, is_requested: bool) -> None:
        if is_requested and signal not in self.offers:
            raise UnsupportedSignal(f"the model '{self.name}' does not return the signal '{signal}'. Use another one.")

    def _read(self, prompt: Prompt, request: SignalRequest) -> Reading:
        """Return the requested signals of one prompt."""
        draft = None
        if request.draft_tokens:
            draft = self._complete(prompt, self._answer(prompt), request.draft_tokens)
        after_draft = f"after {draft.text if draft else None}"  # contains the draft, so that the states depend on it
        samples = [self._complete(prompt, answer, request.sample_tokens) for answer in self._draw(prompt, request)]
        layers_after = request.layers if request.after_draft else ()
        return Reading(
            draft=draft,
            hidden={layer: self._state(prompt, layer, "before") for layer in request.layers},
            hidden_after={layer: self._state(prompt, layer, after_draft) for layer in layers_after},
            samples=tuple(samples),
            resume=backend.RemoteDraft(prompt, draft),
            sample_states=self._sample_states(prompt, samples, request),
        )

    def _sample_states(self, prompt: Prompt, samples: list[Completion], request: SignalRequest) -> Vector | None:
        """Return a made-up hidden state at the end of each sample, or None.

        The shape is samples x width.
        """
        layer = request.sample_layer
        if layer is None or not samples:
            return None
        position = "end of sample" if request.sample_end else "sample"
        return np.stack([self._state(prompt, layer, f"{position} {sample.text}") for sample in samples])

    def _find_entry(self, text: str) -> FakeEntry:
        """Return the entry of the longest key in the text, or an empty entry."""
        if text in self._table:
            return self._table[text]
        keys = [key for key in self._table if key in text]
        return self._table[max(keys, key=len)] if keys else FakeEntry()

    def _answer(self, prompt: Prompt) -> str:
        """Return the answer to a prompt. Unknown questions get a made-up word."""
        entry = self._find_entry(prompt.text)
        if entry.gives_open_answer(prompt.text):
            return entry.open or ""
        return entry.closed if entry.closed is not None else f"word{_digest(prompt.text).hex()[:6]}"

    def _is_known(self, text: str) -> bool:
        entry = self._find_entry(text)
        return entry.known if entry.known is not None else _hash_to_unit("known", text) < 0.5

    def _logprob(self, text: str) -> float:
        """Return the log-probability of every token of the answer.

        The default is high for known answers and low for unknown ones.
        """
        entry = self._find_entry(text)
        if entry.logprob is not None:
            return entry.logprob
        unit = _hash_to_unit("logprob", text)  # a number from 0 to 1 that depends only on the text
        if self._is_known(text) or entry.gives_open_answer(text):
            return -0.01 - 0.3 * unit
        return -1.0 - 2.0 * unit

    def _draw(self, prompt: Prompt, request: SignalRequest) -> list[str]:
        """Return the requested number of sampled answers to a prompt.

        Unless samples are listed, closed-book samples include wrong guesses.
        """
        n, seed = request.samples, request.seed
        entry = self._find_entry(prompt.text)
        answer = self._answer(prompt)
        if entry.gives_open_answer(prompt.text):
            return [answer] * n
        if entry.samples:
            return [entry.samples[((seed or 0) + i) % len(entry.samples)] for i in range(n)]
        if not n:
            return []
        rng = random.Random(_digest("samples", prompt.text, seed))
        probabilities = self._compute_answer_probabilities(prompt.text, request.sampling)
        # top_k and top_p may exclude guesses. `randrange` needs at least one.
        n_guesses = max(1, int(np.count_nonzero(probabilities[1:])))
        return [answer if rng.random() < probabilities[0] else f"guess{rng.randrange(n_guesses)}" for _ in range(n)]

    def _compute_answer_probabilities(self, text: str, sampling: Sampling) -> NDArray[np.float64]:
        """Return the probabilities of the answer and, after it, of each wrong guess."""
        p_answer = math.exp(self._logprob(text))
        p_guess = (1 - p_answer) / WRONG_ANSWER_COUNT  # all guesses are equally probable
        unfiltered = np.array([p_answer] + [p_guess] * WRONG_ANSWER_COUNT)
        return backend.apply_sampling(unfiltered, sampling)

    def _complete(self, prompt: Prompt, answer: str, max_tokens: int) -> Completion:
        """Return the first `max_tokens` words of an answer. Every word counts as one token."""
        words = backend.WORD_PATTERN.findall(answer)
        kept = words[:max_tokens]
        tokens = None
        if Signal.LOGPROBS in self.offers:
            logprob = self._logprob(prompt.text)
            tokens = tuple(_make_token(word, logprob) for word in kept)
        return Completion("".join(kept), tokens, finished=len(kept) == len(words), n_tokens=len(kept))

    def _state(self, prompt: Prompt, layer: int, position: str) -> Vector:
        """Return a made-up hidden state: noise plus a fixed direction.

        The sign of the direction tells known from unknown answers.

        Args:
            prompt: The prompt.
            layer: Number of the layer; negative numbers count from the end.
            position: Any name for the place of the state in the text. The noise depends on this name. Example: 'before'
                stands for the place in front of the draft.
        """
        if not -self.depth <= layer < self.depth:
            raise BadSetting(f"the model '{self.name}' has no layer {layer}. Use a layer from 0 to {self.depth - 1}.")
        index = layer % self.depth
        side = 1.0 if self._is_known(prompt.text) else -1.0
        noise = _draw_noise(self._width, "state", prompt.text, index, position)
        return (noise + side * _draw_direction(self._width, index)).astype(np.float32)

    def _label_row(self, part: str, n_labels: int) -> list[float]:
        """Return made-up label logits. The first label is highest for a known answer, and lowest for an unknown one."""
        strength = 1.0 + _hash_to_unit("label", part)
        logit = strength if self._is_known(part) else -strength
        return [logit] + [-logit] * (n_labels - 1)


def _make_token(text: str, logprob: float) -> Token:
    """Return a token with an entropy and a margin that fit its log-probability.

    All other tokens are assumed equally probable.
    """
    p = math.exp(logprob)
    p_other = (1 - p) / (VOCABULARY_SIZE - 1)
    entropy = -p * logprob
    if p_other > 0:
        entropy -= (1 - p) * math.log(p_other)
    return Token(text, logprob, entropy=entropy, margin=max(0.0, p - p_other))


def _draw_noise(width: int, *key: Any) -> NDArray[np.float64]:
    """Return a normally distributed vector that depends only on the key."""
    # An array of integers seeds the generator like a list of them, and ten times as fast.
    seed = np.frombuffer(_digest(*key), dtype=np.uint8).astype(np.uint32)
    return np.random.default_rng(seed).standard_normal(width)


@functools.cache
def _draw_direction(width: int, layer: int) -> NDArray[np.float64]:
    """Return the direction in which the hidden states of known and unknown answers differ."""
    return _draw_noise(width, "direction", layer)


def _digest(*values: Any) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


@functools.lru_cache(maxsize=1_024)  # the same prompt is hashed for its answer, its tokens and each of its states
def _hash_to_unit(*values: Any) -> float:
    """Return a number in [0, 1) that depends only on the values."""
    return int.from_bytes(_digest(*values)[:6], "big") / 2**48
