"""`knowgate eval-rerank`: compare rerankers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from knowgate.cli.console import inform, print_tables, print_text
from knowgate.cli.options import PreferencesOption, parse_integers, path_option
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.display import TextTable, render_markdown_tables
from knowgate.core.files import check_output_folder, write_json, write_text
from knowgate.core.options import Count, Options, Share, option
from knowgate.core.validation import expand_path
from knowgate.data.preferences import PreferenceFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation import reranker_comparison as comparisons
from knowgate.evaluation.report.evaluation_verdict import LEVEL_LABELS
from knowgate.evaluation.report.reranker_report import build_reranker_verdict, write_reranker_page
from knowgate.evaluation.reranker_cache import CachedAnswerer, CachedReranker
from knowgate.evaluation.reranker_comparison import HeldOutPreferences, RerankerComparison
from knowgate.labels.grading import load_grader
from knowgate.models import load_model
from knowgate.retrieval.rerankers import load_reranker
from knowgate.retrieval.rerankers.cross_encoder import RERANKER_BASE, is_aligned_reranker, read_reranker_manifest

# NAME=SPEC. A path or URL that contains '=' does not match, because '/' or ':' comes before its '='.
NAMED_SPEC = re.compile(r"([\w .-]+)=(.+)")


class RerankEvaluationOptions(Options):
    """Options of `knowgate eval-rerank`."""

    base: str | None = option(
        None,
        "Untrained cross-encoder to compare with. Default: the copy that is stored with the reranker.",
        metavar="DIR",
    )
    model: list[str] = option(
        [], "LLM that also answers the questions, with the first passages of each reranker. May be repeated."
    )
    top: str = option("1,3", "Numbers of passages to give the LLMs, separated by commas. Used with `model`.")
    controls: bool = option(
        False,
        "Also compare two baselines that ignore the question. One sorts passages by length, the other by how "
        "often each passage helped with training questions.",
        flag="--controls",
    )
    rerank_margin: Share | None = option(
        None,
        "Also compare a variant that skips reranking if the retriever is sure: its first passage scores higher than "
        "its second by this share, such as 0.2.",
    )
    split: Literal["test", "dev", "train"] = option("test", "Compare on the questions of this split.")
    limit: Count | None = option(None, "Maximum number of questions per data set.")


def eval_rerank(
    pref: PreferencesOption,
    rerank: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]DIR|SPEC",
            help="Reranker to compare, optionally with a name for the tables. May be repeated.",
        ),
    ],
    out: Annotated[Path, path_option("DIR", "Output folder. If interrupted, run the command again.")],
    options: RerankEvaluationOptions,
) -> None:
    """Compare rerankers by how often they rank a helpful passage first.

    `knowgate prefer` has measured which passages help the LLM. The retriever's own order and the best possible order
    (oracle) are always included. With --model, the accuracy of the answers is compared, too. Each source of passages
    gets a table. The LLMs answer the questions of the first source only.

    Example: knowgate eval-rerank --pref pref --rerank my-reranker --model smollm --out result
    """
    check_output_folder(out, ["rerank.json", "answers.jsonl", "scores.jsonl"], "a comparison of rerankers")
    sources = _load_sources(pref, options)
    specs = add_base_reranker(parse_named_specs(rerank), options.base)
    _print_warnings(specs, sources, options.split)
    comparison = _compare(sources, specs, out, options)
    tables = comparisons.build_reranker_tables(comparison)
    _write_comparison(comparison, tables, out)
    print_tables(tables)
    verdict = build_reranker_verdict(comparison)
    print_text(" ".join([f"{LEVEL_LABELS[verdict.level]}:", verdict.headline, *verdict.sentences]))
    inform(f"Written to {out}. Intervals are 95 % bootstrap intervals over questions; differences are paired.")


def _load_sources(pref: Sequence[Path], options: RerankEvaluationOptions) -> list[HeldOutPreferences]:
    """Load the measured questions of a split, grouped by their source of passages."""
    folders = [PreferenceFolder(path) for path in pref]
    sources = comparisons.group_held_out_preferences(folders, options.split, options.limit)
    empty = [source.name for source in sources if not source.rows]
    if empty:
        raise BadInput(
            f"the split '{options.split}' has no measured questions for {', '.join(empty)}. Measure some with `knowgate prefer`."
        )
    return sources


def _write_comparison(comparison: RerankerComparison, tables: Sequence[TextTable], out: Path) -> None:
    """Write the results of a comparison to a folder: JSON, Markdown, a page and predictions."""
    write_json(out / "rerank.json", comparisons.reranker_comparison_to_dict(comparison))
    write_text(out / "rerank.md", render_markdown_tables(tables))
    write_reranker_page(comparison, out / "report.html")
    write_text(out / "predictions.jsonl", "".join(comparisons.iter_prediction_lines(comparison)))


def _compare(
    sources: Sequence[HeldOutPreferences], specs: Mapping[str, str], out: Path, options: RerankEvaluationOptions
) -> RerankerComparison:
    """Load the rerankers and LLMs, compare them, and show the progress. Scores and answers are cached in `out`."""
    passage_counts = parse_integers("--top", options.top, minimum=1)
    with show_progress("comparing", "questions") as progress:
        rerankers = _load_rerankers(specs, out, progress)
        answerers = _make_answerers(options.model, out, progress)
        try:
            return comparisons.compare_rerankers(
                sources,
                rerankers,
                answerers,
                controls=options.controls,
                passage_counts=passage_counts,
                margin=options.rerank_margin,
            )
        except KeyboardInterrupt:
            inform(f"Scores and answers so far are stored in {out}. Run the same command to continue.")
            raise


def _load_rerankers(specs: Mapping[str, str], out: Path, progress: ProgressCallback) -> dict[str, CachedReranker]:
    """Load the rerankers by name. Their scores are cached in the folder `out`."""
    rerankers = {}
    for name, spec in specs.items():
        on_progress = partial(progress, stage=f"reranking: {name}")
        rerankers[name] = CachedReranker(load_reranker(spec), out / "scores.jsonl", on_progress)
    return rerankers


def parse_named_specs(texts: Sequence[str]) -> dict[str, str]:
    """Parse texts of the form NAME=SPEC into specs by name.

    Example: ['new=models/a', 'models/b'] gives {'new': 'models/a', 'b': 'models/b'}.

    Raises:
        BadSetting: Two rerankers have the same name.
    """
    specs: dict[str, str] = {}
    for text in texts:
        name, spec = _split_named_spec(text)
        if name in specs:
            raise BadSetting(
                f"two rerankers have the name '{name}'. Give each its own: --rerank one={specs[name]} --rerank two={spec}"
            )
        specs[name] = spec
    return specs


def _split_named_spec(text: str) -> tuple[str, str]:
    """Split NAME=SPEC. Without a name, the last part of the path is the name."""
    match = NAMED_SPEC.fullmatch(text)
    if match is None or expand_path(text).is_dir():  # the name of a folder may contain '='
        return Path(text).name, text
    return match[1], match[2]


def add_base_reranker(specs: Mapping[str, str], base: str | None) -> dict[str, str]:
    """Return the specs by name, with the base reranker first, if there is one.

    The base is the reranker before its training on preferences. It is the spec named 'base', or else the argument `base`,
    or else the copy in the folder of a trained reranker.
    """
    stored_copies = [Path(spec) / RERANKER_BASE for spec in specs.values()]
    candidates = [specs.get(RERANKER_BASE), base, *(str(folder) for folder in stored_copies if folder.is_dir())]
    first = next((spec for spec in candidates if spec), None)
    return dict(specs) if first is None else {RERANKER_BASE: first, **specs}


def _make_answerers(specs: Sequence[str], out: Path, progress: ProgressCallback) -> dict[str, CachedAnswerer]:
    """Load the LLMs that answer with reranked passages. Their answers are cached in the folder `out`.

    Returns:
        The LLMs with their caches, by the name of the LLM.
    """
    on_progress = partial(progress, stage="answering", unit="answers")
    grader = load_grader("contains")
    answerers = {}
    for spec in specs:
        model = load_model(spec)
        answerers[model.name] = CachedAnswerer(model, grader, out / "answers.jsonl", on_progress=on_progress)
    return answerers


def _print_warnings(specs: Mapping[str, str], sources: Sequence[HeldOutPreferences], split: str) -> None:
    """Warn about the train split, and about rerankers trained for another LLM."""
    if split == "train":
        inform("Rerankers are trained on the train split, so these numbers say nothing about new questions.")
    for name, spec in specs.items():
        aligned_to = read_reranker_manifest(spec).get("aligned_to", {}) if is_aligned_reranker(spec) else {}
        fingerprint = aligned_to.get("model_fingerprint")
        if fingerprint is not None and any(fingerprint != source.model_fingerprint for source in sources):
            inform(f"'{name}' was trained for {aligned_to['model']}, but --pref was measured with another LLM.")
