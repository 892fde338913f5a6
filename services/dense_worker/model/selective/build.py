"""Builds the parts of Mamba 1's layers."""

from __future__ import annotations

from services.common.families.shape import NormKind, SelectiveScan, ShortConvolution
from services.dense_worker.kernels.norm.norm import RmsNorm, UnweightedRmsNorm
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.gated.layer import GatedRows
from services.dense_worker.model.layer import DecoderLayer
from services.dense_worker.model.selective.layer import ConvolutionOutput, ScanRows


def build_convolution_stroke(layer: Builder, sizes: ShortConvolution) -> DecoderLayer:
    """The part of a layer around its convolution. Rows of its input come first, then those of the gate."""
    config, names, size = layer.config, layer.names, sizes.conv_dim
    norm = layer.norm("input_norm", names.attention_norm)
    mixed = layer.projection(names.of_short_convolution.mixed, 2 * size)
    projection = layer.linear("qkv", config.hidden_size, mixed, has_bias=config.parts.mixer_bias)
    return DecoderLayer(GatedRows(norm, projection, size, None), ConvolutionOutput(size))


def build_scan_rows(layer: Builder, sizes: SelectiveScan) -> ScanRows:
    """The half of a layer between its convolution and its scan."""
    page, rank, state_size = layer.names.of_selective_scan, sizes.time_step_rank, sizes.state_size
    mixed = layer.projection(page.mixed, rank + 2 * state_size)
    steps = layer.projection(page.time_steps, sizes.num_channels)
    norms: tuple[RmsNorm | UnweightedRmsNorm, ...] = ()
    if page.norms:
        of_norms = zip(("time_step_norm", "b_norm", "c_norm"), page.norms, (rank, state_size, state_size), strict=True)
        norms = tuple(layer.norm(*each, kind=NormKind.RMS) for each in of_norms)
    elif sizes.norm_eps is not None:
        norms = (UnweightedRmsNorm(sizes.norm_eps),) * 3
    return ScanRows(
        layer.linear("scan_mixed", sizes.num_channels, mixed),
        layer.linear("scan_time_steps", rank, steps, has_bias=True),
        norms,
    )
