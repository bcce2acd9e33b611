"""The folder of a label run: rows in `labels.jsonl`, hidden states in safetensors shards, the rest in `run.json`.

A shard is written before the rows that refer to it, so a killed run has no row without its states. The name of a shard
contains a digest of its content, so that no name is ever used for two contents.
"""

from __future__ import annotations

import functools
import hashlib
import re
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
from knowgate.data.row_folder import RowFolder
from knowgate.data.runs.rows import LabelRow, row_from_json, row_to_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError, get_cause
from knowgate.models import MODELS
from knowgate.stats.proportions import estimate_proportion, format_proportion
from knowgate.types import Vector
from knowgate.types.markup import escape_html

SHARD_NAME = re.compile(r"vectors-(\d{1,12})(-[0-9a-f]{1,64})?\.safetensors")
STATE_NAME = re.compile(r"(before|after)\.-?\d{1,6}")
DIGEST_DIGITS = 16


def list_shards(folder: Path) -> Iterator[Path]:
    """Yield the shard files of a run, in order."""
    return (path for path in sorted(folder.glob("vectors-*.safetensors")) if SHARD_NAME.fullmatch(path.name))


def write_shard(folder: Path, states: Mapping[str, Vector]) -> str:
    """Write hidden states to a new shard file and return its name."""
    data = save({name: np.ascontiguousarray(block) for name, block in states.items()})
    matches = [SHARD_NAME.fullmatch(path.name) for path in list_shards(folder)]
    number = max((int(match[1]) for match in matches if match), default=-1) + 1  # group 1 is the number of a shard
    digest = hashlib.sha256(data).hexdigest()[:DIGEST_DIGITS]
    name = f"vectors-{number:07d}-{digest}.safetensors"
    write_bytes(folder / name, data)
    return name


def read_shard(path: Path) -> dict[str, Vector]:
    """Read and validate a shard (a file with hidden states of rows).

    Returns:
        Tables with one row per question, by name, such as 'before.12' (layer 12 before the draft).
    """
    try:
        states: dict[str, Vector] = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {get_cause(error)}.") from None
    for name, block in states.items():
        if block.ndim != 2 or not np.issubdtype(block.dtype, np.floating) or not np.isfinite(block).all():
            raise BadInput(f"the hidden states '{name[:80]}' in {path.name} are not a table of finite numbers.")
    if len({len(block) for block in states.values()}) > 1:
        raise BadInput(f"the hidden states in {path.name} differ in their number of rows.")
    return states


def list_state_names(path: Path) -> list[str]:
    """List the states of a shard without reading them."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the hidden states in {path.name} cannot be read: {get_cause(error)}.") from None
    if invalid := [name for name in names if not STATE_NAME.fullmatch(name)]:
        raise BadInput(f"{path.name} contains '{invalid[0][:80]}', which is not a valid name for hidden states.")
    return names


def digest_states(question_id: str, states: Mapping[str, Vector], index: int) -> str:
    """Compute a digest of a question id and its hidden states. It detects states of another question.

    Args:
        question_id: Id of the question.
        states: The arrays of a shard by name, each with one row per question.
        index: Row of the question in the arrays.
    """
    digest = hashlib.sha256(question_id.encode(errors="surrogatepass"))
    for name in sorted(states):
        digest.update(_describe_block(name, states[name].dtype, states[name].shape[1:]))
        digest.update(states[name][index].tobytes())
    return digest.hexdigest()[:DIGEST_DIGITS]


@functools.lru_cache(maxsize=64)  # all rows of a run have states of the same names, types and sizes
def _describe_block(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Format the name, type and size of hidden states for a digest."""
    return f"|{name}|{dtype}|{shape}|".encode()


RUN_MANIFEST, ROWS_FILE = "run.json", "labels.jsonl"
RECORDED_PREFIX = "recorded:"  # before the model name of imported answers; such a model cannot be loaded


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that are validated on reading. Runs record more.

    Attributes:
        questions: Number of questions.
        samples: Number of sampled answers per question.
        max_tokens: Maximum length of an answer.
        k: Number of passages per question.
        candidates: Number of passages that the reranker chose them from.
        depth: Number of hidden states of the model.
        seakr_layer: Layer whose hidden states at the ends of the samples are compared (SeaKR).
        synthetic: Number of questions that an LLM wrote.
    """

    model: str
    model_fingerprint: str
    prompts_fingerprint: str
    grader: str  # name of the grader
    data: str = ""  # spec of the questions
    data_fingerprint: str = ""
    questions: NonNegativeInt = 0
    retriever: str | None = None  # None without passages
    retriever_fingerprint: str | None = None
    samples: NonNegativeInt | None = None
    max_tokens: NonNegativeInt | None = None
    k: NonNegativeInt | None = None
    reranker: str | None = None
    reranker_fingerprint: str | None = None
    candidates: NonNegativeInt | None = None
    depth: NonNegativeInt | None = None
    open_prompts: str | None = None  # fingerprint of the prompts with passages
    seakr_layer: int | None = None
    synthetic: NonNegativeInt = 0


def hash_settings(settings: Mapping[str, Any]) -> str:
    """Hash the settings of a run. Runs with equal hashes have equal settings and therefore equal rows."""
    return sha256_text(*(f"{key}={settings[key]!r}" for key in sorted(settings)))[:16]


@dataclass(frozen=True, repr=False)
class RunFolder(RowFolder):
    """A label run on disk.

    Args:
        path: Folder of the run.

    Example:
        >>> [row.closed.correct for row in RunFolder(Path("run")).rows()]  # doctest: +SKIP
    """

    version: ClassVar[int] = 1
    manifest_name: ClassVar[str] = RUN_MANIFEST
    rows_name: ClassVar[str] = ROWS_FILE
    folder_type: ClassVar[str] = "label run"
    command: ClassVar[str] = "knowgate label"

    def settings(self) -> dict[str, Any]:
        """Read the identifying settings of the run. A recorded `depth` (number of hidden states) is added.

        Raises:
            ArtifactError: The settings are incomplete or were changed.
        """
        manifest = self.manifest()
        settings: dict[str, Any] = dict(manifest.get("settings", {}))
        hashed = {key: value for key, value in settings.items() if key != "hash"}
        if "hash" in settings and settings["hash"] != hash_settings(hashed):
            raise self.make_error(f"the settings in {RUN_MANIFEST} were changed or damaged")
        if "depth" in manifest:
            settings["depth"] = manifest["depth"]
        self._validate(RunSettings, settings, f"the settings in {RUN_MANIFEST}")
        return settings

    def rows(self) -> Iterator[LabelRow]:
        """Yield the rows in file order, including failed ones."""
        for where, record in self.records():
            yield row_from_json(record, where)

    def append(self, rows: Sequence[LabelRow], vectors: Mapping[str, Vector]) -> None:
        """Append finished rows, and write their hidden states to a new file (shard).

        Args:
            rows: The rows.
            vectors: Hidden states by name; `vectors[name][i]` belongs to the i-th row that did not fail.
        """
        located: dict[str, LabelRow] = {}  # rows with the place of their hidden states, by id
        if vectors:
            shard = write_shard(self.path, vectors)
            succeeded = [row for row in rows if row.error is None]
            for index, row in enumerate(succeeded):
                digest = digest_states(row.id, vectors, index)
                located[row.id] = replace(row, vector=(shard, index), states=digest)
        self.append_records([row_to_json(located.get(row.id, row)) for row in rows])

    # --- hidden states ----------------------------------------------------------------------------

    def vectors(self, rows: Sequence[LabelRow], name: str) -> Vector:
        """Read the hidden states of rows.

        Args:
            rows: Rows of this run.
            name: Name of the states, such as "before.12" for layer 12 before the draft.

        Returns:
            An array with one row per label row.
        """
        states: dict[str, Vector] = {}  # by the id of the row
        for shard, shard_rows in self._group_by_shard(rows).items():  # every shard is read once, for all of its rows
            states |= self._read_states(shard, name, shard_rows)
        if len({state.shape for state in states.values()}) > 1:
            raise self.make_error(f"the hidden states '{name}' have different lengths")
        return np.stack([states[row.id] for row in rows]).astype(np.float32)

    def _group_by_shard(self, rows: Sequence[LabelRow]) -> dict[str, list[tuple[LabelRow, int]]]:
        """Group rows by the shard (file) with their hidden states. Each row comes with its index in the shard."""
        rows_by_shard: dict[str, list[tuple[LabelRow, int]]] = {}
        for row in rows:
            if row.vector is None:
                raise ArtifactError(
                    f"question '{row.id}' in '{self.path}' has no hidden states. Run `knowgate label` again with `layers`."
                )
            shard, index = row.vector
            rows_by_shard.setdefault(shard, []).append((row, index))
        return rows_by_shard

    def vector_names(self) -> list[str]:
        """List the names of the hidden states in all shard files, such as 'before.12'."""
        try:
            names_by_shard = [list_state_names(self.file(path.name)) for path in list_shards(self.path)]
            return sorted(set().union(*names_by_shard))
        except BadInput as error:
            raise self.make_error(str(error)) from None

    def _read_states(self, shard: str, name: str, rows: Sequence[tuple[LabelRow, int]]) -> dict[str, Vector]:
        """Read the hidden states of rows from a shard file. States of other rows are rejected.

        Args:
            shard: Name of the shard file.
            name: Name of the states, such as "before.12" for layer 12 before the draft.
            rows: Rows whose states the shard holds, each with its index in the shard.

        Returns:
            The states of each row, by its id.
        """
        try:
            states = read_shard(self.file(shard))
        except BadInput as error:
            raise self.make_error(str(error)) from None
        if name not in states:
            raise BadSetting(f"'{self.path}' has no hidden states named '{name}'. It has: {', '.join(sorted(states))}.")
        for row, index in rows:
            self._check_row_states(row, index, states, shard)
        return {row.id: states[name][index] for row, index in rows}

    def _check_row_states(self, row: LabelRow, index: int, states: Mapping[str, Vector], shard: str) -> None:
        """Raise an error if a shard does not hold the states of a row at this index."""
        n_rows = len(next(iter(states.values())))  # the same for all states
        if index >= n_rows:
            raise self.make_error(f"'{row.id}' refers to row {index} of {shard}, which has {n_rows} rows")
        if row.states and row.states != digest_states(row.id, states, index):
            raise self.make_error(f"the hidden states of row '{row.id}' in {shard} do not match their checksum")

    # --- display ----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<RunFolder {self.path}: {self._describe()}>"

    def _repr_html_(self) -> str:
        """Show a table in notebooks; reads all rows."""
        try:
            return build_run_table(self.path.name, self.manifest(), self.rows()).html()
        except KnowgateError:
            return f"<p>{escape_html(repr(self))}</p>"

    def _describe(self) -> str:
        """Describe the run in a line for `repr`. Errors become text."""
        if not (self.path / RUN_MANIFEST).is_file():
            return "not started"
        try:
            manifest = self.manifest()
        except KnowgateError as error:
            return str(error)
        settings = manifest.get("settings") or {}
        totals = manifest.get("totals") or {}
        n_questions = totals.get("questions", settings.get("questions"))
        text = f"{settings.get('model')} on {settings.get('data')}, {n_questions} questions"
        return f"{text}, {totals['failed']} failed" if totals.get("failed") else text


# --- runs as arguments ----------------------------------------------------------------------------

RunLike = RunFolder | str | Path
RunsLike = RunLike | Sequence[RunLike]


def open_run(path: str | Path) -> RunFolder:
    """Open the label run in a folder.

    Args:
        path: Folder made by `label`.

    Raises:
        ArtifactError: The folder is not a label run.

    Example:
        >>> run = open_run("runs/mine")  # doctest: +SKIP
    """
    folder = RunFolder(expand_path(path))
    folder.manifest()  # raises ArtifactError if the folder is not a label run
    return folder


def resolve_run_paths(runs: RunsLike) -> list[Path]:
    """Convert one or several runs, given as folders or paths, to paths."""
    run_list = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    invalid = [run for run in run_list if not isinstance(run, RunFolder | str | Path)]
    if invalid:
        raise BadSetting(f"{invalid[0]!r} is not a label run. Pass its folder, or the result of `label` or `open_run`.")
    if not run_list:
        raise BadSetting("no label run (recorded answers) is given. Make one: knowgate label")
    return [run.path if isinstance(run, RunFolder) else expand_path(run) for run in run_list]


# --- models of runs -------------------------------------------------------------------------------


def is_recorded_model(model: str) -> bool:
    """Return whether a model name stands for imported answers, whose server and prompts are unknown."""
    return model.startswith(RECORDED_PREFIX)


def strip_model_prefix(model: str) -> str:
    """Return the name of an LLM without backend prefix and URL.

    Example:
        >>> strip_model_prefix("recorded:my-llm"), strip_model_prefix("openai:my-llm@http://localhost:8000/v1")
        ('my-llm', 'my-llm')
    """
    name = model.removeprefix(RECORDED_PREFIX)
    prefix, colon, rest = name.partition(":")
    name = rest if colon and prefix in MODELS else name
    return re.split(r"@(?=https?://)|#", name)[0]  # what comes before the URL or a '#'


def suggest_data_and_model(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the data spec and the model spec for answering a run again.

    Placeholders such as 'SPEC' stand for unknown values.
    """
    data = str(settings.get("data") or "SPEC")
    model = str(settings["model"])
    return data, "openai:NAME@URL" if is_recorded_model(model) else model


# --- summaries ------------------------------------------------------------------------------------


def build_run_table(name: str, manifest: Mapping[str, Any], rows: Iterable[LabelRow]) -> TextTable:
    """Build the summary table of a label run, with settings and accuracies.

    Args:
        name: Name of the run, for the title.
        manifest: The manifest of the run.
        rows: All rows of the run, including failed ones.
    """
    settings = manifest.get("settings") or {}
    n_failed = 0
    closed_book_grades: list[bool | None] = []
    open_book_grades: list[bool | None] = []
    for row in rows:
        n_failed += row.error is not None
        closed_book_grades.append(row.closed.correct if row.closed else None)
        open_book_grades.append(row.open.correct if row.open else None)
    facts = (
        ("model", str(settings.get("model", "not recorded"))),
        ("data", str(settings.get("data", "not recorded"))),
        ("passages from", str(settings.get("retriever", "not recorded"))),
        ("rows", str(len(closed_book_grades))),
        ("failed", str(n_failed)),
        ("closed-book right", format_proportion(estimate_proportion(closed_book_grades))),
        ("open-book right", format_proportion(estimate_proportion(open_book_grades))),
    )
    return TextTable(f"Label run {name}", ("", ""), facts)
