"""A program that extracts the text of PDF files, run by knowgate as a separate process.

It reads one path per line on stdin, as a JSON string, and writes one JSON object per line. A hostile PDF can take hours
or all memory in code that cannot be interrupted. A separate process can be killed and has its own memory limit. This
file imports nothing from knowgate, because it is started by its file name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pypdf

MEMORY_LIMIT = 4 << 30  # maximum address space of this process in bytes
MAX_CHARACTERS = 64 << 20  # maximum extracted text of a file


def extract_text(path: str) -> dict[str, str]:
    """Extract the text of a PDF file.

    Returns:
        {"text": ...}, or {"problem": ...} with the reason why the file cannot be read.
    """
    try:
        reader = pypdf.PdfReader(path)
        # Files that are only protected against printing open with an empty password.
        if reader.is_encrypted and not reader.decrypt(""):
            return {"problem": "it is encrypted"}
        return {"text": "\n\n".join(_extract_pages(reader))}
    except MemoryError:
        return {"problem": f"reading it needs more than {MEMORY_LIMIT >> 30} GB of memory"}
    except Exception as error:  # noqa: BLE001 - pypdf raises nearly anything for broken files
        return {"problem": " ".join(str(error).split())[:200] or type(error).__name__}


def _extract_pages(reader: Any) -> list[str]:
    """Return the text of each page. Too much text raises ValueError."""
    pages: list[str] = []
    length = 0
    for page in reader.pages:
        pages.append(page.extract_text())
        length += len(pages[-1])
        if length > MAX_CHARACTERS:
            raise ValueError(f"the text has more than {MAX_CHARACTERS:,} characters")
    return pages


def _limit_memory() -> None:
    """Limit the memory of this process, as protection against hostile files.

    Does nothing on Windows.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT if hard_limit == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def main() -> None:
    """Answer requests until stdin is closed."""
    _limit_memory()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(extract_text(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
