"""What was measured, for people: tables, charts, pages. One folder per report."""

from __future__ import annotations
