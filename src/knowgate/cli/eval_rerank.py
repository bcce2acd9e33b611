"""`knowgate eval-rerank`: is the aligned reranker better, and by how much?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.options import Limit, Prefs, RerankMargin
from knowgate.cli.paths import path
from knowgate.errors import BadInput, BadSetting
from knowgate.files import check_own, write_json, write_text
from knowgate.models import load_model
from knowgate.rerank import BASE, is_aligned, load_reranker, read_manifest
from knowgate.types import Reranker

SPLITS = ("train", "dev", "test")


def eval_rerank(
    pref: Prefs,
    rerank: Annotated[str, typer.Option(metavar="DIR", help="Aligned reranker, or any cross-encoder.")],
    out: Annotated[
        Path, typer.Option(parser=path, metavar="DIR", help="Folder for rerank.md, rerank.json and the answers.")
    ],
    base: Annotated[
        str | None, typer.Option(metavar="DIR", help="Cross-encoder before alignment. Default: the one kept in DIR.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Also answer with the first 1 and 3 passages, with this model.")
    ] = None,
    rerank_margin: RerankMargin = None,
    split: Annotated[str, typer.Option(help="Which questions: test, dev or train.")] = "test",
    limit: Limit = None,
) -> None:
    """Compare rankers on held-out preferences: retriever, base, aligned, oracle; with paired intervals.

    Example: knowgate eval-rerank --pref pref --rerank my-reranker --model smollm --out result
    """
    from knowgate.evaluation import Answering, compare_rankers, markdown, summary
    from knowgate.labels import load_grader
    from knowgate.preferences import PreferenceFolder, shared_settings

    if split not in SPLITS:
        raise BadSetting(f"--split is '{split}'; allowed: {', '.join(SPLITS)}.")
    check_own(out, ["rerank.json", "answers.jsonl"], "a comparison of rerankers")
    folders = [PreferenceFolder(one) for one in pref]
    settings = shared_settings(folders)
    rows = [row for folder in folders for row in folder.rows() if row.split == split][:limit]
    if not rows:
        raise BadInput(f"the preferences hold no question of the part '{split}'; prefer more, or use another --split.")
    _warn(rerank, str(settings["model_fingerprint"]), split)
    llm = load_model(model) if model else None
    answering = Answering(llm, load_grader("contains", None, "implies"), out / "answers.jsonl") if llm else None
    try:
        found = summary(
            compare_rankers(
                rows, _rerankers(rerank, base), answering=answering, margin=rerank_margin, on_progress=WORDS.print
            )
        )
    except KeyboardInterrupt:
        WORDS.print(f"Answers given so far are kept in {out}; the same command goes on.")
        raise
    text = markdown(found)
    write_json(out / "rerank.json", found)
    write_text(out / "rerank.md", text)
    plain_console().print(text)
    WORDS.print(f"Written to {out}.")


def _rerankers(spec: str, base: str | None) -> dict[str, Reranker]:
    kept = Path(spec) / BASE
    before = base or (str(kept) if kept.is_dir() else None)
    return {**({"base": load_reranker(before)} if before else {}), "aligned": load_reranker(spec)}


def _warn(spec: str, model: str, split: str) -> None:
    """What a reader of the table should know."""
    if split == "train":
        WORDS.print("The train part is what rerankers learn from: these figures say nothing about new questions.")
    if not is_aligned(spec):
        WORDS.print(f"'{spec}' was not aligned by knowgate fit reranker; it is measured as it is.")
        return
    made = read_manifest(spec)["aligned_to"]
    if made["model_fingerprint"] != model:
        WORDS.print(f"The reranker was aligned to {made['model']}; these preferences are another LLM's.")
