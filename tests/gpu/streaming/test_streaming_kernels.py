"""StreamingLLM: our kernels give the results of the torch reference, which other tests compare with the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.cache.step_metadata import StepMetadata, build_step_metadata
from services.common.model_config import AttentionOptions, ModelConfig, RopeConfig
from tests.gpu.attention_pair import MAX_MODEL_LEN, TOLERANCES, Kernels, Pair, make_config, relative_error

HEAD_DIM = 32
PLAIN = RopeConfig("default", 10000.0, HEAD_DIM, MAX_MODEL_LEN)
CASES: dict[str, tuple[AttentionOptions, RopeConfig]] = {
    "plain": (AttentionOptions(), PLAIN),
    "softcap": (AttentionOptions(softcap=2.0), PLAIN),
    "neighbouring pairs of a part": (AttentionOptions(rotates_pairs=True), replace(PLAIN, rotary_dim=16)),
    "two embeddings": (AttentionOptions(layer_ropes=(replace(PLAIN, theta=50.0), None)), PLAIN),
}


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


def config_of(case: str, num_sink_tokens: int, window: int) -> ModelConfig:
    options, rope = CASES[case]
    config = make_config(4, 2, HEAD_DIM, windows=(window, window), rope=rope)
    return replace(config, attention=replace(options, num_sink_tokens=num_sink_tokens))


def check_all_kinds_of_steps(pair: Pair) -> None:
    """Prompts in chunks, single tokens alone and beside them; texts shorter and longer than what is seen."""
    pair.check({"a": 19, "b": 3, "c": 90})
    pair.check({"a": 1, "b": 40, "d": 1, "c": 1})
    pair.check({"c": 1, "a": 1, "d": 1, "b": 1})
    pair.check({"b": 30, "a": 2})


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_step(kernels: Kernels, case: str) -> None:
    check_all_kinds_of_steps(Pair(config_of(case, 4, 9), kernels))


@pytest.mark.parametrize(("num_sink_tokens", "window"), [(1, 16), (16, 16), (17, 20), (40, 64)])
def test_sinks_of_more_than_a_block_or_a_tile(kernels: Kernels, num_sink_tokens: int, window: int) -> None:
    check_all_kinds_of_steps(Pair(config_of("plain", num_sink_tokens, window), kernels))


def test_a_long_window_is_split_into_pieces(kernels: Kernels) -> None:
    pair = Pair(config_of("plain", 5, 300), kernels)
    pair.check({"long": 400})
    pair.check({"long": 1})
    pair.check({"long": 1, "short": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    check_all_kinds_of_steps(Pair(config_of("plain", 4, 20), kernels, dtype))


def test_a_cache_of_int8(kernels: Kernels) -> None:
    pair = Pair(config_of("plain", 5, 20), kernels, cache_dtype=torch.int8)
    for num_tokens in ({"a": 50, "b": 7}, {"a": 1, "b": 1}, {"a": 1, "b": 30}):
        for out, expected in pair.run(pair.plan(num_tokens)):
            assert relative_error(out, expected) < 1e-2


def test_padding_rows_of_a_graph_become_zero(kernels: Kernels) -> None:
    pair = Pair(config_of("plain", 4, 9), kernels)
    pair.check({"a": 30, "b": 3})
    for out, expected in pair.run(pair.plan({"a": 1, "b": 1}), padded_num_rows=4):
        assert relative_error(out[:2], expected) < TOLERANCES[torch.float32]
        assert not out[2:].any()


def test_dropped_blocks_change_nothing(kernels: Kernels) -> None:
    """Far in a text, the table has the block of the sinks and then those of the window."""
    pair = Pair(config_of("plain", 4, 20), kernels)
    pair.check({"a": 200})
    whole = pair.plan({"a": 1})
    num_dropped = 8
    kept = np.delete(whole.block_tables, np.arange(1, 1 + num_dropped), axis=1)
    short = step_of(pair, 200, 1, kept, num_dropped * pair.block_size)
    assert short.context_lens[0] == whole.context_lens[0] - 128
    qkv = pair.make_qkv(1)
    for (first, _), (second, expected) in zip(pair.run(whole, qkv), pair.run(short, qkv), strict=True):
        assert relative_error(first, second) < TOLERANCES[torch.float32]
        assert relative_error(second, expected) < TOLERANCES[torch.float32]


def test_far_positions_cost_no_precision(kernels: Kernels) -> None:
    """A text of thirty million tokens; the keys of its window are computed in the step before the last."""
    pair, far, blocks = Pair(config_of("plain", 4, 20), kernels), 30_000_000, np.arange(10, dtype=np.int32)[None]
    pair.run(step_of(pair, 0, 40, blocks))
    num_dropped = (far - 48) // pair.block_size * pair.block_size
    for start, count in ((far, 40), (far + 40, 1)):
        for out, expected in pair.run(step_of(pair, start, count, blocks, num_dropped)):
            assert relative_error(out[-1:], expected[-1:]) < TOLERANCES[torch.float32]


def step_of(pair: Pair, start: int, count: int, blocks: np.ndarray, num_dropped: int = 0) -> StepMetadata:
    """A step of one sequence that has dropped tokens."""
    counts, starts = np.array([count]), np.array([start])
    return build_step_metadata(counts, starts, starts + count, blocks, pair.block_size, np.array([num_dropped]))
