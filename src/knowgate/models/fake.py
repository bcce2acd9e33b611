"""A model that answers from a table: for tests and examples. Knows no language at all.

An entry of the table belongs to a prompt when its key is the prompt, or occurs in it; the longest key wins.

| field   | meaning | default |
|---|---|---|
| closed  | the answer without passages | a made-up word |
| open    | the answer with passages | `closed` |
| when    | text whose presence in the prompt makes the answer `open` | the `open` answer |
| known   | whether the model knows: shifts states, favours the first label | from a hash |
| logprob | log-probability of every answer token | near 0 if known, well below if not |
| samples | the sampled closed-book answers, repeated in order, begun at `seed` | closed answer and guesses |

An entry that is a string is its closed answer. Whatever the table leaves open follows from a hash of the
prompt, so it is the same in every run and differs between questions.
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
from typing import Any

import numpy as np

from knowgate.core.files import read_jsonl
from knowgate.core.validation import format_value, read_json
from knowgate.errors import BadInput, BadSetting, NotOffered
from knowgate.models.backend import WORD_PATTERN, WordStreamBackend, apply_sampling, check_sampling
from knowgate.types import Completion, LabelPrompt, Prompt, Reading, Sampling, Signal, SignalRequest, Token, Vector

LOGPROB_LIMIT = 1e30  # of log-probabilities: no model says less


@dataclass(frozen=True)
class FakeEntry:
    """One line of the table."""

    closed: str | None = None
    open: str | None = None
    when: str | None = None
    known: bool | None = None
    logprob: float | None = None
    samples: tuple[str, ...] = ()

    def is_open(self, text: str) -> bool:
        """Whether a prompt with this text gets the open-book answer."""
        return self.open is not None and (self.open if self.when is None else self.when) in text


def read_fake_table(path: Path) -> dict[str, Any]:
    """The table in a .json or .jsonl file."""
    if not path.is_file():
        raise BadInput(f"the table of the fake model, {path}, is not a file.")
    if path.suffix != ".jsonl":
        table = read_json(path)
        if not isinstance(table, dict):
            raise BadInput(f"{path} is not a JSON object of question -> entry.")
        return table
    rows: dict[str, Any] = {}
    for number, row in read_jsonl(path):
        question = row.pop("question", None)
        if not isinstance(question, str):
            raise BadInput(f"{path} line {number} has no text 'question'.")
        rows[question] = row
    return rows


def parse_fake_entry(key: str, value: object) -> FakeEntry:
    """A checked entry."""
    if isinstance(value, str):
        return FakeEntry(closed=value)
    key = format_value(key)
    fields = FakeEntry.__dataclass_fields__
    if not isinstance(value, Mapping) or not set(value) <= set(fields):
        raise BadInput(f"table entry {key} must be a text or have only the fields {', '.join(fields)}.")
    for name in ("closed", "open", "when"):
        if not isinstance(value.get(name), str | None):
            raise BadInput(f"table entry {key}: {name} must be a text.")
    if not isinstance(value.get("known"), bool | None):
        raise BadInput(f"table entry {key}: known must be true or false.")
    logprob = value.get("logprob")
    if logprob is not None and not (isinstance(logprob, int | float) and -LOGPROB_LIMIT < logprob <= 0):
        raise BadInput(f"table entry {key}: logprob must be a number not above 0, not {format_value(logprob)}.")
    samples = value.get("samples", ())
    if not isinstance(samples, list | tuple) or not all(isinstance(sample, str) for sample in samples):
        raise BadInput(f"table entry {key}: samples must be a list of texts.")
    return FakeEntry(**{**value, "samples": tuple(samples)})


WRONG_ANSWER_COUNT = 100  # wrong answers of a model that is not sure
VOCABULARY_SIZE = 10  # of the distribution that entropy and margin are worked out from


@dataclass(frozen=True)
class FakeResumeHandle:
    """Where a draft stopped."""

    prompt: Prompt
    draft_tokens: int


def open_fake(file: str = "") -> FakeModel:
    """`fake`, or `fake:FILE` with a .json object or .jsonl lines that have a `question`."""
    return FakeModel(read_fake_table(Path(file)) if file else None)


class FakeModel(WordStreamBackend):
    """Answers from `table`: question, or a part of it, -> entry. Has `layers` layers of `width` numbers."""

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
        self._width = width
        self._layers = layers
        self._table = {key: parse_fake_entry(key, value) for key, value in (table or {}).items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        table = {key: asdict(entry) for key, entry in self._table.items()}
        offers = sorted(self.offers)
        return "fake-" + _digest(self.name, table, self._width, self._layers, offers).hex()[:16]

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        self._require(Signal.HIDDEN, bool(want.layers) or want.sample_layer is not None)
        self._require(Signal.SAMPLES, want.samples > 0)
        return [self._read(prompt, want) for prompt in prompts]

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
        """`max_tokens` counts the draft too; a draft is never cut."""
        if resume is None:
            return [self._generate(prompt, max_tokens, temperature, n, seed) for prompt in prompts]
        if temperature > 0 or n != 1:
            raise BadSetting("going on from a draft is greedy: use temperature 0 and n 1 with resume.")
        return [[self._go_on(handle, max_tokens)] for _, handle in zip(prompts, resume, strict=True)]

    @property
    def depth(self) -> int:
        return self._layers + 1

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        return [True for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """The first label is favoured where the entry of the part before it is known, else the others."""
        self._require(Signal.LABELS, True)
        return [
            np.array([self._label_row(part, len(labels)) for part in prompt.parts], dtype=np.float32)
            for prompt in prompts
        ]

    def _require(self, signal: Signal, wanted: bool) -> None:
        if wanted and signal not in self.offers:
            raise NotOffered(f"the model '{self.name}' does not offer {signal}.")

    def _read(self, prompt: Prompt, want: SignalRequest) -> Reading:
        draft = None
        if want.draft_tokens:
            draft = self._complete(prompt, self._answer(prompt), want.draft_tokens)
        samples = self._draw(prompt, want.sample_tokens, want.samples, want.seed, want.sampling)
        after = want.layers if want.after_draft else ()
        return Reading(
            draft=draft,
            hidden={layer: self._state(prompt, layer, "before") for layer in want.layers},
            hidden_after={layer: self._state(prompt, layer, f"after {draft and draft.text}") for layer in after},
            samples=tuple(samples),
            resume=FakeResumeHandle(prompt, want.draft_tokens),
            sample_states=self._sample_states(prompt, samples, want),
        )

    def _sample_states(self, prompt: Prompt, samples: list[Completion], want: SignalRequest) -> Vector | None:
        """Equal samples end in equal states."""
        if want.sample_layer is None or not samples:
            return None
        place = "end of sample" if want.sample_end else "sample"
        return np.stack([self._state(prompt, want.sample_layer, f"{place} {sample.text}") for sample in samples])

    def _generate(
        self, prompt: Prompt, max_tokens: int, temperature: float, n: int, seed: int | None
    ) -> list[Completion]:
        if temperature > 0:
            return self._draw(prompt, max_tokens, n, seed, Sampling(temperature))
        return [self._complete(prompt, self._answer(prompt), max_tokens) for _ in range(n)]

    def _draw(self, prompt: Prompt, max_tokens: int, n: int, seed: int | None, sampling: Sampling) -> list[Completion]:
        check_sampling(sampling)
        return [self._complete(prompt, text, max_tokens) for text in self._samples(prompt, n, seed, sampling)]

    def _go_on(self, handle: object, max_tokens: int) -> Completion:
        if not isinstance(handle, FakeResumeHandle):
            raise BadSetting("resume takes the handles of this model's own readings.")
        limit = max(max_tokens, handle.draft_tokens)
        return self._complete(handle.prompt, self._answer(handle.prompt), limit)

    def _find(self, text: str) -> FakeEntry:
        if text in self._table:
            return self._table[text]
        keys = [key for key in self._table if key in text]
        return self._table[max(keys, key=len)] if keys else FakeEntry()

    def _answer(self, prompt: Prompt) -> str:
        entry = self._find(prompt.text)
        if entry.is_open(prompt.text):
            return entry.open or ""
        return entry.closed if entry.closed is not None else f"word{_digest(prompt.text).hex()[:6]}"

    def _knows(self, text: str) -> bool:
        entry = self._find(text)
        return entry.known if entry.known is not None else _unit("known", text) < 0.5

    def _logprob(self, text: str) -> float:
        entry = self._find(text)
        if entry.logprob is not None:
            return entry.logprob
        unit = _unit("logprob", text)
        return -0.01 - 0.3 * unit if self._knows(text) or entry.is_open(text) else -1.0 - 2.0 * unit

    def _samples(self, prompt: Prompt, n: int, seed: int | None, sampling: Sampling) -> list[str]:
        """Those of the table as they stand; else the answer and guesses, as often as they are probable."""
        entry, answer = self._find(prompt.text), self._answer(prompt)
        if entry.is_open(prompt.text):
            return [answer] * n
        if entry.samples:
            return [entry.samples[((seed or 0) + i) % len(entry.samples)] for i in range(n)]
        dice = random.Random(_digest("samples", prompt.text, seed))
        sure = math.exp(self._logprob(prompt.text))
        shares = apply_sampling(np.array([sure] + [(1 - sure) / WRONG_ANSWER_COUNT] * WRONG_ANSWER_COUNT), sampling)
        likely, guesses = float(shares[0]), max(1, int((shares[1:] > 0).sum()))
        return [answer if dice.random() < likely else f"guess{dice.randrange(guesses)}" for _ in range(n)]

    def _complete(self, prompt: Prompt, answer: str, max_tokens: int) -> Completion:
        pieces = WORD_PATTERN.findall(answer)
        kept = pieces[:max_tokens]
        tokens = None
        if Signal.LOGPROBS in self.offers:
            tokens = tuple(_token(piece, self._logprob(prompt.text)) for piece in kept)
        return Completion("".join(kept), tokens, finished=len(kept) == len(pieces), n_tokens=len(kept))

    def _state(self, prompt: Prompt, layer: int, place: str) -> Vector:
        """Noise of the prompt, shifted along one direction of the layer to the side of known or unknown."""
        if not -self._layers - 1 <= layer <= self._layers:
            raise BadSetting(f"the model '{self.name}' has layers 0 to {self._layers}, not {layer}.")
        index = layer % (self._layers + 1)
        side = 1.0 if self._knows(prompt.text) else -1.0
        noise = self._noise("state", prompt.text, index, place)
        return (noise + side * self._noise("direction", index)).astype(np.float32)

    def _noise(self, *parts: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.random.default_rng(list(_digest(*parts))).standard_normal(self._width)

    def _label_row(self, part: str, n_labels: int) -> list[float]:
        size = (1.0 + _unit("label", part)) * (1.0 if self._knows(part) else -1.0)
        return [size] + [-size] * (n_labels - 1)


def _token(text: str, logprob: float) -> Token:
    """The rest of the probability is spread evenly over the other words of a tiny vocabulary."""
    p = math.exp(logprob)
    q = (1 - p) / (VOCABULARY_SIZE - 1)
    entropy = -p * logprob - ((1 - p) * math.log(q) if q > 0 else 0.0)
    return Token(text, logprob, entropy=entropy, margin=max(0.0, p - q))


def _digest(*parts: Any) -> bytes:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _unit(*parts: Any) -> float:
    """A number in [0, 1) that is the same in every run."""
    return int.from_bytes(_digest(*parts)[:6], "big") / 2**48
