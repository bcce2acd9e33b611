"""Beginnings of prompts that are shared: run once, reused by every prompt that starts alike.

Most prompts of a run begin with the same system turn and instruction; only the question at the end differs. Their
keys and values are kept, so that a batch pays for the shared part once. Results are the same up to rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

SHORTEST = 16  # tokens worth sharing
KEPT = 8
Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Prefixes:
    """A small store of the beginnings used last."""

    kept: OrderedDict[tuple[int, ...], Layers] = field(default_factory=OrderedDict)

    def start(
        self, model: Any, ids: Sequence[Sequence[int]], device: torch.device, worth_keeping: int = 0
    ) -> tuple[int, DynamicCache]:
        """How many tokens are already dealt with, and a cache that holds them for each of the rows.

        The first `worth_keeping` tokens are known to come again: they are kept even if only one row has them now.
        """
        shared = common(ids)
        prefix = self._find(shared, len(ids))
        if SHORTEST <= worth_keeping <= len(shared) and len(prefix) < worth_keeping:
            prefix = shared[:worth_keeping]
        if not prefix:
            return 0, DynamicCache()
        if prefix not in self.kept:
            self.kept[prefix] = _run(model, prefix, device)
        self.kept.move_to_end(prefix)
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        rows = len(ids)
        expanded = [(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for k, v in self.kept[prefix]]
        return len(prefix), DynamicCache(expanded)

    def _find(self, shared: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """A kept beginning if it covers most of what is shared; else what is shared, if several rows gain by it."""
        known = [key for key in self.kept if shared[: len(key)] == key]
        longest = max(known, key=len, default=())
        if len(longest) >= 0.75 * len(shared) or rows == 1:
            return longest
        return shared if len(shared) >= SHORTEST else longest


def common(ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens all rows begin with, short of any row's last token: its logits are still to be computed."""
    length = min(len(row) for row in ids) - 1
    first = ids[0]
    for place in range(length):
        if any(row[place] != first[place] for row in ids):
            return tuple(first[:place])
    return tuple(first[:length])


def _run(model: Any, prefix: Sequence[int], device: torch.device) -> Layers:
    cache = DynamicCache()
    model(
        input_ids=torch.tensor([list(prefix)], device=device), past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return [(layer.keys, layer.values) for layer in cache.layers]
