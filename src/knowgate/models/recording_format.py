"""File format of a recording, a folder with the outputs of a model.

- DIR/recording.json is the manifest: {"version", "name", "fingerprint", "offers", "depth"} of the recorded model.
- DIR/calls.jsonl has one line per prompt: {"key", "method", "result", "digest"}. The key is a hash of the call, and the
  digest is a hash of the result. Lines from earlier versions have no digest. Arrays are stored as base64 of
  little-endian float32.

The text of the prompts is not stored, only the keys.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.files import file_lock, find_last_line_end, sha256_text, write_json
from knowgate.core.schema import NonNegativeInt, read_record
from knowgate.core.validation import parse_json, read_json
from knowgate.errors import ArtifactError, BadInput
from knowgate.types import Completion, LabelPrompt, Prompt, Reading, Signal, Vector

RECORDING_VERSION = 1
MANIFEST_FILE = "recording.json"
CALLS_FILE = "calls.jsonl"


@dataclass(frozen=True)
class RecordingManifest:
    """Description of the model whose outputs were recorded.

    Args:
        name: Name of the model.
        fingerprint: Identity of its weights and settings.
        offers: Signals that it supports.
        depth: Number of hidden states, including the embeddings; 0 if it has none.
    """

    name: str
    fingerprint: str
    offers: frozenset[Signal]
    depth: NonNegativeInt = 0


def compute_call_key(fingerprint: str, method: str, prompt: Prompt | LabelPrompt, options: Mapping[str, Any]) -> str:
    """Return the key of a call, a hash of the model, method, prompt and options."""
    values = [fingerprint, method, asdict(prompt), options]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> RecordingManifest:
    """Read the manifest of a recording.

    Raises:
        ArtifactError: The folder has no manifest, or one that is broken or of another version.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ArtifactError(
            f"the folder {folder} is not a recording: it has no {MANIFEST_FILE}. To make one, ask questions with record={folder}"
        )
    try:
        value = read_json(path)
        if value["version"] != RECORDING_VERSION:
            raise ArtifactError(
                f"the recording {folder} has format version {str(value['version'])[:40]}, but this knowgate reads only version "
                f"{RECORDING_VERSION}. Record it again."
            )
        return read_record(RecordingManifest, value, MANIFEST_FILE, ignore_unknown=True)
    except (BadInput, KeyError, TypeError) as error:
        raise ArtifactError(f"recording {folder} has a broken {MANIFEST_FILE} ({error}). Record it again.") from None


def write_manifest(folder: Path, manifest: RecordingManifest) -> None:
    """Write the manifest of a recording."""
    value = {"version": RECORDING_VERSION, **asdict(manifest), "offers": sorted(manifest.offers)}
    write_json(folder / MANIFEST_FILE, value)


def append_calls(folder: Path, calls: Sequence[Mapping[str, Any]]) -> None:
    """Append calls to the recording, each with a hash of its result.

    An incomplete last line is removed first.
    """
    rows = [{**call, "digest": compute_result_digest(call["result"])} for call in calls]
    text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
    with file_lock(folder / ".lock"), (folder / CALLS_FILE).open("a+b") as file:
        file.truncate(find_last_line_end(folder / CALLS_FILE))
        file.write(text.encode())


def compute_result_digest(result: Any) -> str:
    """Return a hash of a result in JSON, which shows later whether the stored result was changed."""
    return sha256_text(json.dumps(result, sort_keys=True))[:16]


def parse_result(line: bytes, key: str) -> Any:
    """Return the result in a line of calls.jsonl.

    Raises:
        BadInput: The line belongs to another key, or its result does not match its digest.
    """
    call = parse_json(line.decode(), "the line")
    digest = call.get("digest")  # lines of earlier versions have no digest
    is_changed = digest is not None and digest != compute_result_digest(call["result"])
    if call["key"] != key or is_changed:
        raise BadInput("the line was changed or damaged after it was recorded.")
    return call["result"]


def index_calls(folder: Path) -> dict[str, int]:
    """Return the byte offset in calls.jsonl for each key.

    If a key was recorded twice, the last line counts.
    """
    path = folder / CALLS_FILE
    if not path.is_file():
        raise ArtifactError(f"the recording {folder} has no {CALLS_FILE}. Record it again.")
    offsets: dict[str, int] = {}
    line_offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):  # the last line may be incomplete
                offsets[_parse_key(line, f"{path} line {number}")] = line_offset
            line_offset += len(line)
    return offsets


def _parse_key(line: bytes, where: str) -> str:
    """Return the key of a recorded call; `where` names the line in errors."""
    try:
        return str(parse_json(line.decode(), "the line")["key"])
    except (BadInput, UnicodeDecodeError, KeyError, TypeError):
        raise ArtifactError(f"{where} is not a valid recorded call. Record again.") from None


def encode_array(array: Vector) -> dict[str, Any]:
    """Convert an array to a JSON object with its shape and its values as base64."""
    data = np.ascontiguousarray(array, dtype="<f4")
    return {"shape": list(data.shape), "data": base64.b64encode(data.tobytes()).decode()}


def decode_array(value: Mapping[str, Any]) -> Vector:
    """Convert a JSON object from `encode_array` back to an array."""
    data = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype="<f4")
    if not np.isfinite(data).all():
        raise BadInput("a recorded array contains NaN or infinite values.")
    return data.astype(np.float32).reshape(value["shape"])


def encode_completion(completion: Completion) -> dict[str, Any]:
    """Convert a completion to JSON."""
    tokens = completion.tokens
    return {
        "text": completion.text,
        "tokens": None if tokens is None else [[t.text, t.logprob, t.entropy, t.margin] for t in tokens],
        "finished": completion.finished,
        "n_tokens": completion.n_tokens,
    }


def decode_completion(value: Mapping[str, Any]) -> Completion:
    """Convert JSON to a completion."""
    return read_record(Completion, value, "a completion")


def encode_reading(reading: Reading) -> dict[str, Any]:
    """Convert a reading (the signals of a prompt) to JSON, without its draft handle."""
    return {
        "draft": None if reading.draft is None else encode_completion(reading.draft),
        "hidden": {str(layer): encode_array(state) for layer, state in reading.hidden.items()},
        "hidden_after": {str(layer): encode_array(state) for layer, state in reading.hidden_after.items()},
        "samples": [encode_completion(sample) for sample in reading.samples],
        "sample_states": None if reading.sample_states is None else encode_array(reading.sample_states),
    }


def decode_reading(value: Mapping[str, Any], resume: object) -> Reading:
    """Convert JSON to a reading (the signals of a prompt). `resume` is its draft handle."""
    draft = value["draft"]
    states = value.get("sample_states")
    return Reading(
        draft=None if draft is None else decode_completion(draft),
        hidden={int(layer): decode_array(state) for layer, state in value["hidden"].items()},
        hidden_after={int(layer): decode_array(state) for layer, state in value["hidden_after"].items()},
        samples=tuple(decode_completion(sample) for sample in value["samples"]),
        resume=resume,
        sample_states=None if states is None else decode_array(states),
    )
