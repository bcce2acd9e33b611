"""Starts the server: uvicorn around the application, on an address that only those may reach who should."""

from __future__ import annotations

from typing import Any

from knowgate.errors import BadSetting, MissingExtra
from knowgate.pipeline import Settings
from knowgate.server.options import ServeOptions


def run_server(settings: Settings, options: ServeOptions) -> None:
    """Until it is told to stop (Ctrl-C, SIGTERM); streams that are under way are finished first."""
    if not options.is_local and options.keys is None:
        raise BadSetting(
            f"--host {options.host} can be reached from outside, which needs API keys: make one with knowgate keys add "
            "NAME, then start with --keys FILE."
        )
    try:
        import uvicorn

        from knowgate.server.application import create_app
    except ImportError:
        raise MissingExtra("knowgate serve", "serve") from None
    app = create_app(settings, options)
    uvicorn.Server(uvicorn.Config(app, host=options.host, port=options.port, **tuning(options))).run()


def tuning(options: ServeOptions) -> dict[str, Any]:
    """How uvicorn runs: with what is fast (uvloop and httptools where they are installed), and no layers we do not use.

    What a proxy says of a client is not believed: nothing here depends on who that is.
    """
    return {
        "log_level": "warning",
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "ws": "none",
        "timeout_graceful_shutdown": max(1, round(options.deadline)),
    }
