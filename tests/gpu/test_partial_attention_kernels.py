"""Keys of a sequence in two caches: what the kernels make of each, merged, is the attention over all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.layers.mha.work_items import (
    NUM_FIELDS,
    ChunkRows,
    DecodeRows,
    fill_decode_items,
    prefill_items,
)
from services.dense_worker.attention_workers.split_context.shared_rows import SharedRows

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 12, 2, 32, 16, 24
FIRST_LEN = 9 * BLOCK_SIZE  # tokens in the first cache: it is full
TOLERANCE = 1e-5  # float32, other orders of addition


class Split:
    """A sequence of which the first cache has FIRST_LEN tokens, and the second one the rest."""

    def __init__(self, device: torch.device, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.device = device
        self.keys, self.values = (
            torch.randn(length, NUM_KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2)
        )
        shape = (NUM_BLOCKS + 1, NUM_KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM)
        self.caches = [torch.zeros(shape, device=device) for _ in range(2)]
        self.tables = [
            torch.from_numpy(np.random.default_rng(each).permutation(NUM_BLOCKS).astype(np.int32)).to(device)
            for each in range(2)
        ]

    def store(self, first: int, end: int) -> None:
        """Puts tokens where they belong, in the order of the tables."""
        for token in range(first, end):
            part, place = (0, token) if token < FIRST_LEN else (1, token - FIRST_LEN)
            block = int(self.tables[part][place // BLOCK_SIZE])
            self.caches[part][block, :, 0, place % BLOCK_SIZE] = self.keys[token].to(self.device)
            self.caches[part][block, :, 1, place % BLOCK_SIZE] = self.values[token].to(self.device)

    def slot(self, token: int) -> int:
        place = token - FIRST_LEN
        return int(self.tables[1][place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE

    def reference(self, query: torch.Tensor, positions: range) -> torch.Tensor:
        """query [num_rows, num_heads, head_dim], as by the formula in float64."""
        group = NUM_HEADS // NUM_KV_HEADS
        keys, values = (each.double().repeat_interleave(group, dim=1) for each in (self.keys, self.values))
        outputs = []
        for row, position in zip(query.double(), positions, strict=True):
            scores = torch.einsum("hd,thd->ht", row, keys[: position + 1]) * HEAD_DIM**-0.5
            outputs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[: position + 1]))
        return torch.stack(outputs)


def make_rows(split: Split, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of qkv with random queries and the own keys and values; and the queries."""
    query = torch.randn(len(positions), NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(7))
    tokens = list(positions)
    qkv = torch.cat([query.flatten(1), split.keys[tokens].flatten(1), split.values[tokens].flatten(1)], dim=1)
    return qkv.to(split.device), query


def no_rotation(device: torch.device) -> torch.Tensor:
    """A row of angles of zero."""
    return torch.cat([torch.ones(1, HEAD_DIM // 2), torch.zeros(1, HEAD_DIM // 2)], dim=1).to(device)


def merge(outputs: list[torch.Tensor], log_sums: list[torch.Tensor]) -> torch.Tensor:
    """What all parts give of the same rows; log_sums: to base 2."""
    parts = [(out.cpu(), sums.cpu() * math.log(2.0)) for out, sums in zip(outputs, log_sums, strict=True)]
    rows = torch.arange(len(outputs[0]))
    return SharedRows([rows] * len(parts), len(rows)).merge(parts)


@pytest.mark.parametrize("num_pieces", [1, 5])
def test_a_decode_row_is_attended_in_both_caches(kernel_device: torch.device, num_pieces: int) -> None:
    triton_decode = pytest.importorskip("services.attn_worker.layers.mha.triton_decode", reason="needs triton")
    from services.attn_worker.layers.mha.triton_scores import ScoreOptions

    length = FIRST_LEN + 40
    split, position = Split(kernel_device, length), length - 1
    split.store(0, position)  # the kernel stores the last one
    qkv, query = make_rows(split, range(position, length))
    outputs, log_sums = [], []
    for part, (context_len, slot) in enumerate([(FIRST_LEN, -1), (length - FIRST_LEN, split.slot(position))]):
        items = np.full((8, NUM_FIELDS), -1, np.int32)
        columns = (np.array([value]) for value in (0, context_len, 0, slot, 0))
        fill_decode_items(items, DecodeRows(*columns), None, num_pieces, 16, appends=slot >= 0)
        workspace = triton_decode.DecodeWorkspace(
            torch.zeros(8, NUM_HEADS * HEAD_DIM, device=kernel_device),
            torch.zeros(8, NUM_HEADS, device=kernel_device),
            torch.zeros(8, NUM_KV_HEADS, dtype=torch.int32, device=kernel_device),
        )
        out = torch.empty(1, NUM_HEADS * HEAD_DIM, device=kernel_device)
        sums = torch.empty(1, NUM_HEADS, device=kernel_device)
        tiles = triton_decode.choose_decode_tiles(torch.float32, torch.float32, 6, HEAD_DIM, 1.0)
        triton_decode.decode_attention(
            qkv, out, split.caches[part], None, no_rotation(kernel_device), torch.from_numpy(items).to(kernel_device),
            split.tables[part], workspace, tiles, ScoreOptions(HEAD_DIM**-0.5), None, sums,
        )  # fmt: skip
        outputs.append(out)
        log_sums.append(sums)
    merged = merge(outputs, log_sums).view(1, NUM_HEADS, HEAD_DIM)
    assert (merged - split.reference(query, range(position, length))).abs().max() < TOLERANCE
    block, place = divmod(split.slot(position), BLOCK_SIZE)
    assert torch.equal(split.caches[1][block, :, 0, place].cpu(), split.keys[position])


@pytest.mark.parametrize("heads_of_a_program", [1, 2])
@pytest.mark.parametrize("first", [FIRST_LEN, FIRST_LEN + 21])
def test_a_chunk_behind_a_full_cache_is_attended_in_both(
    kernel_device: torch.device, first: int, heads_of_a_program: int
) -> None:
    triton_prefill = pytest.importorskip("services.attn_worker.layers.mha.triton_prefill", reason="needs triton")
    from services.attn_worker.layers.mha.triton_scores import ScoreOptions

    num_rows, device = 45, kernel_device
    length = first + num_rows
    split = Split(device, length)
    split.store(0, length)
    qkv, query = make_rows(split, range(first, length))
    outputs, log_sums = [], []
    for part, num_keys in enumerate([FIRST_LEN, length - FIRST_LEN]):
        tiles = triton_prefill.choose_prefill_tiles(HEAD_DIM, torch.float32, torch.float32, 6, 100, False)
        tiles = replace(tiles, num_heads=heads_of_a_program)
        # In the first cache all rows see all keys; in the second one they begin behind those that are there.
        context_len = length if part == 0 else length - FIRST_LEN
        chunk = ChunkRows(*(np.array([value]) for value in (0, num_rows, context_len, 0)))
        items = prefill_items(chunk, tiles.block_m)
        items[:, 4] = num_keys
        out = torch.empty(num_rows, NUM_HEADS * HEAD_DIM, device=device)
        sums = torch.empty(num_rows, NUM_HEADS, device=device)
        angle_rows = torch.zeros(num_rows, dtype=torch.int32, device=device)
        triton_prefill.prefill_attention(
            qkv, out, split.caches[part], None, no_rotation(device), angle_rows, torch.from_numpy(items).to(device),
            split.tables[part], None, tiles, ScoreOptions(HEAD_DIM**-0.5), None, sums,
        )  # fmt: skip
        outputs.append(out)
        log_sums.append(sums)
    merged = merge(outputs, log_sums).view(num_rows, NUM_HEADS, HEAD_DIM)
    assert (merged - split.reference(query, range(first, length))).abs().max() < TOLERANCE
