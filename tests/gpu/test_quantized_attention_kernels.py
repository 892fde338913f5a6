"""With a KV cache of 8 bits the Triton kernels give the results of the torch reference, which rounds as they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.attn_worker.cache.step_metadata import build_step_metadata
from services.common.attention.learned import Learned
from services.common.kv_cache.scales import KVScales
from tests.gpu.attention_pair import Kernels, Pair, Sequence, make_config, relative_error

pytestmark = pytest.mark.timeout(900)

FP8, INT8 = torch.float8_e4m3fn, torch.int8
FORMATS = pytest.mark.parametrize("cache_dtype", [FP8, INT8], ids=["fp8", "int8"])
SCALES = KVScales((0.03, 0.5), (0.011, 2.0))  # of two layers
WINDOWS = (None, 20)
# ‖out − reference‖ / ‖reference‖. Both store numbers of 8 bits, so what differs is the arithmetic of the model's dtype,
# as without them (TOLERANCES), and numbers in the middle between two stored ones, which may go to either.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# Triton's interpreter cuts e4m3 off where a GPU and the reference round: the last bit is 2^-3 of a number.
CUT_OFF = 0.13


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    if kernel_device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("Triton converts e4m3 to bfloat16 from compute capability 9.0 on")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


def tolerance(pair: Pair) -> float:
    is_cut_off = pair.device.type == "cpu" and pair.cache_dtype == FP8
    return CUT_OFF if is_cut_off else TOLERANCES[pair.dtype]


def check(pair: Pair, num_tokens: dict[str, int]) -> None:
    for out, expected in pair.run(pair.plan(num_tokens)):
        assert relative_error(out, expected) < tolerance(pair)


@FORMATS
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 32), (3, 3, 80), (2, 1, 128)])
def test_every_kind_of_step(
    kernels: Kernels, cache_dtype: torch.dtype, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    config = make_config(num_heads, num_kv_heads, head_dim, WINDOWS)
    pair = Pair(config, kernels, dtype, cache_dtype=cache_dtype, scales=SCALES)
    check(pair, {"a": 37, "b": 5, "c": 80})
    check(pair, {"a": 1, "b": 70, "d": 1, "c": 1})
    check(pair, {"c": 1, "a": 1, "d": 1})
    check(pair, {"b": 1, "d": 1, "e": 3})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_steps_of_many_rows_have_several_heads_in_a_program(
    kernels: Kernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.attn_worker.layers.triton_attention.MAX_CAPTURED_PROMPT_ROWS", 64)
    pair = Pair(make_config(8, 2, 128, WINDOWS), kernels, dtype, cache_dtype=FP8, scales=SCALES)
    check(pair, {"a": 29, "b": 99})
    check(pair, {"a": 70, "b": 2, "c": 1})


@FORMATS
@pytest.mark.parametrize("block_size", [1, 12, 64])
def test_every_block_size(kernels: Kernels, cache_dtype: torch.dtype, block_size: int) -> None:
    pair = Pair(make_config(), kernels, block_size=block_size, cache_dtype=cache_dtype)
    check(pair, {"a": 37, "b": 5})
    check(pair, {"a": 1, "b": 30})
    check(pair, {"a": 1, "b": 1})


@FORMATS
def test_long_contexts_are_split_and_merged(kernels: Kernels, cache_dtype: torch.dtype) -> None:
    pair = Pair(make_config(6, 1, 64), kernels, cache_dtype=cache_dtype, scales=KVScales((0.1,), (0.3,)))
    check(pair, {"long": 300})
    for _ in range(2):
        check(pair, {"long": 1, "short": 1})


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 128), (6, 1, 64)], ids=str)
def test_pieces_of_few_contexts_are_merged(
    kernels: Kernels, cache_dtype: torch.dtype, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    from services.attn_worker.layers.mha.triton_decode import choose_decode_tiles

    tiles = choose_decode_tiles(dtype, cache_dtype, heads[0] // heads[1], heads[2], 0.5)
    assert tiles.is_for_few == (cache_dtype == FP8)  # not measured for int8
    pair = Pair(make_config(*heads, WINDOWS), kernels, dtype, cache_dtype=cache_dtype, scales=SCALES)
    check(pair, {"long": 300})
    for _ in range(2):
        check(pair, {"long": 1, "short": 1})


@FORMATS
def test_many_programs_have_one_warp_each(
    kernels: Kernels, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.attn_worker.layers.mha.triton_decode.ONE_WARP_FROM", 0)
    for heads in ((2, 1, 128), (6, 2, 64)):
        dtype = torch.float16 if kernels.device.type == "cpu" else torch.bfloat16
        pair = Pair(make_config(*heads, WINDOWS), kernels, dtype, cache_dtype=cache_dtype, scales=SCALES)
        check(pair, {"long": 150, "short": 5})
        for _ in range(2):
            check(pair, {"long": 1, "short": 1})


@FORMATS
def test_excepted_layers_stay_in_the_dtype_of_the_model(kernels: Kernels, cache_dtype: torch.dtype) -> None:
    pair = Pair(make_config(windows=WINDOWS), kernels, cache_dtype=cache_dtype, exceptions=(1,), scales=SCALES)
    for num_tokens in ({"a": 37, "b": 5}, {"a": 1, "b": 9}, {"a": 1, "b": 1}):
        quantized, plain = (relative_error(*each) for each in pair.run(pair.plan(num_tokens)))
        assert plain < 2e-6 and quantized < tolerance(pair)


def test_fp8_saturates_and_zeros_stay_zeros(kernels: Kernels) -> None:
    """Values beyond 448 times the scale, also infinite ones, give that; a sum of equal values is that value."""
    for cache_dtype in (FP8, INT8):
        pair = Pair(make_config(), kernels, cache_dtype=cache_dtype, scales=KVScales((1.0,), (2.0**-8,)))
        kv_size = pair.config.kv_size
        for num_tokens in ({"big": 20, "zero": 20}, {"big": 1, "zero": 1}):
            qkv = pair.make_qkv(sum(num_tokens.values()))
            qkv[: num_tokens["big"], -kv_size:] = 1e30 if cache_dtype == INT8 else torch.inf
            qkv[num_tokens["big"] :, -kv_size:] = 0.0
            ((out, _),) = pair.run(pair.plan(num_tokens), qkv)
            big, zero = out[: num_tokens["big"]], out[num_tokens["big"] :]
            expected = 1e30 if cache_dtype == INT8 else 448 * 2.0**-8
            torch.testing.assert_close(big, torch.full_like(big, expected), rtol=1e-5, atol=0)
            assert (zero == 0).all()


@FORMATS
def test_a_copied_block_has_its_scales(kernels: Kernels, cache_dtype: torch.dtype) -> None:
    pair = Pair(make_config(windows=WINDOWS), kernels, cache_dtype=cache_dtype, scales=SCALES)
    check(pair, {"a": 37})
    parent = pair.sequences["a"]
    copy = (parent.blocks[-1], pair.free_blocks.pop())
    pair.kernels.storage.copy_blocks([[copy]])
    pair.reference.storage.copy_blocks([[copy]])
    pair.sequences["c"] = Sequence([*parent.blocks[:-1], copy[1]], parent.num_computed, parent.num_prompt)
    check(pair, {"a": 1, "c": 1})
    check(pair, {"c": 3, "a": 1})


@pytest.mark.gpu
@FORMATS
def test_one_graph_replays_decode_steps_and_follows_new_scales(kernels: Kernels, cache_dtype: torch.dtype) -> None:
    pair = Pair(make_config(windows=WINDOWS), kernels, torch.bfloat16, cache_dtype=cache_dtype, exceptions=(1,))
    config, backend, device, bucket = pair.config, pair.kernels, pair.device, 4
    qkv = torch.zeros(bucket, config.qkv_size, dtype=torch.bfloat16, device=device)
    outs = torch.empty(2, bucket, config.attn_size, dtype=torch.bfloat16, device=device)
    empty = build_step_metadata(*np.zeros((3, 0), np.int64), np.zeros((0, 0), np.int32), pair.block_size)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        backend.begin_step(empty, padded_num_rows=bucket)
        for layer in backend.layers_to_compile:
            backend.forward(layer, qkv, outs[0])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for layer in range(2):
                backend.forward(layer, qkv, outs[layer])
    for names, scales in (("ab", KVScales.ones(2)), ("cd", SCALES)):  # others, so that nothing old is read
        for each in (pair.kernels, pair.reference):
            each.use_learned(Learned(scales))
        check(pair, dict.fromkeys(names, 50))
        for _ in range(3):
            step = pair.plan(dict.fromkeys(names, 1))
            with torch.inference_mode():
                qkv.copy_(pair.make_qkv(bucket))
                backend.begin_step(step, padded_num_rows=bucket)
                graph.replay()
                pair.reference.begin_step(step)
                for layer in range(2):
                    expected = torch.empty(2, config.attn_size, device=device)
                    pair.reference.forward(layer, qkv[:2].float(), expected)
                    assert relative_error(outs[layer, :2], expected) < tolerance(pair)
                    assert (outs[layer, 2:] == 0).all()
