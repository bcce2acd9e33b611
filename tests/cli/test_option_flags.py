"""The flags of a command come from the option model of the library function that it calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from knowgate.cli.option_flags import expand_options, make_flags
from knowgate.core.options import Count, Options, Share


class DrawOptions(Options):
    """Options of `draw`."""

    samples: Count = Field(30, description="Samples to draw, of `max_tokens` tokens.")
    max_tokens: Count = Field(32, description="Longest answer.")
    top_p: Share | None = Field(None, description="Share of the tokens.")
    mask: bool = Field(False, description="Hide the answers.")
    grade: Literal["exact", "contains"] = Field("contains", description="Grader.")
    rerank: str | None = Field(None, json_schema_extra={"flag": "--reranker", "metavar": "DIR"})
    layers: str | list[int] = "mid"
    runs: list[Path] = Field(default=[], json_schema_extra={"flag": "--run"})
    internal: dict[str, Any] = Field(default={}, json_schema_extra={"flag": None})


calls: list[DrawOptions] = []


def draw(data: Annotated[str, typer.Option(help="The data.")], options: DrawOptions) -> None:
    """Draw samples."""
    calls.append(options)


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(expand_options(draw))
    return app


def run(app: typer.Typer, *arguments: str) -> str:
    calls.clear()
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--data", "x", *arguments]).output


def test_flags_that_are_not_given_leave_their_fields_unset(app: typer.Typer):
    run(app)
    assert calls == [DrawOptions()]
    assert calls[0].model_fields_set == set()


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--samples", "5"], {"samples": 5}),
        (["--max-tokens", "7"], {"max_tokens": 7}),
        (["--top-p", "0.5"], {"top_p": 0.5}),
        (["--mask"], {"mask": True}),
        (["--no-mask"], {"mask": False}),
        (["--grade", "exact"], {"grade": "exact"}),
        (["--reranker", "folder"], {"rerank": "folder"}),
        (["--layers", "1,2"], {"layers": "1,2"}),
        (["--run", "a", "--run", "b"], {"runs": [Path("a"), Path("b")]}),
    ],
)
def test_a_flag_sets_its_field(app: typer.Typer, arguments: list[str], fields: dict[str, Any]):
    run(app, *arguments)
    assert calls == [DrawOptions(**fields)]
    assert calls[0].model_fields_set == set(fields)


def test_a_number_out_of_range_is_wrong_usage(app: typer.Typer):
    assert "--samples" in run(app, "--samples", "0")
    assert not calls


def test_the_help_shows_descriptions_defaults_and_choices_but_no_hidden_field(app: typer.Typer):
    text = " ".join(run(app, "--help").replace("│", " ").split())
    assert "Samples to draw, of --max-tokens tokens. Default: 30." in text
    assert "exact|contains" in text
    assert "--internal" not in text


class OtherOptions(Options):
    """Options of another function, with a flag that `DrawOptions` does not have."""

    internal: str = "plain"


def test_a_field_without_a_flag_does_not_take_the_flag_of_another_model():
    taken = []

    def both(options: DrawOptions, other: OtherOptions) -> None:
        """Take both."""
        taken.extend([options.internal, other.internal])

    app = typer.Typer(add_completion=False)
    app.command()(expand_options(both))
    CliRunner().invoke(app, ["--internal", "x"])
    assert taken == [{}, "x"]


class Vocabulary:
    """A type that JSON does not have."""


class PluginOptions(Options):
    """Options of a gate of another package."""

    vocabulary: Vocabulary | None = Field(None, description="Words.")
    shape: tuple[int, float] = (1, 1.0)
    form: Literal["flat"] = "flat"


def test_types_that_json_does_not_have_become_flags_for_text():
    flags = {flag.name: flag.annotation for flag in make_flags(PluginOptions)}
    assert {name: annotation.__origin__ for name, annotation in flags.items()} == {
        "vocabulary": str | None,
        "shape": list[float] | None,
        "form": str | None,
    }
    assert flags["form"].__metadata__[0].metavar == "flat"
