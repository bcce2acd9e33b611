"""Rules of the whole code base: the layers, what an import may cost, tables that hold, no code in data files."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import knowgate
from knowgate.datasets import DATASETS
from knowgate.gates import GATES, markdown_table
from knowgate.models import MODELS
from knowgate.registry import load_target
from knowgate.rerank import RERANKERS
from knowgate.retrieval import RETRIEVERS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "knowgate"
FILES = sorted(SOURCE.rglob("*.py"))
LEVELS = [
    ["errors", "types"],
    ["files", "text", "registry"],
    ["prompts", "weights"],
    ["embedding"],
    ["models", "retrieval", "rerank", "datasets", "history"],
    ["labels"],
    ["gates"],
    ["fit", "calibrate", "cases"],
    ["pipeline"],
    ["evaluate"],
    ["cli", "serve", "integrations", "__init__"],
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
HEAVY = ("torch", "transformers", "bm25s", "sentence_transformers", "plotly", "typer", "pydantic", "httpx", "sklearn")
SECONDS = 0.3
TABLES = {"gates": GATES, "models": MODELS, "retrieval": RETRIEVERS, "rerank": RERANKERS, "datasets": DATASETS}
ENTRIES = [
    pytest.param(entry, id=f"{table}:{name}") for table, entries in TABLES.items() for name, entry in entries.items()
]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def part_of(module: str) -> str:
    """'knowgate.gates.flare' -> 'gates'; the package itself is '__init__'."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    """Every module of ours that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return {name for name in found if name.split(".")[0] == "knowgate"}


def shown(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def all_imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


# --- layers ---------------------------------------------------------------------------------------


def test_every_part_of_the_package_has_a_level():
    assert {part_of(module) for module in MODULES} <= set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_imports_point_to_a_lower_level_or_into_the_same_part(path):
    own = part_of(module_name(path))
    wrong = [name for name in imports(path) if part_of(name) != own and LEVEL[part_of(name)] >= LEVEL[own]]
    assert not wrong


def test_no_gate_imports_another_gate():
    gates = {entry.target.partition(":")[0] for entry in GATES.values()}
    wrong = {
        shown(path): found
        for path in (SOURCE / "gates").glob("*.py")
        if (found := (imports(path) & gates) - {module_name(path)})
    }
    assert not wrong


# --- import ---------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    return done.stdout.strip()


def test_importing_knowgate_loads_nothing_heavy():
    loaded = run_python("import sys, knowgate; print(*sys.modules)").split()
    assert not [name for name in HEAVY if name in loaded]


def test_importing_knowgate_is_quick(capsys):
    code = "import time; t = time.perf_counter(); import knowgate; print(time.perf_counter() - t)"
    best = min(float(run_python(code)) for _ in range(3))
    with capsys.disabled():
        sys.stderr.write(f"\nimport knowgate: {best:.3f} s, best of 3\n")
    assert best < SECONDS


def test_every_public_name_is_there():
    assert all(getattr(knowgate, name) is not None for name in knowgate.__all__)
    assert sorted(knowgate.__all__) == knowgate.__all__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = knowgate.nothing


# --- tables ---------------------------------------------------------------------------------------


def light_entries():
    """Entries whose module can be imported without torch; the others are resolved where they are tested."""
    return [param for param in ENTRIES if param.values[0].extra != "local"]


@pytest.mark.parametrize("entry", light_entries())
def test_every_entry_that_needs_no_torch_resolves(entry):
    assert callable(load_target(entry.target, "it", entry.extra))


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_target_of_every_entry_is_in_its_file(entry):
    module, _, attribute = entry.target.partition(":")
    tree = ast.parse((SOURCE.parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    assert attribute in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_extra_of_every_entry_can_be_installed(entry):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert entry.extra in ("", *project["optional-dependencies"])


def test_the_readme_has_the_table_of_gates():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition("<!-- gates -->")[2].partition("<!-- /gates -->")[0]
    assert block.strip() == markdown_table()


# --- the code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_nothing_that_runs_code_out_of_data_is_used(path):
    roots = {name.split(".")[0] for name in all_imports(path)}
    assert not roots & {"pickle", "joblib", "dill", "cloudpickle", "shelve", "marshal"}
    assert "trust_remote_code" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_no_file_is_longer_than_300_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


def test_test_files_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
