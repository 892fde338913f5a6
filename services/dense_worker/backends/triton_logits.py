"""What some families do with their logits, in one pass. Reference: `TorchOperations.finish_logits`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.dense_worker.backends.triton_launch import KernelLauncher

_BLOCK_SIZE = 4096


def scale_and_cap(
    launcher: KernelLauncher,
    logits: torch.Tensor,  # float32, contiguous; written in place
    multiplier: float,
    softcap: float | None,
) -> None:
    """logits = multiplier * logits, then softcap * tanh(logits / softcap)."""
    launcher(
        _scale_and_cap_kernel,
        (triton.cdiv(logits.numel(), _BLOCK_SIZE),),
        logits,
        logits.numel(),
        multiplier,
        1.0 if softcap is None else softcap,
        HAS_CAP=softcap is not None,
        BLOCK_SIZE=_BLOCK_SIZE,
        num_warps=8,
    )


@triton.jit
def _scale_and_cap_kernel(
    logits, size, multiplier, softcap, HAS_CAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = places < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(logits + places, mask=mask, other=0.0) * multiplier
    if HAS_CAP:  # tanh of the magnitude, whose exponential cannot overflow
        decay = tl.exp(tl.abs(values) * (-2.0 / softcap))
        capped = softcap * (1.0 - decay) / (1.0 + decay)
        values = tl.where(values < 0.0, -capped, capped)
    tl.store(logits + places, values, mask=mask)
