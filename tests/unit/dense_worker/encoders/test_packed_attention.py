"""Attention among packed sequences equals the plain formula, one sequence and one head at a time."""

from __future__ import annotations

import pytest
import torch

from services.dense_worker.encoders import packed_attention
from services.dense_worker.encoders.packed_attention import PackedSequences, PositionTerms, attend

LENGTHS = (1, 7, 40, 3, 7, 41, 38, 2, 40)
NUM_HEADS, HEAD_DIM = 4, 16


def random_qkv(num_tokens: int, num_kv_heads: int = NUM_HEADS) -> list[torch.Tensor]:
    """Views of one tensor, as a merged projection gives them."""
    generator = torch.Generator().manual_seed(5)
    merged = torch.randn(num_tokens, NUM_HEADS + 2 * num_kv_heads, HEAD_DIM, generator=generator)
    return list(merged.split([NUM_HEADS, num_kv_heads, num_kv_heads], dim=1))


def by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...] = LENGTHS,
    scale: float = HEAD_DIM**-0.5,
    window: int | None = None,
    distance_bias: torch.Tensor | None = None,
    positions: PositionTerms | None = None,
) -> torch.Tensor:
    """The definition: every score by itself, in float64."""
    repeats = q.shape[1] // k.shape[1]
    results = []
    for each_q, each_k, each_v in zip(*(each.double().split(list(lengths)) for each in (q, k, v)), strict=True):
        places = torch.arange(len(each_q))
        distances = places - places[:, None]  # of keys behind queries
        for head in range(q.shape[1]):
            scores = scale * each_q[:, head] @ each_k[:, head // repeats].T
            if distance_bias is not None:
                scores += distance_bias[head, distance_bias.shape[1] // 2 + distances]
            if positions is not None:
                rows = positions.rows[distances + len(positions.rows) // 2]
                if positions.keys is not None:
                    scores += scale * (each_q[:, head, None] * positions.keys[head].double()[rows]).sum(2)
                if positions.queries is not None:
                    scores += scale * (each_k[None, :, head] * positions.queries[head].double()[rows]).sum(2)
            if window is not None:
                scores[distances.abs() > window] = float("-inf")
            results.append(scores.softmax(1) @ each_v[:, head // repeats])
    by_head = [torch.cat(results[head :: q.shape[1]]) for head in range(q.shape[1])]
    return torch.stack(by_head, dim=1)


def bias_of(num_distances: int) -> torch.Tensor:
    return torch.randn(NUM_HEADS, num_distances, generator=torch.Generator().manual_seed(6))


def positions_of(num_rows: int, *, has_keys: bool = True, has_queries: bool = True) -> PositionTerms:
    """Rows that are not symmetric: one way, distances of several tokens share a row."""
    generator = torch.Generator().manual_seed(7)
    keys, queries = torch.randn(2, NUM_HEADS, num_rows, HEAD_DIM, generator=generator)
    rows = (torch.arange(-60, 61) // 3 + num_rows // 2).clamp(0, num_rows - 1)
    return PositionTerms(keys if has_keys else None, queries if has_queries else None, rows)


CASES = {
    "all see all": {},
    "scale": {"scale": 0.7},
    "window": {"window": 3},
    "window wider than sequences": {"window": 100},
    "bias": {"distance_bias": bias_of(2 * max(LENGTHS) - 1)},
    "positions": {"positions": positions_of(8), "scale": 0.1},
    "positions of keys": {"positions": positions_of(90, has_queries=False)},
    "positions of queries": {"positions": positions_of(90, has_keys=False)},
    "longer bias and window": {"distance_bias": bias_of(201), "window": 5},
}


@pytest.mark.parametrize("max_scores", [2**26, 300, 1])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equals_the_formula(options: dict, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when scores are computed in several parts; float32 rounds in another order."""
    monkeypatch.setattr(packed_attention, "MAX_SCORES", max_scores)
    monkeypatch.setattr(packed_attention, "_MIN_WINDOW_ROWS", 8)
    q, k, v = random_qkv(sum(LENGTHS))
    attended = attend(q, k, v, PackedSequences(LENGTHS, "cpu"), **options)
    torch.testing.assert_close(attended.double(), by_formula(q, k, v, **options), rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_heads_of_queries_share_keys_and_values(num_kv_heads: int) -> None:
    q, k, v = random_qkv(sum(LENGTHS), num_kv_heads)
    attended = attend(q, k, v, PackedSequences(LENGTHS, "cpu"))
    torch.testing.assert_close(attended.double(), by_formula(q, k, v), rtol=0, atol=2e-6)


def test_no_call_has_more_scores_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given to torch's attention is counted, as kernels may hold all of its scores."""
    numbers = []

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        numbers.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return torch.zeros_like(q)

    monkeypatch.setattr(packed_attention.F, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(packed_attention, "MAX_SCORES", 2**12)
    for lengths in ((5,) * 300, (500,), (400, 3, 390, 17, 17)):
        for window in (None, 64):
            attend(*random_qkv(sum(lengths)), PackedSequences(lengths, "cpu"), window=window)
    assert max(numbers) <= 2**12


def test_sequences_do_not_touch_each_other() -> None:
    """NaN in one sequence stays there, also where it is padded beside others."""
    q, k, v = random_qkv(sum(LENGTHS))
    v = v.clone()
    v[8:48] = float("nan")  # the third sequence
    attended = attend(q, k, v, PackedSequences(LENGTHS, "cpu"))
    is_nan = attended.isnan().flatten(1).any(1)
    assert is_nan[8:48].all() and not is_nan[:8].any() and not is_nan[48:].any()


def test_wrong_sizes_are_named() -> None:
    q, k, v = random_qkv(10)
    with pytest.raises(ValueError, match="q has 10 tokens, the sequences have 9"):
        attend(q, k, v, PackedSequences([4, 5], "cpu"))
    with pytest.raises(ValueError, match="distance_bias has 7 distances, sequences of 6 tokens need 11"):
        attend(q, k, v, PackedSequences([4, 6], "cpu"), distance_bias=bias_of(7))
    with pytest.raises(ValueError, match="at least one token"):
        PackedSequences([3, 0], "cpu")
