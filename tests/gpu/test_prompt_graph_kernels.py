"""Steps with prompts that a graph runs give the results of the float32 torch reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.attn_worker.cache.step_metadata import build_step_metadata
from services.attn_worker.layers import StepShape
from services.common.kv_cache.scales import KVScales
from services.common.model_config import AttentionOptions, ModelConfig
from tests.gpu.attention_pair import TOLERANCES, Kernels, Pair, make_config, relative_error

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter
SCALES = KVScales((0.03, 0.5), (0.011, 2.0))
# First chunks, with decode rows beside them, later chunks of some length, and a long context.
# Decode rows with contexts do not come first, so that their block tables lie behind others.
STEPS = ({"a": 150, "b": 70}, {"b": 90, "a": 1, "c": 1, "d": 3}, {"b": 400, "a": 1, "d": 100}, {"b": 2, "e": 100})
NUM_ROWS = 512


@pytest.fixture
def kernels(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Split no contexts, so that every chunk is one of a prompt."""
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    monkeypatch.setattr(triton, "MAX_SHORT_CHUNK", 0)
    monkeypatch.setattr(triton, "most_tokens_of_few_rows", lambda group: 0)
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


def config_of(options: AttentionOptions, num_kv_heads: int = 2) -> ModelConfig:
    return replace(make_config(4, num_kv_heads, 16, (None, 40)), attention=options)


def shape_of(pair: Pair, num_tokens: dict[str, int]) -> StepShape | None:
    return pair.kernels.captured_shape(pair.plan(num_tokens))


def check_steps(pair: Pair, tolerance: float) -> None:
    for num_tokens in STEPS:
        step = pair.plan(num_tokens)
        shape = pair.kernels.captured_shape(step)
        assert shape is not None and shape.has_prompts
        num_rows = len(step.positions)
        for out, expected in pair.run(step, padded_num_rows=num_rows + 20, shape=shape):
            assert relative_error(out[:num_rows], expected) < tolerance
            assert out[num_rows:].isnan().all(), "rows beyond those of the step are not written"


@pytest.mark.parametrize(
    "options", [AttentionOptions(), AttentionOptions(has_sinks=True, scale=0.4, softcap=3.0)], ids=("plain", "options")
)
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_prompts_in_padded_steps(kernels: Kernels, options: AttentionOptions, num_kv_heads: int) -> None:
    check_steps(Pair(config_of(options, num_kv_heads), kernels), kernels.tolerance)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_caches_of_8_bits(kernels: Kernels, cache_dtype: torch.dtype) -> None:
    # Triton's interpreter cuts e4m3 off where a GPU and the reference round: 2^-3 of a number.
    is_cut = kernels.device.type == "cpu" and cache_dtype == torch.float8_e4m3fn
    pair = Pair(config_of(AttentionOptions()), kernels, cache_dtype=cache_dtype, scales=SCALES)
    check_steps(pair, 0.2 if is_cut else 1e-3)


def test_what_has_no_graph(kernels: Kernels) -> None:
    pair = Pair(config_of(AttentionOptions()), kernels)
    largest = max(each.num_decode_rows for each in pair.kernels.captured_shapes)
    assert shape_of(pair, {"a": 512}) is not None
    assert shape_of(pair, {"b": 513}) is None, "too many rows"
    assert shape_of(pair, {f"c{i}": 2 for i in range(17)}) is None, "too many prompts"
    rows = {f"d{i}": 1 for i in range(largest)}
    assert shape_of(pair, {**rows, "e": 100}) is not None
    assert shape_of(pair, {**rows, "f": 1, "g": 100}) is None, "too many decode rows"


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_one_graph_replays_every_step_of_its_shape(
    kernels: Kernels, num_kv_heads: int, cache_dtype: torch.dtype | None
) -> None:
    config = make_config(8, num_kv_heads, 64, (None, 100))
    pair = Pair(config, kernels, torch.bfloat16, cache_dtype=cache_dtype)
    backend = pair.kernels
    qkv = torch.zeros(NUM_ROWS, config.qkv_size, dtype=torch.bfloat16, device=pair.device)
    outs = torch.empty(2, NUM_ROWS, config.attn_size, dtype=torch.bfloat16, device=pair.device)
    graphs = {}
    empty = build_step_metadata(*np.zeros((3, 0), np.int64), np.zeros((0, 0), np.int32), pair.block_size)
    with torch.inference_mode():
        for shape in backend.captured_shapes:
            if shape.has_prompts:
                graphs[shape] = torch.cuda.CUDAGraph()
                backend.begin_step(empty, NUM_ROWS, shape)
                backend.forward(0, qkv, outs[0])
                torch.cuda.synchronize()
                with torch.cuda.graph(graphs[shape]):
                    for layer in range(2):
                        backend.forward(layer, qkv, outs[layer])
    replayed = set()
    for num_tokens in ({"a": 300, "b": 200}, {"b": 90, "a": 1, "c": 1, "d": 3}, {"a": 480, "b": 1}, {"a": 40}):
        step = pair.plan(num_tokens)
        shape, num_rows = backend.captured_shape(step), len(step.positions)
        assert shape is not None
        replayed.add(shape)
        with torch.inference_mode():
            qkv.copy_(pair.make_qkv(NUM_ROWS))
            backend.begin_step(step, NUM_ROWS, shape)
            graphs[shape].replay()
            pair.reference.begin_step(step)
            for layer in range(2):
                expected = torch.empty(num_rows, config.attn_size, device=pair.device)
                pair.reference.forward(layer, qkv[:num_rows].float(), expected)
                tolerance = TOLERANCES[torch.bfloat16] if cache_dtype is None else 2e-2
                assert relative_error(outs[layer, :num_rows], expected) < tolerance
    assert replayed == set(graphs)
