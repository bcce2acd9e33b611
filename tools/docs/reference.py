"""The API reference: every name in `knowgate.__all__`. mkdocstrings renders each entry from its docstring."""

from __future__ import annotations

from tools import structure

MEMBERS = "      filters: ['!^_']"


def public_names() -> list[str]:
    """The names in `knowgate.__all__`."""
    return sorted(structure.exports(structure.SOURCE / "__init__.py"))


def markdown() -> str:
    """One mkdocstrings entry per public name, classes first."""
    classes = [name for name in public_names() if name[0].isupper()]
    functions = [name for name in public_names() if name[0].islower()]
    parts = ["## Classes", *map(_entry, classes), "## Functions", *map(_entry, functions)]
    return "\n\n".join(parts)


def _entry(name: str) -> str:
    return f"::: {_home(name)}.{name}\n    options:\n{MEMBERS}"


def _home(name: str) -> str:
    """The module that a public name is imported from."""
    imports = structure.imports(structure.SOURCE / "__init__.py")
    return next(each.target for each in imports if each.name == name)
