"""The size of the KV cache: bytes by the definition, and the memory that is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog
import torch

from services.attn_worker.cache import make_spec
from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.make_spec import make_cache_spec
from services.attn_worker.cache.spec import KVCacheSpec
from services.common.config import AttentionSection, ModelSection
from services.common.errors import CapacityError, ConfigError
from services.common.kv_cache.format import with_own_layers
from services.common.kv_cache.scales import KVScales
from services.common.model_config import LayerHeads
from services.common.rank import Rank, seam_config
from services.common.resolve import ResolvedModel, resolve_model

CPU = torch.device("cpu")
# Llama 3 8B needs 128 KiB per token in 16 bits.
LLAMA = KVCacheSpec(100, 16, 8, 128, torch.bfloat16, (None,) * 32)


def test_a_token_takes_two_vectors_per_kv_head_and_layer() -> None:
    assert (LLAMA.num_layers, LLAMA.kv_shape(0)) == (32, (8, 128))
    assert LLAMA.token_bytes == 128 * 1024
    assert LLAMA.block_bytes == 2 * 1024 * 1024
    assert LLAMA.num_bytes == 200 * 1024 * 1024
    wider = replace(LLAMA, dtype=torch.float32, windows=(None, 8))
    assert wider.token_bytes == 2 * 2 * 1024 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_layouts_have_all_blocks_and_the_null_block(dtype: torch.dtype) -> None:
    spec = KVCacheSpec(5, 4, 2, 16, dtype, (None, 6, None))
    for block_shape in (spec.token_major_block, spec.head_major_block):
        layers, shape = BlockStorage(spec, block_shape, CPU).layers, block_shape(0)
        assert [layer.shape for layer in layers] == [(5 + 1, *shape)] * 3
        assert all(layer.dtype == dtype and not layer.any() for layer in layers)
        assert sum(layer.nbytes for layer in layers) == spec.num_bytes + spec.block_bytes


def test_the_error_for_a_cache_that_does_not_fit_names_its_size() -> None:
    spec = replace(LLAMA, num_blocks=10**12)
    with pytest.raises(CapacityError, match=f"{10**12 + 1} KV blocks need {(10**12 + 1) * 2**21} bytes on cpu"):
        BlockStorage(spec, spec.head_major_block, CPU)


@pytest.fixture(scope="module")
def model() -> ResolvedModel:
    return resolve_model(ModelSection(), "cpu")


def test_a_cpu_is_refused_more_than_it_has(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model.config
    block_bytes = 2 * config.num_layers * 16 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    room = 20 * block_bytes + 5
    monkeypatch.setattr(make_spec, "available_bytes", lambda: room)
    for section, named in (
        (AttentionSection(num_blocks=21), f"need {21 * block_bytes} .*: set attention.num_blocks to 20 or"),
        (AttentionSection(kv_cache_bytes=21 * block_bytes), f"set attention.kv_cache_bytes to {room} or"),
    ):
        with pytest.raises(CapacityError, match=named):
            make_spec.check_host_memory(section, make_cache_spec(section, model))
    section = AttentionSection(num_blocks=20)
    make_spec.check_host_memory(section, make_cache_spec(section, model))


def test_the_cache_has_as_many_blocks_as_fit_and_logs_their_number(model: ResolvedModel) -> None:
    config = model.config
    block_bytes = 2 * config.num_layers * 16 * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    with structlog.testing.capture_logs() as events:
        spec = make_cache_spec(AttentionSection(block_size=16, kv_cache_bytes=10 * block_bytes - 1), model)
    assert spec == KVCacheSpec(9, 16, config.num_kv_heads, config.head_dim, model.dtype, config.sliding_windows)
    assert [(event["num_blocks"], event["bytes"]) for event in events] == [(9, 9 * block_bytes)]
    assert make_cache_spec(AttentionSection(block_size=16, num_blocks=33), model).num_blocks == 33
    with pytest.raises(CapacityError, match=f"is {block_bytes - 1} bytes, one block of 16 tokens takes {block_bytes}"):
        make_cache_spec(AttentionSection(block_size=16, kv_cache_bytes=block_bytes - 1), model)


def test_8_bits_fit_twice_as_many_tokens_and_int8_a_scale_for_each_head_beside_them() -> None:
    assert replace(LLAMA, dtype=torch.float8_e4m3fn).token_bytes * 2 == LLAMA.token_bytes
    assert replace(LLAMA, dtype=torch.int8).token_bytes == 32 * 2 * 8 * (128 + 4)
    exceptions = {0: torch.bfloat16, 31: torch.int8}
    mixed = replace(LLAMA, dtype=torch.float8_e4m3fn, exceptions=exceptions)
    assert mixed.token_bytes == 2 * 8 * (30 * 128 + 2 * 128 + (128 + 4))


def test_layers_of_different_heads_share_block_numbers_and_one_may_read_the_keys_of_another() -> None:
    heads = (LayerHeads(4, 2, 16), LayerHeads(4, 1, 32), LayerHeads(4, 2, 16, kv_layer=0), LayerHeads(4, 2, 16))
    spec = KVCacheSpec(5, 4, 2, 16, torch.int8, (None,) * 4, exceptions={0: torch.float16}, layer_heads=heads)
    assert spec.token_bytes == 2 * (2 * 16 * 2 + 1 * (32 + 4) + 2 * (16 + 4))
    storage = BlockStorage(spec, spec.head_major_block, CPU)
    shapes = [(6, 2, 2, 4, 16), (6, 1, 2, 4, 32), (6, 2, 2, 4, 16), (6, 2, 2, 4, 16)]
    assert [layer.shape for layer in storage.layers] == shapes
    assert storage.layers[2].data_ptr() == storage.layers[0].data_ptr() and storage.scales[2] is None
    for layer in (0, 1, 3):
        storage.layers[layer][3] = layer + 1
    storage.copy_blocks([[(3, 5)]])
    assert [bool((layer[5] == i + 1).all()) for i, layer in enumerate(storage.layers)] == [True, True, False, True]
    tensors = [storage.layers[i] for i in (0, 1, 3)] + [storage.scales[1], storage.scales[3]]
    assert sum(tensor.nbytes for tensor in tensors) == spec.num_bytes + spec.block_bytes


def test_layers_of_different_dtypes_share_block_numbers() -> None:
    spec = KVCacheSpec(5, 4, 2, 16, torch.int8, (None,) * 3, exceptions={1: torch.float32, 2: torch.float8_e4m3fn})
    storage = BlockStorage(spec, spec.head_major_block, CPU)
    tensors = [*storage.layers, storage.scales[0]]
    assert [layer.dtype for layer in storage.layers] == [torch.int8, torch.float32, torch.float8_e4m3fn]
    assert storage.scales[0].shape == (6, 2, 2, 4) and storage.scales[1] is None
    assert sum(tensor.nbytes for tensor in tensors) == spec.num_bytes + spec.block_bytes
    for tensor in tensors:
        tensor.copy_(torch.arange(1, 7).view(-1, *[1] * (tensor.dim() - 1)))
    storage.copy_blocks([[(1, 4), (4, 0)]])
    for tensor in tensors:
        assert tensor.float().flatten(1)[:, -1].tolist() == [2, 2, 3, 4, 2, 6]
    storage.use_scales(KVScales((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)))
    assert storage.scales[2].tolist() == [3.0, 6.0]


@pytest.mark.parametrize(("kv_cache_dtype", "factor"), [("fp8", 4), ("int8", 256 / 68)])
def test_the_log_says_how_many_tokens_fit(model: ResolvedModel, kv_cache_dtype: str, factor: float) -> None:
    """The embedded model has heads of 64 dimensions, which take 256 bytes in float32."""
    with structlog.testing.capture_logs() as events:
        for name in ("auto", kv_cache_dtype):
            make_cache_spec(AttentionSection(kv_cache_dtype=name, kv_cache_bytes=2**24), model)
    plain, quantized = (event["num_tokens"] for event in events)
    assert plain == 2**24 // (4 * 2 * 2 * 64 * 4)
    assert abs(quantized - factor * plain) <= 16 * factor, "whole blocks"
    assert events[1]["dtype"] == {"fp8": "float8_e4m3fn", "int8": "int8"}[kv_cache_dtype]


def test_skipped_layers_must_exist(model: ResolvedModel) -> None:
    spec = make_cache_spec(AttentionSection(kv_cache_dtype="fp8", kv_cache_skip_layers=(0, 3)), model)
    assert spec.dtypes == [torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32]
    with pytest.raises(ConfigError, match="kv_cache_skip_layers names layer 4, the model has layers 0 to 3"):
        make_cache_spec(AttentionSection(kv_cache_dtype="fp8", kv_cache_skip_layers=(4,)), model)


def test_each_stage_skips_its_own_of_the_named_layers(model: ResolvedModel) -> None:
    section = AttentionSection(kv_cache_dtype="fp8", kv_cache_skip_layers=(1, 2))
    of_stages = []
    for index in range(2):
        rank = Rank(index, 2, is_stage=True)
        stage = replace(model, config=seam_config(model.config, rank))
        of_stages += make_cache_spec(with_own_layers(section, model, rank), stage).dtypes
    assert of_stages == make_cache_spec(section, model).dtypes
    assert with_own_layers(section, model, Rank(1, 2)) == section, "a tensor rank has parts of all layers"
    with pytest.raises(ConfigError, match="kv_cache_skip_layers names layer 4, the model has layers 0 to 3"):
        with_own_layers(section.model_copy(update={"kv_cache_skip_layers": (4,)}), model, Rank(0, 2, is_stage=True))
