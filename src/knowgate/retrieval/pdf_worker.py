"""A program of its own that reads PDF files: a path a line comes in, a JSON object a line goes out.

A hostile PDF can take hours or all memory, in code that no clock can interrupt: here it takes those of a process that
can be ended. Knows nothing of knowgate, which starts it by its file name (`pdf.py`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pypdf

MEMORY_LIMIT = 4 << 30  # bytes of address space
MAX_CHARACTERS = 64 << 20  # characters of text


def extract_text(path: str) -> dict[str, str]:
    """{"text": ...} or {"problem": ...}."""
    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):  # those locked only against printing open without a password
            return {"problem": "encrypted"}
        return {"text": "\n\n".join(_pages(reader))}
    except MemoryError:
        return {"problem": "it needs more memory than a document is given"}
    except Exception as error:  # noqa: BLE001  broken files make pypdf raise nearly anything
        return {"problem": " ".join(str(error).split())[:200] or type(error).__name__}


def _pages(reader: Any) -> list[str]:
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
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (MEMORY_LIMIT if most == resource.RLIM_INFINITY else min(MEMORY_LIMIT, most), most)
    )


def main() -> None:
    _limit_memory()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(extract_text(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
