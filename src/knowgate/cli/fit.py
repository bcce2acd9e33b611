"""`knowgate fit`: train a gate from label runs, or a reranker from preferences."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from knowgate.cli.fit_judge import JUDGES, JudgeOptions, fit_judge_gate
from knowgate.cli.fit_reranker import RERANKER, RerankerOptions, fit_reranker_folder
from knowgate.cli.paths import path
from knowgate.datasets import load_questions
from knowgate.errors import BadSetting, MissingExtra, UnknownName
from knowgate.gates import FITTED
from knowgate.models import load_model
from knowgate.types import Question

if TYPE_CHECKING:
    from knowgate.fitting import Examples, FitReport

ENOUGH, ENOUGH_TESTED = 300, 50
WORDS = Console(stderr=True, soft_wrap=True, highlight=False)


def fit(
    name: Annotated[str, typer.Argument(help="Which gate: probe, fusion, ik, kbm, uar or adaptive; or reranker.")],
    out: Annotated[Path, typer.Option(help="Folder of the fitted gate; use it as --gate FOLDER (--rerank FOLDER).")],
    labels: Annotated[
        list[Path] | None, typer.Option(help="Label run; may be repeated. Every gate is fitted on some.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="known or benefit. Default: benefit where open-book answers exist; known for ik and kbm."),
    ] = None,
    layer: Annotated[str, typer.Option(help="probe: mid, late, last or a number.")] = "mid",
    position: Annotated[str, typer.Option(help="probe: pre (before the answer) or post (after the draft).")] = "pre",
    kind: Annotated[str, typer.Option(help="probe: mlp (the paper's network) or linear.")] = "mlp",
    cheap: Annotated[bool, typer.Option(help="fusion: without samples and extra passes.")] = False,
    early: Annotated[
        bool, typer.Option(help="fusion: only what the first answer token shows; retrieving costs a prefill.")
    ] = False,
    text: Annotated[
        bool | None,
        typer.Option("--text/--no-text", help="fusion: read question and draft as text. Default: if no hidden states."),
    ] = None,
    mode: Annotated[str, typer.Option(help="ik: lora (fine-tuned judge) or text (head over embeddings).")] = "lora",
    tokens: Annotated[int, typer.Option(help="ik: draft tokens it reads: 0, 32, 64 or 128.")] = 32,
    base: Annotated[
        str | None,
        typer.Option(help="ik, kbm: model to fine-tune; uar: model to read. Default: the LLM. reranker: minilm."),
    ] = None,
    head: Annotated[str, typer.Option(help="kbm: mastery or certainty.")] = "mastery",
    tau: Annotated[
        float | None, typer.Option(help="kbm: known from here on. Default: chosen on the dev split.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="ik, kbm: fine-tune all weights instead of LoRA.")] = False,
    epochs: Annotated[
        int | None, typer.Option(help="ik, kbm, reranker: walks over the examples. Default: 3; reranker 1.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Learning rate. Default: ik, kbm 1e-4, with --full 1e-5; reranker 6e-5.")
    ] = None,
    accumulate: Annotated[int, typer.Option(help="ik, kbm: portions a batch of 4 is run in, to save memory.")] = 1,
    criteria: Annotated[
        str, typer.Option(help="uar: labelled questions for intent, knowledge and time, as name=SPEC,...")
    ] = "intent=bench:uar_gate_intent/train,knowledge=bench:uar_gate_knowledge/train,time=bench:uar_gate_time/train",
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Retrieve when need is above this. Default: 0.5; chosen on dev for benefit."),
    ] = None,
    pref: Annotated[
        list[Path] | None,
        typer.Option(parser=path, metavar="PREF", help="reranker: preference folder; may be repeated."),
    ] = None,
    relevance: Annotated[
        str | None, typer.Option(help="reranker: data with contexts the base first learns relevance from.")
    ] = None,
    loss: Annotated[str, typer.Option(help="reranker: infonce (the paper's) or listwise (graded shifts).")] = "infonce",
    temperature: Annotated[float, typer.Option(help="reranker: of the loss.")] = 1.0,
    batch: Annotated[int, typer.Option(help="reranker: questions in a step.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="reranker: only the first questions of --relevance.")] = None,
    seed: Annotated[int, typer.Option(help="Of the splits and of training.")] = 0,
) -> None:
    """Fit a gate to your LLM: splits, training, calibration, measures on held-out questions, a card.

    `fit reranker --pref PREF` teaches a cross-encoder which passages the LLM can use.
    """
    # the card travels: it names folders, not where they lie on this machine
    made_by = shlex.join(
        ["knowgate", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])]
    )
    if name == RERANKER:
        training = {
            "loss": loss,
            "temperature": temperature,
            "epochs": epochs,
            "batch": batch,
            "rate": rate,
            "seed": seed,
        }
        fit_reranker_folder(RerankerOptions(pref or [], base, relevance, limit, training), out, made_by)
        return
    _check(target, position, kind)
    if cheap and early:
        raise BadSetting("--early leaves out all that --cheap does, and the draft; give one of them.")
    judging = JudgeOptions(mode, tokens, base, head, tau, full, epochs or JudgeOptions.epochs, rate, accumulate)
    if name not in FITTED:
        raise UnknownName("fitted gate", name, {**FITTED, RERANKER: None})
    if not labels:
        raise BadSetting(f"fit {name} learns from label runs: give --labels RUN, made by knowgate label.")
    try:
        from knowgate.fitting import (
            fit_adaptive,
            fit_fusion,
            fit_probe,
            fit_uar,
            forget_training,
            load_examples,
            save_fitted,
        )
    except ModuleNotFoundError as error:
        raise MissingExtra("fitting", "train") from error
    chosen: Any = target or ("known" if name in JUDGES or name == "uar" else None)
    layers = () if name in JUDGES else None
    examples = load_examples(labels, target=chosen, layers=layers, seed=seed)
    options: dict[str, Any] = {"layer": layer, "position": position, "kind": kind}
    if name in JUDGES:
        fitted = fit_judge_gate(name, examples, judging, out, seed)
    elif name == "uar":
        fitted = fit_uar(examples, load_model(base or examples.settings["model"]), _criteria(criteria), seed=seed)
    elif name == "adaptive":
        fitted = fit_adaptive(examples)
    elif name == "probe":
        fitted = fit_probe(examples, **options)
    else:
        fitted = fit_fusion(examples, cheap=cheap, early=early, text=text)
    report = save_fitted(fitted, examples, out, command=made_by, threshold=threshold)
    forget_training(out)
    for note in fitted.notes:
        WORDS.print(note)
    table = Table("measure", "test split", box=None)
    for measure, found in report.metrics.items():
        table.add_row(measure, found.shown())
    Console().print(table)
    WORDS.print(f"{name} fitted on '{examples.target}', {examples.split.sizes()}. Use it: knowgate ask --gate {out}")
    WORDS.print(_decides(report))
    _warn(examples, target)


def _decides(report: FitReport) -> str:
    """What the gate will do, and whether it learnt anything."""
    words, auroc = f"It retrieves {report.rule}.", report.metrics["auroc"]
    if auroc.low is not None and auroc.low <= 0.5:
        words += " [yellow]On the held-out questions it is not better than chance"
        other = "known" if report.manifest["target"] == "benefit" else "benefit"
        words += f": label more questions, or try --target {other}.[/yellow]"
    return words


def _warn(examples: Examples, target: str | None) -> None:
    """What a reader of the measures should know."""
    tested = len(examples.split.test)
    if tested < ENOUGH_TESTED:
        WORDS.print(
            f"[yellow]Only {tested} questions were held out to measure on: intervals are wide and calibration is "
            f"rough. Label some {ENOUGH * 2} questions or more.[/yellow]"
        )
    without = sum(row.benefit is None for row in examples.rows)
    if target is None and examples.target == "known" and 0 < without < len(examples.rows):
        WORDS.print(f"'known' was chosen because {without} of {len(examples.rows)} rows have no open-book answer.")


def _criteria(spec: str) -> dict[str, list[Question]]:
    pairs = [part.partition("=") for part in spec.split(",")]
    if any(not found for _, equals, value in pairs for found in (equals, value)):
        raise BadSetting(f"--criteria is '{spec}'; write intent=SPEC,knowledge=SPEC,time=SPEC.")
    return {name.strip(): load_questions(value.strip()) for name, _, value in pairs}


def _check(target: str | None, position: str, kind: str) -> None:
    for option, value, allowed in (
        ("target", target, (None, "known", "benefit")),
        ("position", position, ("pre", "post")),
        ("kind", kind, ("mlp", "linear")),
    ):
        if value not in allowed:
            raise BadSetting(f"--{option} is '{value}'; allowed: {', '.join(str(a) for a in allowed if a)}.")
