"""`knowgate fit reranker`: its options, and the measures before and after alignment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.made_by import made_by
from knowgate.cli.options import Seed
from knowgate.cli.paths import path
from knowgate.cli.progress import Show, progress
from knowgate.datasets import load_questions
from knowgate.errors import BadInput, BadSetting

if TYPE_CHECKING:
    from knowgate.fitting import AlignedReranker, Group, RerankStep

FEW = 100  # questions, below which a reranker learns next to nothing


def reranker(
    pref: Annotated[
        list[Path] | None,
        typer.Option("--pref", parser=path, metavar="PREF", help="Preference folder to learn from; may be repeated."),
    ] = None,
    *,
    out: Annotated[
        Path, typer.Option("--out", parser=path, metavar="DIR", help="Folder of the reranker; use it as --rerank DIR.")
    ],
    base: Annotated[str | None, typer.Option(help="Cross-encoder to start from. Default: minilm.")] = None,
    relevance: Annotated[
        str | None, typer.Option(help="Data with contexts the base first learns relevance from.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions of --relevance.")] = None,
    loss: Annotated[str, typer.Option(help="infonce (the paper's) or listwise (graded shifts).")] = "infonce",
    temperature: Annotated[float, typer.Option(help="Of the loss.")] = 1.0,
    epochs: Annotated[int, typer.Option(help="Walks over the questions.")] = 1,
    batch: Annotated[int, typer.Option(help="Questions in a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 6e-5,
    seed: Seed = 0,
) -> None:
    """Teach a cross-encoder which passages the LLM can use, from preferences.

    Example: knowgate fit reranker --pref pref --out my-reranker
    """
    from knowgate.files import check_replaceable
    from knowgate.fitting import MINILM, RerankTraining, fit_reranker, save_reranker
    from knowgate.preferences import PreferenceFolder, data_hash, shared_settings
    from knowgate.rerank import MANIFEST

    if not pref:
        raise BadSetting("fit reranker learns from preferences: give --pref PREF, made by knowgate prefer.")
    check_replaceable(out, MANIFEST, "a reranker of ours")  # before the work, not after it
    folders = [PreferenceFolder(folder) for folder in pref]
    settings = shared_settings(folders)
    rows = [row for folder in folders for row in folder.rows()]
    training = RerankTraining(loss, temperature, epochs, batch, learning_rate, seed=seed)
    groups = _relevance(relevance, limit) if relevance else None
    with progress("training", "questions", WORDS) as show:
        fitted = fit_reranker(rows, base=base or MINILM, training=training, relevance=groups, watch=_watching(show))
    save_reranker(fitted, out, settings=settings, data_hash=data_hash(rows), command=made_by())
    _say(fitted, out)


def _relevance(spec: str, limit: int | None) -> list[Group]:
    from knowgate.fitting import relevance_groups

    groups = relevance_groups(load_questions(spec, limit))
    if not groups:
        raise BadInput(f"{spec} has no question with a context that holds its answer; --relevance needs some.")
    return groups


def _watching(show: Show) -> Callable[[str, RerankStep], None]:
    def watch(stage: str, step: RerankStep) -> None:
        show(step.done, step.total, f"{step.rate:.1f} questions/s, loss {step.loss:.3f}", stage=stage)

    return watch


def _say(fitted: AlignedReranker, out: Path) -> None:
    from knowgate.fitting import gains_of
    from knowgate.preferences import NAMES

    gains = gains_of(fitted)
    if fitted.tested:
        table = Table("measure", "before", "after", "gain, 95 % interval", box=None)
        for name in NAMES:
            table.add_row(name, *(part[name].shown() for part in (gains.before, gains.after, gains.gain)))
        plain_console(soft_wrap=False).print(table)
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
