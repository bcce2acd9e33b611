"""`knowgate eval-rerank`: which reranker is better, and by how much?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from knowgate.cli.console import STDERR_CONSOLE, print_tables, print_text
from knowgate.cli.options import PreferencesOption, parse_integers, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.display import render_markdown_tables
from knowgate.core.files import check_output_folder, write_json, write_text
from knowgate.core.options import Count, Options, Share
from knowgate.core.validation import expand_path
from knowgate.data.preferences import PreferenceFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation import reranker_comparison as comparisons
from knowgate.evaluation.report.reranker_report import build_reranker_verdict, write_reranker_page
from knowgate.evaluation.reranker_cache import CachedAnswerer, CachedReranker
from knowgate.evaluation.reranker_comparison import HeldOutPreferences, RerankerComparison
from knowgate.labels.grading import load_grader
from knowgate.models import load_model
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.cross_encoder import RERANKER_BASE, is_aligned_reranker, read_reranker_manifest

NAMED_SPEC = re.compile(r"([\w .-]+)=(.+)")  # NAME=SPEC; paths and URLs contain other characters before an '='


class RerankEvaluationOptions(Options):
    """Options of `knowgate eval-rerank`."""

    base: str | None = Field(
        default=None,
        description="Cross-encoder before alignment. Default: one stored in the folder of a reranker.",
        json_schema_extra={"metavar": "DIR"},
    )
    model: list[str] = Field(
        default_factory=list, description="Also answer with the first passages, with this model; may be repeated."
    )
    top: str = Field(default="1,3", description="With `model`: numbers of passages, separated by commas.")
    controls: bool = Field(
        default=False,
        description="Also compare rankers that read no question: shortest first, passage means.",
        json_schema_extra={"flag": "--controls"},
    )
    rerank_margin: Share | None = Field(
        default=None, description="Skip reranking if the best passage leads by this share of its score."
    )
    split: Literal["test", "dev", "train"] = Field(default="test", description="Which questions to compare on.")
    limit: Count | None = Field(default=None, description="Use only the first questions, up to this number.")


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
            help="Folder for report.html, rerank.md, rerank.json and caches; the same command continues there.",
        ),
    ],
    options: RerankEvaluationOptions,
) -> None:
    """Compare rankers on held-out preferences, and by the answers they lead to; with paired intervals.

    The retriever's order and the oracle's are always included. Folders of several sources (`prefer --source`) make a
    table each; the LLMs answer the questions of the first.

    Example: knowgate eval-rerank --pref pref --rerank my-reranker --model smollm --out result
    """
    check_output_folder(out, ["rerank.json", "answers.jsonl", "scores.jsonl"], "a comparison of rerankers")
    folders = [PreferenceFolder(path) for path in pref]
    sources = comparisons.group_held_out_preferences(folders, options.split, options.limit)
    if empty := [source.name for source in sources if not source.rows]:
        raise BadInput(
            f"the preferences by {', '.join(empty)} hold no question of the split '{options.split}'. Measure more with "
            "`knowgate prefer`, or use another --split."
        )
    specs = add_base_reranker(parse_named_specs(rerank), options.base)
    _print_warnings(specs, sources, options.split)
    comparison = _compare(sources, specs, out, options)
    tables = comparisons.build_reranker_tables(comparison)
    write_json(out / "rerank.json", comparisons.reranker_comparison_to_dict(comparison))
    write_text(out / "rerank.md", render_markdown_tables(tables))
    write_reranker_page(comparison, out / "report.html")
    write_text(out / "predictions.jsonl", "".join(comparisons.iter_prediction_lines(comparison)))
    print_tables(tables)
    verdict = build_reranker_verdict(comparison)
    print_text(" ".join([f"{verdict.label}:", verdict.headline, *verdict.sentences]))
    STDERR_CONSOLE.print(f"Written to {out}. 95 % bootstrap intervals over questions; differences are paired.")


def _compare(
    sources: Sequence[HeldOutPreferences], specs: Mapping[str, str], out: Path, options: RerankEvaluationOptions
) -> RerankerComparison:
    settings = comparisons.ComparisonSettings(
        options.controls, parse_integers("--top", options.top, minimum=1), options.rerank_margin
    )
    with show_progress("comparing", "questions", STDERR_CONSOLE) as progress:
        rerankers = {name: _cache_reranker(name, spec, out, progress) for name, spec in specs.items()}
        answerers = _make_answerers(options.model, out, progress)
        try:
            return comparisons.compare_rerankers(sources, rerankers, answerers, settings)
        except KeyboardInterrupt:
            STDERR_CONSOLE.print(f"Scores and answers so far are stored in {out}; the same command continues.")
            raise


def parse_named_specs(texts: Sequence[str]) -> dict[str, str]:
    """Parse NAME=SPEC. A spec without a name is named by its folder."""
    specs: dict[str, str] = {}
    for text in texts:
        match = None if expand_path(text).is_dir() else NAMED_SPEC.fullmatch(text)
        name, spec = (match[1], match[2]) if match else (Path(text).name, text)
        if name in specs:
            raise BadSetting(
                f"two rerankers are called '{name}'. Name them: --rerank one={specs[name]} --rerank two={spec}"
            )
        specs[name] = spec
    return specs


def add_base_reranker(specs: Mapping[str, str], base: str | None) -> dict[str, str]:
    """Put the cross-encoder before alignment first: the given one, or one that `fit reranker` stored."""
    if RERANKER_BASE in specs:
        return {RERANKER_BASE: specs[RERANKER_BASE], **specs}
    stored = [str(Path(spec) / RERANKER_BASE) for spec in specs.values() if (Path(spec) / RERANKER_BASE).is_dir()]
    base = base or next(iter(stored), None)
    return {**({RERANKER_BASE: base} if base else {}), **specs}


def _cache_reranker(name: str, spec: str, out: Path, progress: ProgressCallback) -> CachedReranker:
    def on_progress(done: int, total: int) -> None:
        progress(done, total, stage=f"reranking: {name}")

    return CachedReranker(load_reranker(spec), out / "scores.jsonl", on_progress)


def _make_answerers(specs: Sequence[str], out: Path, progress: ProgressCallback) -> dict[str, CachedAnswerer]:
    def on_progress(done: int, total: int) -> None:
        progress(done, total, stage="answering", unit="answers")

    grader = load_grader("contains", None, "implies")
    models = [load_model(spec) for spec in specs]
    return {
        model.name: CachedAnswerer(model, grader, out / "answers.jsonl", on_progress=on_progress) for model in models
    }


def _print_warnings(specs: Mapping[str, str], sources: Sequence[HeldOutPreferences], split: str) -> None:
    if split == "train":
        STDERR_CONSOLE.print("Rerankers are trained on the train split: these numbers say nothing about new questions.")
    for name, spec in specs.items():
        if not is_aligned_reranker(spec):
            if name != RERANKER_BASE:
                STDERR_CONSOLE.print(f"'{spec}' was not aligned by `knowgate fit reranker`; it is measured as it is.")
            continue
        aligned_to = read_reranker_manifest(spec).get("aligned_to", {})
        if any(aligned_to.get("model_fingerprint") != source.model_fingerprint for source in sources):
            llm = aligned_to.get("model", "?")
            STDERR_CONSOLE.print(f"'{name}' was aligned to {llm}; these preferences are another LLM's.")
