"""`QuantizationConfig`: which linear layers of a checkpoint are quantized, and how each of them is stored."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.common.quantization.layer_lists import is_listed

LM_HEAD = "lm_head"


class Element(enum.StrEnum):
    """The type of one element of a quantized matrix, as torch names it."""

    FP8 = "float8_e4m3fn"
    INT8 = "int8"


class Activations(enum.StrEnum):
    """How the input of a layer is quantized before the product. It is part of what a checkpoint means."""

    NONE = "none"  # not at all: only the weight is quantized
    STATIC = "static"  # by one scale for each projection, from the checkpoint
    TOKEN = "token"  # by a scale for each token, from its greatest value


@dataclass(frozen=True, slots=True)
class ScaledScheme:
    """FP8 or INT8 elements, with one scale for each output channel or for the whole projection."""

    element: Element
    is_per_channel: bool
    activations: Activations
    max_activation: float | None = None  # greatest value that a token's scale is computed from; fbgemm's upper bound


@dataclass(frozen=True, slots=True)
class BlockFp8Scheme:
    """FP8 elements with a scale for each block; activations by a scale for each token and block of its features."""

    block_size: tuple[int, int]  # output features, input features


class Packing(enum.StrEnum):
    """The program whose layout a file of packed integers has."""

    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"  # stores zero points less one
    GPTQ_V2 = "gptq_v2"  # stores them as they are


@dataclass(frozen=True, slots=True)
class GroupedIntScheme:
    """Unsigned integers of 4 or 8 bits, each group of input features with a scale and a zero point."""

    packing: Packing
    num_bits: int
    group_size: int | None  # input features; None: all of them
    is_symmetric: bool  # the zero point is always half of the range
    has_order: bool  # a tensor names the group of each input feature (act-order)


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """E2M1 elements, 32 input features with a power of two as their scale (OCP Microscaling Formats 1.0)."""

    is_compressed_tensors: bool  # the names of its tensors; otherwise those of gpt-oss


@dataclass(frozen=True, slots=True)
class OnTheFlyFp8:
    """The checkpoint is not quantized; loading makes FP8 per output channel of it, with a scale for each token."""


Scheme = ScaledScheme | BlockFp8Scheme | GroupedIntScheme | Mxfp4Scheme | OnTheFlyFp8


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """A scheme, and the linear layers that have it."""

    targets: tuple[str, ...]  # as in `is_listed`; "Linear" is every linear layer
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The quantization of a model. Embeddings and norms are never quantized."""

    method: str  # what the checkpoint calls it, such as "awq"
    groups: tuple[SchemeGroup, ...]  # the first that targets a layer counts
    ignored: tuple[str, ...]  # layers that are stored unquantized, as in `is_listed`

    def scheme_of(self, name: str) -> Scheme | None:
        """The scheme of a layer of the checkpoint, such as "model.layers.0.self_attn.q_proj"; None: unquantized.

        The head is called "lm_head" in every family.
        """
        if is_listed(name, self.ignored):
            return None
        return next((each.scheme for each in self.groups if is_listed(name, each.targets)), None)


def on_the_fly_fp8() -> QuantizationConfig:
    """FP8 for all linear layers of an unquantized checkpoint except lm_head."""
    return QuantizationConfig("fp8 on the fly", (SchemeGroup(("Linear",), OnTheFlyFp8()),), (LM_HEAD,))


def fp8_towers() -> QuantizationConfig:
    """FP8 for the layers of Qwen's towers, without what makes rows of the prompt of their output."""
    return QuantizationConfig("fp8 on the fly", (SchemeGroup(("visual.blocks.*",), OnTheFlyFp8()),), ())
