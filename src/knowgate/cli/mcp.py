"""`knowgate mcp`: a server of the Model Context Protocol for agents."""

from __future__ import annotations

from typing import Annotated

import typer

from knowgate.cli.console import WORDS
from knowgate.cli.options import Lang, ModelSpec, Retriever
from knowgate.cli.pipeline_options import (
    ArbiterSpec,
    Config,
    Docs,
    GateSpec,
    Index,
    K,
    Log,
    MaxTokens,
    NoRules,
    PlugIn,
    Rerank,
    RulesFile,
    Threshold,
    chosen_rules,
)
from knowgate.display import harmless
from knowgate.integrations import run_mcp
from knowgate.pipeline import build_pipeline, load_settings

Http = Annotated[bool, typer.Option("--http", help="Streamable HTTP on http://HOST:PORT/mcp instead of stdin and stdout.")]  # fmt: skip  # noqa: E501
Host = Annotated[str, typer.Option(help="With --http: address of this machine to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="With --http: port to listen on.")]
FallOpen = Annotated[bool, typer.Option("--fall-open", help="Where the gate fails, say retrieve instead of an error.")]


def mcp(
    model: ModelSpec = None,
    gate: GateSpec = None,
    plug_in: PlugIn = None,
    threshold: Threshold = None,
    docs: Docs = None,
    index: Index = None,
    retriever: Retriever = None,
    rerank: Rerank = None,
    arbiter: ArbiterSpec = None,
    rules: RulesFile = None,
    no_rules: NoRules = False,
    k: K = None,
    max_tokens: MaxTokens = None,
    lang: Lang = None,
    log: Log = None,
    config: Config = None,
    http: Http = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    fall_open: FallOpen = False,
) -> None:
    """Serve the tools decide, search, ask and feedback to agents, by the Model Context Protocol.

    An MCP client starts it by itself:
    "mcpServers": {"knowgate": {"command": "knowgate", "args": ["mcp", "--docs", "DIR"]}}
    """
    settings = load_settings(
        config, model=model, gate=gate, plug_in=plug_in, threshold=threshold, docs=docs, index=index,
        retriever=retriever, rerank=rerank, arbiter=arbiter, rules=chosen_rules(rules, no_rules), k=k,
        max_tokens=max_tokens, lang=lang, log=log,
    )  # fmt: skip
    rag = build_pipeline(settings)
    where = f"http://{host}:{port}/mcp" if http else "stdin and stdout"
    WORDS.print(harmless(f"Serving {settings.model} to MCP clients on {where}. Ctrl-C ends it."), markup=False)
    run_mcp(rag, http=http, host=host, port=port, fall_open=fall_open)
