"""Waits for the threads that build vector indexes of history logs."""

from __future__ import annotations

from typing import Any


def wait_for_builder(index: Any) -> None:
    """Wait until an index is built, if it is being built. The thread resets the attribute when it is done."""
    builder = index._builder
    if builder is not None:
        builder.join()
