"""`knowgate mcp`: a server of the Model Context Protocol for agents."""

from __future__ import annotations

from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE
from knowgate.cli.options import LangOption, ModelOption, RetrieverOption
from knowgate.cli.pipeline_options import (
    ArbiterSpec,
    ConfigFile,
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
    combine_rule_flags,
)
from knowgate.core.display import sanitize_text
from knowgate.integrations.mcp import run_mcp_server
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import load_settings

Http = Annotated[bool, typer.Option("--http", help="Streamable HTTP on http://HOST:PORT/mcp instead of stdin and stdout.")]  # fmt: skip  # noqa: E501
Host = Annotated[str, typer.Option(help="With --http: address of this machine to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="With --http: port to listen on.")]
FallOpen = Annotated[bool, typer.Option("--fall-open", help="Where the gate fails, say retrieve instead of an error.")]


def mcp(
    model: ModelOption = None,
    gate: GateSpec = None,
    plug_in: PlugIn = None,
    threshold: Threshold = None,
    docs: Docs = None,
    index: Index = None,
    retriever: RetrieverOption = None,
    rerank: Rerank = None,
    arbiter: ArbiterSpec = None,
    rules: RulesFile = None,
    no_rules: NoRules = False,
    k: K = None,
    max_tokens: MaxTokens = None,
    lang: LangOption = None,
    log: Log = None,
    config: ConfigFile = None,
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
        retriever=retriever, rerank=rerank, arbiter=arbiter, rules=combine_rule_flags(rules, no_rules), k=k,
        max_tokens=max_tokens, lang=lang, log=log,
    )  # fmt: skip
    rag = build_pipeline(settings)
    where = f"http://{host}:{port}/mcp" if http else "stdin and stdout"
    STDERR_CONSOLE.print(
        sanitize_text(f"Serving {settings.model} to MCP clients on {where}. Ctrl-C ends it."), markup=False
    )
    run_mcp_server(rag, http=http, host=host, port=port, fall_open=fall_open)
