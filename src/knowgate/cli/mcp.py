"""`knowgate mcp`: a server that offers tools to agents by the Model Context Protocol (MCP)."""

from __future__ import annotations

from typing import Annotated

import typer

from knowgate.cli.console import inform
from knowgate.cli.options import ConfigFile, NoRules, load_command_settings
from knowgate.core.display import sanitize_text
from knowgate.integrations.mcp import run_mcp_server
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import PipelineOptions


def mcp(
    options: PipelineOptions,
    no_rules: NoRules = False,
    config: ConfigFile = None,
    http: Annotated[
        bool, typer.Option("--http", help="Serve HTTP at http://HOST:PORT/mcp instead of using stdin and stdout.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on with --http.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on with --http.")] = 8000,
    fall_open: Annotated[
        bool, typer.Option("--fall-open", help="Retrieve if the gate fails, instead of returning an error.")
    ] = False,
) -> None:
    """Offer the tools decide, search, ask and feedback to agents, by the Model Context Protocol (MCP).

    MCP clients start this command themselves. Add it to the configuration of the client: "mcpServers": {"knowgate":
    {"command": "knowgate", "args": ["mcp", "--docs", "DIR"]}}
    """
    settings = load_command_settings(config, options, no_rules)
    rag = build_pipeline(settings)
    address = f"http://{host}:{port}/mcp" if http else "stdin and stdout"
    inform(sanitize_text(f"Starting the MCP server of {settings.model} on {address}. Ctrl-C stops it."))
    run_mcp_server(rag, http=http, host=host, port=port, fall_open=fall_open)
