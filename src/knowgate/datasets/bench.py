"""Questions of the benchmark folder named by KNOWGATE_BENCH: `NAME/SPLIT.jsonl.gz` in the format of `jsonl`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from knowgate.datasets.parse import read_file
from knowgate.doors import user_path
from knowgate.errors import BadInput, BadSetting, UnknownName
from knowgate.types import Question

VARIABLE = "KNOWGATE_BENCH"


def folder() -> Path:
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        raise BadSetting(
            f"bench: data needs the environment variable {VARIABLE}. Set it to the benchmark folder, or give data of "
            "your own: --data jsonl:FILE"
        )
    path = user_path(chosen)
    if not path.is_dir():
        raise BadInput(f"{VARIABLE} names '{path}', which is not a folder. Set it to the folder with the benchmarks.")
    return path


def read_questions(value: str) -> Iterator[Question]:
    name, _, split = value.partition("/")
    root = folder()
    files = {path.parent.name: path.parent for path in root.glob("*/*.jsonl.gz")}
    if name not in files:
        raise UnknownName("benchmark", name, files)
    splits = {path.name.removesuffix(".jsonl.gz"): path for path in files[name].glob("*.jsonl.gz")}
    if split not in splits:
        raise UnknownName(f"split of '{name}'", split, splits)
    return read_file(splits[split])
