"""Record the outputs of a model, and replay them without it (`replay:DIR`).

A replay needs no weights, no server and no API key, and gives the same results on every machine. It can only answer
calls that were recorded, which means the same prompts with the same options. If a call was recorded several times, the
last result is returned. So unseeded samples, which differ while recording, are all equal in a replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from knowgate.core.files import check_output_folder
from knowgate.errors import ArtifactError, BadInput, ModelError
from knowgate.models import recording_format as recording
from knowgate.models.backend import Backend, check_resume_handle
from knowgate.types import Completion, LabelPrompt, Model, Prompt, Reading, Signal, SignalRequest, TextStream, Vector
from knowgate.types.protocols import Result

AnyPrompt = Prompt | LabelPrompt
Handles = Sequence[object] | None  # of drafts to continue
SHOWN_PROMPT_LENGTH = 60  # characters of a prompt in an error message


@dataclass(frozen=True)
class RecordedHandle:
    """Identifies a recorded draft, so that the draft can be continued.

    Args:
        key: Key of the recorded call that returned the draft.
        inner: While recording, the recorded model's own handle of the draft; None in a replay, which has no model.
    """

    key: str
    inner: object = field(default=None, repr=False, compare=False)


class RecordingModel(Backend):
    """Forwards all calls to `model` and records every result in a folder.

    Results are written after each call.

    Args:
        model: The model to record.
        folder: A new folder, or one with a recording of the same model.
    """

    def __init__(self, model: Model, folder: str | Path):
        self.name = model.name
        self._model = model
        self._folder = Path(folder)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the recorded model."""
        return self._model.fingerprint

    @property
    def offers(self) -> frozenset[Signal]:
        """Signals of the recorded model."""
        return self._model.offers

    @property
    def depth(self) -> int:
        """Number of hidden states of the recorded model."""
        return self._model.depth

    @property
    def concurrency(self) -> int:
        """Number of threads that may use the recorded model at once."""
        return self._model.concurrency

    @property
    def workers(self) -> Executor:
        """The thread pool of the recorded model."""
        return self._model.workers

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Let the recorded model read the prompts, and record the results.

        `resume`, the handle with which a draft is continued, is wrapped in each reading, so that the continuation can be
        recorded, too.
        """
        self._prepare_folder()
        readings = list(self._model.read(prompts, request))
        options = [_describe_read_call(request)] * len(prompts)
        keys = self._record("read", prompts, options, map(recording.encode_reading, readings))
        for index, (key, reading) in enumerate(zip(keys, readings, strict=True)):
            if reading.resume is not None:
                readings[index] = replace(reading, resume=RecordedHandle(key, reading.resume))
        return readings

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
        """Generate completions with the recorded model, and record them.

        `resume` takes handles from `read`.
        """
        options = _describe_generate_calls(prompts, max_tokens, temperature, n, seed, resume)
        unwrapped = None if resume is None else [check_resume_handle(handle, RecordedHandle).inner for handle in resume]
        self._prepare_folder()
        completions = self._model.generate(
            prompts, max_tokens=max_tokens, temperature=temperature, n=n, seed=seed, resume=unwrapped
        )
        results = [[recording.encode_completion(completion) for completion in row] for row in completions]
        self._record("generate", prompts, options, results)
        return completions

    def stream(self, prompt: Prompt, *, max_tokens: int, resume: object | None = None) -> TextStream:
        """Stream an answer of the recorded model, and record it at the end.

        `resume` takes a handle from `read`.
        """
        handles = None if resume is None else [resume]
        options = _describe_generate_calls([prompt], max_tokens, temperature=0.0, n=1, seed=None, resume=handles)
        unwrapped = None if resume is None else check_resume_handle(resume, RecordedHandle).inner
        self._prepare_folder()
        completion = yield from self._model.stream(prompt, max_tokens=max_tokens, resume=unwrapped)
        self._record("generate", [prompt], options, [[recording.encode_completion(completion)]])
        return completion

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Return the logits of labels (such as 'true') that the recorded model computes, and record them."""
        self._prepare_folder()
        logits = self._model.label_logits(prompts, labels)
        options = [{"labels": list(labels)}] * len(prompts)
        self._record("label_logits", prompts, options, map(recording.encode_array, logits))
        return logits

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Record and return whether prompts fit the recorded model's context window."""
        self._prepare_folder()
        results = self._model.fits(prompts, max_tokens)
        self._record("fits", prompts, [{"max_tokens": max_tokens}] * len(prompts), results)
        return results

    def _prepare_folder(self) -> None:
        """Create the folder and its manifest, or check that an existing recording is of the same model."""
        manifest = recording.RecordingManifest(self.name, self.fingerprint, self.offers, self.depth)
        if not (self._folder / recording.MANIFEST_FILE).exists():
            check_output_folder(self._folder, [recording.MANIFEST_FILE], "a recording", "record")
            recording.write_manifest(self._folder, manifest)
            return
        recorded = recording.read_manifest(self._folder)
        if recorded.fingerprint != manifest.fingerprint:
            raise ArtifactError(
                f"the recording in {self._folder} is of {recorded.name} ({recorded.fingerprint}), but this model is "
                f"{manifest.name} ({manifest.fingerprint}). Record into another folder."
            )

    def _record(
        self, method: str, prompts: Sequence[AnyPrompt], options: Sequence[Mapping[str, Any]], results: Iterable[Any]
    ) -> list[str]:
        """Append the results of a call to the folder, and return their keys.

        Args:
            method: Name of the method that was called, such as 'read'.
            prompts: The prompts.
            options: Options of the call for each prompt.
            results: The result for each prompt, as JSON.
        """
        calls = []
        for prompt, prompt_options, result in zip(prompts, options, results, strict=True):
            key = recording.compute_call_key(self.fingerprint, method, prompt, prompt_options)
            calls.append({"key": key, "method": method, "result": result})
        recording.append_calls(self._folder, calls)
        return [call["key"] for call in calls]


class ReplayModel(Backend):
    """A model that returns the outputs recorded in a folder (`replay:DIR`).

    Args:
        folder: Folder of the recording.

    Raises:
        ArtifactError: The folder is not a recording.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        manifest = recording.read_manifest(self._folder)
        self.name = manifest.name
        self.fingerprint = manifest.fingerprint
        self.offers = manifest.offers
        self.depth = manifest.depth

    @functools.cached_property
    def _offsets(self) -> dict[str, int]:
        return recording.index_calls(self._folder)

    def read(self, prompts: Sequence[Prompt], request: SignalRequest) -> list[Reading]:
        """Return the recorded readings of the prompts; raises ModelError if one was not recorded."""
        options = [_describe_read_call(request)] * len(prompts)
        return self._replay(
            "read", prompts, options, lambda key, value: recording.decode_reading(value, RecordedHandle(key))
        )

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
        """Return the recorded completions of the prompts; raises ModelError if one was not recorded."""
        options = _describe_generate_calls(prompts, max_tokens, temperature, n, seed, resume)
        return self._replay("generate", prompts, options, lambda _, rows: list(map(recording.decode_completion, rows)))

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        """Return the recorded label logits of the prompts; raises ModelError if one was not recorded."""
        options = [{"labels": list(labels)}] * len(prompts)
        return self._replay("label_logits", prompts, options, lambda _, value: recording.decode_array(value))

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        """Return whether the prompts fit the recorded model's context window, as recorded."""
        options = [{"max_tokens": max_tokens}] * len(prompts)
        return self._replay("fits", prompts, options, lambda _, value: bool(value))

    def _replay(
        self,
        method: str,
        prompts: Sequence[AnyPrompt],
        options: Sequence[Mapping[str, Any]],
        decode: Callable[[str, Any], Result],
    ) -> list[Result]:
        """Return the recorded result of each prompt. `decode` converts a key and its recorded JSON to a result.

        Raises:
            ModelError: The recording has no result for a prompt with these options.
        """
        results = []
        for prompt, prompt_options in zip(prompts, options, strict=True):
            key = recording.compute_call_key(self.fingerprint, method, prompt, prompt_options)
            if key not in self._offsets:
                raise ModelError(
                    f"the recording {self._folder} has no '{method}' result for the prompt {_shorten_prompt(prompt)} with these "
                    "settings. Record again with this prompt and these settings."
                )
            results.append(self._decode(key, decode))
        return results

    def _decode(self, key: str, decode: Callable[[str, Any], Result]) -> Result:
        """Read and decode the recorded result of one key."""
        try:
            with (self._folder / recording.CALLS_FILE).open("rb") as file:
                file.seek(self._offsets[key])
                return decode(key, recording.parse_result(file.readline(), key))
        except (BadInput, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ArtifactError(
                f"the result {key[:12]} in {self._folder} is damaged ({error}). Record again."
            ) from None


def _describe_read_call(request: SignalRequest) -> dict[str, Any]:
    """Return the fields of a request that belong to the key of the recorded result.

    Fields that later releases have added are left out if they have default values, so that old recordings stay valid.
    """
    options = asdict(request)
    sampling = options.pop("sampling")
    options["temperature"] = sampling["temperature"]
    # Recordings of old releases have no top_k and top_p, so these are added only if they exclude tokens.
    if not request.sampling.keeps_all_tokens:
        options |= sampling
    for name in ("sample_layer", "entropies", "sample_end"):  # added by later releases
        if options[name] == getattr(SignalRequest(), name):
            del options[name]
    del options["resumable"]  # does not change what is read
    return options


def _describe_generate_calls(
    prompts: Sequence[Prompt], max_tokens: int, temperature: float, n: int, seed: int | None, resume: Handles
) -> list[dict[str, Any]]:
    """Return, for each prompt, the options of `generate` that belong to the key of its recorded answer.

    `resume` holds the handles of the drafts to continue. The option `resume` is the key of the draft, or None.
    """
    common = {"max_tokens": max_tokens, "temperature": float(temperature), "n": n, "seed": seed}
    draft_keys: list[str | None] = [None] * len(prompts)
    if resume is not None:
        draft_keys = [check_resume_handle(handle, RecordedHandle).key for handle in resume]
    return [{**common, "resume": key} for key in draft_keys]


def _shorten_prompt(prompt: AnyPrompt) -> str:
    text = prompt.text if isinstance(prompt, Prompt) else "".join(prompt.parts)
    return repr(text if len(text) <= SHOWN_PROMPT_LENGTH else text[:SHOWN_PROMPT_LENGTH] + "…")
