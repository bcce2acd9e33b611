"""`knowgate eval-rerank`: which reranker is better, and by how much?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_tables, print_text
from knowgate.cli.options import LimitOption, PreferencesOption, RerankMarginOption, parse_integers, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.display import render_markdown_tables
from knowgate.core.files import check_output_folder, write_json, write_text
from knowgate.core.validation import expand_path
from knowgate.data.preferences import PreferenceFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.report.reranker_report import build_reranker_verdict, write_reranker_page
from knowgate.evaluation.reranker_cache import CachedAnswerer, CachedReranker
from knowgate.evaluation.reranker_comparison import (
    HeldOutPreferences,
    build_reranker_tables,
    compare_rerankers,
    group_held_out_preferences,
    iter_prediction_lines,
    reranker_comparison_to_dict,
)
from knowgate.labels.grading import load_grader
from knowgate.models import load_model
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.cross_encoder import RERANKER_BASE, is_aligned_reranker, read_reranker_manifest
from knowgate.types import Reranker

SPLITS = ("train", "dev", "test")
NAMED_SPEC = re.compile(r"([\w .-]+)=(.+)")  # NAME=SPEC; a folder or a URL has other signs before an equals sign


def eval_rerank(
    pref: PreferencesOption,
    rerank: Annotated[
        list[str],
        typer.Option(metavar="[NAME=]DIR|SPEC", help="Reranker to compare; may be repeated. Named by its folder."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=parse_path,
            metavar="DIR",
            help="Folder for report.html, rerank.md, rerank.json and what was scored; the same command goes on there.",
        ),
    ],
    base: Annotated[
        str | None, typer.Option(metavar="DIR", help="Cross-encoder before alignment. Default: one kept in a DIR.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Also answer with the first passages, with this model; may be repeated.")
    ] = None,
    top: Annotated[str, typer.Option(help="With --model: how many passages, between commas.")] = "1,3",
    controls: Annotated[
        bool, typer.Option("--controls", help="Also rankers that read no question: shortest first, passage means.")
    ] = False,
    rerank_margin: RerankMarginOption = None,
    split: Annotated[str, typer.Option(help="Which questions: test, dev or train.")] = "test",
    limit: LimitOption = None,
) -> None:
    """Compare rankers on held-out preferences, and by the answers they lead to; with paired intervals.

    The retriever's order and the oracle's are always there. Folders of several sources (`prefer --source`) make a table
    each; the LLMs answer the questions of the first.

    Example: knowgate eval-rerank --pref pref --rerank my-reranker --model smollm --out result
    """
    if split not in SPLITS:
        raise BadSetting(f"--split is '{split}'; allowed: {', '.join(SPLITS)}.")
    check_output_folder(out, ["rerank.json", "answers.jsonl", "scores.jsonl"], "a comparison of rerankers")
    sets = group_held_out_preferences([PreferenceFolder(one) for one in pref], split, limit)
    empty = [held.name for held in sets if not held.rows]
    if empty:
        raise BadInput(
            f"the preferences by {', '.join(empty)} hold no question of the part '{split}'; prefer more, or use "
            "another --split."
        )
    specs = add_base_reranker(parse_named_specs(rerank), base)
    _warn(specs, sets, split)
    with show_progress("comparing", "questions", STDERR_CONSOLE) as show:
        try:
            found = compare_rerankers(
                sets,
                {name: _kept(name, load_reranker(spec), out, show) for name, spec in specs.items()},
                answering=_answering(model or [], out, show),
                controls=controls,
                shown=parse_integers("--top", top, minimum=1),
                margin=rerank_margin,
            )
        except KeyboardInterrupt:
            STDERR_CONSOLE.print(f"Scores and answers so far are kept in {out}; the same command goes on.")
            raise
    sheets = build_reranker_tables(found)
    write_json(out / "rerank.json", reranker_comparison_to_dict(found))
    write_text(out / "rerank.md", render_markdown_tables(sheets))
    write_reranker_page(found, out / "report.html")
    write_text(out / "predictions.jsonl", "".join(iter_prediction_lines(found)))
    print_tables(sheets)
    said = build_reranker_verdict(found)
    print_text(" ".join([f"{said.label}:", said.headline, *said.sentences]))
    STDERR_CONSOLE.print(f"Written to {out}. 95 % bootstrap intervals over questions; differences are paired.")


def parse_named_specs(given: Sequence[str]) -> dict[str, str]:
    """Names and specs; without a name, that of the folder."""
    found: dict[str, str] = {}
    for text in given:
        match = None if expand_path(text).is_dir() else NAMED_SPEC.fullmatch(text)
        name, spec = (match[1], match[2]) if match else (Path(text).name, text)
        if name in found:
            raise BadSetting(
                f"two rerankers are called '{name}'; name them: --rerank one={found[name]} --rerank two={spec}"
            )
        found[name] = spec
    return found


def add_base_reranker(specs: Mapping[str, str], base: str | None) -> dict[str, str]:
    """The cross-encoder before alignment first: the one given, else one that `fit reranker` kept in a folder."""
    if RERANKER_BASE in specs:
        return {RERANKER_BASE: specs[RERANKER_BASE], **specs}
    kept = [str(Path(spec) / RERANKER_BASE) for spec in specs.values() if (Path(spec) / RERANKER_BASE).is_dir()]
    before = base or next(iter(kept), None)
    return {**({RERANKER_BASE: before} if before else {}), **specs}


def _kept(name: str, reranker: Reranker, out: Path, show: ProgressCallback) -> CachedReranker:
    return CachedReranker(
        reranker, out / "scores.jsonl", lambda done, total: show(done, total, stage=f"reranking: {name}")
    )


def _answering(specs: Sequence[str], out: Path, show: ProgressCallback) -> dict[str, CachedAnswerer]:
    grader, file = load_grader("contains", None, "implies"), out / "answers.jsonl"
    return {
        llm.name: CachedAnswerer(
            llm, grader, file, watch=lambda done, total: show(done, total, stage="answering", unit="answers")
        )
        for llm in map(load_model, specs)
    }


def _warn(specs: Mapping[str, str], sets: Sequence[HeldOutPreferences], split: str) -> None:
    """What a reader of the table should know."""
    if split == "train":
        STDERR_CONSOLE.print(
            "The train part is what rerankers learn from: these figures say nothing about new questions."
        )
    for name, spec in specs.items():
        if not is_aligned_reranker(spec):
            if name != RERANKER_BASE:
                STDERR_CONSOLE.print(f"'{spec}' was not aligned by knowgate fit reranker; it is measured as it is.")
            continue
        made = read_reranker_manifest(spec).get("aligned_to", {})
        if any(made.get("model_fingerprint") != held.model_fingerprint for held in sets):
            STDERR_CONSOLE.print(
                f"'{name}' was aligned to {made.get('model', '?')}; these preferences are another LLM's."
            )
