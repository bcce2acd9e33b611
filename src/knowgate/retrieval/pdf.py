"""The text of a PDF through pypdf (extra `pdf`). Scanned pages have no text: knowgate does no OCR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from knowgate.errors import BadInput, MissingExtra


def read_pdf(path: Path) -> str:
    """The text of all pages, a blank line between pages."""
    try:
        import pypdf
    except ModuleNotFoundError as error:
        raise MissingExtra(f"reading {path}", "pdf") from error
    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted:
            _unlock(reader, path)
        return "\n\n".join(page.extract_text() for page in reader.pages)
    except BadInput:
        raise
    except Exception as error:  # broken files make pypdf raise nearly anything
        raise BadInput(
            f"{path} cannot be read as PDF: {error or type(error).__name__}. Repair it or take it out of the folder."
        ) from error


def _unlock(reader: Any, path: Path) -> None:
    """Files locked only against printing open with an empty password."""
    if not reader.decrypt(""):
        raise BadInput(f"{path} is encrypted. Save it without a password or take it out of the folder.")
