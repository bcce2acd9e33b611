"""The server: an OpenAI-compatible endpoint that decides before it answers, in front of a model or another server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.server.application import create_app
    from knowgate.server.asking import Ungated, question_of
    from knowgate.server.keys import ApiKey, add_key, read_keys, revoke_key
    from knowgate.server.learning.labels import by_feedback
    from knowgate.server.options import ServeOptions, serve_options
    from knowgate.server.passages import with_passages
    from knowgate.server.running import run_server
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "ApiKey",
    "ServeOptions",
    "Ungated",
    "add_key",
    "by_feedback",
    "create_app",
    "question_of",
    "read_keys",
    "revoke_key",
    "run_server",
    "serve_options",
    "with_passages",
]
