"""How many tokens fit when layers with a window have blocks of their own: by the definition, for published models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog
import torch

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.build_cache import WindowBlocks
from services.attn_worker.cache.make_spec import StepLimits, make_cache_spec
from services.attn_worker.cache.spec import KVCacheSpec
from services.common.config import AttentionSection, ModelSection
from services.common.model_config import AttentionOptions, LayerHeads
from services.common.resolve import ResolvedModel, resolve_model

GIB, BLOCK_SIZE = 2**30, 16
# Layers with a window, other layers, window, kv heads, head_dim.
GEMMA_3_4B = (29, 5, 1024, 4, 256)
GPT_OSS_20B = (12, 12, 128, 8, 64)


@pytest.fixture(scope="module")
def embedded() -> ResolvedModel:
    return resolve_model(ModelSection(), "cpu")


def model_of(embedded: ResolvedModel, shape: tuple[int, ...]) -> ResolvedModel:
    """A model with these keys and values, in bfloat16."""
    num_windows, num_others, window, num_kv_heads, head_dim = shape
    windows = (window,) * num_windows + (None,) * num_others
    config = replace(
        embedded.config,
        num_layers=len(windows),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_windows=windows,
    )
    return replace(embedded, config=config, dtype=torch.bfloat16)


@pytest.mark.parametrize(("shape", "gain"), [(GEMMA_3_4B, (5.6, 5.7)), (GPT_OSS_20B, (1.9, 2.0))])
def test_published_models_hold_several_times_as_many_tokens(
    embedded: ResolvedModel, shape: tuple[int, ...], gain: tuple[float, float]
) -> None:
    """Of 60 GiB with 64 sequences and steps of 8192 tokens."""
    num_windows, num_others, window, num_kv_heads, head_dim = shape
    model, room, limits = model_of(embedded, shape), 60 * GIB, StepLimits(64, 8192)
    section = AttentionSection(block_size=BLOCK_SIZE, kv_cache_bytes=room)
    before = make_cache_spec(section, model)
    with structlog.testing.capture_logs() as events:
        spec = make_cache_spec(section, model, limits)
    layer_bytes = 2 * num_kv_heads * head_dim * 2 * BLOCK_SIZE
    # Each sequence: the tokens before the last one that a window has, rounded up, and three blocks. Three steps.
    num_own = 64 * (-(-(window - 1) // BLOCK_SIZE) + 3) + -(-(3 * 8192 + 2 * 64) // BLOCK_SIZE)
    num_left = (room - num_own * num_windows * layer_bytes) // (num_others * layer_bytes)
    assert spec.window_blocks == WindowBlocks(window, num_own) and spec.num_blocks == num_left
    assert spec.num_bytes == (num_own * num_windows + num_left * num_others) * layer_bytes <= room
    assert gain[0] < spec.num_blocks / before.num_blocks < gain[1]
    [event] = events
    assert event["num_tokens"] == num_left * BLOCK_SIZE and event["num_window_blocks"] == num_own
    assert event["bytes_per_token"] == num_others * layer_bytes // BLOCK_SIZE, "what one more token takes"


def test_a_cache_too_small_for_the_windows_stays_as_it_is(embedded: ResolvedModel) -> None:
    model, section = model_of(embedded, GEMMA_3_4B), AttentionSection(block_size=BLOCK_SIZE, kv_cache_bytes=2 * GIB)
    assert make_cache_spec(section, model, StepLimits(64, 8192)) == make_cache_spec(section, model)


@pytest.mark.parametrize(("num_blocks", "has_group"), [(1000, True), (201, True), (200, False)])
def test_a_given_number_of_blocks_is_that_of_the_other_layers(
    embedded: ResolvedModel, num_blocks: int, has_group: bool
) -> None:
    section = AttentionSection(block_size=BLOCK_SIZE, num_blocks=num_blocks)
    spec = make_cache_spec(section, model_of(embedded, GPT_OSS_20B), StepLimits(8, 592))
    assert spec.num_blocks == num_blocks
    assert spec.window_blocks == (WindowBlocks(128, 8 * 11 + 112) if has_group else None)


@pytest.mark.parametrize("windows", [(None, None), (64, 64), (64, 128)])
def test_layers_that_are_alike_have_one_group(embedded: ResolvedModel, windows: tuple[int | None, ...]) -> None:
    model = model_of(embedded, (1, 1, 64, 2, 16))
    model = replace(model, config=replace(model.config, sliding_windows=windows))
    section = AttentionSection(block_size=BLOCK_SIZE, kv_cache_bytes=GIB)
    spec = make_cache_spec(section, model, StepLimits(4, 64))
    assert spec == make_cache_spec(section, model) and spec.num_groups == 1


def test_latent_vectors_have_one_group(embedded: ResolvedModel) -> None:
    model = model_of(embedded, GPT_OSS_20B)
    section, limits = AttentionSection(block_size=BLOCK_SIZE, kv_cache_bytes=4 * GIB), StepLimits(8, 64)
    assert make_cache_spec(section, model, limits).num_groups == 2
    latent = replace(model, config=replace(model.config, attention=AttentionOptions(value_dim=8)))
    assert make_cache_spec(section, latent, limits).num_groups == 1


def test_each_layer_has_the_blocks_of_its_group_and_copies_stay_in_it() -> None:
    """Layer 3 reads the keys of layer 0 with another window; layer 4 those of layer 2, and all of them."""
    heads = (*[LayerHeads(4, 2, 16)] * 3, LayerHeads(4, 2, 16, kv_layer=0), LayerHeads(4, 2, 16, kv_layer=2))
    spec = KVCacheSpec(
        9, 4, 2, 16, torch.int8, (6, None, 6, 12, None), exceptions={0: torch.float16}, layer_heads=heads,
        window_blocks=WindowBlocks(12, 5),
    )  # fmt: skip
    assert spec.window_layers == {0, 3} and [spec.group_of(layer) for layer in range(5)] == [1, 0, 0, 1, 0]
    storage = BlockStorage(spec, spec.head_major_block, torch.device("cpu"))
    assert [len(layer) for layer in storage.layers] == [6, 10, 10, 6, 10]
    assert storage.layers[3].data_ptr() == storage.layers[0].data_ptr()
    tensors = [storage.layers[0], storage.layers[1], storage.layers[2], storage.scales[1], storage.scales[2]]
    assert sum(tensor.nbytes for tensor in tensors) == spec.num_bytes + spec.block_bytes
    for tensor in tensors:
        tensor[3] = 7
    storage.copy_blocks([[(3, 4)], [(3, 5)]])
    found = [[bool((tensor[i] == 7).all()) for i in (4, 5)] for tensor in tensors]
    assert found == [[False, True], *[[True, False]] * 4]
