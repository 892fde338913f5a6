"""Both kinds of layers of a decoder with cross attention, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import DECODE_ONLY, BackendSetup, CapturableAttention, StepShape
from services.attn_worker.layers.attention_among_others import attention_part
from services.attn_worker.layers.cross.crossed_attention import CrossedAttention
from services.attn_worker.layers.cross.triton_cross_attention import TritonCrossAttention
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.attn_worker.layers.triton_attention import TritonAttention
from services.attn_worker.runner.step_metadata import StepMetadata


class CapturableCrossedAttention(CrossedAttention):
    """A CapturableAttention of two backends that can be captured."""

    def __init__(self, attention: CapturableAttention, cross: TritonCrossAttention, spec: KVCacheSpec) -> None:
        super().__init__(attention, cross, spec)
        self._capturable, self._captured_cross = attention, cross
        layers = list(self._places)
        self.captured_shapes = attention.captured_shapes
        self.layers_to_compile = [*(layers[place] for place in attention.layers_to_compile), self.cross_layers[0]]

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """That of the layers with keys of tokens: cross attention has any."""
        return self._capturable.captured_shape(step)

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """Begins the step in both."""
        self._capturable.begin_step(step, padded_num_rows, shape)
        self._captured_cross.begin_step(step, padded_num_rows)


class UncapturedCrossedAttention(CrossedAttention):
    """A CapturableAttention without captured steps, for self attention in torch: Triton's has no relative bias."""

    captured_shapes: Sequence[StepShape] = ()
    layers_to_compile: Sequence[int] = ()

    def captured_shape(self, step: StepMetadata) -> None:
        """No step has a graph."""

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """Begins the step in both."""
        assert padded_num_rows is None, "no step is captured"
        super().begin_step(step)


def crossed_cuda_attention(setup: BackendSetup) -> CapturableCrossedAttention | UncapturedCrossedAttention:
    """Cross attention by Triton, and self attention, too, unless it has a relative bias.

    Raises CapacityError if memory is too small.
    """
    spec, options = setup.spec, setup.config.attention
    cross = TritonCrossAttention(spec, options.scale, setup.device, setup.max_num_tokens)
    if options.relative_bias is not None:
        return UncapturedCrossedAttention(TorchAttention(attention_part(setup)), cross, spec)
    return CapturableCrossedAttention(TritonAttention(attention_part(setup)), cross, spec)
