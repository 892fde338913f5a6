"""The tiles of the product of a quantized layer for one row."""

from __future__ import annotations

from dataclasses import dataclass

import triton

MIN_REST_BYTES = 256  # at least a group of features, and 16 bytes for each of some threads
_SM_REGISTERS, _MAX_REGISTERS = 1 << 16, 255  # of an SM, of a thread


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Sizes of the kernel's loop: tiles of `block_out` rows of codes, of which `num_stages` - 1 are in flight."""

    block_bytes: int  # a power of two: bytes of a row of codes that the first load of a tile has
    rest_bytes: int  # a power of two: bytes that a second load has; 0: the first one has the whole row
    block_out: int
    num_stages: int
    num_warps: int
    programs_per_sm: int  # programs that run at the same time on an SM

    @property
    def registers(self) -> int:
        """What a thread may take; the compiler counts in multiples of 8."""
        return min(_SM_REGISTERS // (self.programs_per_sm * self.num_warps * 32) // 8 * 8, _MAX_REGISTERS)


def split_row(row_bytes: int) -> tuple[int, int]:
    """`block_bytes` and `rest_bytes` of a row: the fewest bytes, padding included, in two loads at most."""
    block_bytes = max(triton.next_power_of_2(row_bytes), MIN_REST_BYTES)
    half = block_bytes // 2
    rest_bytes = max(triton.next_power_of_2(row_bytes - half), MIN_REST_BYTES)
    return (half, rest_bytes) if rest_bytes < half else (block_bytes, 0)


def choose_tiles(
    row_bytes: int, per_byte: int, rows_per_sm: int, is_gated: bool, has_scale_pairs: bool
) -> GemvTiles:
    """The tiles with the fastest layers on an H200: of 7B, 13B and 70B in FP8, of 7B to 13B in INT4."""
    block_bytes, rest_bytes = split_row(row_bytes)
    num_stages, num_warps, programs_per_sm = 3, 4, 3
    if has_scale_pairs and block_bytes <= 8192:
        block_out = (8192 if rest_bytes and is_gated else 16384) // block_bytes
        if block_bytes > 4096 or rest_bytes > 512:
            programs_per_sm, num_warps = 2, 8 if rest_bytes else 4
        elif not (rest_bytes or is_gated):
            num_stages, programs_per_sm = 2, 4
    elif per_byte == 2 and block_bytes <= 4096:
        block_out = (8192 if is_gated and rest_bytes else 16384) // block_bytes
        if not rest_bytes:
            num_warps, programs_per_sm = 8, 3 if is_gated else 4
    elif block_bytes <= 4096 and not rest_bytes:
        block_out = 16384 // block_bytes
        num_warps, programs_per_sm = (8, 3) if is_gated else (4, 4)
        if not is_gated and rows_per_sm <= 2 * block_out * programs_per_sm:
            block_out //= 2  # more than two tiles for a program, so that there is something to load ahead
    elif block_bytes <= 4096:
        block_out = 8192 // block_bytes
        num_stages, programs_per_sm = (4, 3) if is_gated else (3, 4)
    elif block_bytes <= 8192:
        block_out, num_stages = (1, 4) if is_gated else (2, 3)
        if rest_bytes and not is_gated:
            num_warps, programs_per_sm = 8, 2
    elif is_gated or block_bytes <= 16384:
        block_out = max(1, (16384 if is_gated else 32768) // block_bytes)
        num_warps, programs_per_sm = 8, 2
    else:
        block_out, num_warps, programs_per_sm = 2, 8, 1
    return GemvTiles(block_bytes, rest_bytes, block_out, num_stages, num_warps, programs_per_sm)
