"""Label runs as callers hand them over: opened, or by their folders, one or several."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from knowgate.core.display import TextTable
from knowgate.core.files import sha256_text, write_bytes
from knowgate.core.schema import NonNegativeInt
from knowgate.core.validation import expand_path
from knowgate.data.row_folder import RowFolder, explain_disk_error
from knowgate.data.runs.rows import GradedAnswer, LabelRow, row_from_json, row_to_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError
from knowgate.stats.formats import format_proportion
from knowgate.stats.proportions import estimate_proportion
from knowgate.types import Vector
from knowgate.types.markup import escape_html

AGREEMENT_FOLDER = "agreed"  # folder of runs that were graded anew, by agreement; they stand for those beside it
MAX_FOLDER_DEPTH = 4  # knowgate-start/labels/KEY/agreed/RUN lies so deep below the folder that people name
MAX_LISTED_RUNS = 8  # runs that are named


def find_runs(folder: Path, manifest: str) -> list[Path]:
    """Folders of label runs below this one. manifest: the file each of them has."""
    below = ["/".join([*(["*"] * depth), manifest]) for depth in range(1, MAX_FOLDER_DEPTH + 1)]
    found = sorted({file.parent for pattern in below for file in folder.glob(pattern)}) if folder.is_dir() else []
    return [run for run in found if run.parent / AGREEMENT_FOLDER / run.name not in found]


def suggest_runs(folder: Path, manifest: str) -> str:
    """What to type instead of this folder; '' where it holds no run."""
    found = find_runs(folder, manifest)
    if not found:
        return ""
    shown = [shlex.quote(str(run)) for run in found[:MAX_LISTED_RUNS]]
    more = f" ({len(found) - MAX_LISTED_RUNS} more are there)" if len(found) > MAX_LISTED_RUNS else ""
    labels = " ".join(f"--labels {run}" for run in shown)
    return (
        f"It holds {len(found)} label runs{more}. Name those you mean: knowgate report {' '.join(shown)} - or: "
        f"knowgate eval {labels}"
    )


def summarize_run(manifest: Mapping[str, Any]) -> str:
    """What was asked of which model and how far it came, by the manifest alone: rows can be many."""
    settings, totals = manifest.get("settings") or {}, manifest.get("totals") or {}
    about = f"{settings.get('model', 'a model not recorded')} on {settings.get('data', 'data not recorded')}"
    asked = totals.get("questions", settings.get("questions"))
    counts = [f"{asked} questions"] if asked is not None else []
    counts += [f"{totals['failed']} failed"] if totals.get("failed") else []
    return ", ".join([about, *counts])


def build_run_table(name: str, manifest: Mapping[str, Any], rows: Iterable[LabelRow]) -> TextTable:
    """The same with what came out: shares of right answers with 95 % intervals (Wilson)."""
    settings = manifest.get("settings") or {}
    verdicts = [(row.error is not None, _right(row.closed), _right(row.open)) for row in rows]
    facts = (
        ("model", str(settings.get("model", "not recorded"))),
        ("data", str(settings.get("data", "not recorded"))),
        ("passages from", str(settings.get("retriever", "not recorded"))),
        ("rows", str(len(verdicts))),
        ("failed", str(sum(failed for failed, _, _ in verdicts))),
        ("closed-book right", format_proportion(estimate_proportion(closed for _, closed, _ in verdicts))),
        ("open-book right", format_proportion(estimate_proportion(opened for _, _, opened in verdicts))),
    )
    return TextTable(f"Label run {name}", ("", ""), facts)


def _right(side: GradedAnswer | None) -> bool | None:
    return side.correct if side is not None else None


SHARD_NAME = re.compile(r"vectors-(\d{1,12})(-[0-9a-f]{1,64})?\.safetensors")
STATE_NAME = re.compile(r"(before|after)\.-?\d{1,6}")
DIGEST_DIGITS = 16  # of a digest


def list_shards(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("vectors-*.safetensors")) if SHARD_NAME.fullmatch(path.name))


def write_shard(folder: Path, states: Mapping[str, Vector]) -> str:
    """A new shard; its name. A file that is there already is never overwritten."""
    data = save({name: np.ascontiguousarray(block) for name, block in states.items()})
    taken = [int(found[1]) for path in list_shards(folder) if (found := SHARD_NAME.fullmatch(path.name))]
    name = f"vectors-{max(taken, default=-1) + 1:07d}-{hashlib.sha256(data).hexdigest()[:DIGEST_DIGITS]}.safetensors"
    if (folder / name).exists():
        raise FileExistsError(17, "a file of a name that is not given twice is there", name)
    write_bytes(folder / name, data)
    return name


def read_shard(path: Path) -> dict[str, Vector]:
    """All states of a shard, if they are numbers and one row each for the same questions."""
    if not SHARD_NAME.fullmatch(path.name):
        raise BadInput(f"'{path.name[:80]}' is no name of a file of hidden states.")
    try:
        states: dict[str, Vector] = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {_first_line(error)}.") from None
    for name, block in states.items():
        if block.ndim != 2 or not np.issubdtype(block.dtype, np.floating) or not np.isfinite(block).all():
            raise BadInput(f"the hidden states '{name[:80]}' in {path.name} are not rows of numbers.")
    if len({len(block) for block in states.values()}) > 1:
        raise BadInput(f"the hidden states in {path.name} are not of equally many questions.")
    return states


def list_state_names(path: Path) -> list[str]:
    """Which states a shard holds, without reading them."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {_first_line(error)}.") from None
    if wrong := [name for name in names if not STATE_NAME.fullmatch(name)]:
        raise BadInput(f"{path.name} holds '{wrong[0][:80]}', which is no name of hidden states.")
    return names


def digest_states(question: str, states: Mapping[str, Vector], row: int) -> str:
    """Of a question's id and its row of a shard: neither another row nor another question has it."""
    digest = hashlib.sha256(question.encode(errors="surrogatepass"))
    for name in sorted(states):
        digest.update(f"|{name}|{states[name].dtype}|{states[name].shape[1:]}|".encode())
        digest.update(np.ascontiguousarray(states[name][row]).tobytes())
    return digest.hexdigest()[:DIGEST_DIGITS]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


__all__ = ["RUN_MANIFEST", "ROWS_FILE", "RUN_FORMAT", "RunFolder", "explain_disk_error"]

RUN_FORMAT = 1
RUN_MANIFEST, ROWS_FILE = "run.json", "labels.jsonl"
IDENTITY_SETTINGS = ("model", "model_fingerprint", "prompts_fingerprint", "grader")


def hash_settings(settings: Mapping[str, Any]) -> str:
    """With a question's id, the key of its work: equal keys mean equal results."""
    return sha256_text(*(f"{key}={settings[key]!r}" for key in sorted(settings)))[:16]


@dataclass(frozen=True)
class RunSettings:
    """What is read back of a run's settings; there are more, for people."""

    model: str = ""
    model_fingerprint: str = ""
    prompts_fingerprint: str = ""
    grader: str = ""
    data: str = ""
    data_fingerprint: str = ""
    questions: NonNegativeInt = 0
    retriever: str | None = None
    retriever_fingerprint: str | None = None
    samples: NonNegativeInt | None = None
    max_tokens: NonNegativeInt | None = None
    k: NonNegativeInt | None = None
    reranker: str | None = None
    reranker_fingerprint: str | None = None
    candidates: NonNegativeInt | None = None
    depth: NonNegativeInt | None = None
    open_prompts: str | None = None
    seakr_layer: int | None = None
    synthetic: NonNegativeInt = 0  # questions that an LLM wrote


@dataclass(frozen=True, repr=False)
class RunFolder(RowFolder):
    """Where a label run is kept."""

    version: ClassVar[int] = RUN_FORMAT
    manifest_name: ClassVar[str] = RUN_MANIFEST
    rows_name: ClassVar[str] = ROWS_FILE
    what: ClassVar[str] = "label run"
    command: ClassVar[str] = "knowgate label"

    @property
    def instead(self) -> str:
        return suggest_runs(self.path, RUN_MANIFEST) or super().instead

    def settings(self) -> dict[str, Any]:
        """What made the run what it is; whoever compares models or wordings needs all of it.

        depth: how many hidden states the LLM has, where the run says so.
        """
        manifest = self.manifest()
        settings: dict[str, Any] = dict(manifest.get("settings", {}))
        self._check_whole(settings)
        settings |= {"depth": manifest["depth"]} if "depth" in manifest else {}
        missing = [key for key in IDENTITY_SETTINGS if key not in settings]
        if missing:
            raise ArtifactError(
                f"{self.path / RUN_MANIFEST} lacks {', '.join(missing)}: it was changed or damaged. Label again."
            )
        self._read(RunSettings, settings, f"the settings in {RUN_MANIFEST}")
        return settings

    def _check_whole(self, settings: Mapping[str, Any]) -> None:
        """Settings come with their hash: another one means that rows were not made by what stands here."""
        rest = {key: value for key, value in settings.items() if key != "hash"}
        if "hash" in settings and settings["hash"] != hash_settings(rest):
            raise self.refusal(f"the settings in {RUN_MANIFEST} were changed or damaged")

    def rows(self) -> Iterator[LabelRow]:
        """The rows in file order; memory stays flat."""
        for where, record in self.records():
            yield row_from_json(record, where)

    def vectors(self, rows: Sequence[LabelRow], name: str) -> Vector:
        """The named hidden states of these rows, one after another."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for number, row in enumerate(rows):
            if row.vector is None:
                raise ArtifactError(f"row '{row.id}' of '{self.path}' has no hidden states; label again with --layers.")
            wanted.setdefault(row.vector[0], []).append((row.vector[1], number))
        states: dict[int, Vector] = {}
        for shard, pairs in wanted.items():
            block = self._shard(shard, name, [(rows[number], place) for place, number in pairs])
            states.update({number: block[place] for place, number in pairs})
        if len({state.shape for state in states.values()}) > 1:
            raise self.refusal(f"the hidden states '{name}' are not of one width")
        return np.stack([states[number] for number in range(len(rows))]).astype(np.float32)

    def vector_names(self) -> list[str]:
        try:
            return sorted({name for path in list_shards(self.path) for name in list_state_names(self.file(path.name))})
        except BadInput as error:
            raise self.refusal(str(error)) from None

    def _shard(self, shard: str, name: str, rows: Sequence[tuple[LabelRow, int]]) -> Vector:
        """The named states of a shard, if they are still those of these rows (each with its place in it)."""
        try:
            states = read_shard(self.file(shard))
        except BadInput as error:
            raise self.refusal(str(error)) from None
        if name not in states:
            raise BadSetting(f"'{self.path}' has no hidden states '{name}'. It has: {', '.join(sorted(states))}.")
        for row, place in rows:
            if place >= len(states[name]):
                raise self.refusal(f"row '{row.id}' points to place {place} of {shard}, which has {len(states[name])}")
            if row.states and row.states != digest_states(row.id, states, place):
                raise self.refusal(f"the hidden states of row '{row.id}' in {shard} are not those it was written with")
        return states[name]

    def append(self, rows: Sequence[LabelRow], vectors: Mapping[str, Vector]) -> None:
        """Add finished rows; `vectors[name][i]` belongs to the i-th of them that did not fail."""
        placed = list(rows)
        if vectors:
            shard, numbers = write_shard(self.path, vectors), itertools.count()
            placed = [_placed(row, shard, next(numbers), vectors) if row.error is None else row for row in rows]
        self.append_records([row_to_json(row) for row in placed])

    def __repr__(self) -> str:
        return f"<RunFolder {self.path}: {self._about}>"

    def _repr_html_(self) -> str:
        """For notebooks. Reads all rows."""
        try:
            return build_run_table(self.path.name, self.manifest(), self.rows()).html()
        except KnowgateError:
            return f"<p>{escape_html(repr(self))}</p>"

    @property
    def _about(self) -> str:
        """In a line; whoever prints a folder wants no error."""
        if not (self.path / RUN_MANIFEST).is_file():
            return "not begun"
        try:
            return summarize_run(self.manifest())
        except KnowgateError as error:
            return str(error)


def _placed(row: LabelRow, shard: str, place: int, vectors: Mapping[str, Vector]) -> LabelRow:
    return replace(row, vector=(shard, place), states=digest_states(row.id, vectors, place))


RunLike = RunFolder | str | Path
RunsLike = RunLike | Sequence[RunLike]


def open_run(path: str | Path) -> RunFolder:
    """The label run in this folder; refuses a folder that is none."""
    folder = RunFolder(expand_path(path))
    folder.manifest()
    return folder


def resolve_run_paths(runs: RunsLike) -> list[Path]:
    """The folders of these runs, in order."""
    several = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    wrong = [run for run in several if not isinstance(run, RunFolder | str | Path)]
    if wrong:
        raise BadSetting(f"{wrong[0]!r} is no label run: give its folder, or what `label` or `open_run` gave.")
    if not several:
        raise BadSetting("no label run is named; make one: knowgate label")
    return [run.path if isinstance(run, RunFolder) else expand_path(run) for run in several]


RECORDED_PREFIX = "recorded:"  # before the name of the LLM of imported answers; no model can be loaded by such a name


def suggest_ask_options(name: str) -> str:
    """Options of `knowgate ask` for what was fitted on this LLM's answers; recorded ones name no server."""
    return " --model openai:NAME@URL --plug-in" if name.startswith(RECORDED_PREFIX) else ""


def suggest_label_options(settings: Mapping[str, Any]) -> tuple[str, str]:
    """--data and --model with which the questions of a run are answered again; recorded answers name no server."""
    name = str(settings["model"])
    return str(settings.get("data") or "SPEC"), "openai:NAME@URL" if name.startswith(RECORDED_PREFIX) else name


def explain_model_mismatch(name: str) -> str:
    """What to do where something fitted on one LLM's answers meets another LLM."""
    if name.startswith(RECORDED_PREFIX):
        llm = name.removeprefix(RECORDED_PREFIX)
        return (
            f"It learned from recorded answers, which name no server: name the LLM with --model (as "
            f"openai:NAME@URL), and add --plug-in if it is the LLM these answers are of ('{llm}')."
        )
    return f"Use it with its own (--model {name}), fit it on this one, or use it as it is with --plug-in."
