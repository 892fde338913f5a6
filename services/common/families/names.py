"""`CheckpointNames`: what the modules of a family are called in its checkpoints."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

from services.common.families.shape import ModelConfig, ResidualKind

# Wrappers around the text part of a model of text and images, old and new spelling, and what takes their place.
WRAPPERS = {"model.language_model.": "model.", "language_model.": ""}
# Constants of old files, and the scales of a quantized KV cache.
_CONSTANT = re.compile(
    r".*(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias|\.attention\.bias|\.[qkv]_scale|\.[kv]_proj\.output_scale)$"
)

# Tensors of stacked experts, whose names end without a dot, and the names that such a tensor of a module has elsewhere.
_STACKED = re.compile(r"(\.experts\.(?:gate_up|down)_proj)(|_bias|_blocks|_scales)$")
_STACKED_TENSORS = {"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}


class FusedHeads(enum.Enum):
    """The order of the heads in a fused projection of q, k and v."""

    BY_KIND = "by_kind"  # all q heads, all k heads, all v heads
    BY_KV_HEAD = "by_kv_head"  # the q heads of a kv head, its k head, its v head; then the next kv head
    BY_QUARTER = "by_quarter"  # a quarter of the q heads, of the v heads, of the k heads; then the next quarters


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the modules of a mixture of experts, relative to the layer; the defaults are Qwen's."""

    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"  # a tensor
    experts: str = "mlp.experts"  # the number of the expert and a name of its own follow
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = ""  # one tensor of gates and ups of all experts, and `down` one of all experts; empty: one by one
    stacked_gate_up: str = ""  # files may have such tensors or single experts; empty: they have one of both forms only
    stacked_down: str = ""
    allows_transposed_stack: bool = False  # such tensors may be [num_experts, in_features, rows], which the shape says
    has_plain_stack: bool = False  # of such tensors: [num_experts, rows, in_features], and gates before ups
    shared: str = "mlp.shared_expert"
    shared_gate_up: str = ""  # one tensor of gate and up of the shared expert; empty: `gate` and `up`
    shared_down: str = ""  # of the shared expert; empty: `down`
    shared_gate: str = "mlp.shared_expert_gate"
    norm: str = ""  # of experts beside an MLP; the next four names, too
    norm_after: str = ""
    norm_after_mlp: str = ""  # of the MLP alone
    router_scale: str = ""  # a tensor: multiplies the normalised token
    expert_scale: str = ""  # a tensor: multiplies the weights of the chosen experts


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of the modules of latent attention, relative to the layer."""

    q: str = "self_attn.q_proj"  # without a latent vector of queries
    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True)
class GatedDeltaNames:
    """Names of the modules and tensors of gated delta layers, relative to the layer; the defaults are Qwen3.5's."""

    qkv: str = "linear_attn.in_proj_qkv"
    z: str = "linear_attn.in_proj_z"
    b: str = "linear_attn.in_proj_b"
    a: str = "linear_attn.in_proj_a"
    qkvz: str = ""  # of one matrix instead, key head by key head; with it b and a are `ba` in the same order
    ba: str = ""
    conv: str = "linear_attn.conv1d.weight"  # a tensor; the next two, too
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    o: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of the encoder's modules, and of cross attention in the decoder's layers; the defaults are BART's."""

    embedding: str = "model.encoder.embed_tokens"  # if it has one of its own
    positions: str = "model.encoder.embed_positions"
    embedding_norm: str = "model.encoder.layernorm_embedding"
    convolutions: tuple[str, str] = ("model.encoder.conv1", "model.encoder.conv2")
    relative_bias: str = ""  # of the encoder: a tensor
    decoder_relative_bias: str = ""
    layers: str = "model.encoder.layers"  # the number of the layer follows
    mlp_norm: str = "final_layer_norm"  # relative to the encoder's layer; the next two, too
    mlp_in: tuple[str, ...] = ("fc1",)
    down: str = "fc2"
    final_norm: str = "model.encoder.layer_norm"
    cross_norm: str = "encoder_attn_layer_norm"  # relative to the decoder's layer; the next two, too
    cross_qkv: tuple[str, str, str] = ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj")
    cross_o: str = "encoder_attn.out_proj"
    logits_bias: str = "final_logits_bias"  # a tensor, [1, vocab_size]


@dataclass(frozen=True, slots=True)
class StateSpaceNames:
    """Names of the modules and tensors of Mamba layers, relative to the layer."""

    mixed: str = "mamba.in_proj"  # the gate, then x, B and C, then the time steps
    conv: str = "mamba.conv1d.weight"  # a tensor; the next four, too
    conv_bias: str = "mamba.conv1d.bias"
    a_log: str = "mamba.A_log"
    dt_bias: str = "mamba.dt_bias"
    d: str = "mamba.D"
    norm: str = "mamba.norm"
    o: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class ShortConvolutionNames:
    """Names of the modules and tensors of layers with a short convolution, relative to the layer."""

    mixed: str = "conv.in_proj"  # what multiplies x, what multiplies the output, and x
    conv: str = "conv.conv.weight"  # a tensor; the next, too
    conv_bias: str = "conv.conv.bias"
    o: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class SelectiveScanNames:
    """Names of the modules and tensors of Mamba 1's recurrence, relative to the layer."""

    mixed: str = "mixer.x_proj"
    time_steps: str = "mixer.dt_proj"
    norms: tuple[str, ...] = ()  # of what the time steps are made of, of B and of C, where these have weights
    a_logs: str = "mixer.A_log"  # a tensor; the next, too
    d: str = "mixer.D"
    o: str = "mixer.out_proj"


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names of modules. Those of a layer are relative to the layer; the defaults are Llama's."""

    base: str = "model"  # the first part of most names, which some files leave out
    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    embedding_projection: str = ""  # of an embedding that is narrower than the residual; the next, too
    head_projection: str = ""
    positions: str = ""  # the table of learned positions
    layers: str = "model.layers"  # the number of the layer follows
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one fused projection
    fused_heads: FusedHeads = FusedHeads.BY_KIND
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    sinks: str = ""  # a tensor: the learned sinks of attention
    norm_after_attention: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one: fused, or without a gate
    down: str = "mlp.down_proj"
    xielu: tuple[str, ...] = tuple(f"mlp.act_fn.{each}" for each in ("alpha_p", "alpha_n", "beta", "eps"))  # tensors
    of_experts: ExpertNames = ExpertNames()
    of_latents: LatentNames = LatentNames()
    of_gated_delta: GatedDeltaNames = GatedDeltaNames()
    of_encoder: EncoderNames = EncoderNames()
    of_state_space: StateSpaceNames = StateSpaceNames()
    of_short_convolution: ShortConvolutionNames = ShortConvolutionNames()
    of_selective_scan: SelectiveScanNames = SelectiveScanNames()
    norm_after_mlp: str = "post_feedforward_layernorm"
    layer_scalar: str = "layer_scalar"  # a tensor
    input_gate: str = "per_layer_input_gate"
    input_projection: str = "per_layer_projection"
    norm_after_input: str = "post_per_layer_input_norm"
    layer_inputs: str = "model.embed_tokens_per_layer"  # the table of tokens of the layers' inputs
    layer_inputs_projection: str = "model.per_layer_model_projection"
    layer_inputs_norm: str = "model.per_layer_projection_norm"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    has_transposed_weights: bool = False  # of the linear layers, [in_features, out_features]

    def canonical(self, name: str) -> str:
        """The name of a tensor as this page spells it, without wrappers and with the base."""
        for wrapper, instead in WRAPPERS.items():
            if name.startswith(wrapper):
                name = instead + name.removeprefix(wrapper)
        if self.of_experts.gate_up:
            name = _STACKED.sub(lambda found: f"{found[1]}.{_STACKED_TENSORS[found[2]]}", name)
        if not self.base or name.startswith((f"{self.base}.", f"{self.head}.")):
            return name
        return f"{self.base}.{name}"

    def layer_of(self, name: str) -> int | None:
        """The layer that a canonical name belongs to; None for no layer, and for what no model reads."""
        found = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        return int(found[1]) if found and not _CONSTANT.match(name) else None


_LLAMA = CheckpointNames()
_GEMMA2 = CheckpointNames(mlp_norm="pre_feedforward_layernorm")
_GLM = CheckpointNames(mlp_in=("mlp.gate_up_proj",))
_DEEPSEEK = CheckpointNames(of_experts=ExpertNames(shared="mlp.shared_experts"))
_MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gate="w1", up="w3", down="w2"
)
_STACKS = ExpertNames(stacked_gate_up="gate_up_proj", stacked_down="down_proj")
_GRANITE_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe",
    gate_up="input_linear",
    down="output_linear",
    has_plain_stack=True,
)
_GEMMA4_EXPERTS = ExpertNames(
    router="router.proj",
    experts="experts",
    gate_up="gate_up_proj",
    has_plain_stack=True,
    norm="pre_feedforward_layernorm_2",
    norm_after="post_feedforward_layernorm_2",
    norm_after_mlp="post_feedforward_layernorm_1",
    router_scale="router.scale",
    expert_scale="router.per_expert_scale",
)
_FALCON = CheckpointNames(
    base="transformer",
    embedding="transformer.word_embeddings",
    layers="transformer.h",
    qkv=("self_attention.query_key_value",),
    fused_heads=FusedHeads.BY_KV_HEAD,
    o="self_attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
)

_GPT2 = CheckpointNames(
    base="transformer",
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    mlp_norm="ln_2",
    mlp_in=("mlp.c_fc",),
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
)
_GPTJ = replace(
    _GPT2,
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.out_proj",
    mlp_in=("mlp.fc_in",),
    down="mlp.fc_out",
)
_WITHOUT_GATE = CheckpointNames(mlp_in=("mlp.up_proj",))
_T5 = CheckpointNames(
    base="",
    embedding="shared",
    layers="decoder.block",
    attention_norm="layer.0.layer_norm",
    qkv=("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    o="layer.0.SelfAttention.o",
    mlp_norm="layer.2.layer_norm",
    mlp_in=("layer.2.DenseReluDense.wi",),
    down="layer.2.DenseReluDense.wo",
    final_norm="decoder.final_layer_norm",
    of_encoder=EncoderNames(
        relative_bias="encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        decoder_relative_bias="decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        layers="encoder.block",
        mlp_norm="layer.1.layer_norm",
        mlp_in=("layer.1.DenseReluDense.wi",),
        down="layer.1.DenseReluDense.wo",
        final_norm="encoder.final_layer_norm",
        cross_norm="layer.1.layer_norm",
        cross_qkv=("layer.1.EncDecAttention.q", "layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
        cross_o="layer.1.EncDecAttention.o",
    ),
)
_BART = CheckpointNames(
    base="",
    embedding="model.shared",
    embedding_norm="model.decoder.layernorm_embedding",
    positions="model.decoder.embed_positions",
    layers="model.decoder.layers",
    attention_norm="self_attn_layer_norm",
    o="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp_in=("fc1",),
    down="fc2",
    final_norm="model.decoder.layer_norm",
)

_MIXER = StateSpaceNames(
    mixed="mixer.in_proj",
    conv="mixer.conv1d.weight",
    conv_bias="mixer.conv1d.bias",
    a_log="mixer.A_log",
    dt_bias="mixer.dt_bias",
    d="mixer.D",
    norm="mixer.norm",
    o="mixer.out_proj",
)

_MAMBA = CheckpointNames(
    base="backbone",
    embedding="backbone.embeddings",
    layers="backbone.layers",
    attention_norm="norm",
    of_state_space=_MIXER,
    of_short_convolution=ShortConvolutionNames("mixer.in_proj", "mixer.conv1d.weight", "mixer.conv1d.bias"),
    final_norm="backbone.norm_f",
)
_GRANITE_SHARED = CheckpointNames(
    mlp_in=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    of_experts=replace(_GRANITE_EXPERTS, shared="shared_mlp", shared_gate_up="input_linear"),
)
_LFM2 = CheckpointNames(
    attention_norm="operator_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    o="self_attn.out_proj",
    mlp_norm="ffn_norm",
    mlp_in=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    final_norm="model.embedding_norm",
)

NAMES: dict[str, CheckpointNames] = {  # by `ModelConfig.family`
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen2_5_vl_text": _LLAMA,
    "qwen3_vl_text": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": CheckpointNames(of_experts=_MIXTRAL),
    "minimax_m2": CheckpointNames(of_experts=replace(_MIXTRAL, router_bias="block_sparse_moe.e_score_correction_bias")),
    "granitemoe": CheckpointNames(of_experts=_GRANITE_EXPERTS),
    "qwen2_moe": _LLAMA,
    "qwen3_moe": _LLAMA,
    "qwen3_next": CheckpointNames(
        of_gated_delta=GatedDeltaNames(qkvz="linear_attn.in_proj_qkvz", ba="linear_attn.in_proj_ba")
    ),
    "qwen3_5_text": _LLAMA,
    "qwen3_5_moe_text": CheckpointNames(of_experts=_STACKS),
    "qwen3_vl_moe_text": CheckpointNames(of_experts=replace(_STACKS, allows_transposed_stack=True)),
    "gpt_oss": CheckpointNames(
        sinks="self_attn.sinks", of_experts=ExpertNames(router="mlp.router", gate_up="gate_up_proj")
    ),
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "seed_oss": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": _LLAMA,
    "exaone4": _LLAMA,
    "ernie4_5": _LLAMA,
    "cohere": _LLAMA,
    "cohere2": _LLAMA,
    "stablelm": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "gemma4_text": replace(_GEMMA2, of_experts=_GEMMA4_EXPERTS),
    "glm": _GLM,
    "glm4": replace(_GLM, norm_after_attention="post_self_attn_layernorm", norm_after_mlp="post_mlp_layernorm"),
    "glm4_moe": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "phi3": CheckpointNames(qkv=("self_attn.qkv_proj",), mlp_in=("mlp.gate_up_proj",)),
    "starcoder2": CheckpointNames(mlp_in=("mlp.c_fc",), down="mlp.c_proj"),
    "phi": CheckpointNames(
        o="self_attn.dense", mlp_in=("mlp.fc1",), down="mlp.fc2", final_norm="model.final_layernorm"
    ),
    "gpt_neox": CheckpointNames(
        base="gpt_neox",
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        qkv=("attention.query_key_value",),
        fused_heads=FusedHeads.BY_KV_HEAD,
        o="attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
    ),
    "falcon": _FALCON,
    "bloom": replace(_FALCON, embedding_norm="transformer.word_embeddings_layernorm"),
    "mpt": CheckpointNames(
        base="transformer",
        embedding="transformer.wte",
        layers="transformer.blocks",
        attention_norm="norm_1",
        qkv=("attn.Wqkv",),
        o="attn.out_proj",
        mlp_norm="norm_2",
        mlp_in=("ffn.up_proj",),
        down="ffn.down_proj",
        final_norm="transformer.norm_f",
    ),
    "gpt2": replace(_GPT2, has_transposed_weights=True),
    "gpt_bigcode": replace(_GPT2, fused_heads=FusedHeads.BY_KV_HEAD),
    "gpt_neo": replace(
        _GPT2,
        qkv=tuple(f"attn.attention.{each}_proj" for each in "qkv"),
        o="attn.attention.out_proj",
    ),
    "gptj": _GPTJ,
    "codegen": replace(_GPTJ, qkv=("attn.qkv_proj",), fused_heads=FusedHeads.BY_QUARTER),
    "baichuan": CheckpointNames(qkv=("self_attn.W_pack",)),
    "chatglm": CheckpointNames(
        base="transformer",
        embedding="transformer.embedding.word_embeddings",
        layers="transformer.encoder.layers",
        qkv=("self_attention.query_key_value",),
        o="self_attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
    ),
    "internlm": _LLAMA,
    "internlm2": CheckpointNames(
        embedding="model.tok_embeddings",
        attention_norm="attention_norm",
        qkv=("attention.wqkv",),
        fused_heads=FusedHeads.BY_KV_HEAD,
        o="attention.wo",
        mlp_norm="ffn_norm",
        mlp_in=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        head="output",
    ),
    "kimi_k2": _DEEPSEEK,
    "qwen": replace(_GPT2, positions="", mlp_in=("mlp.w2", "mlp.w1")),
    "skywork": _LLAMA,
    "bamba": CheckpointNames(
        mlp_norm="pre_ff_layernorm",
        mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
    ),
    "granitemoehybrid": _GRANITE_SHARED,
    "granitemoeshared": _GRANITE_SHARED,
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        of_experts=ExpertNames(
            router="feed_forward.gate",
            router_bias="feed_forward.expert_bias",
            experts="feed_forward.experts",
            gate="w1",
            up="w3",
            down="w2",
        ),
    ),
    "ernie4_5_moe": CheckpointNames(
        of_experts=ExpertNames(
            shared="mlp.shared_experts", router_bias="mlp.moe_statics.e_score_correction_bias"
        )
    ),
    "solar_open": _DEEPSEEK,
    "youtu": _LLAMA,
    "olmoe": _LLAMA,
    "dots1": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "internlm3": _LLAMA,
    "helium": _LLAMA,
    "ministral": _LLAMA,
    "cwm": _LLAMA,
    "jais2": _WITHOUT_GATE,
    "olmo": _LLAMA,
    "apertus": replace(_WITHOUT_GATE, attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    "iquestcoder": _LLAMA,
    "hyperclovax": CheckpointNames(norm_after_attention="post_norm1", norm_after_mlp="post_norm2"),
    "granite_swa": CheckpointNames(sinks="self_attn.sinks"),
    "granitemoe_swa": CheckpointNames(
        sinks="self_attn.sinks",
        of_experts=ExpertNames(
            router="block_sparse_moe.router",
            experts="block_sparse_moe.experts",
            gate_up="gate_up_proj",
            has_plain_stack=True,
            shared="shared_mlp",
            shared_gate_up="input_linear",
            shared_down="output_linear",
        ),
    ),
    "flex_olmo": _LLAMA,
    "phimoe": CheckpointNames(of_experts=_MIXTRAL),
    "exaone_moe": CheckpointNames(
        of_experts=replace(_DEEPSEEK.of_experts, router_bias="mlp.e_score_correction_bias")
    ),
    "hy_v3": CheckpointNames(
        of_experts=ExpertNames(router="mlp.router.gate", router_bias="mlp.expert_bias", shared="mlp.shared_mlp")
    ),
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba2": _MAMBA,
    "jamba": CheckpointNames(
        mlp_norm="pre_ff_layernorm",
        mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        of_experts=ExpertNames(router="feed_forward.router", experts="feed_forward.experts"),
        of_short_convolution=ShortConvolutionNames("mamba.in_proj", "mamba.conv1d.weight", "mamba.conv1d.bias"),
        of_selective_scan=SelectiveScanNames(
            mixed="mamba.x_proj",
            time_steps="mamba.dt_proj",
            norms=("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm"),
            a_logs="mamba.A_log",
            d="mamba.D",
            o="mamba.out_proj",
        ),
        final_norm="model.final_layernorm",
    ),
    "nemotron_h": CheckpointNames(
        base="backbone",
        embedding="backbone.embeddings",
        layers="backbone.layers",
        attention_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        o="mixer.o_proj",
        of_state_space=_MIXER,
        mlp_norm="norm",
        mlp_in=("mixer.up_proj",),
        down="mixer.down_proj",
        final_norm="backbone.norm_f",
    ),
    "arcee": _WITHOUT_GATE,
    "nemotron": _WITHOUT_GATE,
    "opt": CheckpointNames(
        embedding="model.decoder.embed_tokens",
        embedding_projection="model.decoder.project_in",
        head_projection="model.decoder.project_out",
        positions="model.decoder.embed_positions",
        layers="model.decoder.layers",
        attention_norm="self_attn_layer_norm",
        o="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        mlp_in=("fc1",),
        down="fc2",
        final_norm="model.decoder.final_layer_norm",
    ),
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "marian": _BART,
    "fsmt": replace(_BART, embedding="model.decoder.embed_tokens", head="model.decoder.output_projection"),
    "whisper": replace(_BART, embedding="model.decoder.embed_tokens", head="proj_out"),
    "vision-encoder-decoder": replace(
        _BART,
        embedding="decoder.model.decoder.embed_tokens",
        embedding_norm="decoder.model.decoder.layernorm_embedding",
        positions="decoder.model.decoder.embed_positions",
        layers="decoder.model.decoder.layers",
        final_norm="decoder.model.decoder.layer_norm",
        head="decoder.lm_head",
    ),
}


def mixer_name(config: ModelConfig, names: CheckpointNames, layer: int) -> str:
    """What the names of a layer's attention or recurrence begin with."""
    return f"{names.layers}.{config.parts.blocks[layer][0] if config.parts.blocks else layer}"


def mlp_name(config: ModelConfig, names: CheckpointNames, layer: int) -> str:
    """What the names of a layer's MLP begin with, if it has one."""
    return f"{names.layers}.{config.parts.blocks[layer][1] if config.parts.blocks else layer}"


def names_of(config: ModelConfig) -> CheckpointNames:
    """The page of a model. Some call a part by another name if the model has another one beside it."""
    names, parts = NAMES[config.family], config.parts
    if names is _T5 and parts.is_gated:
        mlp_in, of_encoder = (_with_gate(page.mlp_in[0]) for page in (names, names.of_encoder))
        return replace(names, mlp_in=mlp_in, of_encoder=replace(names.of_encoder, mlp_in=of_encoder))
    if config.encoder is not None and config.encoder.has_own_embedding:
        names = replace(names, embedding="model.decoder.embed_tokens")
    if config.family == "falcon" and parts.residual is ResidualKind.PARALLEL and not parts.shares_norm:
        return replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    return names


def _with_gate(name: str) -> tuple[str, str]:
    """T5's names of the gate and of what it multiplies, by the name of the only projection where there is no gate."""
    return f"{name}_0", f"{name}_1"
