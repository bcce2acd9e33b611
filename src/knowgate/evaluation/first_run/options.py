"""Options, progress file and progress reporting of a first run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.core.files import check_output_folder, sha256_text, write_json
from knowgate.core.options import Count, Options, Seed, option
from knowgate.core.redaction import redact_urls
from knowgate.core.validation import read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, KnowgateError

DEFAULT_COUNT = 100
# A loss of 5 % can be proven with 72 questions if two gates compete. Of a hundred questions, 80 are used for that.
DEFAULT_MAX_LOSS = 0.05
DEFAULT_OUT, DEFAULT_CONFIG = Path("knowgate-start"), Path("knowgate.toml")
PROGRESS_FILE, INDEX_FOLDER, PROGRESS_VERSION = "start.json", "index", 1
OPTIONS_KEY = "wishes"  # key of the options in the progress file; old files depend on it


class FirstRunOptions(Options):
    """Options of a first run (`knowgate start`): which LLM, documents and questions to make a gate for."""

    docs: str = option("", "Your documents: a folder (txt, md, html, pdf) or a JSONL file.", metavar="DIR")
    index: str = option("", "Index folder or search endpoint to use instead of `docs`.", metavar="DIR|http:URL")
    model: str = option("smollm", "LLM that answers: smollm, hf:NAME_OR_DIR, gguf:FILE, openai:MODEL@URL, ...")
    questions: str = option(
        "",
        "Questions of your users: a text file (one per line), a JSONL file with or without gold answers, or hub:... "
        "Default: the LLM writes questions from the documents, and results are marked as synthetic.",
        metavar="FILE|SPEC",
    )
    count: Count = option(DEFAULT_COUNT, "Maximum number of questions to label.", le=100_000)
    max_loss: float = option(
        DEFAULT_MAX_LOSS,
        "Maximum share of right answers that skipping retrieval may lose, proven with 95 % confidence. With 500 or more "
        "questions, a policy is fitted, and wrong answers that skipping turns right are subtracted.",
        gt=0,
        lt=1,
    )
    writer: str = option("", "LLM that writes the questions if you have none. Default: `model`.", metavar="SPEC")
    out: Path = option(DEFAULT_OUT, "Folder for all results. An interrupted run continues there.", metavar="DIR")
    config: Path = option(DEFAULT_CONFIG, "Settings file to write; `knowgate ask` reads it.", metavar="FILE")
    seed: Seed = option(0, "Random seed of splits, samples and training.")

    def check(self) -> None:
        """Raise BadSetting unless exactly one source of documents is given."""
        if self.docs and self.index:
            raise BadSetting("`docs` and `index` are mutually exclusive: give only one of them.")
        if not (self.docs or self.index):
            raise BadSetting("no documents to search are given. Set `docs` or `index`.")

    def to_record(self) -> dict[str, Any]:
        """Convert to plain data for the progress file. Passwords and keys in URLs are removed."""
        return {name: redact_urls(str(value)) if isinstance(value, str | Path) else value for name, value in self}


# --- reporting ------------------------------------------------------------------------------------


class ProgressReporter:
    """Receives the messages and the progress of a first run (`knowgate start`). This base class ignores them."""

    def say(self, line: str) -> None:
        """Report a message."""

    def warn(self, line: str) -> None:
        """Report a warning."""

    def show(self, stage: str, done: int, total: int, unit: str, pace: str = "") -> None:
        """Report the progress of a stage."""


# --- progress file --------------------------------------------------------------------------------

StepFunction = Callable[[], dict[str, Any]]
StepOutputs = Callable[[dict[str, Any]], Sequence[Path]]  # returns the files and folders that a step has written


@dataclass
class ProgressFile:
    """The progress file of a first run. An interrupted run continues from it.

    Attributes:
        folder: Folder of the first run.
        options: Options of the first run, as plain data.
        steps: Result of each finished step, by the name of the step.
    """

    folder: Path
    options: dict[str, Any]
    steps: dict[str, dict[str, Any]]

    def run_step(
        self, name: str, inputs: tuple[object, ...], work: StepFunction, outputs: StepOutputs
    ) -> dict[str, Any]:
        """Run a step and record its result, or return the recorded result.

        Args:
            name: Name of the step.
            inputs: Everything the result depends on; if it changes, the step runs again.
            work: Does the work and returns the result.
            outputs: Lists the paths that the step has written; if one is missing, the step runs again.
        """
        key = sha256_text(*map(str, inputs))[:16]
        recorded = self.steps.get(name)
        if recorded and recorded.get("key") == key and all(path.exists() for path in outputs(recorded)):
            return recorded
        self.steps[name] = {**work(), "key": key}
        self.save()
        return self.steps[name]

    @contextlib.contextmanager
    def record_options(self) -> Iterator[None]:
        """Write the options to the progress file. A KnowgateError in the block restores the earlier file."""
        file = self.folder / PROGRESS_FILE
        earlier = file.read_bytes() if file.is_file() else None
        self.save()
        try:
            yield
        except KnowgateError:
            if earlier is None:
                file.unlink()
            else:
                file.write_bytes(earlier)
            raise

    def save(self) -> None:
        """Write the progress file."""
        record = {"version": PROGRESS_VERSION, OPTIONS_KEY: self.options, "steps": self.steps}
        write_json(self.folder / PROGRESS_FILE, record)


def open_progress(folder: Path, options: FirstRunOptions) -> ProgressFile:
    """Load the progress of a first run (`knowgate start`), to continue it. Nothing is written yet.

    Finished steps are kept. The given options replace those of the progress file.

    Raises:
        ArtifactError: The folder contains files that are not from a first run.
    """
    check_output_folder(folder, [PROGRESS_FILE, INDEX_FOLDER, f".{INDEX_FOLDER}.lock"], "a first run's")
    earlier = read_progress(folder)
    return ProgressFile(folder, options.to_record(), earlier.steps if earlier else {})


def read_progress(folder: Path) -> ProgressFile | None:
    """Read the progress file of a folder. Returns None if the file does not exist.

    Raises:
        ArtifactError: The file is damaged or of another version.
    """
    file = folder / PROGRESS_FILE
    if not file.is_file():
        return None
    advice = f"Delete {file} and start again. Recorded answers are kept."
    try:
        record = read_json(file)
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}. {advice}") from None
    content = record if isinstance(record, dict) else {}
    options, steps = content.get(OPTIONS_KEY), content.get("steps", {})
    if not isinstance(options, dict) or not isinstance(steps, dict):
        raise ArtifactError(f"the progress file {file} is damaged. {advice}")
    if content.get("version") != PROGRESS_VERSION:
        raise ArtifactError(f"the progress file {file} was written by another version of knowgate. {advice}")
    return ProgressFile(folder, options, steps)
