"""Full attention among the tokens of each of several sequences, which lie one after another in one tensor; no cache.

Made for encoders, whose inputs have no past: `PackedSequences` is made once for a step, `attend` runs once per layer.
Sequences of nearly the same length are padded to one tensor and go through torch's `scaled_dot_product_attention`
together, on any device and in any dtype. On a GPU in 16 bits, without a bias, one kernel of torch takes all of them as
they lie (FlashAttention-2, arXiv:2307.08691). Tokens of different sequences never see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from services.dense_worker.sampling.upload import upload

MAX_SCORES = 2**26  # of one call, over all heads: 256 MiB in float32 where a kernel of torch has them in memory
_MIN_WINDOW_ROWS = 128  # queries of one call that has a window, at least
_MAX_FLASH_DIM = 256  # of a head, in the kernel of FlashAttention
_SIZES_PER_OCTAVE = 4  # of padded lengths, so that at most a quarter of a tensor's rows is padding


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sequences of nearly the same length."""

    rows: torch.Tensor  # int64 [num_sequences, length]: where the tokens lie; padding repeats a sequence's last token
    is_token: torch.Tensor | None  # bool [num_sequences, length], False for padding; None: there is none
    targets: torch.Tensor  # int64 [num_sequences, length]: where results go; those of padding behind all tokens


@dataclass(frozen=True, slots=True)
class PositionTerms:
    """What is added to the products of queries and keys for the distance between them (DeBERTa, arXiv:2006.03654).

    Each of `keys` and `queries` [num_heads, num_rows, head_dim] has a row for each kind of distance. A query is also
    multiplied by the row of `keys`, and a key by the row of `queries`. None: it is not.
    """

    keys: torch.Tensor | None
    queries: torch.Tensor | None
    rows: torch.Tensor  # int64 [2 n - 1], n at least the longest length: that of a key d places behind is at n - 1 + d

    @property
    def num_rows(self) -> int:
        return max(each.shape[1] for each in (self.keys, self.queries) if each is not None)


class PackedSequences:
    """Where sequences of the given lengths lie in a packed tensor, and which of them are computed together."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        """lengths: of the sequences in their order, each at least 1, as Python's integers"""
        if any(length < 1 for length in lengths):
            raise ValueError(f"sequences have at least one token, these are {min(lengths)} and more")
        self.num_tokens = sum(lengths)
        self.max_length = max(lengths, default=0)
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        # int32 [num_sequences + 1]: the first row of each, and of what follows
        self._lengths, self._device = lengths, torch.device(device)
        self.cu_seqlens = upload(ends.numpy(), self._device)

    @classmethod
    def in_place(cls, cu_seqlens: torch.Tensor, num_tokens: int, max_length: int) -> PackedSequences:
        """Sequences whose ends are written to `cu_seqlens` when this exists, where `suits_flash_kernel` says so.

        cu_seqlens: int32 [num_sequences + 1]; sequences may be empty, and tokens behind the last end belong to none:
        their results have no meaning. max_length: of a sequence, at most.
        """
        sequences = cls.__new__(cls)
        sequences.num_tokens, sequences.max_length, sequences.cu_seqlens = num_tokens, max_length, cu_seqlens
        return sequences

    @cached_property
    def buckets(self) -> tuple[_Bucket, ...]:
        """Those that are padded together."""
        return tuple(_lay_out(each, self.num_tokens, self._device) for each in _group_by_size(self._lengths))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    *,
    scale: float | None = None,
    window: int | None = None,
    distance_bias: torch.Tensor | None = None,
    positions: PositionTerms | None = None,
) -> torch.Tensor:
    """softmax(scale · q·kᵀ + bias)·v of each sequence by itself: [num_tokens, num_heads, head_dim], contiguous.

    q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim], of which each head serves
    num_heads / num_kv_heads heads of q; they may be views of a wider tensor
    scale: None is head_dim ** -0.5
    window: a token sees those at most so many places before or behind it; None: all
    distance_bias: [num_heads, 2 n - 1] with n at least the longest length, added to the scaled scores. Column
    n - 1 + d is for a key d places behind the query, as in T5 (relative positions) or with ALiBi.
    positions: their products are added before scaling; not together with a window or a distance_bias

    Besides copies of its inputs it needs memory for `MAX_SCORES` scores and as many biases, whatever the lengths.
    """
    if len(q) != sequences.num_tokens:
        raise ValueError(f"q has {len(q)} tokens, the sequences have {sequences.num_tokens}")
    if distance_bias is not None and distance_bias.shape[1] < 2 * sequences.max_length - 1:
        raise ValueError(
            f"distance_bias has {distance_bias.shape[1]} distances, sequences of {sequences.max_length} tokens need "
            f"{2 * sequences.max_length - 1}"
        )
    assert positions is None or (window is None and distance_bias is None), "no family has them together"
    if positions is None and distance_bias is None and suits_flash_kernel(q.device, q.dtype, q.shape[2]):
        return _attend_unpadded(q, k, v, sequences, scale, window)
    out = q.new_empty(len(q) + 1, *q.shape[1:])  # the last row is that of padding
    repeats = q.shape[1] // k.shape[1]
    for bucket in sequences.buckets:
        for some in _split(bucket, q.shape[1], window, 0 if positions is None else positions.num_rows):
            heads = [_heads_first(each[some.rows]) for each in (q, k, v)]
            if repeats > 1:
                heads[1:] = [each.repeat_interleave(repeats, dim=1) for each in heads[1:]]
            if positions is None:
                attended = _attend_padded(*heads, some.is_token, scale, window, distance_bias)
            else:
                attended = _attend_with_positions(*heads, some.is_token, scale or q.shape[2] ** -0.5, positions)
            out[some.targets.flatten()] = attended.transpose(1, 2).flatten(0, 1)
    return out[:-1]


def suits_flash_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether one kernel takes all sequences as they lie, if there is no bias."""
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and is_16_bit and head_dim % 8 == 0 and head_dim <= _MAX_FLASH_DIM


def _attend_unpadded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: PackedSequences,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """All sequences by the operator under `torch.nn.attention.varlen`, which has no window in older versions."""
    ends, longest, seen = sequences.cu_seqlens, sequences.max_length, -1 if window is None else window
    return torch.ops.aten._flash_attention_forward(
        *(q, k, v, ends, ends, longest, longest),
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=seen,
        window_size_right=seen,
    )[0]


def _group_by_size(lengths: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The first row and the length of each sequence, grouped by lengths that may be padded to one."""
    groups: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for length in lengths:
        step = max(1, 2 ** (length.bit_length() - 1) // _SIZES_PER_OCTAVE)
        groups.setdefault(-(-length // step) * step, []).append((start, length))
        start += length
    return list(groups.values())


def _lay_out(spans: Sequence[tuple[int, int]], num_tokens: int, device: torch.device) -> _Bucket:
    """The bucket of sequences with these first rows and lengths."""
    starts, lengths = torch.tensor(spans).unbind(1)
    places = torch.arange(int(lengths.max()))
    rows = starts[:, None] + places.clamp(max=lengths[:, None] - 1)
    is_token = places < lengths[:, None]
    on_device = upload(rows.numpy(), device)
    if is_token.all():
        return _Bucket(on_device, None, on_device)
    targets = torch.where(is_token, rows, num_tokens)
    return _Bucket(on_device, upload(is_token.numpy(), device), upload(targets.numpy(), device))


def _split(bucket: _Bucket, num_heads: int, window: int | None, num_position_rows: int) -> Iterator[_Bucket]:
    """Parts of a bucket, each with as many sequences as may be computed at once."""
    length = bucket.rows.shape[1]
    num_rows, num_keys = _tile(length, window)
    size = max(1, MAX_SCORES // (num_heads * num_rows * max(num_keys, num_position_rows)))
    for start in range(0, len(bucket.rows), size):
        some = slice(start, start + size)
        is_token = None if bucket.is_token is None else bucket.is_token[some]
        yield _Bucket(bucket.rows[some], is_token, bucket.targets[some])


def _tile(length: int, window: int | None) -> tuple[int, int]:
    """The queries of one call, and the keys that they see, unless there are too many for one call."""
    if window is None:
        return length, length
    num_rows = min(length, max(_MIN_WINDOW_ROWS, 2 * window))
    return num_rows, min(length, num_rows + 2 * window)


def _attend_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_token: torch.Tensor | None,
    scale: float | None,
    window: int | None,
    distance_bias: torch.Tensor | None,
) -> torch.Tensor:
    """q, k, v [n, num_heads, length, head_dim] -> the same; some queries at a time, so that scores are few."""
    num_heads, length = q.shape[1:3]
    num_rows = min(_tile(length, window)[0], max(1, MAX_SCORES // (num_heads * length)))
    parts = []
    for start in range(0, length, num_rows):
        end = min(start + num_rows, length)
        first, last = (0, length) if window is None else (max(0, start - window), min(length, end + window))
        mask = None if is_token is None else is_token[:, None, None, first:last]
        if window is not None or distance_bias is not None:
            rows, keys = torch.arange(start, end, device=q.device), torch.arange(first, last, device=q.device)
            mask = _mask_of(keys - rows[:, None], mask, window, distance_bias, q.dtype)
        keys, values = k[:, :, first:last], v[:, :, first:last]
        parts.append(F.scaled_dot_product_attention(q[:, :, start:end], keys, values, attn_mask=mask, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_with_positions(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_token: torch.Tensor | None,
    scale: float,
    positions: PositionTerms,
) -> torch.Tensor:
    """q, k, v [n, num_heads, length, head_dim] -> the same; some queries at a time, so that scores are few."""
    num_heads, length = q.shape[1:3]
    num_rows = min(length, max(1, MAX_SCORES // (num_heads * max(length, positions.num_rows))))
    of_keys = None if positions.queries is None else k @ positions.queries.transpose(1, 2)  # [n, heads, length, rows]
    keys, middle, parts = torch.arange(length, device=q.device), len(positions.rows) // 2, []
    for start in range(0, length, num_rows):
        some = q[:, :, start : start + num_rows]
        rows = positions.rows[keys - keys[start : start + num_rows, None] + middle]  # [num_queries, length]
        scores = some @ k.transpose(2, 3)
        if positions.keys is not None:
            of_queries = some @ positions.keys.transpose(1, 2)
            scores += of_queries.gather(3, rows.expand(*scores.shape))
        if of_keys is not None:
            scores += of_keys.gather(3, rows.T.expand(*scores.transpose(2, 3).shape)).transpose(2, 3)
        scores *= scale
        if is_token is not None:
            scores.masked_fill_(~is_token[:, None, None], float("-inf"))
        parts.append(scores.softmax(dim=3) @ v)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _mask_of(
    distances: torch.Tensor,
    is_token: torch.Tensor | None,
    window: int | None,
    distance_bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """What is added to scores, or which keys are seen (bool).

    distances: int64 [num_rows, num_keys], of keys behind queries; is_token: bool [n, 1, 1, num_keys]
    """
    sees = is_token
    if window is not None:
        is_near = distances.abs() <= window
        sees = is_near if sees is None else sees & is_near
    if distance_bias is None:
        return sees
    bias = distance_bias.to(dtype)[:, distances + distance_bias.shape[1] // 2]
    return bias if sees is None else torch.where(sees, bias, float("-inf"))


def _heads_first(tokens: torch.Tensor) -> torch.Tensor:
    """[n, length, num_heads, head_dim] -> [n, num_heads, length, head_dim]"""
    return tokens.transpose(1, 2)
