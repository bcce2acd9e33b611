"""Options that several commands have: one name, one meaning, one text."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from knowgate.core.postgres.address import DatabaseAddress, is_postgres_address, parse_database_address
from knowgate.core.redaction import redact_urls
from knowgate.core.validation import check_integer, expand_path, format_value
from knowgate.errors import BadSetting


def parse_path(text: str) -> Path:
    """A path from the command line. An empty one, as of an unset shell variable, would mean this folder."""
    if not text.strip():
        raise BadSetting("a path on the command line is empty: name a folder or file ('.' is this folder).")
    return expand_path(text)


def parse_log_location(text: str) -> Path | DatabaseAddress:
    """Where a log is: a path, or a database whose address begins with postgresql://."""
    return parse_database_address(text) if is_postgres_address(text) else parse_path(text)


def check_log_location(text: str) -> str:
    """The same, as a text."""
    return text if is_postgres_address(text) else str(parse_path(text))


LabelsOption = Annotated[
    list[Path], typer.Option("--labels", parser=parse_path, metavar="RUN", help="Label run; may be repeated.")
]
OutFolderOption = Annotated[
    Path, typer.Option("--out", parser=parse_path, metavar="DIR", help="Folder that is written.")
]
PreferencesOption = Annotated[
    list[Path], typer.Option("--pref", parser=parse_path, metavar="PREF", help="Preference folder; may be repeated.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="smollm (default), hf:NAME_OR_DIR, gguf:FILE, llamacpp:FILE, openai:MODEL@URL, ... See `knowgate models`.",
    ),
]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many questions.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of splits, samples and training.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
RetrieverOption = Annotated[str | None, typer.Option("--retriever", help="bm25 (default), dense or hybrid.")]
RerankerOption = Annotated[
    str | None,
    typer.Option(
        "--rerank",
        metavar="DIR|SPEC",
        help="Reranker of the passages: folder made by `fit reranker`, a cross-encoder, api:MODEL@URL, tei:URL.",
    ),
]
CandidatesOption = Annotated[
    int, typer.Option("--candidates", min=1, help="With --rerank: passages it chooses the --k from.")
]
RerankMarginOption = Annotated[
    float | None,
    typer.Option(
        "--rerank-margin",
        min=0,
        max=1,
        help="Skip reranking where the best passage leads by this share of its score.",
    ),
]
GatesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gates", help="Gate specs and folders, separated by commas. [default: auto, all that the rows allow]"
    ),
]
PlugInOption = Annotated[bool, typer.Option("--plug-in", help="Allow gates that were fitted on another LLM.")]
LangOption = Annotated[
    str | None, typer.Option("--lang", help="Force the prompt language: en or zh. Default: detected.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        parser=parse_path,
        metavar="free|FILE",
        help="Wording: free (answers at length), or your own TOML file.",
    ),
]
RunnerOption = Annotated[
    str,
    typer.Option(
        "--runner",
        metavar="local|ray[:ADDRESS]",
        help="Where the LLM runs: local (this process), ray:local, ray (a running cluster) or ray:HOST:PORT; options "
        "follow a '?': 'ray:local?workers=2', 'ray?workers=8&gpus=0.5'. Needs the extra 'ray'.",
    ),
]


def parse_integers(option: str, text: str, *, minimum: int = 0) -> list[int]:
    """The numbers of '1,3'; refused where one is none, too small or beyond counting."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = []
    if not found:
        raise BadSetting(f"{option} is {format_value(text)}: give whole numbers between commas, such as 1,3.")
    return [check_integer(number, f"a number of {option}", minimum=minimum) for number in found]


def format_command_line() -> str:
    """The card travels: it names folders, not where they lie on this machine, and no login or key of an address."""
    words = sys.argv[1:]
    words = [Path(word).name if Path(word).is_absolute() else redact_urls(word) for word in words if word != "--debug"]
    return shlex.join(["knowgate", *words])
