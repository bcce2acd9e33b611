"""Whose answers a run holds, by name: of an LLM that can be loaded, or of one that was recorded elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECORDED = "recorded:"  # before the name of the LLM of imported answers; no model can be loaded by such a name


def how_to_ask(name: str) -> str:
    """Options of `knowgate ask` for what was fitted on this LLM's answers; recorded ones name no server."""
    return " --model openai:NAME@URL --plug-in" if name.startswith(RECORDED) else ""


def how_to_answer(settings: Mapping[str, Any]) -> tuple[str, str]:
    """--data and --model with which the questions of a run are answered again; recorded answers name no server."""
    name = str(settings["model"])
    return str(settings.get("data") or "SPEC"), "openai:NAME@URL" if name.startswith(RECORDED) else name


def use_with_its_own(name: str) -> str:
    """What to do where something fitted on one LLM's answers meets another LLM."""
    if name.startswith(RECORDED):
        llm = name.removeprefix(RECORDED)
        return (
            f"It learned from recorded answers, which name no server: name the LLM with --model (as "
            f"openai:NAME@URL), and add --plug-in if it is the LLM these answers are of ('{llm}')."
        )
    return f"Use it with its own (--model {name}), fit it on this one, or use it as it is with --plug-in."
