"""`build_cache`: the groups of a model's KV cache. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.attn_worker.cache.block_group import BlockGroup, WindowGroup
from services.attn_worker.cache.block_pool import BlockPool
from services.attn_worker.cache.group import CacheGroup
from services.attn_worker.cache.kv_cache import KVCache
from services.attn_worker.cache.prefix_cache import PrefixCache
from services.attn_worker.cache.source_group import SourceGroup
from services.attn_worker.cache.state_group import StateGroup
from services.common.kv_cache.sliding_window import SlidingWindow


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """The blocks of layers with a window, if they have blocks of their own because other layers have none."""

    window: int  # the longest of theirs
    num_blocks: int  # and one more, the null block, with this index


@dataclass(frozen=True, slots=True)
class SourceSlots:
    """The slots for keys and values of encoders' outputs, in layers with cross attention."""

    num_slots: int  # and one more, the null slot, with this index
    max_source_len: int  # rows of an output at most


def build_cache(
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    *,
    enable_prefix_cache: bool = True,
    length_dependent_beyond: int | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
    window_blocks: WindowBlocks | None = None,
    num_state_slots: int | None = None,
    sources: SourceSlots | None = None,
    make_pool: Callable[[int], BlockPool] = BlockPool,
    make_prefix_cache: Callable[..., PrefixCache] = PrefixCache,
    make_cache: Callable[..., KVCache] = KVCache,
) -> KVCache:
    """A cache with a group for each kind of layers.

    window: no layer reads further back, except to the first `num_sink_tokens`, so sequences drop the blocks between
    when a plan says so; window_blocks: some layers have a window and blocks of their own, which are evicted in every
    plan; num_state_slots: the model has gated delta layers, whose states have so many slots, and no window; sources:
    some layers have cross attention;
    make_pool: of the blocks that the scheduler counts; make_cache: takes the arguments of `KVCache`
    """
    assert num_state_slots is None or (window is None and window_blocks is None), "states cannot drop tokens"
    most_blocks = -(-max_model_len // block_size)  # of a sequence
    others: list[CacheGroup] = []
    if window_blocks is not None:
        sliding_window = SlidingWindow(block_size, window_blocks.window)
        others.append(WindowGroup(window_blocks.num_blocks, sliding_window, most_blocks))
    if num_state_slots is not None:
        others.append(StateGroup(num_state_slots, block_size))
    if sources is not None:
        others.append(SourceGroup(sources.num_slots, sources.max_source_len))
    return make_cache(
        BlockGroup(num_blocks, SlidingWindow(block_size, window, num_sink_tokens), most_blocks, make_pool),
        others,
        max_model_len,
        partial(
            make_prefix_cache, is_enabled=enable_prefix_cache, length_dependent_beyond=length_dependent_beyond
        ),
    )
