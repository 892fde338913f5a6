"""`ModelConfig`: the shape of a model and the parts of its layers, as both workers use them. Only plain values."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.common.families.kinds import Activation, NormKind
from services.common.quantization.schemes import QuantizationConfig

if TYPE_CHECKING:
    from services.common.vision.vision_config import VisionConfig


class ResidualKind(enum.StrEnum):
    """What the MLP of a layer gets."""

    SEQUENTIAL = "sequential"  # the sum of the layer's input and attention's output
    PARALLEL = "parallel"  # the layer's input, as attention does
    NORMED = "normed"  # the norm of that sum; its own sum is normalised, too, and so nothing is before the head


class QkNormKind(enum.StrEnum):
    """What the norms of q and k cover, if a model has them."""

    HEADS = "heads"  # each head by itself, all with one weight [head_dim]
    OWN_HEADS = "own_heads"  # each head by itself and with its own weight: [num_heads, head_dim]
    ALL_HEADS = "all_heads"  # all heads together: [num_heads * head_dim]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """All parameters of the rotary tables. A parameter that the rope_type does not have is `None`."""

    rope_type: str  # one of `services.common.families.rope.ROPE_TYPES`
    theta: float
    rotary_dim: int  # the first dimensions of each head, which are rotated; there are rotary_dim // 2 frequencies
    max_position_embeddings: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # yarn, longrope, llama3
    attention_factor: float | None = None  # yarn, longrope; None: derived from the factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the ramp starts and ends at whole dimensions
    num_turning: int | None = None  # proportional: the first frequencies, of rotary_dim // 2; the others are 0
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    short_factor: tuple[float, ...] | None = None  # longrope, [rotary_dim // 2]
    long_factor: tuple[float, ...] | None = None  # longrope, [rotary_dim // 2]
    # [rotary_dim // 2]: by which of three positions each pair turns: of time, row or column; empty: there is one
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A layer without attention: a recurrence with a decaying matrix per value head (arXiv:2412.06464).

    Before it, a causal convolution over the last `conv_size` tokens mixes each channel of q, k and v with its own past.
    Each key head serves num_value_heads / num_key_heads neighbouring value heads.
    """

    num_key_heads: int  # heads of q, and as many of k
    num_value_heads: int
    key_dim: int  # of each head of q and k
    value_dim: int  # of each head of v
    conv_size: int  # tokens that the convolution reads, the own one included

    @property
    def key_size(self) -> int:
        """Width of all heads of q, and of all heads of k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all heads of v, and of the recurrence's output."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution: all of q, then k, then v."""
        return 2 * self.key_size + self.value_size

    @property
    def row_size(self) -> int:
        """Width of what the attention worker gets: q, k and v before the convolution, then b and a of each v head."""
        return self.conv_dim + 2 * self.num_value_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The matrices of a sequence."""
        return self.num_value_heads, self.key_dim, self.value_dim

    @property
    def num_weights(self) -> dict[str, int]:
        """How many numbers the attention worker gets, by the fields of `RecurrenceWeights`."""
        heads = self.num_value_heads
        return {"conv": self.conv_dim * self.conv_size, "a_log": heads, "dt_bias": heads}


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A layer without attention: Mamba 2's recurrence, with a decaying matrix per head (arXiv:2405.21060, section 6).

    Before it, a causal convolution over the last `conv_size` tokens mixes each channel of x, B and C with its own past.
    Each group of B and C serves num_heads / num_groups neighbouring heads.
    """

    num_heads: int
    head_dim: int
    state_size: int  # of B and of C
    num_groups: int
    conv_size: int  # tokens that the convolution reads, the own one included
    has_conv_bias: bool
    time_step_limits: tuple[float, float]

    @property
    def value_size(self) -> int:
        """Width of x of all heads, and of the recurrence's output."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution: all of x, then B, then C."""
        return self.value_size + 2 * self.num_groups * self.state_size

    @property
    def row_size(self) -> int:
        """Width of what the attention worker gets: x, B and C before the convolution, then each head's time step."""
        return self.conv_dim + self.num_heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The matrices of a sequence."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def num_weights(self) -> dict[str, int]:
        """How many numbers the attention worker gets, by the fields of `RecurrenceWeights`."""
        of_conv = {"conv": self.conv_dim * self.conv_size, "conv_bias": self.conv_dim * self.has_conv_bias}
        return of_conv | dict.fromkeys(("a_log", "dt_bias", "d"), self.num_heads)


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A layer without attention: a causal convolution of each channel over the last tokens, and nothing else (LFM2)."""

    conv_dim: int  # channels
    conv_size: int  # tokens that the convolution reads, the own one included
    has_conv_bias: bool
    is_activated: bool = False  # by SiLU: the first part of a layer of Mamba 1, see `SelectiveScan`

    @property
    def value_size(self) -> int:
        """Width of the output."""
        return self.conv_dim

    @property
    def row_size(self) -> int:
        """Width of what the attention worker gets."""
        return self.conv_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        """There are no matrices."""
        return (0,)

    @property
    def num_weights(self) -> dict[str, int]:
        """How many numbers the attention worker gets, by the fields of `RecurrenceWeights`."""
        return {"conv": self.conv_dim * self.conv_size, "conv_bias": self.conv_dim * self.has_conv_bias}


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """A layer without attention: Mamba 1's recurrence with a decaying vector per channel (arXiv:2312.00752, section 3).

    It has no convolution of its own. A layer of Mamba 1 counts as two, the first with a `ShortConvolution`: between
    them the dense worker makes the time steps, B and C of what the convolution gives.
    """

    num_channels: int
    state_size: int  # of B and of C, which all channels share
    time_step_rank: int  # numbers that a token's time steps are made of, by the dense worker
    norm_eps: float | None = None  # of norms without weights of these numbers, B and C; None: there are no such norms
    conv_dim: int = 0  # there are no rows before that it reads
    conv_size: int = 1

    @property
    def value_size(self) -> int:
        """Width of x, and of the recurrence's output."""
        return self.num_channels

    @property
    def row_size(self) -> int:
        """Width of what the attention worker gets: x, B, C, and each channel's time step."""
        return 2 * (self.num_channels + self.state_size)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The vectors of a sequence."""
        return self.num_channels, self.state_size

    @property
    def num_weights(self) -> dict[str, int]:
        """How many numbers the attention worker gets, by the fields of `RecurrenceWeights`."""
        return {"a_logs": self.num_channels * self.state_size, "d": self.num_channels}


Recurrence = GatedDelta | StateSpace | ShortConvolution | SelectiveScan


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """A learned number for each head and bucket of distances, which is added to the scores (arXiv:1910.10683).

    Half of the buckets hold one distance each; the others grow up to `max_distance`, and the last one has all beyond.
    """

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of one layer's attention, or of the recurrence that it has instead."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_layer: int | None = None  # the earlier layer whose keys and values it reads; None: it has its own
    value_dim: int | None = None  # values are these last dimensions of their keys; None: there are v heads
    recurrence: Recurrence | None = None  # the layer has this recurrence, and the numbers above do not matter
    is_cross: bool = False  # it reads keys and values of the encoder's output, not of tokens

    @property
    def q_size(self) -> int:
        """Width of all q heads."""
        return self.num_heads * self.head_dim

    @property
    def attn_size(self) -> int:
        """Width of the attention output: that of all q heads, unless values are a part of the keys."""
        if self.recurrence is not None:
            return self.recurrence.value_size
        return self.num_heads * (self.value_dim or self.head_dim)

    @property
    def kv_size(self) -> int:
        """Width of the layer's own k heads; any v heads are as wide. 0 if it stores no keys."""
        stores_none = self.is_cross or self.kv_layer is not None or self.recurrence is not None
        return 0 if stores_none else self.num_kv_heads * self.head_dim

    @property
    def source_size(self) -> int:
        """Width of the keys and values that a layer with cross attention has of a row of the encoder's output."""
        return 2 * self.num_kv_heads * self.head_dim if self.is_cross else 0

    @property
    def qkv_size(self) -> int:
        """Width of what attention gets: q heads, then own k heads, then own v heads, if there are any."""
        if self.recurrence is not None:
            return self.recurrence.row_size
        return self.q_size + (2 if self.value_dim is None else 1) * self.kv_size


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How attention differs from that of Llama. The attention worker computes all of it."""

    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # scaled scores s become softcap * tanh(s / softcap)
    alibi_slopes: tuple[float, ...] = ()  # per q head: slope * (j - i) is added to the scaled score; empty: no ALiBi
    relative_bias: RelativeBias | None = None  # all layers with keys of tokens share its numbers; None: there is none
    rotates_pairs: bool = False  # RoPE turns dimensions (2d, 2d + 1), not (d, d + rotary_dim / 2)
    num_sink_tokens: int = 0  # all tokens see these first ones, too, at their places in the cache: StreamingLLM
    sees_spans: bool = False  # tokens of a span of the prompt, such as a picture, also see those after them in it
    layer_ropes: tuple[RopeConfig | None, ...] = ()  # per layer, None: not rotated; empty: all have `ModelConfig.rope`
    has_sinks: bool = False  # a learned logit per layer and head joins each softmax and adds no value
    layer_heads: tuple[LayerHeads, ...] = ()  # per layer; empty: all have the heads of `ModelConfig`
    value_dim: int | None = None  # of all layers, see `LayerHeads`


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1), of which the cache holds one vector for each token.

    The keys and values of all heads are products with that latent vector; one rotated part of a key is shared by all
    heads. Only the dense worker uses these sizes. It multiplies queries by the matrices of the keys, and the output of
    attention by those of the values: so the attention worker sees one kv head, whose keys are the rotated part and then
    the latent vector, and whose values are the latent vector (`AttentionOptions.value_dim`).
    """

    query_rank: int | None  # size of a latent vector that queries are made of; None: they are made of the token itself
    rank: int  # size of the latent vector of keys and values
    plain_dim: int  # of each head's query and key, without the rotated part
    rotated_dim: int  # of each head's query, and of the shared part of keys
    value_dim: int  # of each head


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """Experts are chosen in a few groups of experts only, and their weights are multiplied.

    With a softmax (DeepSeek-V2, arXiv:2405.04434, section 2.2.2) a token's groups are those with the best experts. With
    a sigmoid (DeepSeek-V3, arXiv:2412.19437, section 2.1.2) a learned bias is added to the scores for the choice alone,
    and groups are compared by the sums of their two best experts.
    """

    num_groups: int  # of equally many neighbouring experts
    num_groups_per_token: int
    multiplier: float  # of the weights, at the end
    is_sigmoid: bool
    has_softmax_bias: bool = False  # a learned bias is added to the softmax for the choice, too (ERNIE 4.5)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The activation of gpt-oss: (u + 1) * g * sigmoid(alpha * g), of the clamped gate g and the clamped input u."""

    alpha: float
    limit: float  # g is at most this, u between its negative and it


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """Layers in which a router chooses a few of many MLPs for each token (arXiv:1701.06538)."""

    num_experts: int
    num_per_token: int  # how many are chosen
    intermediate_size: int  # of each expert
    renormalizes: bool  # the chosen experts' weights are divided by their sum
    layers: tuple[int, ...]  # those with experts; the others have an MLP of `ModelConfig.intermediate_size`
    shared_intermediate_size: int | None = None  # of an expert that all tokens use; None: there is none
    has_shared_gate: bool = False  # what that one gives is multiplied by the sigmoid of a product with the token
    grouped: GroupedRouting | None = None  # None: the scores are the softmax of the router's logits
    has_router_bias: bool = False  # is added to the router's logits; only without groups
    clamped: ClampedSwiglu | None = None  # None: `LayerParts.activation` of the gate, times up
    is_beside_mlp: bool = False  # the layer's MLP is there, too; the router reads the residual, not what experts read
    # Experts are chosen one after the other (arXiv:2409.12136). The weight of each is its softmax among the logits that
    # are left and relatively at most twice this below it. None: see the fields above.
    mixer_jitter: float | None = None


@dataclass(frozen=True, slots=True)
class LayerInputOptions:
    """Each layer adds a projection of a vector of its own, made of the token's id and its embedding (Gemma 3n, 4)."""

    size: int  # of the vectors
    num_layers: int  # that the tables in the checkpoint have, and `ModelConfig.num_layers` at most
    vocab_size: int  # rows of the table of tokens


@dataclass(frozen=True, slots=True)
class LayerParts:
    """How the dense parts differ from those of Llama."""

    norm: NormKind = NormKind.RMS
    activation: Activation = Activation.SILU
    experts: ExpertOptions | None = None  # None: no layer has experts
    latent: LatentAttention | None = None  # None: q, k and v are products with the token
    is_gated: bool = True  # the MLP is down(activation(gate(x)) * up(x)); if False, down(activation(up(x)))
    residual: ResidualKind = ResidualKind.SEQUENTIAL
    shares_norm: bool = False  # parallel residual: attention and the MLP read the same normalised input
    has_norms_before: bool = True  # of attention and of the MLP: x + f(norm(x))
    has_norms_after: bool = False  # x + norm(f(x)); with both, x + norm(f(norm(x)))
    qk_norm: QkNormKind = QkNormKind.HEADS  # used if `ModelConfig.qk_norm`
    has_attention_gate: bool = False  # attention's output is multiplied by the sigmoid of a product with the token
    has_key_bias: bool = True  # if q and v have one; only families with an encoder lack it
    has_v_norm: bool = False  # each v head is normalised by its RMS, without a weight
    key_value_layers: tuple[int, ...] = ()  # without a projection of v: v is what k is before its norm and rotation
    mixer_bias: bool = False  # of the projections before and after Mamba's recurrence or a short convolution
    layers_without_mlp: tuple[int, ...] = ()
    # By layer, the numbers that its attention or recurrence, and its MLP, have in files as if each were a layer; empty:
    # both have the layer's.
    blocks: tuple[tuple[int, int | None], ...] = ()
    has_layer_scalar: bool = False  # a learned number multiplies the residual after each layer
    layer_inputs: LayerInputOptions | None = None  # None: a layer reads the residual alone
    layer_intermediate_sizes: tuple[int, ...] = ()  # of each layer's MLP; empty: `ModelConfig.intermediate_size`
    num_learned_positions: int = 0  # rows of a table that is added to the embedding; 0: none
    learned_position_offset: int = 0  # the row of position 0
    sinusoidal_positions: SinusoidalPositions | None = None  # the table's rows, of decoder and encoder, by a formula
    has_embedding_norm: bool = False  # the embedding is normalised before layer 0
    embedding_size: int | None = None  # of the embedding's rows; projections lead from and to it; None: hidden_size
    head_bias: bool = False
    has_unit_head: bool = False  # each row of the head is divided by its length
    embedding_multiplier: float = 1.0  # rounded to the model's dtype
    is_multiplier_of_table: bool = False  # vectors that a client gives in place of rows are not multiplied
    residual_multiplier: float = 1.0  # of what attention and the MLP add to the residual
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None  # logits z become softcap * tanh(z / softcap)


@dataclass(frozen=True, slots=True)
class SinusoidalPositions:
    """A table of sines, then cosines, of a position times geometrically falling frequencies (arXiv:1706.03762)."""

    reaches_base: bool  # the last of n frequencies is 1 / 10000, not 10000 ** (1 / n) times that
    first_row: int = 0  # the position that the formula has for position 0


@dataclass(frozen=True, slots=True)
class SwinConfig:
    """An encoder of pictures whose patches see each other in windows (Swin, arXiv:2103.14030), as Donut has it.

    Between two stages four neighbouring rows become one of twice the size.
    """

    height: int  # of a picture, in pixels
    width: int
    patch_size: int
    embed_dim: int  # of a row in the first stage
    depths: tuple[int, ...]  # layers of each stage
    num_heads: tuple[int, ...]  # in each stage
    window_size: int  # along a side, in rows
    mlp_ratio: float
    has_qkv_bias: bool
    activation: Activation
    norm_eps: float

    def grid(self, stage: int) -> tuple[int, int]:
        """Rows and columns in a stage, counted from 0."""
        sides = -(-self.height // self.patch_size), -(-self.width // self.patch_size)
        return -(-sides[0] // 2**stage), -(-sides[1] // 2**stage)

    @property
    def num_outputs(self) -> int:
        """Rows of the output."""
        rows, columns = self.grid(len(self.depths) - 1)
        return rows * columns


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The encoder of a model whose decoder has cross attention. Only the dense worker computes it."""

    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    max_source_len: int  # rows of its output at most
    has_final_norm: bool
    num_learned_positions: int = 0  # rows of its own table, without its offset; 0: none
    has_own_embedding: bool = False  # a table of its own, of `vocab_size` rows; else it shares the decoder's
    vocab_size: int = 0  # ids that its tokens may have; 0: it reads sound or pictures
    num_mel_bins: int = 0  # of sound, whose features become rows by two convolutions; 0: it reads none
    swin: SwinConfig | None = None  # of pictures; with it the sizes above, but for the rows, mean nothing
    pictures: VisionConfig | None = None  # that stand among its tokens


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes (in elements) and variants of a model of a supported family that generates tokens.

    With an encoder each layer of the decoder counts as two, each with one attention: over tokens, then over the
    encoder's output.
    """

    family: str  # key of `services.common.families.registry.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # norms of q and k after the projection
    sliding_windows: tuple[int | None, ...]  # per layer; token i sees token j iff 0 <= i - j < window
    max_position_embeddings: int
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]  # any of these ends an answer; may be empty
    checkpoint_dtype: str  # element type of the unquantized weights in the files, as torch names it
    parts: LayerParts = LayerParts()
    attention: AttentionOptions = AttentionOptions()
    quantization: QuantizationConfig | None = None  # of the linear layers; only the dense worker needs it
    num_stored_layers: int | None = None  # that a checkpoint may have, with those that draft tokens; None: any number
    encoder: EncoderConfig | None = None  # None: the model is a decoder alone

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of all fields but the quantization: equal in two processes that run the same model."""
        return hashlib.blake2b(repr(replace(self, quantization=None)).encode(), digest_size=16).hexdigest()

    @property
    def heads(self) -> LayerHeads:
        """The heads of every layer, if the layers do not differ."""
        return LayerHeads(self.num_heads, self.num_kv_heads, self.head_dim, value_dim=self.attention.value_dim)

    @property
    def embedding_size(self) -> int:
        """Width of the rows of the embedding, and of vectors that a client gives in their place."""
        return self.parts.embedding_size or self.hidden_size

    @property
    def layer_heads(self) -> tuple[LayerHeads, ...]:
        """The heads of each layer."""
        return self.attention.layer_heads or (self.heads,) * self.num_layers

    @property
    def recurrent_layers(self) -> dict[int, Recurrence]:
        """The layers that have a recurrence instead of attention, by their numbers, in order."""
        layers = enumerate(self.attention.layer_heads)
        return {layer: heads.recurrence for layer, heads in layers if heads.recurrence is not None}

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """The layers with cross attention."""
        return tuple(layer for layer, heads in enumerate(self.attention.layer_heads) if heads.is_cross)

    @property
    def num_middle_kinds(self) -> int:
        """Kinds of layers that take turns: after a decoder's own attention comes that over its encoder's output."""
        return 1 if self.encoder is None else 2

    @property
    def q_size(self) -> int:
        """Width of all q heads, if the layers do not differ."""
        return self.heads.q_size

    @property
    def attn_size(self) -> int:
        """Width of the attention output in the widest layer."""
        return max(heads.attn_size for heads in self.attention.layer_heads or (self.heads,))

    @property
    def kv_size(self) -> int:
        """Width of all k heads, and of all v heads, if the layers do not differ."""
        return self.heads.kv_size

    @property
    def qkv_size(self) -> int:
        """Width of what attention gets in the widest layer."""
        return max(heads.qkv_size for heads in self.attention.layer_heads or (self.heads,))

    @property
    def layer_ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embedding of each layer; None: the layer does not rotate."""
        return self.attention.layer_ropes or (self.rope,) * self.num_layers
