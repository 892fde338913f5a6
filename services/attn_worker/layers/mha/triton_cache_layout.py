"""The layout of keys and values in the paged cache, and the order in which a kernel holds a head's dimensions.

The cache of a layer is [num_blocks + 1, num_kv_heads, 2, block_size, head_dim], 2 for keys and values. The data that
one head reads of one block is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels read (but do not use) block tables a few tiles beyond their end, so this many entries must follow.
TABLE_SLACK = 256


@triton.jit
def cache_offset(block, kv_head, offset_in_block, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 HEAD_DIM: tl.constexpr):  # fmt: skip
    """The offset of a key in a layer's cache, in elements. The value lies BLOCK_SIZE * HEAD_DIM further."""
    return ((block.to(tl.int64) * NUM_KV_HEADS + kv_head) * (2 * BLOCK_SIZE) + offset_in_block) * HEAD_DIM


@triton.jit
def load_tile_blocks(table, first_key, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The blocks of keys [first_key, first_key + TILE), where first_key is a multiple of TILE.

    A scalar if the tile lies in one block, else one block per key.
    """
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + first_key // BLOCK_SIZE)
    elif TILE % BLOCK_SIZE == 0:
        return tl.load(table + first_key // BLOCK_SIZE + tl.arange(0, TILE) // BLOCK_SIZE)
    else:
        return tl.load(table + (first_key + tl.arange(0, TILE)) // BLOCK_SIZE)


@triton.jit
def offsets_in_blocks(first_key, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The place in its block of each key of a tile, int32 [TILE], for the result of `load_tile_blocks`."""
    offsets = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        return first_key % BLOCK_SIZE + offsets
    elif TILE % BLOCK_SIZE == 0:
        return offsets % BLOCK_SIZE
    else:
        return (first_key + offsets) % BLOCK_SIZE


@triton.jit
def tile_offsets(blocks, first_key, kv_head, TILE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):  # fmt: skip
    """`cache_offset` of the keys of a tile, int64 [TILE], for the result of `load_tile_blocks`."""
    offset_in_block = offsets_in_blocks(first_key, TILE, BLOCK_SIZE)
    return cache_offset(blocks, kv_head, offset_in_block, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)


@triton.jit
def join_halves(first_half, second_half):
    """Concatenates two [M, HALF] tiles to [M, 2 * HALF]."""
    num_rows: tl.constexpr = first_half.shape[0]
    joined = tl.permute(tl.join(first_half, second_half), (0, 2, 1))
    return tl.reshape(joined, (num_rows, 2 * first_half.shape[1]))


@triton.jit
def opaque(numbers):
    """The same numbers, behind a sum, behind which the compiler does not look.

    Where it sees that a factor was joined, it lays out the other so that shared memory cannot give it by matrix loads.
    """
    return tl.sum(tl.reshape(numbers, (numbers.shape[0], numbers.shape[1], 1)), axis=2)


@triton.jit
def joined_dims(HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The head dimension of each column of joined halves, and a mask that is False for padding columns."""
    columns = tl.arange(0, 2 * HALF)
    half: tl.constexpr = HEAD_DIM // 2
    if half == HALF:
        return columns, tl.full([2 * HALF], True, tl.int1)
    dims = columns // HALF * half + columns % HALF
    if half % 8 == 0:  # a hint for the compiler, so that loads are wide
        dims = tl.max_contiguous(tl.multiple_of(dims, 8), 8)
    return dims, columns % HALF < half


@triton.jit
def padded_dims(HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """The dimensions of a head padded to a power of two, and a mask that is False for padding."""
    columns = tl.arange(0, HEAD_DIM_PADDED)
    if HEAD_DIM == HEAD_DIM_PADDED:
        return columns, tl.full([HEAD_DIM_PADDED], True, tl.int1)
    return columns, columns < HEAD_DIM
