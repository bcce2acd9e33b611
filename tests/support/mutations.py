"""Damage to folders, drawn at random: bytes, files, links, JSON fields, tensors. With or without new checksums.

A mutation says what it did; whoever draws one says how a folder is signed again, as a forger would.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tests.support.fuzz import IS_REPEATABLE

Sign = Callable[[Path], None]
ODD: list[Any] = [
    None, True, False, 0, -1, 2, 10**9, 2**63, 10**40, -(10**40), 0.5, 1.5, -0.5, 1e308, float("nan"), float("inf"), "",
    "x", "../../etc/passwd", "/etc/passwd", "\x00", "long " * 2000, [], [[]], [None], {}, {"a": {"b": []}}, "NaN",
]  # fmt: skip
FILES = ("gone", "folder", "link out", "link to nothing", "loop", "swapped", "pickle", "pickle in its place")
DEEP = "[" * 200 + "]" * 200


@dataclass(frozen=True)
class Mutation:
    """kind: for the table of what was tried. signed: checksums were made to fit afterwards. what: for a failed test."""

    kind: str
    signed: bool
    what: str


def seeded(seed: int) -> int:
    """Return the seed itself in repeatable runs, else a random one."""
    return seed if IS_REPEATABLE else random.randrange(10**9)


def damaged_copies(folder: Path, place: Path, count: int, seed: int, sign: Sign | None) -> Iterator[Mutation]:
    """`count` times: a fresh copy of `folder` at `place` with one mutation. Half of those that can be are signed."""
    seed = seeded(seed)
    rng = random.Random(seed)
    for number in range(count):
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
        shutil.copytree(folder, place)
        kind, what = _damage(place, rng)
        signed = sign is not None and number % 2 == 0 and kind in ("JSON fields", "tensors and arrays")
        if signed and sign is not None:
            try:
                sign(place)
            except (ValueError, OSError, TypeError, KeyError, AttributeError):
                signed = False  # too damaged for a forger
        yield Mutation(kind, signed, f"{what} (number {number} of seed {seed})")


def _damage(folder: Path, rng: random.Random) -> tuple[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = rng.choice(files)
    shaped = {".json": _damage_json, ".jsonl": _damage_lines, ".safetensors": _damage_tensors, ".npy": _damage_array}
    if path.suffix in shaped and rng.random() < 0.6:
        kind = "JSON fields" if path.suffix in (".json", ".jsonl") else "tensors and arrays"
        return kind, f"{path.name}: {shaped[path.suffix](path, rng)}"
    if rng.random() < 0.5:
        return "bytes", f"{path.name}: {_damage_bytes(path, rng)}"
    return "files and links", f"{path.name}: {_damage_file(path, folder, files, rng)}"


# --- bytes and files ------------------------------------------------------------------------------


def _damage_bytes(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes()) or bytearray(b"\x00")
    way = rng.choice(["flip", "flips", "cut", "empty", "more", "noise"])
    if way in ("flip", "flips"):
        for _ in range(1 if way == "flip" else 20):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del data[rng.randrange(len(data)) :]
    elif way == "empty":
        data.clear()
    elif way == "more":
        data += rng.randbytes(rng.randrange(1, 200))
    else:
        data = bytearray(rng.randbytes(len(data)))
    path.write_bytes(bytes(data))
    return way


class Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, ("exploded",))


def _damage_file(path: Path, folder: Path, files: list[Path], rng: random.Random) -> str:
    way = rng.choice(FILES)
    if way == "swapped":
        other = rng.choice(files)
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
        return f"swapped with {other.name}"
    if way == "pickle":
        name = rng.choice(["model.pkl", "pytorch_model.bin", "adapter_model.bin", "training_args.pt"])
        (path.parent / name).write_bytes(pickle.dumps(Bomb()))
        return f"{name} beside it"
    kept = path.read_bytes()
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "link out":
        outside = folder.parent / f"outside-{path.name}"
        outside.write_bytes(kept)
        path.symlink_to(outside)
    elif way == "link to nothing":
        path.symlink_to(folder / "nothing")
    elif way == "loop":
        path.symlink_to(path)
    elif way == "pickle in its place":
        path.write_bytes(pickle.dumps(Bomb()))
    return way


# --- JSON -----------------------------------------------------------------------------------------


def _damage_json(path: Path, rng: random.Random) -> str:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return "nothing"
    value, what = damage_value(value, rng)
    path.write_text(json.dumps(value, indent=2).replace('"DEEP"', DEEP), encoding="utf-8")
    return what


def _damage_lines(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8").splitlines() or ["{}"]
    place, way = rng.randrange(len(lines)), rng.choice(["gone", "twice", "moved", "field", "field", "field", "field"])
    if way == "gone":
        del lines[place]
    elif way == "twice":
        lines.insert(rng.randrange(len(lines)), lines[place])
    elif way == "moved":
        lines.append(lines.pop(place))
    else:
        value, way = damage_value(json.loads(lines[place]), rng)
        lines[place] = json.dumps(value, ensure_ascii=False).replace('"DEEP"', DEEP)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"line {place + 1}: {way}"


def damage_value(value: Any, rng: random.Random) -> tuple[Any, str]:
    """One value somewhere inside is removed, replaced, renamed, or gets company."""
    holders = [holder for holder in _holders(value) if holder]
    if not holders or rng.random() < 0.03:
        return rng.choice(ODD), "all of it"
    holder = rng.choice(holders)
    key = rng.choice(sorted(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    way = rng.choice(["removed", "replaced", "replaced", "replaced", "replaced", "deep", "renamed", "wrapped"])
    if way == "removed":
        del holder[key]
    elif way == "renamed" and isinstance(holder, dict):
        holder[rng.choice(["../x", "", "extra", "0.9.weight"])] = holder.pop(key)
    elif way == "wrapped":
        holder[key] = [holder[key]]
    else:
        holder[key] = "DEEP" if way == "deep" else rng.choice(ODD)
        way = f"{way} by {str(holder[key])[:20]!r}"
    return value, f"{key} {way}"


def _holders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


# --- tensors --------------------------------------------------------------------------------------


def _damage_tensors(path: Path, rng: random.Random) -> str:
    try:
        tensors = load_file(path)
    except SafetensorError:
        return "nothing"
    name, way = rng.choice(sorted(tensors)), rng.choice(["removed", "renamed", "one more", *["changed"] * 7])
    if way == "changed":
        tensors[name], way = damage_array(tensors[name], rng)
    elif way == "one more":
        tensors[rng.choice(["0.9.weight", "extra", "before.x", "../x"])] = tensors[name]
    else:
        tensor = tensors.pop(name)
        if way == "renamed":
            tensors[rng.choice(["../../x", "0", name.upper() + "x"])] = tensor
    save_file(tensors, path)
    return f"{name} {way}"


def _damage_array(path: Path, rng: random.Random) -> str:
    array, way = damage_array(np.load(path), rng)
    np.save(path, array)
    return way


def damage_array(array: Any, rng: random.Random) -> tuple[Any, str]:
    flat = array.reshape(-1)
    spoilt = flat.copy()
    if len(flat) and np.issubdtype(flat.dtype, np.floating):
        spoilt[rng.randrange(len(flat))] = rng.choice([np.nan, np.inf, -np.inf, np.finfo(flat.dtype).max, 0.0, -7.5])
    elif len(flat):
        spoilt[rng.randrange(len(flat))] = rng.choice([-1, np.iinfo(flat.dtype).max, 0])
    ways = {
        "emptied": flat[:0],
        "flat": flat,
        "a scalar": np.array(flat[0] if len(flat) else 0),
        "one axis more": array[None],
        "turned": np.ascontiguousarray(array.T),
        "shorter": array[:-1] if array.ndim else array,
        "longer": np.concatenate([array, array]) if array.ndim else array,
        "as integers": np.nan_to_num(array).astype(np.int64),
        "as halves": array.astype(np.float16),
        "as booleans": array.astype(bool),
        "all zero": np.zeros_like(array),
        "spoilt": spoilt.reshape(array.shape),
    }
    way = rng.choice([*ways, "spoilt", "spoilt"])
    return ways[way], way
