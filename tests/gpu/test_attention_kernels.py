"""Our kernels give the results of the float32 torch reference, for every kind of step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.attn_worker.layers import BackendSetup
from services.common.errors import ConfigError
from services.common.kv_cache.sliding_window import SlidingWindow
from services.common.model_config import RopeConfig
from tests.gpu.attention_pair import (
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    TOLERANCES,
    Kernels,
    Pair,
    Sequence,
    check_all_kinds_of_steps,
    make_config,
    relative_error,
)

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
DROPPING_WINDOWS = (20, 7)


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


def test_a_cache_of_another_dtype_than_the_models_is_refused_by_name(kernels: Kernels) -> None:
    spec = KVCacheSpec.of_model(make_config(), torch.int16, NUM_BLOCKS, 16)
    with pytest.raises(ConfigError, match=rf"{kernels.dtype}, this one is torch\.int16$"):
        kernels.make(BackendSetup(make_config(), spec, kernels.dtype, kernels.device, MAX_MODEL_LEN))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [
        (2, 2, 128),
        (8, 2, 64),
        (7, 1, 32),
        (7, 1, 64),
        (3, 3, 80),
        (4, 2, 96),
        (2, 1, 16),
        (5, 5, 64),
        (40, 1, 32),
        (40, 1, 64),
    ],
)
def test_every_dtype_and_head_shape(
    kernels: Kernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    check_all_kinds_of_steps(Pair(make_config(num_heads, num_kv_heads, head_dim), kernels, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "num_heads"), [(2, 2), (4, 4), (6, 2), (3, 1)])
def test_steps_of_many_rows_have_several_heads_in_a_program(
    kernels: Kernels, dtype: torch.dtype, group: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.attn_worker.layers.mha.triton_prefill import choose_prefill_tiles

    assert choose_prefill_tiles(128, dtype, dtype, group, 99, has_many_rows=True).num_heads == num_heads
    monkeypatch.setattr("services.attn_worker.layers.triton_attention.MAX_CAPTURED_PROMPT_ROWS", 64)
    pair = Pair(make_config(2 * group, 2, 128, windows=(None, 20)), kernels, dtype)
    pair.check({"a": 29, "b": 99})
    pair.check({"a": 70, "b": 2, "c": 1})


@pytest.mark.parametrize("block_size", [1, 12, 32, 64])
def test_every_block_size(kernels: Kernels, block_size: int) -> None:
    check_all_kinds_of_steps(Pair(make_config(), kernels, block_size=block_size))


@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_windows_differ_by_layer(kernels: Kernels, num_kv_heads: int) -> None:
    pair = Pair(make_config(num_kv_heads=num_kv_heads, windows=(None, 20, 1, 300)), kernels)
    check_all_kinds_of_steps(pair)
    pair.check({"c": 250, "a": 400})
    pair.check({"c": 1, "a": 1, "b": 1})


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig("linear", 10000.0, 64, 64, factor=4.0),
        RopeConfig("dynamic", 10000.0, 64, 64, factor=2.0),
        RopeConfig("yarn", 10000.0, 64, 256, factor=4.0, original_max_position_embeddings=64),
        RopeConfig(
            "longrope",
            10000.0,
            64,
            256,
            factor=4.0,
            original_max_position_embeddings=64,
            short_factor=(1.0,) * 32,
            long_factor=tuple(1.0 + index / 8 for index in range(32)),
        ),
        RopeConfig(
            "llama3",
            10000.0,
            64,
            256,
            factor=8.0,
            original_max_position_embeddings=64,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ],
    ids=lambda rope: rope.rope_type,
)
def test_every_rope_type(kernels: Kernels, rope: RopeConfig) -> None:
    check_all_kinds_of_steps(Pair(make_config(rope=rope), kernels))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 1), (3, 3)])
def test_long_contexts_are_split_and_merged(
    kernels: Kernels, num_heads: int, num_kv_heads: int
) -> None:
    pair = Pair(make_config(num_heads, num_kv_heads, head_dim=128), kernels)
    pair.check({"long": 700})
    for _ in range(3):  # each call must reset the counters of finished splits to zero
        pair.check({"long": 1, "short": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "programs_per_sm"),
    [(8, 1, 128, 0.5), (3, 1, 80, 2.0), (2, 2, 128, 0.5), (2, 2, 64, 2.0)],
)
def test_pieces_of_few_contexts_are_merged(
    kernels: Kernels,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    programs_per_sm: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.attn_worker.layers.mha import triton_decode

    group = num_heads // num_kv_heads
    tiles = triton_decode.choose_decode_tiles(dtype, dtype, group, head_dim, programs_per_sm)
    assert tiles.is_for_few and tiles.block_n == (32 if group == 1 and programs_per_sm > 1 else 64)
    if tiles.block_n == 32:
        monkeypatch.setattr(triton_decode, "FEW_BELOW", 0)  # two sequences have such tiles, too
    pair = Pair(make_config(num_heads, num_kv_heads, head_dim, windows=(None, 300)), kernels, dtype)
    pair.check({"long": 1300})  # more pieces than are merged at a time
    for _ in range(2):
        pair.check({"long": 1, "short": 1})


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has the loop for many sequences."""
    attention = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    from services.attn_worker.layers.mha.triton_decode import choose_decode_tiles

    tiles = choose_decode_tiles(torch.float16, torch.float16, 1, 128, 99)
    assert tiles.is_for_many
    kernels = dataclasses.replace(attention.PLAIN_KERNELS, choose_decode_tiles=lambda *_: tiles)
    monkeypatch.setattr(attention, "PLAIN_KERNELS", kernels)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(2, 2, 128, 16), (8, 1, 128, 32), (3, 1, 80, 16), (4, 2, 64, 48), (2, 2, 32, 12)],
)
def test_steps_of_many_sequences(
    kernels: Kernels, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Contexts of less and more than a tile, with a window that begins within one, and split ones."""
    config = make_config(num_heads, num_kv_heads, head_dim, windows=(None, 20))
    pair = Pair(config, kernels, dtype, block_size)
    check_all_kinds_of_steps(pair)
    pair.check({"a": 400})
    pair.check({"a": 1, "c": 1})


@pytest.mark.usefixtures("many")
def test_what_a_block_had_before_stays_out_of_steps_of_many_sequences(kernels: Kernels) -> None:
    pair = Pair(make_config(), kernels, torch.float16)
    pair.check({"a": 20, "b": 21})
    (cache,) = pair.kernels.storage.layers
    cache[pair.sequences["a"].blocks[1], :, :, 5:] = float("nan")  # behind its 20 tokens and the next one
    pair.check({"a": 1, "b": 1})


def test_padding_rows_become_zero(kernels: Kernels) -> None:
    pair = Pair(make_config(), kernels)
    pair.check({"a": 30, "b": 3})
    ((out, expected),) = pair.run(pair.plan({"a": 1, "b": 1}), padded_num_rows=8)
    assert relative_error(out[:2], expected) < kernels.tolerance
    assert (out[2:] == 0).all()
    pair.check({"b": 1, "a": 1})


def test_failed_sequences_do_not_change_others(kernels: Kernels) -> None:
    pair = Pair(make_config(), kernels)
    pair.check({"a": 30, "b": 50})
    step = pair.plan({"failed_1": 20, "a": 1, "failed_2": 1, "b": 2}, failed=("failed_1", "failed_2"))
    ((out, expected),) = pair.run(step)
    rows = [20, 22, 23]
    assert relative_error(out[rows], expected[rows]) < kernels.tolerance
    assert out.isfinite().all()
    pair.check({"a": 1, "b": 1})


def test_nan_stays_in_its_sequence(kernels: Kernels) -> None:
    pair = Pair(make_config(), kernels, torch.bfloat16)
    pair.check({"a": 20, "b": 21})
    step = pair.plan({"a": 1, "b": 1})
    qkv = pair.make_qkv(2)
    qkv[0] = float("nan")
    ((out, expected),) = pair.run(step, qkv)
    assert relative_error(out[1], expected[1]) < TOLERANCES[torch.bfloat16]
    pair.sequences["c"] = pair.sequences.pop("a")  # its last block goes to a new sequence
    pair.sequences["c"].num_computed = 0
    pair.check({"b": 1, "c": 17})
    pair.check({"b": 1, "c": 1})


def test_a_step_beyond_the_limits_is_refused(kernels: Kernels) -> None:
    from services.common.errors import CapacityError

    pair = Pair(make_config(), kernels)
    step = pair.plan({"a": 1})
    with pytest.raises(CapacityError, match=r"33 sequences and 1 tokens.*32 and 2048"):
        pair.kernels.begin_step(step, padded_num_rows=33)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_kv_heads", "rope_type"), [(2, "default"), (2, "dynamic"), (8, "default")])
def test_one_graph_replays_every_decode_step_of_its_bucket(
    kernels: Kernels, num_kv_heads: int, rope_type: str
) -> None:
    rope = RopeConfig(rope_type, 10000.0, 64, 512, factor=2.0)
    pair = Pair(make_config(8, num_kv_heads, 64, (None, 100), rope), kernels, torch.bfloat16)
    config, backend, device, bucket = pair.config, pair.kernels, pair.device, 8
    qkv = torch.zeros(bucket, config.qkv_size, dtype=torch.bfloat16, device=device)
    outs = torch.empty(2, bucket, config.attn_size, dtype=torch.bfloat16, device=device)
    empty = build_step_metadata(*np.zeros((3, 0), np.int64), np.zeros((0, 0), np.int32), pair.block_size)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        backend.begin_step(empty, padded_num_rows=bucket)
        backend.forward(0, qkv, outs[0])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for layer in range(2):
                backend.forward(layer, qkv, outs[layer])
    for prompts in ({"a": 700, "b": 3}, {"c": 64, "d": 1000, "e": 1}):
        pair.check(prompts)
        for _ in range(3):
            step = pair.plan(dict.fromkeys(pair.sequences, 1))
            num_seqs = len(step.num_tokens)
            with torch.inference_mode():
                qkv.copy_(pair.make_qkv(bucket))
                outs.fill_(float("nan"))
                backend.begin_step(step, padded_num_rows=bucket)
                graph.replay()
                pair.reference.begin_step(step)
                for layer in range(2):
                    expected = torch.empty(num_seqs, config.attn_size, device=device)
                    pair.reference.forward(layer, qkv[:num_seqs].float(), expected)
                    assert relative_error(outs[layer, :num_seqs], expected) < TOLERANCES[torch.bfloat16]
                    assert (outs[layer, num_seqs:] == 0).all()


@pytest.mark.gpu
def test_steps_planned_ahead_of_the_device_keep_their_plans(kernels: Kernels) -> None:
    pair = Pair(make_config(), kernels)
    pair.check({"a": 100, "b": 1500})
    pair.run(pair.plan({"a": 1}), padded_num_rows=4)  # creates what is created once for each size
    steps = [pair.plan(dict.fromkeys(names, 1)) for names in ("a", "ab", "b", "ba", "a", "ab")]
    qkvs = [pair.make_qkv(4) for _ in steps]
    outs = [torch.empty(4, pair.config.attn_size, dtype=pair.dtype, device=pair.device) for _ in steps]
    with torch.inference_mode():
        torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
        for step, qkv, out in zip(steps, qkvs, outs, strict=True):
            pair.kernels.begin_step(step, padded_num_rows=4)
            pair.kernels.forward(0, qkv, out)
        for step, qkv, out in zip(steps, qkvs, outs, strict=True):
            num_seqs = len(step.num_tokens)
            expected = torch.empty(num_seqs, pair.config.attn_size, device=pair.device)
            pair.reference.begin_step(step)
            pair.reference.forward(0, qkv[:num_seqs].float(), expected)
            assert relative_error(out[:num_seqs], expected) < kernels.tolerance


def test_a_forked_sequence_goes_on_in_a_copy_of_the_last_block(kernels: Kernels) -> None:
    pair = Pair(make_config(windows=(None, 32)), kernels)
    pair.check({"a": 37, "b": 5})
    parent = pair.sequences["a"]
    copy = (parent.blocks[-1], pair.free_blocks.pop())
    pair.kernels.storage.copy_blocks([[copy]])
    pair.reference.storage.copy_blocks([[copy]])
    child = Sequence([*parent.blocks[:-1], copy[1]], parent.num_computed, parent.num_prompt)
    pair.sequences["c"] = child
    pair.check({"a": 1, "c": 1, "b": 1})
    pair.check({"a": 12, "c": 3})
    pair.check({"c": 1, "a": 1})


def without_evicted_blocks(step: StepMetadata, block_size: int) -> StepMetadata:
    """The same step, as it is for sequences that dropped all blocks that they can drop."""
    sliding_window = SlidingWindow(block_size, max(DROPPING_WINDOWS))
    first_positions = step.context_lens - step.num_tokens
    num_dropped = [sliding_window.num_evicted_blocks(int(position)) for position in first_positions]
    context_lens = step.context_lens - np.array(num_dropped, np.int32) * block_size
    tables = np.full((len(num_dropped), -(-int(context_lens.max()) // block_size)), NUM_BLOCKS, np.int32)
    for row, old, first in zip(tables, step.block_tables, num_dropped, strict=True):
        kept = old[first : first + len(row)]
        row[: len(kept)] = kept
    return dataclasses.replace(step, context_lens=context_lens, block_tables=tables)


@pytest.mark.parametrize("block_size", [8, 16])
def test_dropped_blocks_change_nothing(kernels: Kernels, block_size: int) -> None:
    pair = Pair(make_config(windows=DROPPING_WINDOWS), kernels, block_size=block_size)
    steps = [{"a": 37, "b": 5, "c": 80}, {"a": 1, "b": 70, "d": 1, "c": 1}, {"c": 1, "a": 1, "d": 1}, {"b": 2, "a": 90}]
    for num_tokens in [*steps, {"a": 1, "b": 1, "c": 1}]:
        full = pair.plan(num_tokens)
        short = without_evicted_blocks(full, block_size)
        qkv = pair.make_qkv(len(full.positions))
        with torch.inference_mode():
            pair.reference.begin_step(full)
            pair.kernels.begin_step(short)
            for layer in range(len(DROPPING_WINDOWS)):
                shape = (len(full.positions), pair.config.attn_size)
                expected = torch.empty(shape, device=pair.device)
                out = torch.full(shape, float("nan"), dtype=pair.dtype, device=pair.device)
                pair.reference.forward(layer, qkv.float(), expected)
                pair.kernels.forward(layer, qkv, out)
                assert relative_error(out, expected) < kernels.tolerance
    assert short.block_tables.shape[1] < full.block_tables.shape[1]
