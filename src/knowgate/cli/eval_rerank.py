"""`knowgate eval-rerank`: which reranker is better, and by how much?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS
from knowgate.cli.numbers import whole_numbers
from knowgate.cli.options import Limit, Prefs, RerankMargin
from knowgate.cli.paths import path
from knowgate.cli.progress import Show, progress
from knowgate.cli.tables import print_sheets, print_text
from knowgate.display import markdown_tables
from knowgate.doors import user_path
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation import (
    Answering,
    HeldOut,
    KeptScores,
    compare_rerankers,
    held_out,
    prediction_lines,
    rerank_json,
    rerank_sheets,
)
from knowgate.files import check_own, write_json, write_text
from knowgate.labels import load_grader
from knowgate.models import load_model
from knowgate.preferences import PreferenceFolder
from knowgate.report import rerank_verdict, write_rerank_page
from knowgate.rerank import BASE, is_aligned, load_reranker, read_manifest
from knowgate.types import Reranker

SPLITS = ("train", "dev", "test")
NAMED = re.compile(r"([\w .-]+)=(.+)")  # NAME=SPEC; a folder or a URL has other signs before an equals sign


def eval_rerank(
    pref: Prefs,
    rerank: Annotated[
        list[str],
        typer.Option(metavar="[NAME=]DIR|SPEC", help="Reranker to compare; may be repeated. Named by its folder."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=path,
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
    rerank_margin: RerankMargin = None,
    split: Annotated[str, typer.Option(help="Which questions: test, dev or train.")] = "test",
    limit: Limit = None,
) -> None:
    """Compare rankers on held-out preferences, and by the answers they lead to; with paired intervals.

    The retriever's order and the oracle's are always there. Folders of several sources (`prefer --source`) make a table
    each; the LLMs answer the questions of the first.

    Example: knowgate eval-rerank --pref pref --rerank my-reranker --model smollm --out result
    """
    if split not in SPLITS:
        raise BadSetting(f"--split is '{split}'; allowed: {', '.join(SPLITS)}.")
    check_own(out, ["rerank.json", "answers.jsonl", "scores.jsonl"], "a comparison of rerankers")
    sets = held_out([PreferenceFolder(one) for one in pref], split, limit)
    empty = [held.name for held in sets if not held.rows]
    if empty:
        raise BadInput(
            f"the preferences by {', '.join(empty)} hold no question of the part '{split}'; prefer more, or use "
            "another --split."
        )
    specs = with_base(named(rerank), base)
    _warn(specs, sets, split)
    with progress("comparing", "questions", WORDS) as show:
        try:
            found = compare_rerankers(
                sets,
                {name: _kept(name, load_reranker(spec), out, show) for name, spec in specs.items()},
                answering=_answering(model or [], out, show),
                controls=controls,
                shown=whole_numbers("--top", top, least=1),
                margin=rerank_margin,
            )
        except KeyboardInterrupt:
            WORDS.print(f"Scores and answers so far are kept in {out}; the same command goes on.")
            raise
    sheets = rerank_sheets(found)
    write_json(out / "rerank.json", rerank_json(found))
    write_text(out / "rerank.md", markdown_tables(sheets))
    write_rerank_page(found, out / "report.html")
    write_text(out / "predictions.jsonl", "".join(prediction_lines(found)))
    print_sheets(sheets)
    said = rerank_verdict(found)
    print_text(" ".join([f"{said.label}:", said.headline, *said.sentences]))
    WORDS.print(f"Written to {out}. 95 % bootstrap intervals over questions; differences are paired.")


def named(given: Sequence[str]) -> dict[str, str]:
    """Names and specs; without a name, that of the folder."""
    found: dict[str, str] = {}
    for text in given:
        match = None if user_path(text).is_dir() else NAMED.fullmatch(text)
        name, spec = (match[1], match[2]) if match else (Path(text).name, text)
        if name in found:
            raise BadSetting(
                f"two rerankers are called '{name}'; name them: --rerank one={found[name]} --rerank two={spec}"
            )
        found[name] = spec
    return found


def with_base(specs: Mapping[str, str], base: str | None) -> dict[str, str]:
    """The cross-encoder before alignment first: the one given, else one that `fit reranker` kept in a folder."""
    if BASE in specs:
        return {BASE: specs[BASE], **specs}
    kept = [str(Path(spec) / BASE) for spec in specs.values() if (Path(spec) / BASE).is_dir()]
    before = base or next(iter(kept), None)
    return {**({BASE: before} if before else {}), **specs}


def _kept(name: str, reranker: Reranker, out: Path, show: Show) -> KeptScores:
    return KeptScores(reranker, out / "scores.jsonl", lambda done, total: show(done, total, stage=f"reranking: {name}"))


def _answering(specs: Sequence[str], out: Path, show: Show) -> dict[str, Answering]:
    grader, file = load_grader("contains", None, "implies"), out / "answers.jsonl"
    return {
        llm.name: Answering(
            llm, grader, file, watch=lambda done, total: show(done, total, stage="answering", unit="answers")
        )
        for llm in map(load_model, specs)
    }


def _warn(specs: Mapping[str, str], sets: Sequence[HeldOut], split: str) -> None:
    """What a reader of the table should know."""
    if split == "train":
        WORDS.print("The train part is what rerankers learn from: these figures say nothing about new questions.")
    for name, spec in specs.items():
        if not is_aligned(spec):
            if name != BASE:
                WORDS.print(f"'{spec}' was not aligned by knowgate fit reranker; it is measured as it is.")
            continue
        made = read_manifest(spec).get("aligned_to", {})
        if any(made.get("model_fingerprint") != held.model_fingerprint for held in sets):
            WORDS.print(f"'{name}' was aligned to {made.get('model', '?')}; these preferences are another LLM's.")
