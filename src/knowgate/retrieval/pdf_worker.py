"""A program that reads PDF files: takes one JSON path per line on stdin, answers with one JSON object per line.

A hostile PDF can take hours or all memory in code that cannot be interrupted, so it is read in a process that can be
killed. This file imports nothing of knowgate, which starts it by its file name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pypdf

MEMORY_LIMIT = 4 << 30  # bytes of address space
MAX_CHARACTERS = 64 << 20  # of extracted text


def extract_text(path: str) -> dict[str, str]:
    """Return {"text": ...} or {"problem": ...}."""
    try:
        reader = pypdf.PdfReader(path)
        # Files that are only protected against printing open with an empty password.
        if reader.is_encrypted and not reader.decrypt(""):
            return {"problem": "encrypted"}
        return {"text": "\n\n".join(_extract_pages(reader))}
    except MemoryError:
        return {"problem": "it needs more memory than allowed for a document"}
    except Exception as error:  # noqa: BLE001 - pypdf raises nearly anything for broken files
        return {"problem": " ".join(str(error).split())[:200] or type(error).__name__}


def _extract_pages(reader: Any) -> list[str]:
    pages: list[str] = []
    length = 0
    for page in reader.pages:
        pages.append(page.extract_text())
        length += len(pages[-1])
        if length > MAX_CHARACTERS:
            raise ValueError(f"it holds more than {MAX_CHARACTERS:,} characters")
    return pages


def _limit_memory() -> None:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT if hard_limit == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def main() -> None:
    _limit_memory()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(extract_text(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
