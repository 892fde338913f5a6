"""Creates the weight of a linear layer in the format that its scheme says. A new format is a line here."""

from __future__ import annotations

from services.common.quantization.schemes import (
    BlockFp8Scheme,
    GroupedIntScheme,
    Mxfp4Scheme,
    OnTheFlyFp8,
    ScaledScheme,
    Scheme,
)
from services.dense_worker.model.linear import QuantizedFormat
from services.dense_worker.model.quantized.block_fp8_weight import create_block_fp8
from services.dense_worker.model.quantized.layer import QuantizedLayer
from services.dense_worker.model.quantized.mxfp4_weight import create_mxfp4
from services.dense_worker.model.quantized.packed_sources import create_grouped_int
from services.dense_worker.model.quantized.scaled_weight import create_on_the_fly, create_scaled


def create_quantized(scheme: Scheme, layer: QuantizedLayer) -> QuantizedFormat:
    """Raises ModelError if the layer's shape does not fit the scheme."""
    match scheme:
        case ScaledScheme():
            return create_scaled(scheme, layer)
        case BlockFp8Scheme():
            return create_block_fp8(scheme, layer)
        case GroupedIntScheme():
            return create_grouped_int(scheme, layer)
        case Mxfp4Scheme():
            return create_mxfp4(scheme, layer)
        case OnTheFlyFp8():
            return create_on_the_fly(layer)
