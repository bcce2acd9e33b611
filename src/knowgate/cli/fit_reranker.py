"""What `knowgate fit reranker` does: its options, progress, and the measures before and after alignment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from knowgate.datasets import load_questions
from knowgate.errors import BadInput, BadSetting, MissingExtra

if TYPE_CHECKING:
    from knowgate.fitting import AlignedReranker, Group, RerankStep
    from knowgate.preferences import PreferenceFolder

RERANKER = "reranker"
SAME = ("model_fingerprint", "prompts_fingerprint", "source")  # what folders that are used together must share
WORDS = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
FEW = 100  # questions, below which a reranker learns next to nothing


@dataclass(frozen=True)
class RerankerOptions:
    """Options of the command; None where the library's own default holds."""

    pref: Sequence[Path]
    base: str | None = None
    relevance: str | None = None
    limit: int | None = None
    training: dict[str, Any] = field(default_factory=dict)  # loss, temperature, epochs, batch, rate, seed


def fit_reranker_folder(options: RerankerOptions, out: Path, command: str) -> None:
    """Train, measure before and after, write the folder."""
    try:
        from knowgate.fitting import MINILM, RerankTraining, fit_reranker, save_reranker
        from knowgate.preferences import PreferenceFolder, data_hash
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    if not options.pref:
        raise BadSetting("fit reranker learns from preferences: give --pref PREF, made by knowgate prefer.")
    folders = [PreferenceFolder(pref) for pref in options.pref]
    settings = shared_settings(folders)
    rows = [row for folder in folders for row in folder.rows()]
    given = {name: value for name, value in options.training.items() if value is not None}
    relevance = _relevance(options.relevance, options.limit) if options.relevance else None
    with _watching() as watch:
        fitted = fit_reranker(
            rows, base=options.base or MINILM, training=RerankTraining(**given), relevance=relevance, watch=watch
        )
    save_reranker(fitted, out, settings=settings, data_hash=data_hash(rows), command=command)
    _say(fitted, out)


def shared_settings(folders: Sequence[PreferenceFolder]) -> dict[str, Any]:
    """Settings of the first folder; the others must be preferences of the same LLM, taken in the same way."""
    settings: list[dict[str, Any]] = [folder.manifest()["settings"] for folder in folders]
    for folder, other in zip(folders[1:], settings[1:], strict=True):
        for key in SAME:
            if other.get(key) != settings[0].get(key):
                raise BadSetting(
                    f"'{folder.path}' cannot be used with '{folders[0].path}': {key} is {other.get(key)} there and "
                    f"{settings[0].get(key)} here."
                )
    return settings[0]


def _relevance(spec: str, limit: int | None) -> list[Group]:
    from knowgate.fitting import relevance_groups

    groups = relevance_groups(load_questions(spec, limit))
    if not groups:
        raise BadInput(f"{spec} has no question with a context that holds its answer; --relevance needs some.")
    return groups


@contextmanager
def _watching() -> Iterator[Any]:
    """A bar on stderr for each stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[pace]}"), TimeRemainingColumn())
    with Progress(*columns, console=WORDS, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def watch(stage: str, step: RerankStep) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, pace="")
            pace = f"{step.rate:.1f} questions/s, loss {step.loss:.3f}"
            progress.update(tasks[stage], completed=step.done, total=step.total, pace=pace)

        yield watch


def _say(fitted: AlignedReranker, out: Path) -> None:
    from knowgate.fitting import gains_of
    from knowgate.preferences import NAMES

    gains = gains_of(fitted)
    if fitted.tested:
        table = Table("measure", "before", "after", "gain, 95 % interval", box=None)
        for name in NAMES:
            table.add_row(name, *(part[name].shown() for part in (gains.before, gains.after, gains.gain)))
        Console().print(table)
    else:
        WORDS.print(
            "No held-out question of these preferences has passages of both kinds, so nothing was measured. Prefer "
            "more questions (some hundred), or a folder of test questions: knowgate prefer --split test"
        )
    if fitted.alignment.groups < FEW:
        WORDS.print(f"Only {fitted.alignment.groups} questions were learnt from; the paper has 7,622. Prefer more.")
    cut = fitted.cut
    if cut.questions or cut.passages:
        WORDS.print(f"Cut to the paper's limits: {cut.questions} questions, {cut.passages} passages.")
    WORDS.print(
        f"Reranker aligned on {fitted.alignment.groups} questions, measured on {len(fitted.tested)}. "
        f"Use it: knowgate ask --rerank {out}"
    )
