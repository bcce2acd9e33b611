import pytest

from knowgate.errors import BadSetting
from knowgate.labels.options import resolve_layers
from knowgate.models.fake import FakeModel
from knowgate.types import Signal

MODEL = FakeModel(layers=11)  # depth 12: the embeddings and eleven layers


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("mid,late,last", (6, 9, 11)),
        ("last, mid", (6, 11)),
        ("3,-1", (3, 11)),
        ("mid,6", (6,)),
        ("none", ()),
        ([3, -1], (3, 11)),
        ([], ()),
    ],
)
def test_layer_names_and_numbers_are_resolved(layers, numbers):
    assert resolve_layers(layers, MODEL) == numbers


def test_a_model_without_hidden_states_has_no_layers():
    assert resolve_layers("mid", FakeModel(offers=frozenset({Signal.DRAFT}))) == ()


def test_an_unknown_layer_is_rejected():
    with pytest.raises(
        BadSetting, match=r"layers='top' does not name a layer. Use layer numbers, mid, late, last or none"
    ):
        resolve_layers("mid,top", MODEL)
