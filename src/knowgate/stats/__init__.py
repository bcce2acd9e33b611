"""Numbers with their uncertainty: one bootstrap, one AUROC, ECE and Brier, shares with intervals, paired tests,
bounds that hold at every moment.

Knows arrays; nothing of gates, questions or files."""

from __future__ import annotations
