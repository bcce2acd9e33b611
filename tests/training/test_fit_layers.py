"""Which layer `--layer` means: a place in the network, not in the list of kept layers."""

from dataclasses import replace

import pytest

from knowgate.errors import BadSetting
from knowgate.training.examples import load_examples
from knowgate.training.probe import pick_layer
from tests.support.planted_run import LAYER, planted_rows, write_run


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    rows, states = planted_rows(60)
    return load_examples([write_run(tmp_path_factory.mktemp("layers") / "run", rows, states)])


def kept(examples, *layers, **settings):
    readings = [replace(one, hidden=dict.fromkeys(layers, one.hidden[LAYER])) for one in examples.readings]
    told = {**{key: value for key, value in examples.settings.items() if key != "depth"}, **settings}
    return replace(examples, table=replace(examples.table, readings=readings, settings=told))


def test_mid_is_the_middle_of_the_network_and_not_the_lowest_kept_layer(examples):
    found = kept(examples, 4, 8, 14, 21, 28, depth=29)
    assert [pick_layer(found, layer) for layer in ("mid", "late", "last", "8")] == [14, 21, 28, 8]


def test_a_layer_that_was_not_kept_is_an_error_that_names_the_kept_ones(examples):
    with pytest.raises(BadSetting, match=r"no hidden states of layer='mid'\. Use one of these layers: 21, 28"):
        pick_layer(kept(examples, 21, 28, depth=29), "mid")
    with pytest.raises(BadSetting, match=r"no hidden states of layer='4'\. Use one of these layers: 3, 5, 9"):
        pick_layer(kept(examples, 3, 5, 9, depth=10), "4")


def test_an_older_run_tells_its_middle_by_seakr(examples):
    assert pick_layer(kept(examples, 4, 14, seakr_layer=14), "mid") == 14


@pytest.mark.parametrize("layers", [(4,), (3, 5, 9), (28,)])
def test_where_nobody_knows_how_deep_the_llm_is_a_number_is_asked_for(examples, layers):
    with pytest.raises(BadSetting, match=rf"no hidden states of layer='mid'\. Use one of these layers: {layers[0]}"):
        pick_layer(kept(examples, *layers), "mid")
