"""What README, CONTRIBUTING and the documentation show is what runs."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import knowgate as kg
from knowgate.cli.commands import COMMANDS, CommandLineError
from knowgate.cli.demo.comparison import demo_folder
from knowgate.cli.main import run
from knowgate.core.files import read_jsonl
from knowgate.core.registry import load_target
from knowgate.pipeline.settings import PipelineOptions
from tests.support import command_lines, entry_points
from tests.support.invented import write_invented
from tests.support.params import also_slow
from tools import generated_sections
from tools.pages import EXAMPLES, Block, blocks, inline_code
from tools.structure import ROOT

CONSOLE, PYTHON, TOML = blocks("console"), blocks("python"), blocks("toml")
PAGES_WITH_PYTHON = sorted({block.page for block in PYTHON})
HARMLESS = {"echo", "head", "tail"}
LEARN, TUNE, TEST = 60, 340, 60  # questions; half of those to tune on are held out, and a guarantee takes 149


def listed_points(block: Block) -> dict[str, dict[str, str]]:
    """Of a pyproject.toml; settings have none."""
    found: dict[str, dict[str, str]] = tomllib.loads(block.text).get("project", {}).get("entry-points", {})
    return found


@pytest.fixture
def docs(tmp_path, monkeypatch):
    shutil.copytree(demo_folder() / "handbook", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "docs"


@pytest.fixture
def examples(tmp_path, monkeypatch):
    """The examples of the documentation as if they were installed, with every entry point the pages list."""
    points: dict[str, dict[str, str]] = {}
    for block in TOML:
        for group, names in listed_points(block).items():
            points.setdefault(group, {}).update(names)
    entry_points.install(tmp_path / "installed", points, EXAMPLES, monkeypatch)


# --- parts made from code -------------------------------------------------------------------------


# The part of README is tested beside the benchmark that it shows (test_policy_benchmark.py).
GENERATED = [also_slow(page) if page == "docs/judges.md" else page for page in generated_sections.SECTIONS]
GENERATED.remove("README.md")


@pytest.mark.parametrize("page", GENERATED)
def test_parts_made_from_the_code_are_up_to_date(page):
    assert generated_sections.update_sections(page) == (ROOT / page).read_text(encoding="utf-8"), "run `make readme`"


def test_readme_has_at_most_650_words():
    """About two screens."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 650


# --- shell ----------------------------------------------------------------------------------------


@pytest.fixture
def top(examples):
    """The command line, where the examples are installed."""
    return command_lines.root()


def check_program(top: Any, words: list[str]) -> None:
    """What a line of shell names is there."""
    program, *rest = words
    if program == "knowgate":
        command_lines.check(top, rest)
    elif program == "make":
        assert set(rest) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    elif program == "pip":
        check_extras(rest[-1])
    else:
        assert program in HARMLESS, f"tests know no program '{program}'"


def check_extras(requirement: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.fullmatch(r"(?:knowgate|\.)(?:\[(.*)\])?", requirement)
    assert named
    assert set((named[1] or "all").split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_every_shell_line_is_one_the_command_line_takes(block, top):
    programs = list(command_lines.programs(block.text))
    assert programs
    for words in programs:
        check_program(top, words)


def test_the_page_of_commands_has_a_line_for_every_command():
    table = [
        line
        for line in (ROOT / "docs" / "which-command.md").read_text(encoding="utf-8").splitlines()
        if line[:1] == "|"
    ]
    named = set(re.findall(r"`knowgate ([\w-]+)", "\n".join(line.split("|")[1] for line in table)))
    assert set(COMMANDS) - named == set()


def test_every_mention_of_a_command_names_one_that_exists(top):
    mentions = [(page, text) for page, text in inline_code() if text.startswith("knowgate ")]
    assert mentions
    for _, text in mentions:
        command_lines.check_names(top, shlex.split(text)[1:])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('knowgate ask "a | b" # why', [["knowgate", "ask", "a | b"]]),
        ("echo 'x y' | knowgate ask --json", [["echo", "x y"], ["knowgate", "ask", "--json"]]),
        ("knowgate ask < in.txt >> out.jsonl", [["knowgate", "ask"]]),
        ("knowgate eval \\\n  --labels run", [["knowgate", "eval", "--labels", "run"]]),
        ("make demo && make test", [["make", "demo"], ["make", "test"]]),
        ("# only words", []),
    ],
)
def test_shell_lines_are_taken_apart(line, words):
    assert list(command_lines.programs(line)) == words


@pytest.mark.parametrize(
    "words", [["no-such-command"], ["ask", "--no-such-option", "q"], ["index", "source"], ["ask", "--k", "many", "q"]]
)
def test_lines_the_command_line_would_refuse_are_refused(words, top):
    with pytest.raises(CommandLineError):
        command_lines.check(top, words)


@pytest.mark.parametrize("words", [["nothing"], ["ask", "--nothing"], ["history", "nothing"]])
def test_mentions_of_what_is_not_there_are_refused(words, top):
    with pytest.raises(AssertionError, match="nothing"):
        command_lines.check_names(top, words)


def first_ask(page: str) -> list[str]:
    """Return the words of the first `knowgate ask` on a page."""
    shown = [words for block in CONSOLE if block.page.name == page for words in command_lines.programs(block.text)]
    return next(words for words in shown if words[:2] == ["knowgate", "ask"])


@pytest.mark.model
@pytest.mark.parametrize("page", ["README.md", "quickstart.md"])
def test_the_first_ask_command_answers_from_the_packaged_handbook(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run(first_ask(page)[1:]) == 0
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "29" in printed
    shown = [block.text for block in blocks("text") if block.page.name in (page, page.replace(".md", ".zh.md"))]
    outputs = [text for text in shown if text.startswith("1. ")]
    assert [line for text in outputs for line in text.splitlines() if line not in printed] == []


def test_the_chinese_page_shows_the_same_first_ask_command():
    assert first_ask("quickstart.zh.md") == first_ask("quickstart.md")


# --- Python and TOML ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with everything that the code blocks name: documents, questions, label runs of a fake model."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = write_invented(Path("made"), LEARN + TUNE + TEST)
        rows = Path("made", "questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        Path("train.jsonl").write_text("".join(rows[:LEARN]), encoding="utf-8")
        Path("docs").mkdir()
        for number, (_, document) in enumerate(read_jsonl(made.docs)):
            Path("docs", f"{number}.txt").write_text(document["text"], encoding="utf-8")
        kg.build_index("docs", "made/index")
        for out, questions in {"run2": made.questions[LEARN:-TEST], "test-run": made.questions[-TEST:]}.items():
            kg.label(questions, model=made.model, index="made/index", out=out, samples=0)
    return folder, made.model


@pytest.fixture
def fake_model(prepared, tmp_path, monkeypatch):
    """The spec of the fake model, in a fresh copy of the prepared folder."""
    folder, model = prepared
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return model


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=lambda page: page.name)
def test_the_python_of_every_page_runs(page, fake_model, examples):
    """Its blocks one after another, with the fake model in the place of the embedded one."""
    names = {"__name__": "shown"}
    for block in [block for block in PYTHON if block.page == page]:
        code = block.text.replace('"smollm"', repr(fake_model))
        exec(compile(code, str(block), "exec", dont_inherit=True), names)


@pytest.mark.model
def test_the_library_example_runs(docs, capsys):
    first = next(block for block in PYTHON if block.page.name == "library.md")
    exec(compile(first.text, "library.md", "exec", dont_inherit=True), {})
    assert "Paris" in capsys.readouterr().out


@pytest.mark.parametrize("block", TOML, ids=str)
def test_every_toml_block_names_what_is_there(block, examples, tmp_path):
    points = listed_points(block)
    if "[[rule]]" in block.text:
        (tmp_path / "rules.toml").write_text(block.text, encoding="utf-8")
        kg.load_rules(tmp_path / "rules.toml")
    elif not points:
        PipelineOptions(**tomllib.loads(block.text))
    for names in points.values():
        assert all(callable(load_target(target, "it", "")) for target in names.values())
