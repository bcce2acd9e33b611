"""Shared foundations: validation, option models, files, text, HTTP, PostgreSQL, registries, tables and charts."""

from __future__ import annotations

VERSION = "0.2.0"
