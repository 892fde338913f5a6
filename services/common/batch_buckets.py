"""The sizes for which CUDA graphs are captured. A step is padded to the next size."""

from __future__ import annotations

import bisect

MAX_CAPTURED_TOKENS = 2048  # for larger steps the GPU takes longer than launching the kernels
# Longer steps use another flag (see `channel.qkv_flag`), so no step of up to this size is padded beyond it.
SHORT_STEP_TOKENS = 64
MAX_CAPTURED_CHUNK_ROWS = 64  # of a step with short chunks of prompts or drafts, as the attention worker captures it
MAX_CAPTURED_PROMPT_ROWS = 512  # of a step with prompts; the device takes longer for more than launching them takes


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Ascending numbers of sequences up to `max_num_seqs`. Padding adds at most an eighth, or 3."""
    return _buckets(1, max_num_seqs)


def chunk_buckets(max_num_tokens: int) -> list[int]:
    """Ascending numbers of rows, few, because the attention worker's kernels for chunks pay little for padding."""
    largest = min(max_num_tokens, MAX_CAPTURED_CHUNK_ROWS)
    return [size for size in (4, 8, 16, 32, 48) if size < largest] + [largest]


def prompt_buckets(max_num_tokens: int) -> list[int]:
    """Ascending numbers of rows of steps with prompts, as few as `chunk_buckets`."""
    largest = min(max_num_tokens, MAX_CAPTURED_PROMPT_ROWS)
    return [size for size in (8, 16, 32, 64, 96, 128, 192, 256, 384) if size < largest] + [largest]


def token_buckets(max_num_seqs: int, max_num_tokens: int, most: int = MAX_CAPTURED_TOKENS) -> list[int]:
    """Ascending numbers of tokens: the batch buckets and larger sizes up to `most`."""
    largest = min(max_num_tokens, most)
    batches = batch_buckets(min(max_num_seqs, largest))
    sizes = {*batches, *_buckets(batches[-1], largest)}
    return sorted(sizes | {SHORT_STEP_TOKENS} if largest > SHORT_STEP_TOKENS else sizes)


def bucket_for(buckets: list[int], size: int) -> int:
    """The smallest bucket that is at least `size`; `size` must not exceed the last bucket."""
    return buckets[bisect.bisect_left(buckets, size)]


def _buckets(first: int, last: int) -> list[int]:
    sizes = [first]
    while sizes[-1] < last:
        size = sizes[-1]
        sizes.append(2 * size if size < 4 else size + max(4, 2 ** (size.bit_length() - 4)))
    return [size for size in sizes if size < last] + [last]
