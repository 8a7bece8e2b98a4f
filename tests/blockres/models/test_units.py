"""Block sizes between layers and sublayers, and read from configurations of other libraries."""

from collections import Counter
from types import SimpleNamespace

import pytest

from blockres.models import layers_from_sublayers, sublayers_from_layers, sublayers_per_block_of
from blockres.pipeline import BlockRouting, split_sublayers


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


@pytest.mark.parametrize(
    ("per_stage", "split"),
    [
        ([sublayers_from_layers(count) for count in split_sublayers(93, 32)], {6: 29, 4: 3}),
        (split_sublayers(186, 32), {6: 26, 5: 6}),
    ],
    ids=["between layers", "within layers"],
)
def test_kimi_k3_over_a_pipeline(per_stage, split):
    """93 layers on 8 ranks with 4 stages each, in blocks of 12 layers, the last of 9."""
    config = {"model_type": "kimi_k3", "text_config": {"num_hidden_layers": 93, "attn_res_block_size": 12}}
    size = sublayers_per_block_of(config)
    assert Counter(per_stage) == split
    routing = BlockRouting(per_stage, size, pp_size=8)
    assert routing.num_sublayers == 186
    assert routing.num_sources(32) == 8  # the embedding and 7 complete blocks: K3's bank has as many slots
    seen: list[set[int]] = [set() for _ in range(8)]
    units, run = [], 0
    for stage, count in enumerate(routing.sublayers_per_stage):
        sources = set(range(1 + run // size)) if stage else set()
        if stage:
            units.append(len(sources - seen[stage % 8]) + (run % size > 0))
        run += count
        seen[stage % 8] |= sources | set(range(1 + run // size))
    assert list(routing.hop_units()) == units
    assert (sum(units), max(units)) == (77, 3)
    assert (sum(routing.hop_units(cache=False)), max(routing.hop_units(cache=False))) == (167, 9)
