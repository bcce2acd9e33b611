"""Files that a release consists of: they agree with each other and with the code."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

import knowgate
from tests import conftest
from tools import adapter_versions, ci, dist, release_check

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_changelog_and_the_citation_name_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(knowgate.__version__)}\b", changelog, re.MULTILINE)
    assert f"version: {knowgate.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_every_step_of_the_workflows_is_a_command_of_tools_ci():
    for path in WORKFLOWS:
        commands = re.findall(r"^\s*- run: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert commands
        for command in commands:
            prefix, _, step = command.rpartition(" ")
            assert prefix == "python tools/ci.py", command
            assert step in ci.STEPS, command


def test_the_workflows_cover_the_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    listed = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert versions == ["3.11", "3.12", "3.13", "3.14"]
    assert listed
    assert all([version.strip('" ') for version in line.split(",")] == versions for line in listed)


def test_every_check_of_the_release_runs_something_that_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for check in release_check.CHECKS:
        if check.command[0] == "make":
            assert check.command[1] in targets, check.name
        for argument in check.command[1:]:
            if "/" in argument and argument.endswith((".py", ".yml", ".yaml", ".cfg", ".json", ".md")):
                assert (ROOT / argument).exists(), argument


def test_an_archive_with_tests_or_records_is_rejected(tmp_path):
    import zipfile

    path = tmp_path / "knowgate-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("knowgate/__init__.py", "")
        archive.writestr("benchmarks/runs/rows.jsonl", "")
    assert dist.check_archive(path) == [f"{path.name} contains benchmarks/runs/rows.jsonl, which users do not need"]


def test_the_dashboard_of_grafana_shows_metrics_that_the_server_has():
    pytest.importorskip("prometheus_client")
    board = json.loads((ROOT / "deploy/grafana/dashboards/knowgate.json").read_text(encoding="utf-8"))
    source = (ROOT / "src/knowgate/server/telemetry/metrics.py").read_text(encoding="utf-8")
    shown = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"knowgate_(\w+)", target["expr"])
    }
    assert len(shown) > 8
    assert {"alarm", "key_alarms"} <= shown
    for name in shown:
        assert f'"{re.sub("_(total|bucket)$", "", name)}"' in source.replace('"knowgate_', '"'), name


def test_every_required_package_is_in_the_list_of_licenses():
    pytest.importorskip("packaging")
    page = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert f"| {name.lower()} | " in page, name
    assert "not stated" not in page


def test_the_files_that_small_environments_leave_out_exist():
    paths = [path for paths in conftest.FILES_BY_PACKAGE.values() for path in paths]
    assert [path for path in paths if not (ROOT / "tests" / path).is_file()] == []


def test_the_files_that_tests_start_with_exist():
    names = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(conftest.LONGEST_FILES) <= names


def test_an_adapter_is_recorded_only_if_its_tests_passed(tmp_path):
    outcomes = {name: Counter() for name in adapter_versions.ADAPTERS}
    outcomes["mcp"] = Counter(passed=2, skipped=1)
    outcomes["dspy"] = Counter(skipped=3)
    outcomes["qdrant"] = Counter(passed=2, failed=1)
    pytest.importorskip("mcp")
    adapter_versions.write_record(outcomes, tmp_path / "record.json")
    adapters = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["adapters"]
    assert adapters == {"mcp": {"tests": 2, "packages": {"mcp": metadata.version("mcp")}}}


def test_every_adapter_of_the_extra_integrations_has_tested_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = set(re.search(r"\[(.*)\]", extras["integrations"][0])[1].split(",")) - {"parquet"}  # a file format
    assert names == set(json.loads(adapter_versions.RECORD.read_text(encoding="utf-8"))["adapters"])
