"""The documentation builds without a broken link, holds all that it should, and fetches nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import knowgate
from knowgate.data.runs.records import RecordedBeliefs, RecordedNeeds
from knowgate.data.runs.rows import LabelRow
from knowgate.gates import FITTED_GATES, GATES, load_gate
from knowgate.gates.arbiters.fitted_arbiter import ArbiterManifest
from knowgate.pipeline.settings import PipelineOptions
from tools import structure
from tools.structure import ROOT

OLD = ROOT / "tests" / "fixtures" / "old"


def needs(package: str) -> None:
    reason = "the documentation needs the extra 'docs': pip install -c constraints.txt -e '.[docs]'"
    pytest.importorskip(package, reason=reason)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole documentation, built once; a broken link or reference fails here."""
    needs("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


# --- what it holds --------------------------------------------------------------------------------


def test_every_public_name_is_described(site):
    text = page(site, "api")
    described = set(re.findall(r'id="knowgate\.[\w.]*?(\w+)"', text))
    assert set(knowgate.__all__) <= described


def test_every_command_is_there_with_its_options(site):
    from tools.docs import commands

    text = page(site, "command-line")
    for command in commands.walk(commands.root()):
        section = text.partition(f'id="{command.path.replace(" ", "-")}"')[2].partition("<h2")[0]
        options = [param.opts[0] for param in command.params() if param.param_type_name == "option"]
        assert section
        assert [name for name in options if name not in section] == []


def test_every_gate_is_there_with_what_it_needs(site):
    text = page(site, "gates")
    for name in [*GATES, *FITTED_GATES]:
        section = text.partition(f'<h3 id="{name}"')[2].partition("<h3")[0]
        assert "Needs" in section
        assert "Cost per question" in section


def formula_rows() -> dict[str, list[str]]:
    """The cells after the name of each gate, in the table of formulas."""
    section = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8").partition("## Formulas")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return {name.strip("`"): cells for name, *cells in rows[1:]}


def test_every_gate_has_a_formula():
    assert list(formula_rows()) == [*GATES, *FITTED_GATES]


@pytest.mark.parametrize("name", sorted(GATES.keys() - {"random"}))
def test_the_table_of_formulas_has_the_thresholds_of_the_code(name):
    threshold = formula_rows()[name][-1].split("= ")[-1]
    assert load_gate(name).threshold == pytest.approx(float(threshold))


def test_every_setting_is_there_and_says_what_it_means(site):
    text = page(site, "settings")
    assert [key for key in PipelineOptions.model_fields if f"<code>{key}</code>" not in text] == []
    assert [key for key in PipelineOptions.model_fields if not PipelineOptions.model_fields[key].description] == []


def test_the_layers_are_those_of_the_code(site):
    text = page(site, "layout")
    assert [part for part in structure.top_level() if f"<code>{part}</code>" not in text] == []


def test_no_place_is_left_to_be_filled(site):
    assert [file.name for file in site.rglob("*.html") if "<!-- from code" in file.read_text(encoding="utf-8")] == []


def test_reading_it_fetches_nothing_from_elsewhere(site):
    """Links may lead out; styles, scripts, pictures and fonts may not come from there."""
    pages = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.html"))
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"<(?:link|script|img|iframe)[^>]+(?:href|src)=\"?(?:https?:)?//[^>]+>", pages) == []
    assert re.findall(r"url\([\"']?(?:https?:)?//[^)]+\)|@import", styles) == []


def test_a_broken_link_fails(tmp_path):
    needs("mkdocs")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text("# A\n\n[gone](nowhere.md)\n", encoding="utf-8")
    settings = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": "pages",
        "nav": ["index.md"],
        "hooks": [],
        "plugins": [],
    }
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr


def test_a_cell_of_a_table_stays_in_its_column():
    from tools.docs.markdown import table

    assert table(("a", "b", "c"), [("x|y", "", "1 < 2 `<3`")]) == "| a | c |\n| --- | --- |\n| x\\|y | 1 &lt; 2 `<3` |"


# --- file formats ---------------------------------------------------------------------------------


def documented(file: str) -> set[str]:
    """The keys that the page on file formats lists under the name of a file."""
    text = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    section = re.split(r"^#", text.partition(f"### `{file}`")[2], flags=re.MULTILINE)[0]
    firsts = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for cell in firsts for key in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("file", ["gate.json", "run.json", "pref.json", "index.json"])
def test_the_keys_of_a_manifest_are_those_on_the_page(file):
    written = {key for path in OLD.glob(f"*/{file}") for key in json.loads(path.read_text(encoding="utf-8"))}
    never_in_these = {
        "gate.json": {
            "accuracy",
            "sets",
            "balanced",
            "distance",
            "reference",
            "synthetic",
            "calibrated",
            "test_counts",
            "policy",
        },
        "run.json": {"depth"},
    }
    assert documented(file) - never_in_these.get(file, set()) == written


ROW_RECORDS = [("labels.jsonl", LabelRow), ("needs.jsonl", RecordedNeeds), ("beliefs.jsonl", RecordedBeliefs)]


@pytest.mark.parametrize(("file", "record"), ROW_RECORDS)
def test_the_keys_of_rows_are_those_on_the_page(file, record):
    assert documented(file) == {field.name for field in dataclasses.fields(record)}


def test_the_keys_of_an_arbiter_are_those_on_the_page():
    assert documented("arbiter.json") == {field.name for field in dataclasses.fields(ArbiterManifest)} | {"version"}
