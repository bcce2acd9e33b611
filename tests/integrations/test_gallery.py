"""The examples of the gallery, run as their page shows them, each with its real framework."""

import json
import os
import re
import runpy
import subprocess
import sys
import warnings

import pytest

from tests.integrations.conftest import KNOWN, TABLE, UNKNOWN
from tools.structure import ROOT

FOLDER = ROOT / "docs" / "examples" / "integrations"
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
MODULES = {
    "langchain": "langchain",
    "langgraph": "langgraph",
    "llamaindex": "llama_index.core",
    "haystack": "haystack",
    "dspy": "dspy",
    "litellm": "litellm",
    "pydantic": "pydantic_ai",
    "openai": "agents",
    "mcp": "mcp",
    "qdrant": "qdrant_client",
}
EXTRAS = {  # by the first words of an example's name
    **{name: name for name in ("langchain", "llamaindex", "haystack", "dspy", "litellm", "mcp", "qdrant")},
    "langgraph": "langchain",
    "pydantic": "pydantic-ai",
    "openai": "openai-agents",
}
# What each example prints for a known and for an unknown question.
EXPECTED = {
    "langchain_retriever": (
        r"\[\] \| the LLM probably knows",
        r"\['Mira runs the canteen of Balaland\.'\] \| the LLM may",
    ),
    "langchain_agent": (r"^Who wrote Hamlet\? \| False", r"^searched\n.* \| True"),
    "langgraph_route": (r"\| None", r"\| Mira runs the canteen"),
    "llamaindex_engine": (r"\| False \| William Shakespeare", r"\| True \| .*Mira runs the canteen"),
    "haystack_pipeline": (r"\| \[\] \| 0\.0", r"\| \['Mira runs the canteen of Balaland\.'\] \| 0\.9"),
    "dspy_program": (r"\| False \| an answer", r"\| True \| an answer"),
    "litellm_callback": (r"\| False \| False", r"\| True \| True"),
    "pydantic_ai_tool": (r"\| success \(no tool calls\)", r"\| .*Mira runs the canteen"),
    "openai_agents_tool": (r"\| \[\]", r"\| \['search'\]"),
    "mcp_client": (r"\| False \| William Shakespeare", r"\| True \| Mira"),
    "qdrant_search": (r"\| \[\] \| William Shakespeare", r"\| \['Mira runs the canteen of Balaland\.'\] \| Mira"),
}
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.fixture
def project(tmp_path):
    """A folder with documents, a model that knows one thing, and a knowgate.toml that names both."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "canteen.txt").write_text("Mira runs the canteen of Balaland.", encoding="utf-8")
    (tmp_path / "table.json").write_text(json.dumps(TABLE), encoding="utf-8")
    settings = "model = 'fake:table.json'\ngate = 'logprob:mean'\ndocs = 'docs'\n"
    (tmp_path / "knowgate.toml").write_text(settings, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(project, monkeypatch, capfd):
    """What an example prints, run in this process: frameworks take seconds to import."""

    def output(file, *questions):
        monkeypatch.chdir(project)
        monkeypatch.setattr(sys, "argv", [str(file), *questions])
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # for what an example starts
        if file.stem != "qdrant_search":  # which takes the embedded embedder from the cache everybody has
            monkeypatch.setenv("KNOWGATE_CACHE", str(project / "cache"))
        with warnings.catch_warnings(action="ignore"):
            runpy.run_path(str(file), run_name="__main__")
        return capfd.readouterr().out

    return output


def test_every_example_is_on_the_page_and_has_an_expectation():
    assert sorted(EXPECTED) == [file.stem for file in EXAMPLES]
    assert [
        file.name for file in EXAMPLES if f"<!-- example: docs/examples/integrations/{file.name} -->" not in PAGE
    ] == []


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=pytest.mark.model) if f.stem == "qdrant_search" else f for f in EXAMPLES],
    ids=lambda file: file.stem,
)
def test_an_example_retrieves_only_for_unknown_questions(file, run):
    pytest.importorskip(MODULES[file.stem.split("_")[0]])
    if file.stem == "qdrant_search":
        pytest.importorskip("sentence_transformers", reason="needs the extra local")
    output = run(file, KNOWN, UNKNOWN)
    known, unknown = output[: output.index(UNKNOWN)], output
    for text, pattern in zip((known, unknown), EXPECTED[file.stem], strict=True):
        assert re.search(pattern, text, re.MULTILINE), output


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_without_its_framework_prints_how_to_install_it(file, monkeypatch):
    framework = MODULES[file.stem.split("_")[0]].split(".")[0]
    extra = EXTRAS[file.stem.split("_")[0]]
    for name in (framework, f"{framework}_core"):  # as if neither were installed
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=rf"{framework}.* needs .* pip install 'knowgate\[{extra}\]'$"):
        runpy.run_path(str(file), run_name="__main__")


@pytest.mark.process
def test_a_missing_framework_prints_one_sentence_and_no_traceback(project):
    script = "import runpy, sys; sys.modules['langgraph'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    file, environment = FOLDER / "langgraph_route.py", {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", script, file], cwd=project, env=environment, capture_output=True, text=True
    )
    sentence = "this script imports langgraph, which needs the 'langchain' extra."
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{sentence} Install it: pip install 'knowgate[langchain]'\n"
