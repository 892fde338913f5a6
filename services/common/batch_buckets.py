"""Sizes for which steps are captured as CUDA graphs. A step is padded to the next one."""

from __future__ import annotations

import bisect

MAX_CAPTURED_TOKENS = 2048  # larger steps keep the GPU busy longer than launching their kernels takes
# Up to here the workers hand over in another way (see `channel.qkv_flag`), so no step is padded beyond it.
SHORT_STEP_TOKENS = 32


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Ascending numbers of sequences up to `max_num_seqs`; padding adds an eighth at the most, or 3."""
    return _buckets(1, max_num_seqs)


def token_buckets(max_num_seqs: int, max_num_tokens: int) -> list[int]:
    """Ascending numbers of tokens: the batch buckets, and on to what is worth capturing."""
    largest = min(max_num_tokens, MAX_CAPTURED_TOKENS)
    batches = batch_buckets(min(max_num_seqs, largest))
    sizes = {*batches, *_buckets(batches[-1], largest)}
    return sorted(sizes | {SHORT_STEP_TOKENS} if largest > SHORT_STEP_TOKENS else sizes)


def bucket_for(buckets: list[int], size: int) -> int:
    """The smallest bucket that holds `size`, which is at most the last one."""
    return buckets[bisect.bisect_left(buckets, size)]


def _buckets(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        size = sizes[-1]
        sizes.append(2 * size if size < 4 else size + max(4, 2 ** (size.bit_length() - 4)))
    return [size for size in sizes if size < last] + [last]
