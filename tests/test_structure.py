"""Rules of the whole code base. Each test lists every violation of one rule."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import knowgate
from knowgate.core.registry import RegistryEntry, load_target
from knowgate.data.questions import DATASETS
from knowgate.errors import MissingExtra
from knowgate.gates import FITTED_GATES, GATES
from knowgate.models import MODELS
from knowgate.retrieval import RETRIEVERS
from knowgate.retrieval.rerankers import RERANKERS
from tests.support.processes import python
from tools import structure
from tools.docs.gate_sections import render_gate_table

HEAVY = ("torch", "transformers", "bm25s", "sentence_transformers", "typer", "pydantic", "httpx", "sklearn")
TABLES = {"gates": GATES, "models": MODELS, "retrieval": RETRIEVERS, "rerankers": RERANKERS, "datasets": DATASETS}
ENTRIES = {f"{table}:{name}": entry for table, entries in TABLES.items() for name, entry in entries.items()}
FORBIDDEN_IMPORTS = {"pickle", "joblib", "dill", "cloudpickle", "shelve", "marshal"}
# Words of the project's early dialect. STYLE: use the term the field already uses.
API_KEYS = {(str(structure.SOURCE / "server" / "schemas.py"), "promised")}
FORBIDDEN_WORDS = ("doorkeeper", "gatekeeper", "promised", "schooling", "pupil", "weighing", "going_on", "wishes")


def imported_packages(path: Path) -> set[str]:
    """The top-level packages that a file imports, at any place."""
    names: set[str] = set()
    for node in structure.nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return {name.split(".")[0] for name in names}


# --- layers ---------------------------------------------------------------------------------------


def test_the_top_level_is_the_sixteen_packages():
    assert sorted(structure.top_level()) == sorted(set(structure.LAYERS) - {"__main__", structure.TOP})


def test_imports_point_down_only():
    assert [str(each) for each in structure.upward_imports()] == []


def test_no_modules_import_each_other():
    assert structure.cycles() == []


def test_benchmarks_do_not_import_tests_or_each_other_in_a_cycle():
    files = {path.stem: path for path in (structure.ROOT / "benchmarks").glob("*.py")}
    graph = {
        stem: {
            name.removeprefix("benchmarks.").split(".")[0]
            for node in structure.nodes(path)
            if isinstance(node, ast.ImportFrom)
            for name in [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            if name.startswith("benchmarks.")
        }
        & set(files)
        for stem, path in files.items()
    }
    assert [group for group in structure.strongly_connected(graph) if len(group) > 1] == []


def test_tools_and_documentation_do_not_import_tests():
    folders = ("tools", "docs", "examples", "benchmarks")
    files = [path for folder in folders for path in (structure.ROOT / folder).rglob("*.py")]
    assert [str(path) for path in files if "tests" in imported_packages(path)] == []


def test_no_gate_imports_another_gate():
    gates = {entry.target.partition(":")[0] for entry in [*GATES.values(), *FITTED_GATES.values()]}
    imports = [each for each in structure.all_imports() if each.module in gates and each.home in gates - {each.module}]
    assert [str(each) for each in imports] == []


def test_a_name_that_a_package_exports_has_a_user_outside():
    assert structure.export_users()[0] == 0


# --- sizes and names ------------------------------------------------------------------------------


def test_the_package_stays_within_its_size():
    advice = "see 'Where things are' in CONTRIBUTING.md"
    assert len(structure.files()) <= structure.MOST_MODULES, advice
    assert sum(structure.code_lines(path) for path in structure.files()) <= structure.MOST_CODE_LINES, advice
    assert len(structure.package_exports()) <= structure.MOST_EXPORTS


def test_no_file_is_too_long():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in structure.files()}
    assert {str(path): length for path, length in lengths.items() if length > structure.LONGEST_FILE} == {}


def test_functions_are_short_and_take_few_parameters():
    assert structure.long_functions(structure.LONGEST_FUNCTION) == []
    assert len(structure.long_functions(40)) <= structure.MOST_LONG_FUNCTIONS
    assert structure.wide_functions() == []


def test_modules_and_classes_are_named_by_nouns():
    assert structure.odd_names() == []


def test_no_library_message_names_a_flag_of_the_command_line():
    assert structure.messages_with_flags() == []


def test_words_of_the_early_dialect_do_not_come_back():
    """Looks at the names in the code. Keys of files and of the HTTP API keep their old words."""
    names = {
        (str(path), name)
        for path in structure.files()
        for node in structure.nodes(path)
        for name in [getattr(node, "name", None), getattr(node, "id", None), getattr(node, "arg", None)]
        if isinstance(name, str)
    }
    assert [
        pair for pair in names if any(word in pair[1].lower() for word in FORBIDDEN_WORDS) and pair not in API_KEYS
    ] == []


def test_nothing_that_runs_code_out_of_data_is_used():
    assert [str(path) for path in structure.files() if imported_packages(path) & FORBIDDEN_IMPORTS] == []
    assert [str(path) for path in structure.files() if "trust_remote_code" in path.read_text(encoding="utf-8")] == []


def test_test_folders_mirror_the_package():
    folders = {
        path.parent.relative_to(structure.ROOT / "tests") for path in (structure.ROOT / "tests").rglob("test_*.py")
    }
    others = {Path(), Path("fuzz")}
    assert [str(folder) for folder in folders - others if not (structure.SOURCE / folder).is_dir()] == []


# --- the public interface -------------------------------------------------------------------------


def test_every_public_name_can_be_loaded():
    assert all(getattr(knowgate, name) is not None for name in knowgate.__all__)
    assert sorted(knowgate.__all__) == knowgate.__all__
    assert set(dir(knowgate)) == {*knowgate.__all__, "__version__"}


def test_public_names_are_loaded_from_where_type_checkers_see_them():
    imports = structure.imports(structure.SOURCE / "__init__.py")
    seen = {each.name: each.target for each in imports if each.name in knowgate.__all__}
    assert seen == knowgate._HOMES


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = knowgate.nothing


def test_a_name_of_version_0_1_still_works_and_warns():
    with pytest.warns(DeprecationWarning, match=r"knowgate\.Want is now knowgate\.SignalRequest"):
        assert knowgate.Want is knowgate.SignalRequest


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


def test_importing_knowgate_is_quick():
    """Processor time beside numpy's: seconds alone would tell about the machine."""
    ours, numpys = (min(float(python(IMPORT_COST, name)) for _ in range(3)) for name in ("knowgate", "numpy"))
    assert ours < numpys


def test_the_help_of_the_command_line_loads_nothing_heavy():
    code = "import sys; from knowgate.cli.main import run; run(['--help']); print('loaded', *sys.modules)"
    loaded = python(code).rpartition("loaded")[2].split()
    assert not [name for name in HEAVY if name in loaded and name not in ("typer", "pydantic", "httpx")]


# --- tables ---------------------------------------------------------------------------------------


def test_every_entry_that_needs_no_torch_resolves():
    light = {name: entry for name, entry in ENTRIES.items() if entry.extra != "local"}
    assert [name for name, entry in light.items() if not resolves(entry)] == []


def resolves(entry: RegistryEntry) -> bool:
    """Whether an entry leads to something callable, or its framework is not installed."""
    try:
        return callable(load_target(entry.target, "it", entry.extra))
    except MissingExtra:
        return bool(entry.extra)


def test_the_target_of_every_entry_is_defined_in_its_file():
    wrong = []
    for name, entry in ENTRIES.items():
        module, _, attribute = entry.target.partition(":")
        body = structure.tree(structure.modules()[module]).body
        if attribute not in {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}:
            wrong.append(name)
    assert wrong == []


def test_the_extra_of_every_entry_can_be_installed():
    project = tomllib.loads((structure.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("", *project["optional-dependencies"])
    assert [name for name, entry in ENTRIES.items() if entry.extra not in extras] == []


def test_the_page_of_gates_has_the_table_of_them():
    text = (structure.ROOT / "docs" / "which-gate.md").read_text(encoding="utf-8")
    section = text.partition("<!-- gates -->")[2].partition("<!-- /gates -->")[0]
    assert section.strip() == render_gate_table()


# --- text files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextCall:
    """A call that opens a file as text."""

    line: int
    writes: bool
    given: frozenset[str | None]


def text_calls(path: Path) -> list[TextCall]:
    calls = [node for node in structure.nodes(path) if isinstance(node, ast.Call)]
    modes = [(call, _mode(call)) for call in calls]
    return [
        TextCall(call.lineno, mode != "r", frozenset(keyword.arg for keyword in call.keywords))
        for call, mode in modes
        if mode and "b" not in mode
    ]


def _mode(call: ast.Call) -> str:
    """'' of what opens no file: of `open` the mode stands first in `path.open` and second elsewhere."""
    if isinstance(call.func, ast.Name):
        return _word(call.args[1:], "r") if call.func.id == "open" else ""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "write_text" and ast.unparse(call.func) == "files.write_text":
        return ""  # knowgate.core.files, which writes UTF-8 with one line end
    if name in ("read_text", "write_text"):
        return name[0]
    if name == "fdopen":
        return _word(call.args[1:], "r")
    return _word(call.args, "r") if name == "open" else ""


def _word(arguments: list[ast.expr], default: str) -> str:
    if not arguments:
        return default
    value = arguments[0].value if isinstance(arguments[0], ast.Constant) else ""
    return value if isinstance(value, str) else ""


def test_text_files_have_one_encoding_and_one_line_end_on_every_system():
    calls = [
        (f"{path.relative_to(structure.SOURCE)}:{call.line}", call)
        for path in structure.files()
        for call in text_calls(path)
    ]
    assert [where for where, call in calls if "encoding" not in call.given] == []
    assert [where for where, call in calls if call.writes and "newline" not in call.given] == []


def test_a_call_without_them_would_be_seen(tmp_path: Path):
    (tmp_path / "a.py").write_text(
        "path.open()\npath.open('ab')\nopen(path, 'a', encoding='utf-8')\npath.write_text('x')\nos.fdopen(2, 'w')\n"
        "prompts.open(question)\npath.read_text(encoding='utf-8')\n",
        encoding="utf-8",
    )
    found = {call.line: (call.writes, sorted(map(str, call.given))) for call in text_calls(tmp_path / "a.py")}
    expected = {1: (False, []), 3: (True, ["encoding"]), 4: (True, []), 5: (True, []), 7: (False, ["encoding"])}
    assert found == expected
