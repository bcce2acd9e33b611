"""Adapters: knowgate inside the frameworks people already use, and their models and search engines inside knowgate.

One file = one framework or engine, with an extra of its own that is imported when it is used. This face is what they
share; a framework's own names are in its file, `knowgate.integrations.langchain` say.
"""

from __future__ import annotations
