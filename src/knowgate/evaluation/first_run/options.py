"""What a first run is told: documents, LLM, questions, how many. Checks them; does nothing with them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from knowgate.core.files import check_output_folder, sha256_text, write_json
from knowgate.core.redaction import redact_urls
from knowgate.core.schema import read_record
from knowgate.core.validation import check_integer, check_seed, read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError

DEFAULT_COUNT, MAX_COUNT = 100, 100_000
DEFAULT_MAX_LOSS = 0.05  # what 72 questions can prove where two gates compete, and a hundred leave 80 for that
DEFAULT_OUT, DEFAULT_CONFIG = Path("knowgate-start"), Path("knowgate.toml")
OPTION_NAMES = ("docs", "index", "model", "questions", "count", "max_loss", "writer", "out", "config", "seed")
OPTION_FLAGS = {name: f"--{name.replace('_', '-')}" for name in OPTION_NAMES}


@dataclass(frozen=True)
class FirstRunOptions:
    """docs: folder or JSONL file; or index: folder or http:URL. questions: file or data spec; '' has them written, by
    `writer` or, where that is '', by the LLM itself. count: questions labelled, at most. max_loss: to be proven."""

    docs: str = ""
    index: str = ""
    model: str = "smollm"
    questions: str = ""
    count: int = DEFAULT_COUNT
    max_loss: float = DEFAULT_MAX_LOSS
    writer: str = ""
    out: Path = DEFAULT_OUT
    config: Path = DEFAULT_CONFIG
    seed: int = 0

    @property
    def source(self) -> str:
        """Documents or index, whichever was given."""
        return self.docs or self.index

    def check(self) -> None:
        """What can be seen before anything is read."""
        if bool(self.docs) == bool(self.index):
            problem = "both --docs and --index are given" if self.docs else "no documents are named"
            raise BadSetting(f"{problem}. Type: knowgate start --docs FOLDER (or --index DIR)")
        check_integer(self.count, "the number of questions (--count)", maximum=MAX_COUNT)
        if not 0 < self.max_loss < 1:
            raise BadSetting(f"--max-loss is {self.max_loss}; it must be above 0 and below 1 (0.05 is five points).")
        check_seed(self.seed)

    def command(self, **other: Any) -> str:
        """What to type for the same first run, or for another one; logins and keys in addresses are left out."""
        usual, own = asdict(FirstRunOptions()), {**asdict(self), **other}
        words = [
            word
            for name, option in OPTION_FLAGS.items()
            if own[name] != usual[name]
            for word in (option, redact_urls(str(own[name])))
        ]
        return shlex.join(["knowgate", "start", *words])

    def record(self) -> dict[str, Any]:
        """Plain data, without logins and keys."""
        return {
            key: redact_urls(value) if isinstance(value, str) else str(value) if isinstance(value, Path) else value
            for key, value in asdict(self).items()
        }

    def changes(self, before: dict[str, Any]) -> list[str]:
        """What is not as it was in an earlier record, in words."""
        now, known = self.record(), {one.name for one in fields(self)} - {"out", "config"}
        return [
            f"{OPTION_FLAGS[key]} was '{before[key]}', now '{now[key]}'"
            for key in now
            if key in known and key in before and before[key] != now[key]
        ]


class ProgressReporter(Protocol):
    """Told in sentences, and how far a long step is."""

    def say(self, line: str) -> None: ...

    def warn(self, line: str) -> None:
        """What must not be missed."""

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None: ...


@dataclass(frozen=True)
class SilentReporter:
    """Nobody listens."""

    def say(self, line: str) -> None:
        pass

    def warn(self, line: str) -> None:
        pass

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        pass


StepFunction = Callable[[], dict[str, Any]]
StepOutputs = Callable[[dict[str, Any]], Sequence[Path]]  # files and folders of a step, by what it came to
PROGRESS_FILE, INDEX_FOLDER, PROGRESS_VERSION = "start.json", "index", 1


@dataclass(frozen=True)
class ProgressRecord:
    """What the file holds. steps: by name, what each came to, with the key of what it was made from."""

    version: int
    wishes: Mapping[str, Any]
    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass
class ProgressFile:
    """Written anew after every step, whole or not at all."""

    folder: Path
    wishes: dict[str, Any]
    steps: dict[str, dict[str, Any]]

    def step(self, name: str, made_from: tuple[object, ...], work: StepFunction, leaves: StepOutputs) -> dict[str, Any]:
        """What the step comes to: as it is on record, if what it leaves is still there, or worked out now and kept."""
        key = sha256_text(*map(str, made_from))[:16]
        found = self.steps.get(name)
        if found is None or found.get("key") != key or not all(path.exists() for path in leaves(found)):
            self.steps[name] = {**work(), "key": key}
            self.save()
        return self.steps[name]

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Wishes are on record from here on, whatever interrupts; those that turn out wrong are taken back."""
        file = self.folder / PROGRESS_FILE
        before = file.read_bytes() if file.is_file() else None
        self.save()
        try:
            yield
        except KnowgateError:
            file.unlink() if before is None else file.write_bytes(before)
            raise

    def save(self) -> None:
        write_json(
            self.folder / PROGRESS_FILE, {"version": PROGRESS_VERSION, "wishes": self.wishes, "steps": self.steps}
        )


def open_progress(folder: Path, wishes: FirstRunOptions) -> ProgressFile:
    """That of this folder with the wishes of now, or a new one; a folder of other things is refused. Writes nothing."""
    check_output_folder(folder, [PROGRESS_FILE, INDEX_FOLDER, f".{INDEX_FOLDER}.lock"], "a first run's")
    found = read_progress(folder)
    return ProgressFile(
        folder, wishes.record(), {name: dict(step) for name, step in found.steps.items()} if found else {}
    )


def read_progress(folder: Path) -> ProgressRecord | None:
    """What an earlier start left in this folder."""
    file = folder / PROGRESS_FILE
    if not file.is_file():
        return None
    advice = f"Delete {file}: labels are kept, and the rest is soon made again."
    try:
        found = read_record(ProgressRecord, read_json(file), str(file), ignore_unknown=True)
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}. {advice}") from None
    if found.version != PROGRESS_VERSION:
        raise ArtifactError(f"{file} was written by another version of knowgate. {advice}")
    return found
