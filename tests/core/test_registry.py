import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import pytest

from knowgate.core import registry
from knowgate.core.registry import RegistryEntry, load_entry, load_target, parse_options, split_spec
from knowgate.errors import BadSetting, MissingExtra, UnknownName

TABLE = {
    "first": RegistryEntry("collections:OrderedDict", "a"),
    "second": RegistryEntry("collections:Counter", "b"),
}


@dataclass(frozen=True)
class Options:
    kind: Literal["fast", "slow"] = "fast"
    count: int = 1
    share: float = 0.5
    loud: bool = False
    word: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class NoOptions:
    name = "none"


# --- names ----------------------------------------------------------------------------------------


def test_a_name_resolves_to_its_target():
    from collections import Counter

    assert load_entry(TABLE, "thing", "second") is Counter


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"unknown thing 'zzz'\. Known: first, second\."):
        load_entry(TABLE, "thing", "zzz")


def test_a_misspelled_name_suggests_the_closest():
    with pytest.raises(UnknownName, match=r"unknown thing 'secnd'\. Did you mean 'second'\?"):
        load_entry(TABLE, "thing", "secnd")


def test_a_missing_package_names_the_extra_to_install():
    table = {"x": RegistryEntry("package_that_is_not_there:Thing", "x", extra="local")}
    with pytest.raises(MissingExtra, match=r"thing 'x' needs the 'local' extra.*pip install 'knowgate\[local\]'"):
        load_entry(table, "thing", "x")


def test_a_module_that_imports_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra, match="'train' extra"):
        load_target("needs_more:Thing", "the thing", "train")


def test_a_missing_package_without_an_extra_is_raised_unchanged():
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_there"):
        load_target("package_that_is_not_there:Thing", "the thing", "")


def test_a_missing_module_of_knowgate_does_not_suggest_an_extra():
    with pytest.raises(ModuleNotFoundError, match=r"knowgate\.no_such_module"):
        load_target("knowgate.no_such_module:Thing", "the thing", "local")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A distribution that adds 'third' to the group 'knowgate.things'."""
    (tmp_path / "plugin_for_tests.py").write_text("THING = 'from outside'\n")
    info = tmp_path / "plugin_for_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-for-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[knowgate.things]\nthird = plugin_for_tests:THING\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("plugin_for_tests", None)


@pytest.mark.usefixtures("plugin")
def test_a_plugin_adds_a_name():
    assert load_entry(TABLE, "thing", "third", "knowgate.things") == "from outside"


@pytest.mark.usefixtures("plugin")
def test_names_of_plugins_are_listed():
    with pytest.raises(UnknownName, match="Known: first, second, third"):
        load_entry(TABLE, "thing", "zzz", "knowgate.things")


@pytest.mark.usefixtures("plugin")
def test_names_of_another_group_are_not_seen():
    with pytest.raises(UnknownName):
        load_entry(TABLE, "thing", "third", "knowgate.others")


# --- specs and options ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("name", ("name", "")),
        ("name:rest", ("name", "rest")),
        (" name : rest ", ("name", "rest")),
        ("openai:m@http://h:1/v1", ("openai", "m@http://h:1/v1")),
    ],
)
def test_a_spec_is_split_at_its_first_colon(spec, expected):
    assert split_spec(spec) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("slow", {"kind": "slow"}),
        ("slow,count=3", {"kind": "slow", "count": 3}),
        ("count=-2", {"count": -2}),
        ("share=0.25", {"share": 0.25}),
        ("share=1", {"share": 1.0}),
        ("loud=true", {"loud": True}),
        ("loud=False", {"loud": False}),
        ("seed=7", {"seed": 7}),
        (" count = 3 , word = a b ,", {"count": 3, "word": "a b"}),
        ("word=x=y", {"word": "x=y"}),
    ],
)
def test_options_become_the_values_of_their_fields(text, expected):
    assert parse_options(Options, text, "thing") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("medium", "option 'kind' is 'medium'. Use one of: fast, slow"),
        ("count=many", "option 'count' must be a number, not 'many'"),
        ("count=1.5", "option 'count' must be a number"),
        ("share=half", "option 'share' must be a number"),
        ("loud=yes", "option 'loud' is 'yes'. Use one of: true, false"),
        ("colou\nr=red", r"unknown option 'colou\\nr'\. Known options: kind"),
        ("colour=red", "unknown option 'colour'. Known options: kind, count, share, loud, word, seed"),
        ("count=1,slow", "'slow' does not have the form key=value. Known options: kind, count"),
    ],
)
def test_a_wrong_option_lists_what_is_allowed(text, message):
    with pytest.raises(BadSetting, match=f"thing: {message}"):
        parse_options(Options, text, "thing")


@pytest.mark.parametrize("text", ["x", "x=1"])
def test_a_class_without_fields_accepts_no_options(text):
    with pytest.raises(BadSetting, match="Known options: none"):
        parse_options(NoOptions, text, "thing")


def test_an_entry_point_that_cannot_be_loaded_is_named(monkeypatch):
    point = metadata.EntryPoint("worse", "no_such_module:Gate", "knowgate.gates")
    monkeypatch.setattr(registry, "find_plugins", lambda group: {"worse": point})
    with pytest.raises(BadSetting, match=r"gate 'worse' \(no_such_module:Gate\) cannot be loaded: No module named"):
        load_entry({}, "gate", "worse", "knowgate.gates")
