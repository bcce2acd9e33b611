"""Options that several commands have: one name, one meaning, one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.paths import path

Labels = Annotated[list[Path], typer.Option("--labels", parser=path, metavar="RUN", help="Label run; may be repeated.")]
OutFolder = Annotated[Path, typer.Option("--out", parser=path, metavar="DIR", help="Folder that is written.")]
Prefs = Annotated[
    list[Path], typer.Option("--pref", parser=path, metavar="PREF", help="Preference folder; may be repeated.")
]
ModelSpec = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="smollm (default), hf:NAME_OR_DIR, gguf:FILE, llamacpp:FILE, openai:MODEL@URL, ... See `knowgate models`.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many questions.")]
Seed = Annotated[int, typer.Option("--seed", help="Of splits, samples and training.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Retriever = Annotated[str | None, typer.Option("--retriever", help="bm25 (default), dense or hybrid.")]
Rerank = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        metavar="DIR|SPEC",
        help="Reranker of the passages: folder made by `fit reranker`, a cross-encoder, api:MODEL@URL, tei:URL.",
    ),
]
Candidates = Annotated[
    int, typer.Option("--candidates", min=1, help="With --rerank: passages it chooses the --k from.")
]
RerankMargin = Annotated[
    float | None,
    typer.Option(
        "--rerank-margin",
        min=0,
        max=1,
        help="Skip reranking where the best passage leads by this share of its score.",
    ),
]
Gates = Annotated[
    list[str] | None,
    typer.Option(
        "--gates", help="Gate specs and folders, separated by commas. [default: auto, all that the rows allow]"
    ),
]
PlugIn = Annotated[bool, typer.Option("--plug-in", help="Allow gates that were fitted on another LLM.")]
Lang = Annotated[str | None, typer.Option("--lang", help="Force the prompt language: en or zh. Default: detected.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts", parser=path, metavar="free|FILE", help="Wording: free (answers at length), or your own TOML file."
    ),
]
RunnerSpec = Annotated[
    str,
    typer.Option(
        "--runner",
        metavar="local|ray[:ADDRESS]",
        help="Where the LLM runs: local (this process), ray:local, ray (a running cluster) or ray:HOST:PORT; options "
        "follow a '?': 'ray:local?workers=2', 'ray?workers=8&gpus=0.5'. Needs the extra 'ray'.",
    ),
]
