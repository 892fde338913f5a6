"""`TensorRTBackend`: the dense stroke by TensorRT, and by torch for sizes where torch was measured faster."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.dense_worker.backends.segment_runner import SegmentRunner

# Microseconds by segment, number of tokens (of `last`: of rows), and "tensorrt" or "torch".
Measurements = Mapping[str, Mapping[int, Mapping[str, float]]]


class TensorRTBackend:
    """A DenseBackend, for one thread and one step at a time.

    With `torch_segments` and what was `measured`, each call goes to whichever was faster at the nearest
    measured size that is not smaller. That depends on the size alone: a captured CUDA graph holds the choice.
    """

    def __init__(
        self,
        tensorrt_segments: SegmentRunner,
        torch_segments: SegmentRunner | None = None,
        measured: Measurements | None = None,
    ) -> None:
        self._tensorrt, self._torch = tensorrt_segments, torch_segments
        self._measured = measured or {}
        self._residual: torch.Tensor | None = None  # [n, hidden], from `first` to `last`

    def first(self, token_ids: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        self._residual = self._runner("first", len(token_ids)).first(token_ids, qkv_out)

    def middle(self, layer: int, attn_out: torch.Tensor, qkv_out: torch.Tensor) -> None:
        """See DenseBackend."""
        assert self._residual is not None, "middle before first"
        runner = self._runner("middle", len(attn_out))
        self._residual = runner.middle(layer, attn_out, self._residual, qkv_out)

    def last(self, attn_out: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See DenseBackend."""
        assert self._residual is not None, "last before first"
        return self._runner("last", len(rows)).last(attn_out, self._residual, rows)

    def _runner(self, segment: str, size: int) -> SegmentRunner:
        times = self._measured.get(segment)
        if not times:
            return self._tensorrt
        bucket = min((measured for measured in times if measured >= size), default=max(times))
        assert self._torch is not None, "measured, but no torch to choose"
        return self._torch if times[bucket]["torch"] < times[bucket]["tensorrt"] else self._tensorrt
