"""What a run keeps and how it is read back: row folders, label rows, needs on record, readings, splits, trials."""

from __future__ import annotations
