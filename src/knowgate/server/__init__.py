"""The server: an OpenAI-compatible endpoint that decides before it answers, in front of a model or another server."""

from __future__ import annotations
