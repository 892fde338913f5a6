"""The recurrence of a gated delta layer over many tokens of a sequence, in chunks of 64, as two Triton kernels.

See `gated_delta.py:run_chunks` for the formulas. The first kernel inverts the triangular systems of all chunks side by
side. The second goes through the chunks of each sequence one after the other, with products of tiles; its programs have
some value dimensions of one value head, whose part of the matrix stays in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.attn_worker.layers.recurrent.gated_delta import CHUNK_SIZE
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.triton_gated_delta_convolution import Convolved
from services.attn_worker.layers.recurrent.triton_parts import load_part
from services.common.families.shape import GatedDelta

CHUNK_FIELDS = 2  # of a chunk: first row, number of tokens

_SUBSTITUTED = 16  # rows of a system that are solved one after the other; larger blocks are made of products
_VALUE_BLOCK = 32  # so that 32 heads of 128 dimensions are about as many programs as a large GPU has multiprocessors
# tl.dot's kinds of products: three of 10 bits are almost float32, and one has more bits than 16-bit models' values.
_EXACT, _ROUNDED = tl.constexpr("tf32x3"), tl.constexpr("tf32")


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    """What the first kernel leaves for the second one; the layers use it one after the other.

    Row i of a chunk has one value for each token j of the chunk. All float32 [max_num_tokens, num_value_heads, 64].
    """

    inverses: torch.Tensor  # of the systems, times the strength of j
    scores: torch.Tensor  # how much of what j changes is in the output of i

    @classmethod
    def empty(cls, max_num_tokens: int, sizes: GatedDelta, device: torch.device) -> ChunkTiles:
        """Raises RuntimeError if memory is short."""
        shape = max_num_tokens, sizes.num_value_heads, CHUNK_SIZE
        return cls(torch.empty(shape, device=device), torch.empty(shape, device=device))


def run_chunked_parts(
    convolved: Convolved,
    tiles: ChunkTiles,
    out: torch.Tensor,
    parts: torch.Tensor,
    chunks: torch.Tensor,
    storage: StateStorage,
    layer: int,
    sizes: GatedDelta,
) -> None:
    """Runs parts of a wave after `convolve_items`, as `run_parts` does, but in chunks.

    parts: int32 [num_parts, PART_FIELDS], each with tokens. chunks: int32 [num_chunks, CHUNK_FIELDS], all those of the
    parts: 64 tokens, and what is left at the end of a part.
    """
    is_exact = convolved.rows.dtype == torch.float32
    options = {
        "NUM_KEY_HEADS": sizes.num_key_heads,
        "NUM_VALUE_HEADS": sizes.num_value_heads,
        "KEY_DIM": sizes.key_dim,
        "VALUE_DIM": sizes.value_dim,
        "KEY_BLOCK": max(16, triton.next_power_of_2(sizes.key_dim)),
        "CHUNK": CHUNK_SIZE,
    }
    _solve_chunks[(len(chunks), sizes.num_value_heads)](
        convolved.rows,
        convolved.norms,
        convolved.gates,
        chunks,
        tiles.inverses,
        tiles.scores,
        **options,
        SUBSTITUTED=_SUBSTITUTED,
        NUM_DOUBLINGS=(CHUNK_SIZE // _SUBSTITUTED).bit_length() - 1,
        num_warps=4,
    )
    value_block = min(_VALUE_BLOCK, max(16, triton.next_power_of_2(sizes.value_dim)))
    _run_chunks[(len(parts), sizes.num_value_heads, triton.cdiv(sizes.value_dim, value_block))](
        convolved.rows,
        convolved.norms,
        convolved.gates,
        tiles.inverses,
        tiles.scores,
        out,
        parts,
        storage.matrices[layer],
        **options,
        VALUE_BLOCK=value_block,
        PRECISION=_EXACT if is_exact else _ROUNDED,
        num_warps=4,
        num_stages=2 if options["KEY_BLOCK"] <= 128 else 1,  # 157 of the 227 KB that Hopper has, for bfloat16
    )


@triton.jit
def _solve_chunks(
    rows_ptr,
    norms_ptr,
    gates_ptr,
    chunks_ptr,
    inverses_ptr,
    scores_ptr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SUBSTITUTED: tl.constexpr,
    NUM_DOUBLINGS: tl.constexpr,
):
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    CONV_DIM: tl.constexpr = 2 * KEY_SIZE + NUM_VALUE_HEADS * VALUE_DIM
    chunk_ptr, head = chunks_ptr + 2 * tl.program_id(0), tl.program_id(1)
    first_row, num_tokens = tl.load(chunk_ptr).to(tl.int64), tl.load(chunk_ptr + 1)
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)

    tokens, key_dims = tl.arange(0, CHUNK), tl.arange(0, KEY_BLOCK)
    rows, is_token = first_row + tokens, tokens < num_tokens
    is_key = is_token[:, None] & (key_dims < KEY_DIM)[None, :]
    q_ptrs = rows_ptr + rows[:, None] * CONV_DIM + key_head * KEY_DIM + key_dims[None, :]
    q, k = tl.load(q_ptrs, is_key, 0.0), tl.load(q_ptrs + KEY_SIZE, is_key, 0.0)
    norm_ptrs = norms_ptr + rows * (2 * NUM_KEY_HEADS) + key_head
    q_norms, k_norms = tl.load(norm_ptrs, is_token, 0.0), tl.load(norm_ptrs + NUM_KEY_HEADS, is_token, 0.0)
    gate_ptrs = gates_ptr + rows * (2 * NUM_VALUE_HEADS) + head
    log_decays = tl.cumsum(_log_decays(gate_ptrs, is_token), axis=0)
    strengths = tl.load(gate_ptrs + NUM_VALUE_HEADS, is_token, 0.0)

    i, j = tokens[:, None], tokens[None, :]
    # Exponents above the diagonal are positive and could overflow, so they are cut before exp.
    pairs = tl.exp(tl.minimum(log_decays[:, None] - log_decays[None, :], 0.0)) * k_norms[None, :]
    tile = (rows[:, None] * NUM_VALUE_HEADS + head) * CHUNK + j
    scores = q_norms[:, None] * pairs * tl.dot(q, tl.trans(k), input_precision=_EXACT)
    tl.store(scores_ptr + tile, tl.where(i >= j, scores, 0.0), is_token[:, None])
    system = (strengths * k_norms)[:, None] * pairs * tl.dot(k, tl.trans(k), input_precision=_EXACT)
    lower = tl.where(i > j, system, 0.0)

    # The inverse of I + lower. As keys have at most length 1, no element of it is beyond 1, nor is one of the blocks
    # that it is made of: so nothing cancels, as it would in a series of powers of `lower`. Its diagonal blocks go
    # through memory, because the compiler needs far too many registers to cut them out of tiles.
    tl.store(inverses_ptr + tile, lower, is_token[:, None])
    tl.debug_barrier()
    block_row, index = tl.arange(0, CHUNK // SUBSTITUTED)[:, None, None] * SUBSTITUTED, tl.arange(0, SUBSTITUTED)
    row, column = block_row + index[None, :, None], block_row + index[None, None, :]
    block_ptrs = inverses_ptr + ((first_row + row) * NUM_VALUE_HEADS + head) * CHUNK + column
    block_lower = tl.load(block_ptrs, row < num_tokens, 0.0)  # [num_blocks, SUBSTITUTED, SUBSTITUTED]
    blocks = tl.where(row == column, 1.0, tl.zeros_like(block_lower))
    for solved in range(1, SUBSTITUTED):
        is_row = (index == solved)[None, :, None]
        factors = tl.sum(tl.where(is_row, block_lower, 0.0), axis=1)
        known = tl.sum(factors[:, :, None] * blocks, axis=1)
        blocks = tl.where(is_row, blocks - known[:, None, :], blocks)
    tl.store(block_ptrs, blocks, row < num_tokens)
    tl.debug_barrier()
    is_diagonal = is_token[:, None] & (i // SUBSTITUTED == j // SUBSTITUTED)
    inverse = tl.load(inverses_ptr + tile, is_diagonal, 0.0)
    for doubling in tl.static_range(NUM_DOUBLINGS):
        inverse = _join(inverse, lower, CHUNK, SUBSTITUTED << doubling)
    tl.store(inverses_ptr + tile, inverse * strengths[None, :], is_token[:, None])


@triton.jit
def _join(inverse, lower, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """From the inverses of the diagonal blocks of I + lower, those of blocks of twice the size."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    is_beside = (i // BLOCK != j // BLOCK) & (i // (2 * BLOCK) == j // (2 * BLOCK))
    beside = tl.dot(inverse, tl.where(is_beside, lower, 0.0), input_precision=_EXACT)
    return inverse - tl.dot(beside, inverse, input_precision=_EXACT)


@triton.jit
def _run_chunks(
    rows_ptr,
    norms_ptr,
    gates_ptr,
    inverses_ptr,
    scores_ptr,
    out_ptr,
    parts_ptr,
    matrices_ptr,  # float32 [num_slots, num_value_heads, key_dim, value_dim]
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = NUM_VALUE_HEADS * VALUE_DIM
    CONV_DIM: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    SLOT_SIZE: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    part_ptr, head, block = parts_ptr + 4 * tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, num_tokens, source, target = load_part(part_ptr)
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)

    tokens, key_dims = tl.arange(0, CHUNK), tl.arange(0, KEY_BLOCK)
    value_dims = block * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_key, is_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    tile = head * KEY_DIM * VALUE_DIM + key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    is_tile = is_key[:, None] & is_value[None, :]
    state = tl.load(matrices_ptr + source * SLOT_SIZE + tile, is_tile, 0.0)

    for start in range(0, num_tokens, CHUNK):
        rows, is_token = first_row + start + tokens, start + tokens < num_tokens
        is_row = is_token[:, None]
        q_ptrs = rows_ptr + rows[:, None] * CONV_DIM + key_head * KEY_DIM + key_dims[None, :]
        q = tl.load(q_ptrs, is_row & is_key[None, :], 0.0)
        k = tl.load(q_ptrs + KEY_SIZE, is_row & is_key[None, :], 0.0)
        v_ptrs = rows_ptr + rows[:, None] * CONV_DIM + 2 * KEY_SIZE + head * VALUE_DIM + value_dims[None, :]
        v = tl.load(v_ptrs, is_row & is_value[None, :], 0.0).to(tl.float32)
        norm_ptrs = norms_ptr + rows * (2 * NUM_KEY_HEADS) + key_head
        q_norms, k_norms = tl.load(norm_ptrs, is_token, 0.0), tl.load(norm_ptrs + NUM_KEY_HEADS, is_token, 0.0)
        log_decay = _log_decays(gates_ptr + rows * (2 * NUM_VALUE_HEADS) + head, is_token)
        log_decays, last = tl.cumsum(log_decay, axis=0), tl.sum(log_decay, axis=0)
        decays, to_end = tl.exp(log_decays), tl.exp(tl.minimum(last - log_decays, 0.0))
        chunk_tile = (rows[:, None] * NUM_VALUE_HEADS + head) * CHUNK + tokens[None, :]
        inverse, scores = tl.load(inverses_ptr + chunk_tile, is_row, 0.0), tl.load(scores_ptr + chunk_tile, is_row, 0.0)

        # Norms and decays multiply what products give, so q and k of 16 bits lose nothing.
        known = (k_norms * decays)[:, None] * narrow_product(k, state, PRECISION)
        change = tl.dot(inverse, v - known, input_precision=PRECISION)
        values = (q_norms * decays)[:, None] * narrow_product(q, state, PRECISION)
        values += tl.dot(scores, change, input_precision=PRECISION)
        kept = (k_norms * to_end)[:, None] * change
        state = tl.exp(last) * state + narrow_product(tl.trans(k), kept, PRECISION)
        out_ptrs = out_ptr + rows[:, None] * VALUE_SIZE + head * VALUE_DIM + value_dims[None, :]
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), is_row & is_value[None, :])

    tl.store(matrices_ptr + target * SLOT_SIZE + tile, state, is_tile)


@triton.jit
def _log_decays(decay_ptrs, is_token):
    """Logarithms of the decays of tokens, 0 for others. A decay below 1e-37 leaves nothing, either."""
    return tl.log(tl.maximum(tl.load(decay_ptrs, is_token, 1.0), 1e-37))


@triton.jit
def narrow_product(narrow, wide, PRECISION: tl.constexpr):
    """narrow @ wide, of which `wide` is float32. For bfloat16 as two products, which keep 16 bits of it."""
    if narrow.dtype == tl.bfloat16:
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(narrow, low, tl.dot(narrow, high))
    return tl.dot(narrow.to(tl.float32), wide, input_precision=PRECISION)
