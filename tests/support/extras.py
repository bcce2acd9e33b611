"""Marks that skip a test where the packages of an optional extra are not installed."""

from importlib.util import find_spec

import pytest


def skip_without(package: str, extra: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test if a package of an extra is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the extra '{extra}'")


needs_local = skip_without("torch", "local")
needs_pdf = skip_without("pypdf", "pdf")
needs_train = skip_without("sklearn", "train")
