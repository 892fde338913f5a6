"""The options of attention that some families have: our kernels give the results of the float32 torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.common.model_config import AttentionOptions, LayerHeads, ModelConfig, RopeConfig
from tests.gpu.attention_pair import MAX_MODEL_LEN, Kernels, Pair, make_config, relative_error

HEAD_DIM = 32
PLAIN = RopeConfig("default", 10000.0, HEAD_DIM, MAX_MODEL_LEN)
SLOPES = (0.5, 0.25, 0.125, 0.0625)
LONGROPE = RopeConfig(
    "longrope",
    10000.0,
    16,
    256,
    factor=4.0,
    original_max_position_embeddings=12,
    short_factor=(1.0,) * 8,
    long_factor=tuple(1.0 + index for index in range(8)),
)
# The options, and the rotary embedding. With ALiBi nothing is rotated.
CASES: dict[str, tuple[AttentionOptions, RopeConfig]] = {
    "scale": (AttentionOptions(scale=0.3), PLAIN),
    "softcap": (AttentionOptions(softcap=2.0), PLAIN),
    "softcap and scale": (AttentionOptions(scale=0.4, softcap=3.0), PLAIN),
    "ALiBi": (AttentionOptions(alibi_slopes=SLOPES, layer_ropes=(None, None)), PLAIN),
    "neighbouring pairs": (AttentionOptions(rotates_pairs=True), PLAIN),
    "a part of each head": (AttentionOptions(), replace(PLAIN, rotary_dim=12)),
    "neighbouring pairs of a part": (AttentionOptions(rotates_pairs=True), replace(PLAIN, rotary_dim=16)),
    "a part of each head by longrope": (AttentionOptions(layer_ropes=(LONGROPE, None)), LONGROPE),
    "two embeddings": (AttentionOptions(layer_ropes=(replace(PLAIN, theta=50.0), PLAIN)), PLAIN),
    "a layer without rotation": (AttentionOptions(layer_ropes=(None, PLAIN)), PLAIN),
    "different parts of heads": (AttentionOptions(layer_ropes=(replace(PLAIN, rotary_dim=12), PLAIN)), PLAIN),
    "a part of the pairs": (AttentionOptions(), RopeConfig("proportional", 100.0, HEAD_DIM, 256, num_turning=4)),
    "other heads in each layer": (
        AttentionOptions(
            scale=0.2,
            layer_heads=(LayerHeads(4, 1, 2 * HEAD_DIM), LayerHeads(4, 2, HEAD_DIM)),
            layer_ropes=(replace(PLAIN, rotary_dim=2 * HEAD_DIM), PLAIN),
        ),
        PLAIN,
    ),
    "the keys of an earlier layer": (
        AttentionOptions(scale=0.2, layer_heads=(LayerHeads(4, 2, HEAD_DIM), LayerHeads(4, 2, HEAD_DIM, kv_layer=0))),
        PLAIN,
    ),
    "learned sinks": (AttentionOptions(has_sinks=True), PLAIN),
    "learned sinks and a soft cap": (AttentionOptions(has_sinks=True, softcap=2.0), PLAIN),
    "dynamic scaling of a part": (AttentionOptions(), RopeConfig("dynamic", 10000.0, 16, 12, factor=2.0)),
}


@pytest.fixture
def kernels(kernel_device: torch.device) -> Kernels:
    triton = pytest.importorskip("services.attn_worker.layers.triton_attention", reason="needs triton")
    return Kernels(triton.TritonAttention, kernel_device, torch.float32)


def config_of(case: str) -> ModelConfig:
    options, rope = CASES[case]
    config = make_config(4, 2, HEAD_DIM, windows=(None, 7), rope=rope)
    return replace(config, attention=options)


@pytest.mark.parametrize("case", CASES)
def test_every_option_in_every_kind_of_step(kernels: Kernels, case: str) -> None:
    pair = Pair(config_of(case), kernels)
    pair.check({"a": 19, "b": 3})
    pair.check({"a": 1, "b": 18, "c": 1})
    pair.check({"c": 1, "a": 1, "b": 1})


@pytest.mark.parametrize(
    "case", ["softcap", "ALiBi", "learned sinks", "other heads in each layer", "the keys of an earlier layer"]
)
def test_options_of_long_contexts_that_are_split(kernels: Kernels, case: str) -> None:
    pair = Pair(config_of(case), kernels)
    pair.check({"long": 300})
    pair.check({"long": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_options_in_16_bits(kernels: Kernels, dtype: torch.dtype) -> None:
    for case in ("softcap and scale", "ALiBi", "neighbouring pairs of a part", "learned sinks"):
        pair = Pair(config_of(case), kernels, dtype)
        pair.check({"a": 19, "b": 3})
        pair.check({"a": 1, "b": 1})


def test_options_in_steps_of_many_sequences(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.attn_worker.layers import triton_attention
    from services.attn_worker.layers.mha.triton_decode import choose_decode_tiles

    tiles = choose_decode_tiles(torch.float16, torch.float16, 1, 128, 99)
    assert tiles.is_for_many
    plain = replace(triton_attention.PLAIN_KERNELS, choose_decode_tiles=lambda *_: tiles)
    monkeypatch.setattr(triton_attention, "PLAIN_KERNELS", plain)
    for case in ("softcap and scale", "ALiBi", "learned sinks", "the keys of an earlier layer"):
        pair = Pair(config_of(case), kernels, torch.float16)
        pair.check({"a": 49, "b": 3})
        pair.check({"a": 1, "b": 1})


@pytest.mark.parametrize("num_heads", [2, 4])
def test_options_with_several_heads_in_a_program(
    kernels: Kernels, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, behind a context, with and without a window, and with fewer tokens than a tile has."""
    from services.attn_worker.layers import triton_attention
    from services.attn_worker.layers.mha.triton_prefill import PrefillTiles

    tiles = PrefillTiles(block_m=32 // num_heads, block_n=16, num_warps=4, num_stages=2, num_heads=num_heads)
    plain = replace(triton_attention.PLAIN_KERNELS, choose_prefill_tiles=lambda *_: tiles)
    monkeypatch.setattr(triton_attention, "PLAIN_KERNELS", plain)
    for case in ("scale", "softcap and scale", "ALiBi", "neighbouring pairs of a part", "learned sinks"):
        config = replace(config_of(case), num_kv_heads=1)
        pair = Pair(config, kernels, torch.float16)
        pair.check({"a": 19, "b": 40})
        pair.check({"a": 21, "b": 1})


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float16], ids=str)
def test_layers_with_the_heads_of_gemma_4(kernels: Kernels, cache_dtype: torch.dtype) -> None:
    """In 16 bits: heads of 512 dimensions have tiles of their own. The last two layers read the keys of the first."""
    heads = (LayerHeads(8, 1, 256), LayerHeads(8, 1, 512))
    heads += tuple(replace(each, kv_layer=layer) for layer, each in enumerate(heads))
    ropes = (
        replace(PLAIN, rotary_dim=256),
        RopeConfig("proportional", 1e6, 512, MAX_MODEL_LEN, num_turning=64),
    )
    options = AttentionOptions(scale=0.05, layer_heads=heads, layer_ropes=ropes * 2)
    config = replace(make_config(8, 1, 512, windows=(7, None) * 2, rope=ropes[1]), attention=options)
    pair = Pair(config, kernels, torch.float16, cache_dtype=cache_dtype if cache_dtype == torch.int8 else None)
    for num_tokens in ({"a": 19, "b": 40}, {"a": 1, "b": 1}, {"a": 1, "b": 3}):
        for out, expected in pair.run(pair.plan(num_tokens)):
            assert relative_error(out, expected) < (1e-2 if cache_dtype == torch.int8 else 1e-3)


@pytest.mark.parametrize("num_heads", [6, 64], ids=str)  # 6: the sinks of a layer are padded
def test_sinks_of_an_8_bit_cache_and_of_large_groups(kernels: Kernels, num_heads: int) -> None:
    config = make_config(num_heads, 2, HEAD_DIM, windows=(None, 7))
    config = replace(config, attention=AttentionOptions(has_sinks=True))
    for cache_dtype in (None, torch.int8):
        pair = Pair(config, kernels, cache_dtype=cache_dtype)
        pair.run(pair.plan({"a": 19, "b": 300}))
        for _ in range(2):
            for out, expected in pair.run(pair.plan({"a": 1, "b": 1})):
                assert relative_error(out, expected) < (kernels.tolerance if cache_dtype is None else 1e-2)


def test_keys_are_appended_from_rows_beyond_two_billion_elements(kernel_device: torch.device) -> None:
    """As a step of 100,000 tokens has them with wide layers. Memory between the rows is never touched."""
    append = pytest.importorskip("services.attn_worker.layers.mha.triton_rope_append", reason="needs triton")
    num_rows, head_dim = 3, 16
    near = torch.randn(num_rows, 3 * head_dim).to(kernel_device, torch.float16)
    far = torch.empty(2**31 + 3 * head_dim, dtype=torch.float16, device=kernel_device)
    far = far.as_strided(near.shape, (2**30, 1))
    far.copy_(near)
    angles = torch.randn(num_rows, head_dim, device=kernel_device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=kernel_device)
    caches = torch.zeros(2, 2, 1, 2, 4, head_dim, dtype=torch.float16, device=kernel_device)
    for cache, qkv in zip(caches, (near, far), strict=True):
        append.append_prefill(qkv, cache, None, angles, rows, rows)
    assert caches[0].any() and torch.equal(caches[0], caches[1])
