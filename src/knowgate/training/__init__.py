"""What trains artefacts: gates from label runs, rerankers from preferences."""

from __future__ import annotations
