"""Record which versions of other frameworks the adapters were tested with, as a plugin of pytest.

`make test-integrations` runs the tests with `-p tools.adapter_versions`. An adapter is recorded if at least one of its tests
passed and none failed. `make readme` writes the record into `docs/integrations.md`.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).parent / "docs" / "adapter_versions.json"


class Adapter(NamedTuple):
    """An adapter: its packages, and words that the ids of its tests contain."""

    packages: tuple[str, ...]
    words: tuple[str, ...]


ADAPTERS = {
    "langchain": Adapter(("langchain", "langgraph"), ("integrations/test_langchain.py",)),
    "llamaindex": Adapter(("llama-index-core",), ("integrations/test_llamaindex.py",)),
    "haystack": Adapter(("haystack-ai",), ("integrations/test_haystack.py",)),
    "dspy": Adapter(("dspy",), ("integrations/test_dspy.py",)),
    "litellm": Adapter(("litellm",), ("integrations/test_litellm.py",)),
    "pydantic-ai": Adapter(("pydantic-ai-slim",), ("integrations/test_agents.py", "pydantic")),
    "openai-agents": Adapter(("openai-agents",), ("integrations/test_agents.py", "openai")),
    "mcp": Adapter(("mcp",), ("integrations/test_mcp.py",)),
    "qdrant": Adapter(("qdrant-client",), ("engines/test_engines.py", "qdrant")),
    "chroma": Adapter(("chromadb",), ("engines/test_engines.py", "chroma")),
    "lancedb": Adapter(("lancedb",), ("engines/test_engines.py", "lancedb")),
    "mlflow": Adapter(("mlflow-skinny",), ("integrations/test_tracking.py", "mlflow")),
    "wandb": Adapter(("wandb",), ("integrations/test_tracking.py", "wandb")),
    "hub": Adapter(("huggingface-hub",), ("integrations/test_hub.py",)),
}
_outcomes: dict[str, Counter[str]] = {name: Counter() for name in ADAPTERS}


def pytest_runtest_logreport(report: Any) -> None:
    """Count the outcomes of each adapter's tests."""
    if report.when == "call" or report.failed:
        for name, adapter in ADAPTERS.items():
            if all(word in report.nodeid for word in adapter.words):
                _outcomes[name][report.outcome] += 1


def pytest_sessionfinish(session: Any) -> None:
    """Write the record. Only the process that collects the results does so, not its workers."""
    if not hasattr(session.config, "workerinput"):
        write_record(_outcomes)


def write_record(outcomes: dict[str, Counter[str]], path: Path = RECORD) -> None:
    """Write the versions of the adapters that passed.

    Args:
        outcomes: Number of tests by outcome, for each adapter.
        path: File to write.
    """
    passed = [name for name, counts in outcomes.items() if counts["passed"] and not counts["failed"]]
    record = {
        "python": platform.python_version(),
        "adapters": {
            name: {
                "tests": outcomes[name]["passed"],
                "packages": {package: metadata.version(package) for package in ADAPTERS[name].packages},
            }
            for name in passed
        },
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def version_table() -> str:
    """Render the record as a table for the page on integrations."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [
        f"Tested with Python {record['python']} and these versions. `make test-integrations` writes this table.",
        "",
        "| extra | tested with | tests passed |",
        "|---|---|---|",
    ]
    for name, adapter in record["adapters"].items():
        packages = ", ".join(f"{package} {version}" for package, version in adapter["packages"].items())
        lines.append(f"| `{name}` | {packages} | {adapter['tests']} |")
    return "\n".join(lines)
