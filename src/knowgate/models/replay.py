"""Recorded outputs of an earlier run: `RecordingModel` writes them, `ReplayModel` gives them back.

A replay needs no weights, no server and no key, and is the same on every machine. It answers only what was
asked when recording: the same prompts with the same settings. A call recorded twice is given back as it was
the last time, so unseeded samples of one prompt come out equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from knowgate.core.files import check_output_folder
from knowgate.errors import ArtifactError, BadInput, BadSetting, ModelError
from knowgate.models import recording_format as disk
from knowgate.models.backend import Backend, WordStreamBackend
from knowgate.types import Completion, LabelPrompt, Model, Prompt, Reading, Signal, SignalRequest, TextStream, Vector

Result = TypeVar("Result")
SHOWN_PROMPT_LENGTH = 60  # characters of a prompt shown in an error


@dataclass(frozen=True)
class RecordedHandle:
    """Stands for a draft: the key of its reading and, while recording, the handle of the model itself."""

    key: str
    inner: object = field(default=None, repr=False, compare=False)


class RecordingModel(Backend):
    """Gives what `model` gives and appends every result to `folder`, batch by batch.

    A run that was killed keeps all finished batches. The folder takes outputs of one model only.
    """

    def __init__(self, model: Model, folder: str | Path):
        self._model = model
        self._folder = Path(folder)

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    @property
    def offers(self) -> frozenset[Signal]:
        return self._model.offers

    @property
    def depth(self) -> int:
        return self._model.depth

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        self._open()
        readings = self._model.read(prompts, want)
        keys = _keys(self.fingerprint, "read", prompts, [_reading_settings(want)] * len(prompts))
        self._append("read", keys, map(disk.encode_reading, readings))
        return [
            replace(reading, resume=None if reading.resume is None else RecordedHandle(key, reading.resume))
            for key, reading in zip(keys, readings, strict=True)
        ]

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
        settings = _generate_settings(len(prompts), max_tokens, temperature, n, seed, resume)
        inner = None if resume is None else [_handle(item).inner for item in resume]
        self._open()
        completions = self._model.generate(
            prompts, max_tokens=max_tokens, temperature=temperature, n=n, seed=seed, resume=inner
        )
        keys = _keys(self.fingerprint, "generate", prompts, settings)
        self._append("generate", keys, (list(map(disk.encode_completion, row)) for row in completions))
        return completions

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Recorded as `generate` would be, once it is whole: a stream that was left is not kept."""
        handles = None if resume is None else [resume]
        settings = _generate_settings(1, max_tokens, 0.0, 1, None, handles)
        inner = None if resume is None else _handle(resume).inner
        self._open()
        completion = yield from self._model.stream(prompt, max_tokens=max_tokens, resume=inner)
        keys = _keys(self.fingerprint, "generate", [prompt], settings)
        self._append("generate", keys, [[disk.encode_completion(completion)]])
        return completion

    @property
    def concurrency(self) -> int:
        return self._model.concurrency

    @property
    def workers(self) -> Executor:
        return self._model.workers

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        self._open()
        logits = self._model.label_logits(prompts, labels)
        settings = [{"labels": list(labels)}] * len(prompts)
        keys = _keys(self.fingerprint, "label_logits", prompts, settings)
        self._append("label_logits", keys, map(disk.encode_array, logits))
        return logits

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        self._open()
        fitting = self._model.fits(prompts, max_tokens)
        keys = _keys(self.fingerprint, "fits", prompts, [{"max_tokens": max_tokens}] * len(prompts))
        self._append("fits", keys, fitting)
        return fitting

    def _open(self) -> None:
        """Make the folder, or see that it holds outputs of this model."""
        mine = disk.RecordingManifest(self.name, self.fingerprint, self.offers, self.depth)
        if not (self._folder / disk.MANIFEST_FILE).exists():
            check_output_folder(self._folder, [disk.MANIFEST_FILE], "a recording", "record")
            disk.write_manifest(self._folder, mine)
            return
        there = disk.read_manifest(self._folder)
        if there.fingerprint != mine.fingerprint:
            raise ArtifactError(
                f"{self._folder} holds outputs of {there.name} ({there.fingerprint}), not of {mine.name} "
                f"({mine.fingerprint}). Record into another folder."
            )

    def _append(self, method: str, keys: Sequence[str], results: Iterable[Any]) -> None:
        rows = zip(keys, results, strict=True)
        disk.append_calls(self._folder, [{"key": key, "method": method, "result": result} for key, result in rows])


class ReplayModel(WordStreamBackend):
    """The model that was recorded into `folder`; the folder is read on first use."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        if not (self._folder / disk.MANIFEST_FILE).is_file():
            raise ArtifactError(
                f"{folder} is not a recording: it has no {disk.MANIFEST_FILE}. Make one: knowgate ask --record {folder}"
            )

    @functools.cached_property
    def _manifest(self) -> disk.RecordingManifest:
        return disk.read_manifest(self._folder)

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return disk.index_calls(self._folder)

    @property
    def name(self) -> str:
        return self._manifest.name

    @property
    def fingerprint(self) -> str:
        return self._manifest.fingerprint

    @property
    def offers(self) -> frozenset[Signal]:
        return self._manifest.offers

    @property
    def depth(self) -> int:
        return self._manifest.depth

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        settings = [_reading_settings(want)] * len(prompts)
        return self._find("read", prompts, settings, lambda key, x: disk.decode_reading(x, RecordedHandle(key)))

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
        settings = _generate_settings(len(prompts), max_tokens, temperature, n, seed, resume)
        return self._find("generate", prompts, settings, lambda _, x: list(map(disk.decode_completion, x)))

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        settings = [{"labels": list(labels)}] * len(prompts)
        return self._find("label_logits", prompts, settings, lambda _, x: disk.decode_array(x))

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        return self._find("fits", prompts, [{"max_tokens": max_tokens}] * len(prompts), lambda _, x: _flag(x))

    def _find(
        self,
        method: str,
        prompts: Sequence[Prompt | LabelPrompt],
        settings: Sequence[Mapping[str, Any]],
        decode: Callable[[str, Any], Result],
    ) -> list[Result]:
        keys = _keys(self.fingerprint, method, prompts, settings)
        for key, prompt in zip(keys, prompts, strict=True):
            if key not in self._places:
                raise ModelError(
                    f"no recorded {method} for the prompt {_beginning(prompt)} with these settings in "
                    f"{self._folder}. Record again with this prompt and these settings."
                )
        return [self._decode(key, decode) for key in keys]

    def _decode(self, key: str, decode: Callable[[str, Any], Result]) -> Result:
        try:
            with (self._folder / disk.CALLS_FILE).open("rb") as file:
                file.seek(self._places[key])
                return decode(key, disk.parse_result(file.readline(), key))
        except (BadInput, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"the recorded result {key[:12]} in {self._folder} is broken ({error}). Record it again."
            ) from None


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise BadInput("it is neither true nor false.")
    return value


def _keys(
    fingerprint: str,
    method: str,
    prompts: Sequence[Prompt | LabelPrompt],
    settings: Sequence[Mapping[str, Any]],
) -> list[str]:
    pairs = zip(prompts, settings, strict=True)
    return [disk.compute_call_key(fingerprint, method, asdict(prompt), setting) for prompt, setting in pairs]


def _reading_settings(want: SignalRequest) -> dict[str, Any]:
    settings = asdict(want)
    drawn = settings.pop("sampling")
    settings |= {"temperature": drawn["temperature"]} | ({} if want.sampling.is_whole else drawn)
    if want.sample_layer is None:
        del settings["sample_layer"]  # recordings made before it was there keep their keys
    if not want.entropies:  # recordings from before there was such a thing go on
        del settings["entropies"]
    if not want.sample_end:
        del settings["sample_end"]
    del settings["resumable"]  # says what is kept in memory, not what is read
    return settings


def _generate_settings(
    count: int,
    max_tokens: int,
    temperature: float,
    n: int,
    seed: int | None,
    resume: Sequence[object] | None,
) -> list[dict[str, Any]]:
    """One per prompt; the key of the draft that goes on is part of them."""
    common = {"max_tokens": max_tokens, "temperature": float(temperature), "n": n, "seed": seed}
    drafts = [None] * count if resume is None else [_handle(item).key for item in resume]
    return [{**common, "resume": draft} for draft in drafts]


def _handle(item: object) -> RecordedHandle:
    if not isinstance(item, RecordedHandle):
        raise BadSetting("resume takes the handles of this model's own readings.")
    return item


def _beginning(prompt: Prompt | LabelPrompt) -> str:
    text = prompt.text if isinstance(prompt, Prompt) else "".join(prompt.parts)
    return repr(text if len(text) <= SHOWN_PROMPT_LENGTH else text[:SHOWN_PROMPT_LENGTH] + "…")
