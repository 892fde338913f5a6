"""How many states of gated delta layers fit beside the blocks: by the definition, for published sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structlog
import torch

from services.attn_worker.cache.make_spec import StepLimits, make_cache_spec
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.backends import torch_backend
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.common.config import AttentionSection, ModelSection
from services.common.errors import CapacityError
from services.common.families.shape import GatedDelta
from services.common.model_config import AttentionOptions, LayerHeads
from services.common.resolve import ResolvedModel, resolve_model

GIB = 2**30
NEXT = GatedDelta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_size=4)
STATE_BYTES = 24 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))  # 24 layers, float32
BLOCK_BYTES = 8 * 16 * 2 * 4 * 256 * 2  # 8 layers, 16 tokens, keys and values of 4 heads of 256 in bfloat16


def model_of(sizes: GatedDelta, num_layers: int) -> ResolvedModel:
    """Every fourth layer has attention."""
    model = resolve_model(ModelSection(), "cpu")
    own = LayerHeads(16, 4, 256)
    heads = tuple(own if layer % 4 == 3 else replace(own, recurrence=sizes) for layer in range(num_layers))
    config = replace(
        model.config,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=4,
        head_dim=256,
        sliding_windows=(None,) * num_layers,
        attention=AttentionOptions(scale=1 / 16, layer_heads=heads),
    )
    return replace(model, config=config, dtype=torch.bfloat16)


@pytest.mark.parametrize(("max_num_seqs", "num_slots"), [(64, 384), (200, 652), (240, 720)])
def test_states_take_as_much_as_sequences_need_and_half_of_the_room_for_checkpoints(
    max_num_seqs: int, num_slots: int
) -> None:
    """Six for each sequence; of 64 GiB, only as many as half of it holds, but three for each at least."""
    assert num_slots == max(3 * max_num_seqs, min(6 * max_num_seqs, 32 * GIB // STATE_BYTES))
    section = AttentionSection(kv_cache_bytes=64 * GIB)
    with structlog.testing.capture_logs() as events:
        spec = make_cache_spec(section, model_of(NEXT, 32), StepLimits(max_num_seqs, 8192))
    assert spec.num_state_slots == num_slots and spec.state_bytes == STATE_BYTES
    assert spec.num_blocks == (64 * GIB - num_slots * STATE_BYTES) // BLOCK_BYTES
    assert spec.num_bytes == num_slots * STATE_BYTES + spec.num_blocks * BLOCK_BYTES <= 64 * GIB
    [event] = [event for event in events if event["event"] == "KV cache"]
    assert (event["num_state_slots"], event["bytes_per_state"]) == (num_slots, STATE_BYTES)


def test_blocks_of_a_model_without_attention_count_the_tokens_of_all_sequences() -> None:
    """They hold nothing, and are as many as sequences of any length need, up to a number."""
    model = model_of(NEXT, 3)
    assert len(model.config.recurrent_layers) == 3
    for max_model_len, num_blocks in ((1000, 64 * 63), (10**6, 2**18)):
        limits, section = StepLimits(64, 8192), AttentionSection(kv_cache_bytes=64 * GIB)
        spec = make_cache_spec(section, replace(model, max_model_len=max_model_len), limits)
        assert (spec.num_blocks, spec.block_bytes) == (num_blocks, 0)
        assert spec.num_bytes == spec.num_state_slots * spec.state_bytes


def test_too_little_room_for_the_states_of_all_sequences_says_what_to_change() -> None:
    section, model = AttentionSection(kv_cache_bytes=GIB), model_of(NEXT, 32)
    message = rf"the states of 64 sequences take {3 * 64 * STATE_BYTES} bytes.*kv_cache_bytes is {GIB}.*max_num_seqs"
    with pytest.raises(CapacityError, match=message):
        make_cache_spec(section, model, StepLimits(64, 8192))


def test_the_backends_hold_what_the_spec_counts() -> None:
    sizes = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12, conv_size=4)
    model = model_of(sizes, 8)
    spec = make_cache_spec(AttentionSection(num_blocks=7), model, StepLimits(3, 64))
    storage = StateStorage(spec, torch.device("cpu"))
    tensors = [*storage.matrices.values(), *storage.past_rows.values()]
    assert list(storage.matrices) == [0, 1, 2, 4, 5, 6]
    assert sum(each.nbytes for each in tensors) == (spec.num_state_slots + 2) * spec.state_bytes
    assert spec.storing_layers == [3, 7] and spec.token_bytes == 2 * 2 * 4 * 256 * 2
    torch_backend(BackendSetup(model.config, spec, model.dtype, torch.device("cpu"), 64))
