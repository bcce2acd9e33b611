"""Rules of the whole code base: the layers, what an import may cost, tables that hold, no code in data files."""

import ast
import importlib
import sys
import tomllib
from pathlib import Path

import pytest

import knowgate
from knowgate.core.registry import load_target
from knowgate.data.questions import DATASETS
from knowgate.gates import FITTED_GATES, GATES, render_gate_table
from knowgate.models import MODELS
from knowgate.retrieval import RETRIEVERS
from knowgate.retrieval.rerankers import RERANKERS
from tests.support import house
from tests.support.house import LEVEL, ROOT, SOURCE, imports, module_name, part_of
from tests.support.processes import python

HEAVY = ("torch", "transformers", "bm25s", "sentence_transformers", "typer", "pydantic", "httpx", "sklearn")
TABLES = {"gates": GATES, "models": MODELS, "retrieval": RETRIEVERS, "rerank": RERANKERS, "datasets": DATASETS}
FILES = house.files()
MIRRORED = ("datasets", "display", "history", "prompts", "rerank", "retrieval")
ENTRIES = [
    pytest.param(entry, id=f"{table}:{name}") for table, entries in TABLES.items() for name, entry in entries.items()
]


def shown(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def all_imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


# --- layers ---------------------------------------------------------------------------------------


def test_every_part_of_the_package_has_a_level():
    assert {part_of(module) for module in house.modules()} <= set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_imports_point_to_a_lower_level_or_into_the_same_part(path):
    own = part_of(module_name(path))
    wrong = [one for one in imports(path) if one.leaves_its_part and LEVEL[part_of(one.home)] >= LEVEL[own]]
    assert not wrong


def test_packages_are_entered_through_their_faces():
    _, inside = house.through_faces()
    assert not inside


def test_every_name_taken_from_a_face_is_one_it_hands_on():
    through, _ = house.through_faces()
    wrong = [one for one in through if one.name not in house.handed_on(part_of(one.home))]
    assert not wrong


@pytest.mark.parametrize("package", sorted(house.packages()))
def test_every_name_of_a_face_is_there_and_none_is_hidden_by_a_module(package):
    face = importlib.import_module(f"knowgate.{package}")
    modules = {path.stem for path in (SOURCE / package).iterdir()}
    assert not modules & house.handed_on(package)
    assert all(hasattr(face, name) for name in house.handed_on(package))


def test_no_modules_import_each_other_in_a_circle():
    assert house.circles() == []


def test_no_gate_imports_another_gate():
    gates = {entry.target.partition(":")[0] for entry in [*GATES.values(), *FITTED_GATES.values()]}
    wrong = {
        one.module: one.home
        for path in (SOURCE / "gates").rglob("*.py")
        for one in imports(path)
        if path.stem != "__init__" and one.home in gates - {one.module}
    }
    assert not wrong


# --- import ---------------------------------------------------------------------------------------


def test_importing_knowgate_loads_nothing_heavy():
    loaded = python("import sys, knowgate; print(*sys.modules)").split()
    assert not [name for name in HEAVY if name in loaded]


IMPORT_COST = """
import sys, time
start = time.process_time()
__import__(sys.argv[1])
print(time.process_time() - start)
"""


def test_importing_knowgate_is_quick(capsys):
    """Against numpy, in processor time: seconds would tell about the machine and its load."""
    ours, numpys = (min(float(python(IMPORT_COST, name)) for _ in range(5)) for name in ("knowgate", "numpy"))
    with capsys.disabled():
        sys.stderr.write(f"\nimport knowgate: {ours:.3f} s of processor time, numpy {numpys:.3f} s, best of 5\n")
    assert ours < numpys


def test_the_help_of_the_command_line_loads_nothing_heavy():
    code = "import sys; from knowgate.cli.main import run; run(['--help']); print('loaded', *sys.modules)"
    loaded = python(code).rpartition("loaded")[2].split()
    assert not [name for name in HEAVY if name in loaded and name not in ("typer", "pydantic", "httpx")]


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
    tree = house.tree(house.modules()[module])
    assert attribute in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_extra_of_every_entry_can_be_installed(entry):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert entry.extra in ("", *project["optional-dependencies"])


def test_the_page_of_gates_has_the_table_of_them():
    text = (ROOT / "docs" / "which-gate.md").read_text(encoding="utf-8")
    block = text.partition("<!-- gates -->")[2].partition("<!-- /gates -->")[0]
    assert block.strip() == render_gate_table()


# --- the code -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_nothing_that_runs_code_out_of_data_is_used(path):
    roots = {name.split(".")[0] for name in all_imports(path)}
    assert not roots & {"pickle", "joblib", "dill", "cloudpickle", "shelve", "marshal"}
    assert "trust_remote_code" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_no_file_is_longer_than_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("room", MIRRORED)
def test_test_files_are_named_after_the_module_they_test(room):
    modules = {room, *(path.stem for path in (SOURCE / room).glob("*.py"))}
    named = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / room).glob("test_*.py")}
    assert named <= modules
