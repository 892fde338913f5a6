"""`NormKind` and `Activation`: the formula of a norm, and the function of an MLP, in decoders, encoders and towers."""

from __future__ import annotations

import enum


class NormKind(enum.StrEnum):
    """The formula of a model's norms."""

    RMS = "rms"  # x / rms(x) * weight
    RMS_PLUS_ONE = "rms_plus_one"  # x / rms(x) * (1 + weight), in float32
    LAYER = "layer"  # (x - mean(x)) / std(x) * weight + bias
    LAYER_NO_BIAS = "layer_no_bias"
    LAYER_PLUS_ONE = "layer_plus_one"  # as LAYER with 1 + weight in place of the weight that files have
    LAYER_UNWEIGHTED = "layer_unweighted"  # as LAYER without weight and bias


class Activation(enum.StrEnum):
    """The function between the projections of an MLP."""

    SILU = "silu"
    GELU = "gelu"  # by the error function
    GELU_TANH = "gelu_tanh"  # its approximation by tanh
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    XIELU = "xielu"  # with two learned numbers in each layer (arXiv:2411.13010); only of MLPs without a gate
    QUICK_GELU = "quick_gelu"  # x times the sigmoid of 1.702 x
