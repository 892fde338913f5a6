"""How large the KV cache is: the spec of a configured number of blocks, or of as many as fit. Needs no backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog
import torch

from services.attn_worker.cache.build_cache import SourceSlots, WindowBlocks
from services.attn_worker.cache.spec import KVCacheSpec
from services.common.config import AttentionSection
from services.common.errors import CapacityError
from services.common.kv_cache.format import resolve_kv_cache_format
from services.common.kv_cache.sliding_window import SlidingWindow
from services.common.process import available_bytes
from services.common.resolve import ResolvedModel

log = structlog.get_logger()

# Slots for the states of recurrent layers, for each sequence of a step: its committed state, the one that the running
# step leaves, and the one that the next step leaves. With the state before the committed one they are four; two more
# hold checkpoints, those at the ends of a prompt and of its answer.
_FEWEST_STATES, _MOST_STATES = 3, 6
_MOST_EMPTY_BLOCKS = 2**18  # of a model without attention
_STORED_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # by format; "model": in the model's dtype


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that the dense worker will plan."""

    max_num_seqs: int
    max_num_tokens: int
    num_lanes: int = 1  # that run beside each other, each with steps up to these limits


def make_cache_spec(section: AttentionSection, model: ResolvedModel, limits: StepLimits | None = None) -> KVCacheSpec:
    """The configured number of blocks, or as many as fit: into `kv_cache_bytes` on a CPU, into free memory on a GPU.

    `limits`: layers with a window get blocks of their own if that saves memory, except in latent attention, and with a
    host tier, whose copies of a block are of all layers.
    """
    device = model.device
    if device.type == "cpu":
        room, source = section.kv_cache_bytes, "attention.kv_cache_bytes"
    else:
        room = int(torch.cuda.mem_get_info(device)[0] * section.kv_cache_memory_fraction)
        source = f"attention.kv_cache_memory_fraction {section.kv_cache_memory_fraction} of free memory"
    spec = one_block_spec(section, model)
    if spec.recurrences:
        spec = _with_states(spec, limits, room, source)
    if spec.cross_layers:
        spec = _with_sources(spec, model, limits, room, source)
    num_left = room - spec.num_state_slots * spec.state_bytes
    if spec.source_slots is not None:
        num_left -= spec.source_slots.num_slots * spec.source_bytes
    if spec.storing_layers:
        num_blocks = num_left // spec.block_bytes
    else:  # blocks of nothing, which count tokens
        assert limits is not None, "no other backend has such layers"
        num_blocks = min(_MOST_EMPTY_BLOCKS, limits.max_num_seqs * -(-model.max_model_len // spec.block_size))
    spec = replace(spec, num_blocks=section.num_blocks or num_blocks)
    if limits is not None and model.config.attention.value_dim is None and not section.host_kv_bytes:
        spec = _with_window_group(spec, limits, None if section.num_blocks else room)
    if spec.num_blocks < 1:
        raise CapacityError(
            f"the KV cache has room for no block: {source} is {room} bytes,{_states_of(spec)} "
            f"one block of {spec.block_size} tokens takes {spec.block_bytes}"
        )
    if spec.num_bytes > room and device.type != "cpu":
        raise CapacityError(
            f"{spec.num_blocks} blocks{_states_of(spec)} need {spec.num_bytes} bytes, {source} is {room}"
        )
    of_windows = {} if spec.window_blocks is None else {"num_window_blocks": spec.window_blocks.num_blocks}
    of_states = {}
    if spec.recurrences:
        of_states = {"num_state_slots": spec.num_state_slots, "bytes_per_state": spec.state_bytes}
    if spec.source_slots is not None:
        of_states = {"num_source_slots": spec.source_slots.num_slots, "bytes_per_source": spec.source_bytes}
    log.info(
        "KV cache",
        num_tokens=spec.num_blocks * spec.block_size,
        num_blocks=spec.num_blocks,
        **of_windows,
        **of_states,
        block_size=spec.block_size,
        bytes=spec.num_bytes,
        bytes_per_token=spec.group_token_bytes(0),
        dtype=str(spec.dtype).removeprefix("torch."),
    )
    return spec


def one_block_spec(section: AttentionSection, model: ResolvedModel) -> KVCacheSpec:
    """The spec of a cache of one block."""
    dtype = _STORED_DTYPES.get(resolve_kv_cache_format(section, model), model.dtype)
    spec = KVCacheSpec.of_model(model.config, dtype, num_blocks=1, block_size=section.block_size)
    return replace(spec, exceptions=dict.fromkeys(section.kv_cache_skip_layers, model.dtype))


def check_host_memory(section: AttentionSection, spec: KVCacheSpec) -> None:
    """Raises CapacityError, which names a value that fits, if a CPU has too little memory for the cache.

    The system would grant it, and end a process when the cache fills.
    """
    available = available_bytes()
    if spec.num_bytes <= available:
        return
    mend = f"attention.kv_cache_bytes to {available}"
    if section.num_blocks is not None:
        mend = f"attention.num_blocks to {available // spec.block_bytes}"
    raise CapacityError(
        f"{spec.num_blocks} KV blocks need {spec.num_bytes} bytes of host memory, {available} are available: set {mend}"
        " or less"
    )


def _with_states(spec: KVCacheSpec, limits: StepLimits | None, room: int, source: str) -> KVCacheSpec:
    """The spec with slots for the states of recurrent layers: more, for the prefix cache, up to half of the room.

    Raises CapacityError, which says what to change, if all sequences of a step have too little room.
    """
    assert limits is not None, "no other backend has such layers"
    fewest, most = (each * limits.max_num_seqs for each in (_FEWEST_STATES, _MOST_STATES))
    if fewest * spec.state_bytes >= room:
        raise CapacityError(
            f"the states of {limits.max_num_seqs} sequences take {fewest * spec.state_bytes} bytes, {_FEWEST_STATES} of"
            f" {spec.state_bytes} for each, and {source} is {room}: more memory, or a lower scheduler.max_num_seqs, is"
            " needed"
        )
    return replace(spec, num_state_slots=max(fewest, min(most, room // 2 // spec.state_bytes)))


def _with_sources(
    spec: KVCacheSpec, model: ResolvedModel, limits: StepLimits | None, room: int, source: str
) -> KVCacheSpec:
    """The spec with slots for the outputs of encoders: one for each sequence of a step, up to half of the room.

    Raises CapacityError if there is room for none.
    """
    assert limits is not None and model.config.encoder is not None, "layers with cross attention have an encoder"
    one = replace(spec, source_slots=SourceSlots(1, model.config.encoder.max_source_len))
    num_slots = min(limits.max_num_seqs, room // 2 // one.source_bytes)
    if not num_slots:
        raise CapacityError(
            f"the output of an encoder takes {one.source_bytes} bytes in layers with cross attention, half of the room"
            f" is {room // 2}: {source} is {room}"
        )
    return replace(one, source_slots=SourceSlots(num_slots, model.config.encoder.max_source_len))


def _states_of(spec: KVCacheSpec) -> str:
    """What a message says about states."""
    return f" {spec.num_state_slots} states take {spec.num_state_slots * spec.state_bytes}," if spec.recurrences else ""


def _with_window_group(spec: KVCacheSpec, limits: StepLimits, room: int | None) -> KVCacheSpec:
    """The spec with blocks of their own for layers with a window, if these are fewer than the others.

    `room`: bytes for all blocks; None: the others stay as many as they are.
    """
    layers = spec.window_layers
    if not layers:
        return spec
    window = max(window for layer in layers if (window := spec.windows[layer]) is not None)
    num_own = SlidingWindow(spec.block_size, window).pool_blocks(limits.max_num_seqs, limits.max_num_tokens)
    grouped = replace(spec, window_blocks=WindowBlocks(window, num_own))
    if room is not None:
        num_left = room - num_own * spec.block_size * grouped.group_token_bytes(1)
        grouped = replace(grouped, num_blocks=num_left // (spec.block_size * grouped.group_token_bytes(0)))
    return grouped if num_own < grouped.num_blocks else spec
