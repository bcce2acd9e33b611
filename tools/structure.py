"""Measure the structure of the package: layers, import cycles, sizes, names. `python -m tools.structure` prints it.

The tests in `tests/test_structure.py` hold the code to the limits below. CONTRIBUTING.md and the documentation show the
tables.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "knowgate"
TOP = "__init__"

# From top to bottom. A package imports only from packages in later lines.
LAYERS = [
    "__main__",
    "cli",
    TOP,
    "integrations",
    "server",
    "papers",
    "evaluation",
    "pipeline",
    "training",
    "gates",
    "labels",
    "data",
    "retrieval",
    "models",
    "stats",
    "core",
    "types",
    "errors",
]
LEVEL = {part: len(LAYERS) - number for number, part in enumerate(LAYERS)}

DOCUMENTED_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # nodes that may have a docstring

# Limits that the tests enforce.
MOST_MODULES = 374
MOST_CODE_LINES = 48_440
MOST_EXPORTS = 200
LONGEST_FUNCTION = 60
MOST_LONG_FUNCTIONS = 5  # functions of more than 40 lines
MOST_PARAMETERS = 8
LONGEST_FILE = 450

# Words ending in -ing or -ed that name a thing in this field.
NOUNS = {
    "training",
    "streaming",
    "batching",
    "routing",
    "forwarding",
    "learning",
    "grading",
    "sampling",
    "ranking",
    "reranking",
    "embedding",
    "embeddings",
    "setting",
    "settings",
    "string",
    "meaning",
    "reading",
    "readings",
    "recording",
    "recordings",
    "rating",
    "heading",
    "thing",
    "things",
    "casing",
    "encoding",
    "decoding",
    "masking",
    "scoring",
    "scheduling",
    "logging",
    "timing",
    "billing",
    "pricing",
    "labeling",
    "testing",
    "warning",
    "warnings",
    "mapping",
    "mappings",
    "listing",
    "padding",
    "seed",
    "feed",
    "need",
    "needs",
    "bed",
    "red",
    "shed",
    "finding",
    "findings",
    "reasoning",
    "tracking",
    "processing",
    "sharding",
    "chunking",
    "pooling",
    "tokenizing",
    "caching",
    "prompting",
    "hashing",
    "parsing",
    "planning",
    "fitted",
    "calibrated",
    "cached",
    "recorded",
    "embedded",
}
# Adverbs, prepositions, pronouns and verb forms that say nothing about what a module or class is.
ODD_NAMES = {
    "whose",
    "given",
    "inside",
    "together",
    "ahead",
    "beside",
    "held",
    "kept",
    "said",
    "told",
    "heard",
    "asked",
    "begun",
    "far",
    "half",
    "apart",
    "between",
    "within",
    "without",
    "again",
    "already",
    "soon",
    "later",
    "still",
    "aside",
    "going_on",
    "shown",
    "found",
    "seen",
    "made",
    "done",
    "meant",
    "taken",
    "chosen",
    "written",
    "spoken",
    "wanted",
    "wish",
    "wishes",
    "want",
    "what",
    "how",
    "why",
    "where",
    "when",
    "which",
}
# Variables that do not describe their value.
VAGUE_VARIABLES = ("found", "place", "one", "said", "asked")

CARD_MODULES = ("knowgate.data.runs.folder",)  # commands that cards show
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name: `from target import name`, written in `module` at `line`."""

    module: str
    target: str
    name: str
    line: int

    @property
    def home(self) -> str:
        """The module that is imported from, or the submodule if `name` is a submodule."""
        inner = f"{self.target}.{self.name}"
        return inner if inner in modules() else self.target

    @property
    def leaves_package(self) -> bool:
        """Whether the import crosses the border of a top-level package."""
        return package_of(self.home) != package_of(self.module)

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name} from {self.target}"


@cache
def files() -> tuple[Path, ...]:
    """Return every Python file of the package."""
    return tuple(sorted(SOURCE.rglob("*.py")))


def module_name(path: Path) -> str:
    """Return `knowgate.gates.flare` for `src/knowgate/gates/flare.py`."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Return dotted module names and their files."""
    return {module_name(path): path for path in files()}


@cache
def tree(path: Path) -> ast.Module:
    """Return the parsed source of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of the parsed source of a file. Walking a tree takes longer than parsing it."""
    return tuple(ast.walk(tree(path)))


def package_of(module: str) -> str:
    """Return `gates` for `knowgate.gates.flare`, and `__init__` for the top-level package."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else TOP


def top_level() -> list[str]:
    """Return packages and modules directly under `knowgate/`, without data folders."""
    entries = {package_of(name) for name in modules()}
    return sorted(entries - {TOP, "__main__"})


# --- imports --------------------------------------------------------------------------------------


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return every import of knowgate modules in a file, including those in functions and for type checkers."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    own = module_name(path)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "knowgate"]
            yield from (Import(own, name, "", node.lineno) for name in names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}:{node.lineno}: use absolute imports")
            if str(node.module).split(".")[0] == "knowgate":
                yield from (Import(own, str(node.module), alias.name, node.lineno) for alias in node.names)


def all_imports() -> list[Import]:
    """Return every import of knowgate modules in the package."""
    return [each for path in files() for each in imports(path)]


def upward_imports() -> list[Import]:
    """Return imports that point to the same or a higher layer of another package."""
    return [
        each
        for each in all_imports()
        if each.leaves_package and LEVEL[package_of(each.home)] >= LEVEL[package_of(each.module)]
    ]


def cycles() -> list[list[str]]:
    """Return groups of modules that import each other, including imports for type checkers."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for each in all_imports():
        if each.home in graph and not _is_reexport(each):
            graph[each.module].add(each.home)
    return [group for group in strongly_connected(graph) if len(group) > 1]


def _is_reexport(each: Import) -> bool:
    return modules()[each.module].stem == "__init__" and each.home.startswith(f"{each.module}.")


def strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

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
            group: list[str] = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            groups.append(sorted(group))

    for name in graph:
        if name not in number:
            visit(name)
    return groups


def exports(path: Path) -> list[str]:
    """Return the names in `__all__` of a file."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def package_exports() -> list[tuple[str, str]]:
    """Return the names that packages below the top level list in `__all__`, each with its package."""
    return [
        (name, export)
        for name, path in modules().items()
        if path.name == "__init__.py" and name != "knowgate"
        for export in exports(path)
    ]


def export_users() -> Counter[int]:
    """Count the exported names that are used by 0, 1, 2, ... other top-level packages."""
    users = {pair: set[str]() for pair in package_exports()}
    for each in all_imports():
        if (each.target, each.name) in users and each.leaves_package:
            users[each.target, each.name].add(package_of(each.module))
    return Counter(len(packages) for packages in users.values())


# --- sizes ----------------------------------------------------------------------------------------


@cache
def code_lines(path: Path) -> int:
    """Count lines of code, without docstrings, comments and blank lines."""
    text = path.read_text(encoding="utf-8").splitlines()
    lines = {number for number, line in enumerate(text, 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in nodes(path):
        if isinstance(
            node, ast.Constant | ast.JoinedStr
        ):  # a long string may have blank lines, and lines with a # first
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for node in nodes(path):
        if isinstance(node, DOCUMENTED_NODES) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


@cache
def functions() -> tuple[tuple[str, Function], ...]:
    """Return every function and method, each with its module."""
    return tuple((name, node) for name, path in modules().items() for node in nodes(path) if isinstance(node, Function))


def function_length(function: Function) -> int:
    """Count the lines of a function without its docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    first = function.body[0]
    return total - ((first.end_lineno or first.lineno) - first.lineno + 1)


def long_functions(limit: int) -> list[str]:
    """List functions longer than `limit` lines, longest first."""
    sized = [(function_length(node), f"{name}.{node.name}") for name, node in functions()]
    return [f"{size} {name}" for size, name in sorted(sized, reverse=True) if size > limit]


def wide_functions() -> list[str]:
    """List functions with more than MOST_PARAMETERS parameters."""
    counted = [(_parameters(node), f"{name}.{node.name}") for name, node in functions()]
    return [f"{count} {name}" for count, name in sorted(counted, reverse=True) if count > MOST_PARAMETERS]


def _parameters(function: Function) -> int:
    names = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


# --- names ----------------------------------------------------------------------------------------


def odd_names() -> list[str]:
    """List modules and classes whose names are not nouns."""
    stems = [(name, name.rpartition(".")[2]) for name in modules()]
    classes = [
        (f"{name}.{node.name}", re.sub(r"(?<!^)(?=[A-Z])", "_", node.name.lstrip("_")).lower())
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    ]
    return [where for where, stem in [*stems, *classes] if not _is_noun(stem)]


def _is_noun(name: str) -> bool:
    last = name.strip("_").split("_")[-1]
    if name in ODD_NAMES or (last in ODD_NAMES):
        return False
    return last in NOUNS or not (re.fullmatch(r"\w+(ing|ed|ly)", last) and len(last) > 4)


def vague_variables() -> Counter[str]:
    """Count variables whose names do not describe their value."""
    names: Counter[str] = Counter()
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_VARIABLES:
                names[node.id] += 1
            elif isinstance(node, ast.arg) and node.arg in VAGUE_VARIABLES:
                names[node.arg] += 1
    return names


def messages_with_flags() -> list[str]:
    """List texts outside `cli/` that name an option of the command line.

    Docstrings are ignored, and so are strings that consist of a flag only, such as arguments of other programs.
    """
    return [
        f"{name}:{node.lineno}: {node.value.strip()[:90]}"
        for name, path in modules().items()
        if package_of(name) not in ("cli", "__main__") and name not in CARD_MODULES
        for node in _strings(path)
        if FLAG.search(node.value) and len(node.value.split()) > 1
    ]


def _strings(path: Path) -> Iterator[ast.Constant]:
    docstrings = {
        id(node.body[0].value)
        for node in nodes(path)
        if isinstance(node, DOCUMENTED_NODES) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


# --- modules that an evaluation uses --------------------------------------------------------------


def modules_of_an_evaluation() -> set[str]:
    """Return the modules whose functions run while two gates are compared on a small label run."""
    import json
    import tempfile

    import knowgate as kg

    seen: set[str] = set()

    def record_module(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.add(str(frame.f_globals.get("__name__", "")))

    with tempfile.TemporaryDirectory() as folder:
        questions = [kg.Question(f"Which letter has the number {n}?", answers=(f"letter{n}",)) for n in range(60)]
        entries = {
            question.text: {"closed": question.answers[0] if n % 2 else "none", "open": question.answers[0]}
            for n, question in enumerate(questions)
        }
        Path(folder, "table.json").write_text(json.dumps(entries), encoding="utf-8")
        Path(folder, "docs").mkdir()
        for n, question in enumerate(questions):
            Path(folder, "docs", f"{n}.txt").write_text(f"{question.text} {question.answers[0]}", encoding="utf-8")
        kg.build_index(f"{folder}/docs", f"{folder}/index")
        run = kg.label(
            questions, model=f"fake:{folder}/table.json", index=f"{folder}/index", out=f"{folder}/run", samples=0
        )
        kg.evaluate(["logprob:mean", "always"], run)  # The first call also imports modules.
        sys.setprofile(record_module)
        try:
            kg.evaluate(["logprob:mean", "always"], run)
        finally:
            sys.setprofile(None)
    return {name for name in seen if name.startswith("knowgate")}


# --- tables ---------------------------------------------------------------------------------------


def measures() -> list[tuple[str, str, str]]:
    """Return each measure with its current value and its limit."""
    lengths = sorted(function_length(node) for _, node in functions())
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files()]
    users = export_users()
    vague = vague_variables()
    return [
        ("lines of code", f"{sum(code_lines(path) for path in files()):,}", f"<= {MOST_CODE_LINES:,}"),
        ("modules", str(len(files())), f"<= {MOST_MODULES}"),
        ("lines per module, mean / longest", f"{statistics.mean(lines):.0f} / {max(lines)}", f"<= {LONGEST_FILE}"),
        ("packages and modules under knowgate/", str(len(top_level())), "16"),
        ("names exported by packages", str(sum(users.values())), f"<= {MOST_EXPORTS}"),
        ("... used by one other package / by none", f"{users[1]} / {users[0]}", ""),
        ("function length, median / 90 % / longest", _spread(lengths), f"<= {LONGEST_FUNCTION}"),
        ("functions over 40 lines", str(len(long_functions(40))), f"<= {MOST_LONG_FUNCTIONS}"),
        (f"functions with more than {MOST_PARAMETERS} parameters", str(len(wide_functions())), "0"),
        ("modules and classes whose names are not nouns", str(len(odd_names())), "0"),
        ("variables " + " / ".join(VAGUE_VARIABLES), " / ".join(str(vague[name]) for name in VAGUE_VARIABLES), ""),
        ("library messages that name a --flag", str(len(messages_with_flags())), "0"),
        ("imports that point up", str(len(upward_imports())), "0"),
        ("import cycles", str(len(cycles())), "0"),
    ]


def _spread(values: list[int]) -> str:
    return f"{values[len(values) // 2]} / {values[int(0.9 * len(values))]} / {values[-1]}"


def measure_table() -> str:
    """Render the measures with their limits as Markdown."""
    rows = [f"| {name} | {value} | {limit} |" for name, value, limit in measures()]
    return "\n".join(["| measure | now | limit |", "|---|---|---|", *rows])


def layer_table() -> str:
    """Render the packages from top to bottom, each with the summary of its docstring, as Markdown."""
    rows = [f"| `{part}` | {_summary(part)} |" for part in LAYERS if part not in (TOP, "__main__")]
    return "\n".join(["| package | what it holds |", "|---|---|", *rows])


def _summary(part: str) -> str:
    path = SOURCE / part / "__init__.py"
    path = path if path.is_file() else SOURCE / f"{part}.py"
    return (ast.get_docstring(tree(path)) or "").split("\n\n")[0].replace("\n", " ")


def main() -> None:
    """Print the tables, and with --list every violation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="also list every violation")
    parser.add_argument("--trace", action="store_true", help="also count the modules that run in an evaluation")
    options = parser.parse_args()
    sys.stdout.write(f"{layer_table()}\n\n{measure_table()}\n")
    if options.trace:
        sys.stdout.write(f"\nmodules that run in an evaluation: {len(modules_of_an_evaluation())}\n")
    if options.list:
        lists = {
            "imports that point up": [str(each) for each in upward_imports()],
            "import cycles": [" <-> ".join(group) for group in cycles()],
            "functions over 40 lines": long_functions(40),
            "too many parameters": wide_functions(),
            "names that are not nouns": odd_names(),
            "messages with flags": messages_with_flags(),
        }
        for title, rows in lists.items():
            sys.stdout.write(f"\n{title}\n" + "".join(f"  {row}\n" for row in rows))


if __name__ == "__main__":
    main()
