"""Which tiles a product gets."""

from __future__ import annotations

from itertools import product

import pytest

from services.dense_worker.kernels.linear.quantized.tile_choice import (
    CODE_TILES,
    LARGEST_TILE,
    MIN_ROUNDS,
    VALUE_TILES,
    TiledProduct,
    Tiles,
    choose_tiles,
    estimated_cycles,
)

NUM_SMS = 132  # of an H200
SHAPES = [(4096, 4096), (4096, 11008), (6144, 4096), (22016, 4096), (28672, 8192), (8192, 28672), (130, 192)]
ROWS = (128, 256, 512, 1024)


def int4(num_rows: int, out_features: int, in_features: int) -> TiledProduct:
    return TiledProduct(num_rows, out_features, in_features, 0.5, 2, 2048)


def blocks(num_rows: int, out_features: int, in_features: int) -> TiledProduct:
    return TiledProduct(num_rows, out_features, in_features, 1.0, 1, 4096)


@pytest.mark.parametrize(("make", "candidates"), [(int4, VALUE_TILES), (blocks, CODE_TILES)], ids=["int4", "blocks"])
def test_split_tiles_fit_into_the_workspace_and_all_run_at_once(make: type, candidates: tuple[Tiles, ...]) -> None:
    num_split = 0
    for (out_features, in_features), num_rows in product(SHAPES, ROWS):
        tiles = choose_tiles(candidates, make(num_rows, out_features, in_features), NUM_SMS)
        if tiles.num_splits == 1:
            continue
        num_split += 1
        assert tiles.num_splits <= tiles.max_splits
        assert tiles.num_tiles(num_rows, out_features) * tiles.num_splits <= NUM_SMS
        for fewer in (1, num_rows // 2 + 1, num_rows):  # steps of the bucket that have fewer rows
            assert tiles.split_sums(fewer, out_features) <= NUM_SMS * LARGEST_TILE
        assert in_features / tiles.block_in / tiles.num_splits >= MIN_ROUNDS
    assert num_split > 5


def test_narrow_matrices_are_split_and_wide_ones_are_not() -> None:
    """32 tiles of 128 features for 128 rows would leave three quarters of the SMs idle; 172 occupy all of them."""
    assert choose_tiles(VALUE_TILES, int4(128, 4096, 11008), NUM_SMS).num_splits == 4
    assert choose_tiles(VALUE_TILES, int4(512, 22016, 4096), NUM_SMS).num_splits == 1
    assert choose_tiles(VALUE_TILES, int4(128, 4096, 192), NUM_SMS).num_splits == 1, "too short for a split"


def test_taller_tiles_where_they_occupy_the_gpu() -> None:
    """They read the codes half as often; of few rows and features there are too few such tiles."""
    assert choose_tiles(CODE_TILES, blocks(1024, 12288, 4096), NUM_SMS).block_rows == 128
    assert choose_tiles(CODE_TILES, blocks(128, 4096, 192), NUM_SMS).block_rows == 64


def test_the_choice_has_the_least_estimate_of_the_unsplit_candidates() -> None:
    for (out_features, in_features), num_rows in product(SHAPES, ROWS):
        each = int4(num_rows, out_features, in_features)
        chosen = estimated_cycles(choose_tiles(VALUE_TILES, each, NUM_SMS), each, NUM_SMS)
        assert chosen <= min(estimated_cycles(tiles, each, NUM_SMS) for tiles in VALUE_TILES)


def test_the_estimate_is_never_below_what_the_tensor_cores_and_the_cache_allow() -> None:
    """Of a whole GPU: 2,048 multiply-adds of an SM in a cycle, and the bytes of the codes at 26 in a cycle."""
    for (out_features, in_features), num_rows in product(SHAPES, ROWS):
        each = int4(num_rows, out_features, in_features)
        for tiles in VALUE_TILES:
            cycles = estimated_cycles(tiles, each, NUM_SMS)
            assert cycles > num_rows * out_features * in_features / 2048 / NUM_SMS
            assert cycles > out_features * in_features / 2 / 26 / NUM_SMS
