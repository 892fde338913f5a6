"""What some families do to the scores of attention, in the Triton kernels: a soft cap, ALiBi, learned sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How scores become weights. Kernels compute 2 ** (score * softmax_scale)."""

    scale: float  # of the products of q and k
    softcap: float = 0.0  # 0: none
    slopes: torch.Tensor | None = None  # float32 [num_heads], of ALiBi
    sinks: torch.Tensor | None = None  # float32 [num_heads], the learned ones of the layer
    num_sink_tokens: int = 0  # StreamingLLM: the first tokens, which all see beyond their windows; see StreamingAngles
    place_rows: int = 0  # with such tokens: from a token's row of angles to the row for its place

    @property
    def softmax_scale(self) -> float:
        """The factor of adjusted scores; without an adjustment, also of the products."""
        is_adjusted = self.softcap > 0 or self.slopes is not None
        return math.log2(math.e) * (1.0 if is_adjusted else self.scale)


@triton.jit
def adjust_scores(scores, slope, distance, RAW_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Products of q and k -> scores that are scaled, capped by SOFTCAP * tanh(s / SOFTCAP), and biased by ALiBi.

    `slope` and `distance` (from key to query, in tokens) must broadcast to `scores`.
    """
    scores = scores * RAW_SCALE
    if SOFTCAP > 0:
        decay = tl.exp(tl.abs(scores) * (-2.0 / SOFTCAP))
        capped = SOFTCAP * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0, -capped, capped)
    if HAS_ALIBI:
        scores = scores - slope * distance.to(tl.float32)
    return scores


@triton.jit
def sink_weight(sinks, heads, mask, log_max):
    """The part of the sinks in sums of exponentials relative to 2 ** `log_max`; `heads` has the shape of `log_max`."""
    sink = tl.load(sinks + heads, mask=mask, other=0.0) * 1.4426950408889634  # log2(e)
    return tl.exp2(sink - log_max)
