"""Block sizes between layers and sublayers, and read from configurations of other libraries."""

from types import SimpleNamespace

import pytest

from blockres.models import layers_from_sublayers, sublayers_from_layers, sublayers_per_block_of


def test_there_and_back():
    assert sublayers_from_layers(12) == 24
    assert sublayers_from_layers(4, sublayers_per_layer=3) == 12
    assert layers_from_sublayers(24) == 12
    with pytest.raises(ValueError, match="7 sublayers are no whole number of layers of 2 sublayers; 6 or 8 are"):
        layers_from_sublayers(7)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        sublayers_from_layers(0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"attn_res_block_size": 12}, 24),
        ({"attn_res_block_size": None}, None),
        ({"model_type": "kimi_k3", "text_config": {"attn_res_block_size": 12}}, 24),
        (SimpleNamespace(attn_res_block_layers=3), 6),
        (SimpleNamespace(attnres_block_size=4), 4),
    ],
)
def test_somebody_elses_configuration(config, expected):
    assert sublayers_per_block_of(config) == expected


def test_a_configuration_that_says_nothing_or_too_much():
    with pytest.raises(ValueError, match="got none"):
        sublayers_per_block_of({"num_hidden_layers": 3})
    with pytest.raises(ValueError, match="got attn_res_block_size, attnres_block_size"):
        sublayers_per_block_of({"attn_res_block_size": 3, "attnres_block_size": 6})
