"""`CapturableLayeredAttention`: attention and gated delta layers by Triton kernels, which CUDA graphs can capture."""

from __future__ import annotations

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_states import StepStates
from services.attn_worker.layers import DECODE_ONLY, BackendSetup, CapturableAttention, StepShape
from services.attn_worker.layers.attention_among_others import attention_part
from services.attn_worker.layers.gated_delta.layered_attention import LayeredAttention, NoAttention
from services.attn_worker.layers.gated_delta.triton_layers import TritonRecurrences
from services.attn_worker.layers.triton_attention import TritonAttention
from services.attn_worker.runner.step_metadata import StepMetadata


class CapturableLayeredAttention(LayeredAttention):
    """A CapturableAttention of two backends that can be captured."""

    def __init__(
        self, attention: CapturableAttention | NoAttention, gated_delta: TritonRecurrences, spec: KVCacheSpec
    ) -> None:
        super().__init__(attention, gated_delta, spec)
        self._capturable, self._captured_states = attention, gated_delta
        layers = list(self._places)
        of_each_size = {sizes: layer for layer, sizes in spec.recurrences.items()}.values()
        self.captured_shapes = (DECODE_ONLY,)
        self.layers_to_compile = [*(layers[place] for place in attention.layers_to_compile), *of_each_size]

    def captured_shape(self, step: StepMetadata) -> StepShape | None:
        """Steps in which a sequence has several tokens have no graph."""
        return DECODE_ONLY if len(step.positions) == len(step.num_tokens) else None

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        """Begins the step in both."""
        assert shape is DECODE_ONLY, "gated delta layers capture decode-only steps"
        self._capturable.begin_step(step, padded_num_rows)
        self._captured_states.begin_step(step.of(StepStates), padded_num_rows)


def layered_triton_attention(setup: BackendSetup) -> CapturableLayeredAttention:
    """Both kinds of layers by Triton kernels; see `TritonRecurrences`. Raises CapacityError if memory is too small."""
    spec, limits = setup.spec, {"max_num_seqs": setup.max_num_seqs, "max_num_tokens": setup.max_num_tokens}
    attention: CapturableAttention | NoAttention = NoAttention(spec.attention_layers(), setup.device)
    if spec.attention_layers().num_layers:
        attention = TritonAttention(attention_part(setup))
    gated_delta = TritonRecurrences(spec, setup.dtype, setup.device, **limits)
    return CapturableLayeredAttention(attention, gated_delta, spec)
