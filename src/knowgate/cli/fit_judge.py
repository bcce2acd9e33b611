"""What `knowgate fit` does for ik and kbm: their options, and a progress bar with examples a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from knowgate.errors import BadSetting

if TYPE_CHECKING:
    from knowgate.fitting import Examples, FitResult, JudgeStep, Watch

JUDGES = ("ik", "kbm")


@dataclass(frozen=True)
class JudgeOptions:
    """Options of the command; None where the library's own default holds."""

    mode: str = "lora"
    tokens: int = 32
    base: str | None = None
    head: str = "mastery"
    tau: float | None = None
    full: bool = False
    epochs: int = 3
    rate: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("mode", self.mode, ("lora", "text")),
            ("head", self.head, ("mastery", "certainty")),
        ):
            if value not in allowed:
                raise BadSetting(f"--{option} is '{value}'; allowed: {', '.join(allowed)}.")


def fit_judge_gate(name: str, examples: Examples, options: JudgeOptions, out: Path, seed: int) -> FitResult:
    """Train, or go on with what an interrupted command left beside `out`."""
    from knowgate.fitting import JudgeTraining, fit_ik, fit_ik_text, fit_kbm, training_folder

    if name == "ik" and options.mode == "text":
        return fit_ik_text(examples, tokens=options.tokens)
    training = JudgeTraining(
        options.epochs, accumulate=options.accumulate, rate=options.rate, full=options.full, seed=seed
    )  # fmt: skip
    with watching() as watch:
        shared: dict[str, Any] = {
            "base": options.base,
            "training": training,
            "work": training_folder(out),
            "watch": watch,
        }
        if name == "ik":
            return fit_ik(examples, tokens=options.tokens, **shared)
        return fit_kbm(examples, head=options.head, tau=options.tau, **shared)  # type: ignore[arg-type]


@contextmanager
def watching() -> Iterator[Watch]:
    """A bar on stderr; each epoch's losses stay as lines above it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("training", rate="")

        def watch(step: JudgeStep) -> None:
            said = f"epoch {step.epoch}, loss {step.loss:.3f}"
            rate = f"{step.rate:.1f} examples/s"
            progress.update(task, description=said, completed=step.done, total=step.total, rate=rate)
            if step.dev_loss is not None:
                progress.console.print(f"{said}, dev loss {step.dev_loss:.3f}, {rate}")

        yield watch
