"""`TensorRTBackend`: the dense stroke by TensorRT, and by torch for sizes where torch was measured faster."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from services.dense_worker.backends import DenseBackend, InputEmbeds
from services.step import StepPlan

# Microseconds by segment, number of tokens (of `last`: of rows), and "tensorrt" or "torch".
Measurements = Mapping[str, Mapping[int, Mapping[str, float]]]


class TensorRTBackend:
    """A DenseBackend that hands each call to one of two, with the residual.

    With `by_torch` and what was `measured`, each call goes to whichever was faster at the nearest
    measured size that is not smaller. That depends on the size alone: a captured CUDA graph holds the choice.
    """

    def __init__(
        self,
        by_tensorrt: DenseBackend,
        by_torch: DenseBackend | None = None,
        measured: Measurements | None = None,
    ) -> None:
        self._tensorrt, self._torch = by_tensorrt, by_torch
        self._measured = measured or {}
        self.takes_input_embeds = by_torch is not None
        self.captures_embeds = self.gives_hidden_states = self.always_ends = self.skips_logits = False
        self.logits_dtype = torch.float32

    def begin_step(
        self, plan: StepPlan, num_tokens: int, num_sampled: int = 0, input_embeds: InputEmbeds | None = None
    ) -> None:
        """Both backends prepare, for they may take turns within the step."""
        self._tensorrt.begin_step(plan, num_tokens)
        if self._torch is not None:
            self._torch.begin_step(plan, num_tokens)

    def first(
        self, token_ids: torch.Tensor, qkv_out: torch.Tensor, input_embeds: InputEmbeds | None = None
    ) -> torch.Tensor:
        """Runs the faster backend for this number of tokens; torch, if vectors are given."""
        if input_embeds is None:
            return self._faster("first", len(token_ids)).first(token_ids, qkv_out)
        assert self._torch is not None, "only torch takes vectors"
        return self._torch.first(token_ids, qkv_out, input_embeds)

    def middle(
        self,
        layer: int,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        qkv_out: torch.Tensor,
        added: InputEmbeds | None = None,
    ) -> torch.Tensor:
        """Runs the faster backend for this number of tokens, which may not be that of the layer before; torch, if
        vectors are added.
        """
        if added is not None:
            assert self._torch is not None, "only torch takes vectors"
            return self._torch.middle(layer, attn_out, residual, qkv_out, added)
        return self._faster("middle", len(attn_out)).middle(layer, attn_out, residual, qkv_out)

    def last(
        self,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        rows: torch.Tensor,
        hidden_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the faster backend for this number of rows."""
        assert hidden_out is None, "TensorRT keeps the hidden states to itself"
        return self._faster("last", len(rows)).last(attn_out, residual, rows)

    def hidden(
        self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden_out: torch.Tensor
    ) -> None:
        """Never called."""
        raise AssertionError("TensorRT keeps the hidden states to itself")

    def _faster(self, segment: str, size: int) -> DenseBackend:
        times = self._measured.get(segment)
        if not times:
            return self._tensorrt
        bucket = min((measured for measured in times if measured >= size), default=max(times))
        assert self._torch is not None, "measured, but no torch to choose"
        return self._torch if times[bucket]["torch"] < times[bucket]["tensorrt"] else self._tensorrt
