"""The tiles of products of 65 and more rows: a short list for each kernel, and which of it a shape gets.

bench/results/quantization.md has the estimate of what the kernels could reach, and what they reached on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MIN_ROUNDS = 4  # of a split's loop: fewer do not fill the pipeline of loads
_L2_BYTES_PER_CYCLE = 26  # that an SM reads when all do: 6 TB/s of an H200 at 1.76 GHz
_MATRIX_SHARE = 0.85  # of the tensor cores' rate that a loop without waits for loads reaches
_START_CYCLES = 3000  # until the first tiles have arrived, and from the last sum until it is stored
_SPLIT_CYCLES = 1000  # until the programs of a tile know which of them is the last


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of a program's tile and of its loop; `num_stages` - 1 rounds of loads are in flight."""

    block_rows: int  # of the step
    block_out: int  # features of the result
    block_in: int  # features of the input in each round of the loop
    num_stages: int
    num_warps: int
    max_splits: int  # that the compiler adds up without keeping much outside of registers
    num_splits: int = 1  # programs of a tile, each for a part of in_features

    def num_tiles(self, num_rows: int, out_features: int) -> int:
        """Programs, if nothing is split."""
        return -(-num_rows // self.block_rows) * -(-out_features // self.block_out)

    def split_sums(self, num_rows: int, out_features: int) -> int:
        """Numbers in float32 that the programs of split tiles leave for the last ones."""
        if self.num_splits == 1:
            return 0
        return self.num_tiles(num_rows, out_features) * self.num_splits * self.block_rows * self.block_out


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """What a kernel multiplies, for the estimate of its time."""

    num_rows: int
    out_features: int
    in_features: int
    weight_bytes: float  # of a number in the matrix
    input_bytes: int  # of a number in the rows
    multiply_adds_per_cycle: int  # of an SM: 2,048 in 16 bits, 4,096 in 8


VALUE_TILES = (  # of the kernel that multiplies in 16 bits
    Tiles(block_rows=128, block_out=128, block_in=64, num_stages=4, num_warps=8, max_splits=4),
)
CODE_TILES = (  # of the kernel that multiplies codes of FP8; a block of features in each round
    Tiles(block_rows=64, block_out=128, block_in=128, num_stages=3, num_warps=4, max_splits=4),
    Tiles(block_rows=128, block_out=128, block_in=128, num_stages=4, num_warps=8, max_splits=4),
)
LARGEST_TILE = max(tiles.block_rows * tiles.block_out for tiles in (*VALUE_TILES, *CODE_TILES))


def choose_tiles(candidates: Sequence[Tiles], product: TiledProduct, num_sms: int) -> Tiles:
    """The candidate and the number of splits with the least estimated time.

    A product whose tiles are split has at most `num_sms` programs, so their sums fit into `num_sms * LARGEST_TILE`.
    """
    choices = _with_splits(candidates, product, num_sms)
    return min(choices, key=lambda tiles: estimated_cycles(tiles, product, num_sms))


def estimated_cycles(tiles: Tiles, product: TiledProduct, num_sms: int) -> float:
    """Cycles of the SM with the most programs: each round takes the time of its products or that of its loads."""
    num_programs = tiles.num_tiles(product.num_rows, product.out_features) * tiles.num_splits
    multiply_adds = tiles.block_rows * tiles.block_out * tiles.block_in
    num_bytes = tiles.block_in * (tiles.block_rows * product.input_bytes + tiles.block_out * product.weight_bytes)
    round_cycles = max(
        multiply_adds / (product.multiply_adds_per_cycle * _MATRIX_SHARE), num_bytes / _L2_BYTES_PER_CYCLE
    )
    cycles = _num_rounds(tiles, product) * round_cycles + _START_CYCLES
    if tiles.num_splits > 1:
        sum_bytes = 4 * tiles.block_rows * tiles.block_out * tiles.num_splits
        cycles += _SPLIT_CYCLES + sum_bytes / _L2_BYTES_PER_CYCLE
    return -(-num_programs // num_sms) * cycles


def _with_splits(candidates: Sequence[Tiles], product: TiledProduct, num_sms: int) -> Iterable[Tiles]:
    for tiles in candidates:
        yield tiles
        num_tiles, num_splits = tiles.num_tiles(product.num_rows, product.out_features), 2
        while num_splits <= tiles.max_splits and num_tiles * num_splits <= num_sms:
            split = replace(tiles, num_splits=num_splits)
            if _num_rounds(split, product) >= MIN_ROUNDS:
                yield split
            num_splits *= 2


def _num_rounds(tiles: Tiles, product: TiledProduct) -> int:
    """Of the loop of a program that has a whole part."""
    return -(-product.in_features // tiles.block_in // tiles.num_splits)
