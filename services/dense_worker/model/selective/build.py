"""Builds the parts of Mamba 1's layers."""

from __future__ import annotations

from services.common.families.names import CheckpointNames
from services.common.families.shape import NormKind, SelectiveScan, ShortConvolution
from services.common.model_config import ModelConfig
from services.dense_worker.kernels.linear.linear import Cut, Projection
from services.dense_worker.kernels.norm.norm import RmsNorm, UnweightedRmsNorm
from services.dense_worker.model.allocator import WeightAllocator
from services.dense_worker.model.gated.layer import GatedRows
from services.dense_worker.model.layer import DecoderLayer
from services.dense_worker.model.selective.layer import ConvolutionOutput, ScanRows


def build_convolution_stroke(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: str, sizes: ShortConvolution
) -> DecoderLayer:
    """The part of a layer around its convolution. Rows of its input come first, then those of the gate."""
    hidden, size = config.hidden_size, sizes.conv_dim
    norm = allocator.norm("input_norm", f"{layer}.{names.attention_norm}", hidden, config.norm_eps, config.parts.norm)
    merged = (Projection(f"{layer}.{names.of_short_convolution.mixed}", 2 * size),)
    projection = allocator.linear("qkv", hidden, merged, Cut.OUT, config.parts.mixer_bias)
    return DecoderLayer(GatedRows(norm, projection, size, None), ConvolutionOutput(size))


def build_scan_rows(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: str, sizes: SelectiveScan
) -> ScanRows:
    """The half of a layer between its convolution and its scan."""
    page, rank, state_size = names.of_selective_scan, sizes.time_step_rank, sizes.state_size
    mixed = (Projection(f"{layer}.{page.mixed}", rank + 2 * state_size),)
    steps = (Projection(f"{layer}.{page.time_steps}", sizes.num_channels),)
    norms: tuple[RmsNorm | UnweightedRmsNorm, ...] = ()
    if page.norms:
        of_norms = zip(("time_step_norm", "b_norm", "c_norm"), page.norms, (rank, state_size, state_size), strict=True)
        norms = tuple(
            allocator.norm(name, f"{layer}.{stored}", size, config.norm_eps, NormKind.RMS)
            for name, stored, size in of_norms
        )
    elif sizes.norm_eps is not None:
        norms = (UnweightedRmsNorm(sizes.norm_eps),) * 3
    return ScanRows(
        allocator.linear("scan_mixed", sizes.num_channels, mixed, Cut.OUT, False),
        allocator.linear("scan_time_steps", rank, steps, Cut.OUT, True),
        norms,
    )
