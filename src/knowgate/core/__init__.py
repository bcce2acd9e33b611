"""Which knowgate this is; known without an installation, too."""

from __future__ import annotations

VERSION = "0.1.0"
