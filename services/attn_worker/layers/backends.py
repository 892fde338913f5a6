"""The attention backend of a model, by torch operations or by Triton kernels: one for each kind of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import DECODE_ONLY, AttentionBackend, BackendSetup, CapturableAttention, StepShape
from services.attn_worker.layers.attention_among_others import (
    AttentionAmongOthers,
    CapturableAttentionAmongOthers,
    NoAttention,
    OtherLayers,
    attention_part,
)
from services.attn_worker.layers.cross.torch_cross_attention import TorchCrossAttention
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.attn_worker.layers.recurrent.torch_recurrences import TorchRecurrences


def torch_backend(setup: BackendSetup) -> AttentionBackend:
    """All layers in torch operations. Raises CapacityError if memory is too small."""
    spec = setup.spec
    if spec.recurrences:
        others: OtherLayers = TorchRecurrences(spec, setup.device)
    elif spec.cross_layers:
        others = TorchCrossAttention(spec, setup.config.attention.scale, setup.device)
    else:
        return TorchAttention(setup)
    part = attention_part(setup)
    return AttentionAmongOthers(TorchAttention(part) if spec.token_layers else NoAttention(part), others, spec)


def triton_backend(setup: BackendSetup) -> CapturableAttention:
    """All layers by Triton kernels, except those with a relative bias. Raises CapacityError if memory is too small."""
    from services.attn_worker.layers.triton_attention import TritonAttention  # needs triton

    spec, options = setup.spec, setup.config.attention
    if not (spec.recurrences or spec.cross_layers):
        return TritonAttention(setup)
    from services.attn_worker.layers.cross.triton_cross_attention import TritonCrossAttention
    from services.attn_worker.layers.recurrent.triton_recurrences import TritonRecurrences

    part = attention_part(setup)
    attention: CapturableAttention
    if not spec.token_layers:
        attention = NoAttention(part)
    elif options.relative_bias is not None:
        attention = _UncapturedTorchAttention(part)
    else:
        attention = TritonAttention(part)
    if spec.recurrences:
        limits = {"max_num_seqs": setup.max_num_seqs, "max_num_tokens": setup.max_num_tokens}
        recurrences = TritonRecurrences(spec, setup.dtype, setup.device, **limits)
        return CapturableAttentionAmongOthers(attention, recurrences, spec)
    cross = TritonCrossAttention(spec, options.scale, setup.device, setup.max_num_tokens)
    return CapturableAttentionAmongOthers(attention, cross, spec)


class _UncapturedTorchAttention(TorchAttention):
    """A CapturableAttention without captured steps."""

    captured_shapes: Sequence[StepShape] = ()
    layers_to_compile: Sequence[int] = ()

    def captured_shape(self, step: StepMetadata) -> None:
        """No step has a graph."""

    def begin_step(
        self, step: StepMetadata, padded_num_rows: int | None = None, shape: StepShape = DECODE_ONLY
    ) -> None:
        assert padded_num_rows is None, "no step is captured"
        super().begin_step(step)
