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
def test_words_and_figures_become_layer_numbers(layers, numbers):
    assert resolve_layers(layers, MODEL) == numbers


def test_a_backend_without_hidden_states_keeps_none():
    assert resolve_layers("mid", FakeModel(offers=frozenset({Signal.DRAFT}))) == ()


def test_an_unknown_word_is_refused():
    with pytest.raises(BadSetting, match="'top' is neither a number nor one of mid, late, last, none"):
        resolve_layers("mid,top", MODEL)
