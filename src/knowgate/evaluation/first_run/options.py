"""Options, progress file and progress reporting of a first run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from knowgate.core.files import check_output_folder, sha256_text, write_json
from knowgate.core.options import Count, Options, Seed
from knowgate.core.redaction import redact_urls
from knowgate.core.validation import read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError

DEFAULT_COUNT = 100
DEFAULT_MAX_LOSS = 0.05  # provable with 72 questions where two gates compete; a hundred leave 80 for that
DEFAULT_OUT, DEFAULT_CONFIG = Path("knowgate-start"), Path("knowgate.toml")
PROGRESS_FILE, INDEX_FOLDER, PROGRESS_VERSION = "start.json", "index", 1
OPTIONS_KEY = "wishes"  # of the progress file


class FirstRunOptions(Options):
    """Options of a first run."""

    docs: str = Field(
        default="",
        description="Documents: folder (txt, md, html, pdf) or JSONL file.",
        json_schema_extra={"metavar": "DIR"},
    )
    index: str = Field(
        default="",
        description="Instead of `docs`: an index folder or search endpoint.",
        json_schema_extra={"metavar": "DIR|http:URL"},
    )
    model: str = Field(
        default="smollm", description="The LLM: smollm, hf:NAME_OR_DIR, gguf:FILE, openai:MODEL@URL, ..."
    )
    questions: str = Field(
        default="",
        description="What your users ask: text (one a line), JSONL with or without gold answers, hub:... Default: the "
        "LLM writes some from the documents, marked synthetic.",
        json_schema_extra={"metavar": "FILE|SPEC"},
    )
    count: Count = Field(default=DEFAULT_COUNT, le=100_000, description="Questions to label, at most.")
    max_loss: float = Field(
        default=DEFAULT_MAX_LOSS,
        gt=0,
        lt=1,
        description="Share of answers that skipping may lose, at most; to be proven at 95 %.",
    )
    writer: str = Field(
        default="",
        description="LLM that writes the questions, if not `model` itself.",
        json_schema_extra={"metavar": "SPEC"},
    )
    out: Path = Field(
        default=DEFAULT_OUT,
        description="Folder for everything; the same command continues there.",
        json_schema_extra={"metavar": "DIR"},
    )
    config: Path = Field(
        default=DEFAULT_CONFIG,
        description="Settings file to write, which `knowgate ask` then reads.",
        json_schema_extra={"metavar": "FILE"},
    )
    seed: Seed = Field(default=0, description="Seed of splits, samples and training.")

    def check(self) -> None:
        """Raise BadSetting unless exactly one source of documents is given."""
        if self.docs and self.index:
            raise BadSetting("`docs` and `index` are mutually exclusive: give one.")
        if not (self.docs or self.index):
            raise BadSetting("no documents are named: give `docs` (or `index`).")

    def to_record(self) -> dict[str, Any]:
        """Convert to plain data, without logins and keys in URLs."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: redact_urls(str(value)) if isinstance(value, str | Path) else value for name, value in values.items()
        }

    def describe_changes(self, earlier: Mapping[str, Any]) -> list[str]:
        """Describe the options that differ from an earlier record."""
        current = {name: value for name, value in self.to_record().items() if name not in ("out", "config")}
        return [
            f"`{name}` was '{earlier[name]}', now '{value}'"
            for name, value in current.items()
            if name in earlier and earlier[name] != value
        ]


# --- reporting ------------------------------------------------------------------------------------


class ProgressReporter(Protocol):
    """Receives messages and progress of a first run."""

    def say(self, line: str) -> None:
        """Report a message."""

    def warn(self, line: str) -> None:
        """Report a warning."""

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        """Report the progress of a stage."""


@dataclass(frozen=True)
class SilentReporter:
    """A reporter that ignores everything."""

    def say(self, line: str) -> None:
        """Ignore a message."""

    def warn(self, line: str) -> None:
        """Ignore a warning."""

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        """Ignore progress."""


# --- progress file --------------------------------------------------------------------------------

StepFunction = Callable[[], dict[str, Any]]
StepOutputs = Callable[[dict[str, Any]], Sequence[Path]]  # files and folders of a step, from its result


@dataclass(frozen=True)
class ProgressRecord:
    """The content of a progress file: the options, and the result of each finished step by name."""

    options: Mapping[str, Any]
    steps: Mapping[str, Mapping[str, Any]]


@dataclass
class ProgressFile:
    """The progress file of a first run, written atomically after every step."""

    folder: Path
    options: dict[str, Any]
    steps: dict[str, dict[str, Any]]

    def run_step(
        self, name: str, inputs: tuple[object, ...], work: StepFunction, outputs: StepOutputs
    ) -> dict[str, Any]:
        """Return the recorded result of a step if inputs and outputs are unchanged; otherwise run and record it."""
        key = sha256_text(*map(str, inputs))[:16]
        recorded = self.steps.get(name)
        if recorded is None or recorded.get("key") != key or not all(path.exists() for path in outputs(recorded)):
            self.steps[name] = {**work(), "key": key}
            self.save()
        return self.steps[name]

    @contextlib.contextmanager
    def record_options(self) -> Iterator[None]:
        """Record the options; restore the earlier file if the block shows that they are wrong."""
        file = self.folder / PROGRESS_FILE
        earlier = file.read_bytes() if file.is_file() else None
        self.save()
        try:
            yield
        except KnowgateError:
            file.unlink() if earlier is None else file.write_bytes(earlier)
            raise

    def save(self) -> None:
        """Write the file."""
        record = {"version": PROGRESS_VERSION, OPTIONS_KEY: self.options, "steps": self.steps}
        write_json(self.folder / PROGRESS_FILE, record)


def open_progress(folder: Path, options: FirstRunOptions) -> ProgressFile:
    """Open the progress file of a folder with new options. Writes nothing.

    Raises:
        ArtifactError: The folder contains something else than a first run.
    """
    check_output_folder(folder, [PROGRESS_FILE, INDEX_FOLDER, f".{INDEX_FOLDER}.lock"], "a first run's")
    earlier = read_progress(folder)
    steps = {name: dict(step) for name, step in earlier.steps.items()} if earlier else {}
    return ProgressFile(folder, options.to_record(), steps)


def read_progress(folder: Path) -> ProgressRecord | None:
    """Read the progress file of a folder; None if there is none.

    Raises:
        ArtifactError: The file is damaged or of another version.
    """
    file = folder / PROGRESS_FILE
    if not file.is_file():
        return None
    advice = f"Delete {file}: labels are kept, and the rest is made again quickly."
    try:
        record = read_json(file)
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}. {advice}") from None
    options, steps = (record.get(OPTIONS_KEY), record.get("steps", {})) if isinstance(record, dict) else (None, None)
    if not isinstance(options, dict) or not isinstance(steps, dict):
        raise ArtifactError(f"{file} is damaged. {advice}")
    if record.get("version") != PROGRESS_VERSION:
        raise ArtifactError(f"{file} was written by another version of knowgate. {advice}")
    return ProgressRecord(options, steps)
