"""Options as one object or as keywords, with errors that name the argument."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from pydantic import Field

from knowgate.core.options import Count, Options, Share, UserPath, read_options, with_options
from knowgate.errors import BadSetting


class DrawOptions(Options):
    """Options of `draw`."""

    samples: Count = Field(30, description="Samples to draw.")
    top_p: Share | None = None
    mask: bool = False
    grade: Literal["exact", "contains"] = "contains"
    prompts: UserPath | None = None


@with_options(DrawOptions)
def draw(data: str, *, out: str, options: DrawOptions) -> DrawOptions:
    """Draw samples."""
    return options


def test_fields_can_be_given_as_keywords():
    assert draw("data", out="run", samples=3) == DrawOptions(samples=3)


def test_an_options_object_can_be_given():
    assert draw("data", out="run", options=DrawOptions(samples=3)).samples == 3


def test_keywords_override_the_fields_of_the_object():
    assert draw("data", out="run", options=DrawOptions(samples=3, mask=True), samples=4) == DrawOptions(
        samples=4, mask=True
    )


def test_numpy_numbers_are_accepted():
    assert draw("data", out="run", samples=np.int64(3)).samples == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": 0}, "samples=0 is not allowed: it must be at least 1."),
        ({"samples": True}, "samples=True is not allowed: it must be a whole number."),
        ({"samples": 2.5}, "samples=2.5 is not allowed: it must be a whole number."),
        ({"samples": "3"}, "samples='3' is not allowed: it must be a whole number."),
        ({"top_p": 1.5}, "top_p=1.5 is not allowed: it must be at most 1."),
        ({"top_p": float("nan")}, "top_p=nan is not allowed: it must be at least 0."),
        ({"mask": "perhaps"}, "mask='perhaps' is not allowed: it must be true or false."),
        ({"grade": "x"}, "grade='x' is not allowed: it must be 'exact' or 'contains'."),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_argument(fields: dict[str, Any], message: str):
    with pytest.raises(BadSetting) as error:
        draw("data", out="run", **fields)
    assert str(error.value) == message


def test_an_unknown_keyword_is_named_with_the_one_that_is_meant():
    with pytest.raises(BadSetting, match=r"unknown option 'sample'\. Did you mean 'samples'\?"):
        draw("data", out="run", sample=3)


def test_the_signature_lists_every_field():
    parameters = inspect.signature(draw).parameters
    assert list(parameters) == ["data", "out", "samples", "top_p", "mask", "grade", "prompts", "options"]
    assert parameters["samples"].default == 30
    assert parameters["samples"].annotation is int


def test_the_docstring_lists_every_described_field():
    assert "samples: Samples to draw." in str(draw.__doc__)


def test_options_can_be_sent_to_another_process():
    options = pickle.loads(pickle.dumps(DrawOptions(samples=3)))  # noqa: S301 - made here
    assert options == DrawOptions(samples=3)
    assert options.model_fields_set == {"samples"}


def test_a_home_folder_in_a_path_is_expanded():
    assert DrawOptions(prompts="~/prompts.toml").prompts == Path.home() / "prompts.toml"  # type: ignore[arg-type]


def test_an_error_in_a_table_of_the_settings_file_names_the_table():
    with pytest.raises(BadSetting, match=r"^knowgate\.toml \[draw\]: samples=0 is not allowed"):
        read_options(DrawOptions, {"samples": 0}, "knowgate.toml [draw]")


def test_renamed_fields_work_under_both_names():
    class Renamed(Options):
        renamed: ClassVar[dict[str, str]] = {"old": "new"}
        new: int = 0

    @with_options(Renamed)
    def read(*, options: Renamed) -> int:
        return options.new

    assert (Renamed(old=3).new, Renamed(new=4).new, read(old=5)) == (3, 4, 5)
    with pytest.raises(BadSetting, match="older"):
        Renamed(older=1)
