"""The plan of the house, read from the code: layers, faces, circles, sizes. `python -m tests.support.house` prints it.

The guard tests hold the code to it, and CONTRIBUTING and the documentation show what is printed here.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from knowgate.core.registry import RegistryEntry
from knowgate.gates import FITTED_GATES, GATES

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "knowgate"
TOP = "__init__"

# Imports only go to an earlier line; what stands in one line does not import each other.
LEVELS = [
    ["markup", "version"],
    ["errors", "types", "lazy"],
    ["doors", "proxies", "typed"],
    ["files", "text", "registry", "statistics", "nearest", "unpickle", "servers", "postgres"],
    ["endpoint"],
    ["prompts", "weights", "display", "folders", "rules", "embedding_api"],
    ["embedding"],
    ["models", "retrieval", "rerank", "datasets", "history"],
    ["signals"],
    ["runs"],
    ["labels"],
    ["gates"],
    ["arbiters"],
    ["thresholds", "preferences"],
    ["fitting"],
    ["pipeline"],
    ["evaluation"],
    ["report"],
    ["firstrun", "server"],
    ["integrations"],
    ["cli", TOP],
    ["__main__"],
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
LEAVES = LEVELS[-2]


@dataclass(frozen=True)
class Import:
    """`from target import name`; module: the file that says so, at the top, inside a function or for type checkers."""

    module: str
    target: str
    name: str
    line: int

    @property
    def home(self) -> str:
        """The module that is really meant: a submodule where `name` is one."""
        inner = f"{self.target}.{self.name}"
        return inner if inner in modules() else self.target

    @property
    def leaves_its_part(self) -> bool:
        return part_of(self.home) != part_of(self.module)


@cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(SOURCE.rglob("*.py")))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in files()}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def part_of(module: str) -> str:
    """'knowgate.gates.logprob' -> 'gates'; the package itself is '__init__'."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else TOP


@cache
def packages() -> frozenset[str]:
    """Parts that are folders and so have a face."""
    return frozenset(path.parent.name for path in files() if path.parent.parent == SOURCE and path.stem == "__init__")


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of ours in a file: at the top, inside functions, and for type checkers only."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    own = module_name(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names if alias.name.split(".")[0] == "knowgate"]
            yield from (Import(own, name, "", node.lineno) for name in named)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path} line {node.lineno}: imports are absolute")
            if str(node.module).split(".")[0] == "knowgate":
                yield from (Import(own, str(node.module), alias.name, node.lineno) for alias in node.names)


def every_import() -> list[Import]:
    return [one for path in files() for one in imports(path)]


# --- faces ----------------------------------------------------------------------------------------


def through_faces() -> tuple[list[Import], list[Import]]:
    """Imports from other packages: those of names their face hands on, and those that reach inside."""
    crossing = [one for one in every_import() if one.leaves_its_part and part_of(one.home) in packages()]
    inside = [one for one in crossing if one.target.count(".") > 1 or one.home != one.target]
    return [one for one in crossing if one not in inside], inside


def handed_on(package: str) -> set[str]:
    """What a face lists in `__all__`."""
    for node in tree(SOURCE / package / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


# --- circles --------------------------------------------------------------------------------------


def circles() -> list[list[str]]:
    """Modules that import each other in a ring, type checkers' imports included. A package does not count as importing
    what it hands on."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for one in every_import():
        if one.home in graph and not _hands_on(one):
            graph[one.module].add(one.home)
    return [ring for ring in _rings(graph) if len(ring) > 1]


def _hands_on(one: Import) -> bool:
    return modules()[one.module].stem == "__init__" and one.home.startswith(f"{one.module}.")


def _rings(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            ring = []
            while not ring or ring[-1] != name:
                ring.append(stack.pop())
            found.append(sorted(ring))

    for name in graph:
        if name not in number:
            visit(name)
    return found


# --- sizes ----------------------------------------------------------------------------------------


def functions() -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for path in files() for node in ast.walk(tree(path)) if isinstance(node, kinds)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is None:
        return total
    return total - ((first.end_lineno or first.lineno) - first.lineno + 1)


def figures() -> list[tuple[str, str]]:
    """What HOUSE measures, as it is now."""
    lengths = sorted(length(function) for function in functions())
    public = [function for function in functions() if not function.name.startswith("_")]
    told = sum(ast.get_docstring(function) is not None for function in public)
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files()]
    faces, inside = through_faces()
    return [
        ("functions", str(len(lengths))),
        ("their length, median / p90 / max", " / ".join(str(part) for part in _spread(lengths))),
        ("files; lines in each, mean / max", f"{len(lines)}; {statistics.mean(lines):.0f} / {max(lines)}"),
        ("public functions with a docstring", f"{told / len(public):.0%}"),
        ("imports from other packages: through faces / inside", f"{len(faces)} / {len(inside)}"),
        ("circles of imports", str(len(circles()))),
        ("files that know a gate: median / max over the table", _shown(files_knowing(GATES))),
        ("files that know a fitted gate: median / max over the table", _shown(files_knowing(FITTED_GATES))),
    ]


def files_knowing(table: Mapping[str, RegistryEntry]) -> list[int]:
    """For each gate, in how many files its class, its module or its fit function is written: those one adds it in."""
    texts = [path.read_text(encoding="utf-8") for path in files()]
    return [sum(any(name in text for name in _names(entry)) for text in texts) for entry in table.values()]


def _names(entry: RegistryEntry) -> list[str]:
    module, _, cls = entry.target.partition(":")
    return [
        f"{module}:",
        f"{module} import",
        f"class {cls}",
        *([f"def {entry.fit.split(':')[1]}("] if entry.fit else []),
    ]


def _shown(counts: Sequence[int]) -> str:
    return f"{statistics.median_high(counts)} / {max(counts)}"


def _spread(values: Sequence[int]) -> tuple[int, int, int]:
    return values[len(values) // 2], values[int(0.9 * len(values))], values[-1]


def layer_table() -> str:
    """Markdown: each layer with what its parts say of themselves."""
    lines = ["| layer | part | what lives there |", "|---|---|---|"]
    for level, parts in enumerate(LEVELS):
        there = [part for part in parts if part != TOP and (part in packages() or (SOURCE / f"{part}.py").is_file())]
        lines += [f"| {level} | `{part}{'/' if part in packages() else ''}` | {_about(part)} |" for part in there]
    return "\n".join(lines)


def _about(part: str) -> str:
    path = SOURCE / part / "__init__.py" if part in packages() else SOURCE / f"{part}.py"
    return (ast.get_docstring(tree(path)) or "").split("\n\n")[0].replace("\n", " ")


def figure_table() -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in figures())])


if __name__ == "__main__":
    sys.stdout.write(f"{layer_table()}\n\n{figure_table()}\n")
