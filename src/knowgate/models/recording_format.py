"""What a recording looks like on disk: the manifest, the keys, and records as JSON. Asks no model anything.

DIR/recording.json   {"version", "name", "fingerprint", "offers"}
DIR/calls.jsonl      one {"key", "method", "result", "digest"} per prompt; arrays are base64 of little-endian float32.
                     digest: of the result; rows of earlier versions have none

The prompt itself is not stored, only the hash it goes into.
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
from knowgate.types import Completion, Reading, Signal, Vector

RECORDING_VERSION = 1
MANIFEST_FILE = "recording.json"
CALLS_FILE = "calls.jsonl"


@dataclass(frozen=True)
class RecordingManifest:
    """Whose outputs were recorded."""

    name: str
    fingerprint: str
    offers: frozenset[Signal]
    depth: NonNegativeInt = 0


def compute_call_key(fingerprint: str, method: str, prompt: object, settings: Mapping[str, Any]) -> str:
    """The name of one call: the same model, method, prompt and settings give the same key."""
    parts = [fingerprint, method, prompt, settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> RecordingManifest:
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ArtifactError(
            f"{folder} is not a recording: it has no {MANIFEST_FILE}. Make one: knowgate ask --record {folder}"
        )
    try:
        value = read_json(path)
        if value["version"] != RECORDING_VERSION:
            raise ArtifactError(
                f"the recording {folder} has version {str(value['version'])[:40]}; this knowgate reads version "
                f"{RECORDING_VERSION}. Record it again."
            )
        return read_record(RecordingManifest, value, MANIFEST_FILE, ignore_unknown=True)
    except (BadInput, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is broken ({error}). Record it again.") from None


def write_manifest(folder: Path, manifest: RecordingManifest) -> None:
    value = {"version": RECORDING_VERSION, **asdict(manifest), "offers": sorted(manifest.offers)}
    write_json(folder / MANIFEST_FILE, value)


def append_calls(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows and hand them to the system at once; what a killed run left half written goes first."""
    sealed = [{**row, "digest": compute_result_digest(row["result"])} for row in rows]
    text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in sealed)
    with file_lock(folder / ".lock"), (folder / CALLS_FILE).open("a+b") as file:
        file.truncate(find_last_line_end(folder / CALLS_FILE))
        file.write(text.encode())


def compute_result_digest(result: Any) -> str:
    return sha256_text(json.dumps(result, sort_keys=True))[:16]


def parse_result(line: bytes, key: str) -> Any:
    """The result in a row, if it is the one that was written under this key."""
    row = read_record(RecordedCall, parse_json(line.decode(), "it"), "it", ignore_unknown=True)
    if row.key != key or row.digest not in ("", compute_result_digest(row.result)):
        raise BadInput("it was changed or damaged.")
    return row.result


@dataclass(frozen=True)
class RecordedCall:
    key: str
    result: Any
    digest: str = ""


@dataclass(frozen=True)
class EncodedArray:
    shape: tuple[NonNegativeInt, ...]
    data: str


def index_calls(folder: Path) -> dict[str, int]:
    """Where in the file each key's last row begins. A last line without its end was torn: it is left out."""
    path, places, start = folder / CALLS_FILE, {}, 0
    if not path.is_file():
        raise ArtifactError(f"the recording {folder} has no {CALLS_FILE}. Record it again.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                places[_key_of(line, path, number)] = start
            start += len(line)
    return places


def _key_of(line: bytes, path: Path, number: int) -> str:
    try:
        row = parse_json(line.decode(), "it")
        return str(row["key"])
    except (BadInput, UnicodeDecodeError, KeyError, TypeError):
        raise ArtifactError(f"{path} line {number} is broken. Record it again.") from None


def encode_array(array: Vector) -> dict[str, Any]:
    data = np.ascontiguousarray(array, dtype="<f4")
    return {"shape": list(data.shape), "data": base64.b64encode(data.tobytes()).decode()}


def decode_array(value: Mapping[str, Any]) -> Vector:
    record = read_record(EncodedArray, value, "an array")
    data = np.frombuffer(base64.b64decode(record.data, validate=True), dtype="<f4")
    if not np.isfinite(data).all():
        raise BadInput("an array holds values that are not numbers.")
    return data.astype(np.float32).reshape(record.shape)


def encode_completion(completion: Completion) -> dict[str, Any]:
    tokens = completion.tokens
    return {
        "text": completion.text,
        "tokens": None if tokens is None else [[t.text, t.logprob, t.entropy, t.margin] for t in tokens],
        "finished": completion.finished,
        "n_tokens": completion.n_tokens,
    }


def decode_completion(value: Mapping[str, Any]) -> Completion:
    return read_record(Completion, value, "a completion")


def encode_reading(reading: Reading) -> dict[str, Any]:
    return {
        "draft": None if reading.draft is None else encode_completion(reading.draft),
        "hidden": {str(layer): encode_array(state) for layer, state in reading.hidden.items()},
        "hidden_after": {str(layer): encode_array(state) for layer, state in reading.hidden_after.items()},
        "samples": [encode_completion(sample) for sample in reading.samples],
        "labels": {name: encode_array(logits) for name, logits in reading.labels.items()},
        "sample_states": None if reading.sample_states is None else encode_array(reading.sample_states),
    }


def decode_reading(value: Mapping[str, Any], resume: object) -> Reading:
    draft, states = value["draft"], value.get("sample_states")
    return Reading(
        draft=None if draft is None else decode_completion(draft),
        hidden={int(layer): decode_array(state) for layer, state in value["hidden"].items()},
        hidden_after={int(layer): decode_array(state) for layer, state in value["hidden_after"].items()},
        samples=tuple(decode_completion(sample) for sample in value["samples"]),
        labels={name: decode_array(logits) for name, logits in value["labels"].items()},
        resume=resume,
        sample_states=None if states is None else decode_array(states),
    )
