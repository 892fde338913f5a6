"""Builds the parts of a model from its `ModelConfig` and the names in its family's checkpoints.

A family that is made of existing parts is a page of names and a reader of its config, both in
`services/common/families/`. Another part, or another arrangement of parts, is a case here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from services.common.families.names import CheckpointNames, FusedHeads, mixer_name, mlp_name, names_of
from services.common.families.shape import (
    Activation,
    ExpertOptions,
    GatedDelta,
    LayerHeads,
    LayerInputOptions,
    QkNormKind,
    ResidualKind,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from services.common.model_config import ModelConfig
from services.common.quantization.schemes import Mxfp4Scheme
from services.dense_worker.encoders.source.build import build_source_encoder, sinusoidal_table
from services.dense_worker.kernels.experts.routed_experts import RoutedExperts
from services.dense_worker.kernels.experts.router import GroupedRouter, Router, ScaledRouter, SoftmaxRouter, SparseMixer
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Cut, Linear, PlainWeight, Projection
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import HeadNorms, LayerNorm, Norm, UnweightedRmsNorm
from services.dense_worker.model.allocator import WeightAllocator, optional_zeros
from services.dense_worker.model.builder import Builder
from services.dense_worker.model.expert_mlp import ExpertMlp, MlpBesideExperts, SharedExpert
from services.dense_worker.model.gated_layers import build_convolution_stroke, build_gated_output, build_gated_rows
from services.dense_worker.model.head import Embedding, Head, LayerInputs, LearnedPositions
from services.dense_worker.model.latent_attention import build_latent_output, build_latent_qkv
from services.dense_worker.model.layer import (
    AddedInput,
    AfterAttention,
    AttentionAlone,
    BeforeAttention,
    DecoderLayer,
    Mlp,
    NormedQkv,
    NormedResidual,
    ParallelResidual,
    SequentialResidual,
)
from services.dense_worker.model.mlp import ActivatedMlp, XieluMlp
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.stored_layout import GroupedHeads, PartsByHead, StackedExperts, Transposed, UnitRows
from services.dense_worker.parameters import Conversion, Parameter, Source, StoredLayout, StoredTensor


def build_decoder(config: ModelConfig, allocator: WeightAllocator) -> ModelWeights:
    """The model of any family: what it is made of is in `config.parts`."""
    model = Builder(config, names_of(config), allocator)
    table = build_embedding_table(model)
    encoder = None if config.encoder is None else build_source_encoder(model, config.encoder, table)
    return ModelWeights(
        build_embedding(model, table),
        tuple(build_layer(model, i) for i in range(config.num_layers)),
        build_head(model, table),
        encoder,
    )


def build_embedding_table(model: Builder) -> Parameter:
    """The embedding table, [vocab, embedding_size]."""
    config = model.config
    return model.parameter("embed", f"{model.names.embedding}.weight", config.vocab_size, config.embedding_size)


def build_embedding(model: Builder, table: Parameter) -> Embedding:
    """The embedding, with what is done to it before layer 0."""
    config, names, parts, hidden = model.config, model.names, model.config.parts, model.config.hidden_size
    positions = norm = inputs = projection = None
    if parts.num_learned_positions:
        num_rows = parts.num_learned_positions + parts.learned_position_offset
        rows = model.parameter("positions", f"{names.positions}.weight", num_rows, hidden)
        positions = LearnedPositions(rows, parts.learned_position_offset)
    if parts.sinusoidal_positions is not None:
        num_rows = config.max_position_embeddings
        rows = sinusoidal_table("positions", parts.sinusoidal_positions, num_rows, hidden, model.allocator)
        positions = LearnedPositions(rows, 0)
    if parts.has_embedding_norm:
        norm = model.norm("embedding_norm", names.embedding_norm)
    if parts.layer_inputs is not None:
        inputs = build_layer_inputs(model, parts.layer_inputs)
    if parts.embedding_size is not None:
        widening = model.projection(names.embedding_projection, hidden)
        projection = model.linear("embedding_projection", parts.embedding_size, widening)
    multiplier = model.rounded(parts.embedding_multiplier)
    return Embedding(table, multiplier, positions, norm, parts.is_multiplier_of_table, inputs, projection)


def build_layer_inputs(model: Builder, options: LayerInputOptions) -> LayerInputs:
    """What makes the inputs of all layers."""
    names, size, width = model.names, options.size, options.num_layers * options.size
    table = model.parameter("layer_inputs", f"{names.layer_inputs}.weight", options.vocab_size, width)
    of_all = model.projection(names.layer_inputs_projection, width)
    projection = model.linear("layer_inputs_projection", model.config.hidden_size, of_all)
    norm = model.norm("layer_inputs_norm", names.layer_inputs_norm, size)
    return LayerInputs(table, projection, norm, model.rounded(size**0.5))


def build_layer(model: Builder, index: int) -> DecoderLayer:
    """One layer, counted from 0."""
    config, parts = model.config, model.config.parts
    if config.encoder is not None:
        return build_stroke(model, index)
    layer, heads = model.of_layer(mixer_name(config, model.names, index)), config.layer_heads[index]
    if index in parts.key_value_layers:
        qkv = model.names.qkv
        layer = replace(layer, names=replace(layer.names, qkv=(*qkv[:2], qkv[1])))  # the same rows twice
    latent, experts = parts.latent, parts.experts
    if isinstance(heads.recurrence, ShortConvolution) and heads.recurrence.is_activated:
        return build_convolution_stroke(layer, heads.recurrence)
    is_gated = parts.has_attention_gate or heads.recurrence is not None
    if is_gated:
        norms = build_head_norms(layer, heads) if heads.recurrence is None else None
        before: BeforeAttention = build_gated_rows(layer, heads, norms)
    elif latent is None:
        before = build_normed_qkv(layer, heads)
    else:
        before = build_latent_qkv(layer, latent)
    o = build_o(layer, heads)
    has_experts = experts is not None and index in experts.layers
    mlp: Mlp | None = None
    if index not in parts.layers_without_mlp and (not has_experts or experts.is_beside_mlp):
        sizes = parts.layer_intermediate_sizes
        intermediate = sizes[index] if sizes else config.intermediate_size
        mlp = build_mlp(model.of_layer(mlp_name(config, model.names, index)), before.norm, intermediate)
    if has_experts:
        # The last layer computes only the tokens that need logits, and does not count them.
        routed = build_experts(layer, experts, is_counted=index < config.num_layers - 1)
        mlp = build_beside(layer, mlp, routed) if experts.is_beside_mlp else routed
    after = build_residual(layer, o, mlp)
    if parts.layer_inputs is not None:
        assert isinstance(after, SequentialResidual), "only families with a sequential residual have such inputs"
        own = model.of_layer(f"{model.names.layers}.{index}")
        after = replace(after, added_input=build_added_input(own, index, parts.layer_inputs))
    if latent is not None:
        after = build_latent_output(layer, latent, after)
    if is_gated:
        after = build_gated_output(layer, heads, after)
    return DecoderLayer(before, after)


def build_stroke(model: Builder, index: int) -> DecoderLayer:
    """Half a layer of a decoder with cross attention: self attention alone, or cross attention and the MLP."""
    names, page, config = model.names, model.names.of_encoder, model.config
    layer, heads = model.of_layer(f"{names.layers}.{index // 2}"), config.layer_heads[index]
    if heads.is_cross:
        names = replace(names, qkv=page.cross_qkv, o=page.cross_o, attention_norm=page.cross_norm)
        layer = replace(layer, names=names)
    before = build_normed_qkv(layer, heads)
    o = build_o(layer, heads)
    norm = None
    if config.parts.residual is ResidualKind.NORMED:
        norm = layer.norm("attention_sum_norm", names.attention_norm)
    if not heads.is_cross:
        return DecoderLayer(before, AttentionAlone(o, norm))
    mlp = build_mlp(layer, before.norm, config.intermediate_size)
    if norm is None:
        return DecoderLayer(before, SequentialResidual(o, mlp))
    return DecoderLayer(before, NormedResidual(o, norm, mlp, layer.norm("mlp_sum_norm", names.mlp_norm)))


def build_added_input(layer: Builder, index: int, options: LayerInputOptions) -> AddedInput:
    """What a layer does with its own input."""
    names, hidden = layer.names, layer.config.hidden_size
    gate = layer.linear("input_gate", hidden, layer.projection(names.input_gate, options.size))
    widening = layer.projection(names.input_projection, hidden)
    projection = layer.linear("input_projection", options.size, widening, cut=Cut.IN)
    norm = layer.norm("input_out_norm", names.norm_after_input)
    return AddedInput(index, gate, projection, norm, layer.config.parts.activation)


def build_normed_qkv(layer: Builder, heads: LayerHeads) -> NormedQkv:
    """The first half of a layer."""
    config, names, parts = layer.config, layer.names, layer.config.parts
    sizes = (heads.attn_size, heads.kv_size, heads.kv_size)
    if len(names.qkv) == 1:
        layout: StoredLayout | None = _weight_layout(names)
        if names.fused_heads is FusedHeads.BY_KV_HEAD and heads.num_kv_heads > 1:
            layout = GroupedHeads(heads.num_kv_heads, heads.head_dim)
        elif names.fused_heads is FusedHeads.BY_QUARTER:
            layout = PartsByHead(4, (heads.kv_size // 4,) * 3, (0, 2, 1))
        merged = (layer.projection(names.qkv[0], heads.qkv_size, layout),)
    else:
        merged = tuple(layer.projection(*each) for each in zip(names.qkv, sizes, strict=True) if each[1])
    norm = layer.norm("input_norm", names.attention_norm) if parts.has_norms_before else None
    qkv = layer.allocator.attention_projections(
        "qkv", config.hidden_size, merged, has_bias=config.qkv_bias, has_key_bias=parts.has_key_bias
    )
    return NormedQkv(norm, qkv, build_head_norms(layer, heads) if config.qk_norm else None)


def build_head_norms(layer: Builder, heads: LayerHeads) -> HeadNorms:
    """The norms of q and k, and in some families of v."""
    names, parts, num_heads, num_kv_heads = layer.names, layer.config.parts, heads.num_heads, heads.num_kv_heads
    sizes: tuple[int | tuple[int, int], ...] = (heads.head_dim, heads.head_dim)
    if parts.qk_norm is QkNormKind.ALL_HEADS:
        sizes, num_heads, num_kv_heads = (heads.attn_size, heads.kv_size), 1, 1
    elif parts.qk_norm is QkNormKind.OWN_HEADS:
        sizes = ((num_heads, heads.head_dim), (num_kv_heads, heads.head_dim))
    q_norm = layer.norm("q_norm", names.q_norm, sizes[0])
    if not heads.kv_size:
        return HeadNorms(q_norm, None, num_heads, num_kv_heads)
    k_norm = layer.norm("k_norm", names.k_norm, sizes[1])
    v_norm = UnweightedRmsNorm(layer.config.norm_eps) if parts.has_v_norm else None
    return HeadNorms(q_norm, k_norm, num_heads, num_kv_heads, v_norm)


def build_o(layer: Builder, heads: LayerHeads) -> Linear:
    """The projection of the output of attention, or of a recurrence."""
    config, names, latent = layer.config, layer.names, layer.config.parts.latent
    match heads.recurrence:
        case None:
            name, has_bias = names.o, config.o_bias
        case GatedDelta():
            name, has_bias = names.of_gated_delta.o, False
        case StateSpace():
            name, has_bias = names.of_state_space.o, config.parts.mixer_bias
        case ShortConvolution():
            name, has_bias = names.of_short_convolution.o, config.parts.mixer_bias
        case SelectiveScan():
            name, has_bias = names.of_selective_scan.o, config.parts.mixer_bias
    in_features = heads.attn_size if latent is None else heads.num_heads * latent.value_dim
    stored = layer.projection(name, config.hidden_size, _weight_layout(names))
    return layer.linear("o", in_features, stored, cut=Cut.IN, has_bias=has_bias)


def build_mlp(layer: Builder, attention_norm: Norm | None, intermediate: int) -> Mlp:
    """The MLP and the norm before it, which some families share with attention."""
    config, names, parts, hidden = layer.config, layer.names, layer.config.parts, layer.config.hidden_size
    layout = _weight_layout(names)
    norm = None
    if parts.shares_norm:
        norm = _shared(attention_norm)
    elif parts.has_norms_before:
        norm = layer.norm("post_norm", names.mlp_norm)
    num_rows = (1 + parts.is_gated) * intermediate // len(names.mlp_in)
    merged = [layer.projection(name, num_rows, layout) for name in names.mlp_in]
    down = layer.projection(names.down, hidden, layout)
    first = layer.linear("gate_up" if parts.is_gated else "up", hidden, *merged, has_bias=config.mlp_bias)
    last = layer.linear("down", intermediate, down, cut=Cut.IN, has_bias=config.mlp_bias)
    if parts.activation is Activation.XIELU:
        numbers = tuple(build_number(layer.path(name)) for name in names.xielu)
        return XieluMlp(norm, first, last, layer.allocator.parameter("xielu", len(numbers), sources=numbers))
    return ActivatedMlp(norm, first, last, MlpActivation(parts.activation, parts.is_gated))


def build_number(name: str) -> Source:
    """The source of a single number, which files have with or without a dimension."""
    stored = StoredTensor((name,), FLOATS, ((1,), ()))
    return Source(name, 1, Conversion((stored,), lambda loaded: loaded.tensor.view(1)))


def build_experts(layer: Builder, options: ExpertOptions, *, is_counted: bool) -> ExpertMlp:
    """The mixture of experts of a layer, and the norm before it. The router and its gate are never quantized."""
    config, names, parts, hidden = layer.config, layer.names.of_experts, layer.config.parts, layer.config.hidden_size
    num_experts, size, has_bias = options.num_experts, options.intermediate_size, config.mlp_bias

    def projections(module: str, size: int) -> tuple[Projection, ...]:
        return tuple(layer.projection(f"{module}.{each}", size) for each in (names.gate, names.up))

    norm = None
    if parts.has_norms_before:
        norm_names = ("experts_norm", names.norm) if options.is_beside_mlp else ("post_norm", layer.names.mlp_norm)
        norm = layer.norm(*norm_names)
    if names.gate_up:
        gates_and_ups, downs = _stacked_projections(layer, options)
    else:
        modules = [f"{names.experts}.{i}" for i in range(num_experts)]
        gates_and_ups = tuple(each for module in modules for each in projections(module, size))
        downs = tuple(layer.projection(f"{module}.{names.down}", hidden) for module in modules)
    gate_up = layer.allocator.experts("experts_gate_up", num_experts, hidden, gates_and_ups, has_bias)
    down = layer.allocator.experts("experts_down", num_experts, size, downs, has_bias)
    shared, shared_size = None, options.shared_intermediate_size
    if shared_size is not None:
        merged = projections(names.shared, shared_size)
        if names.shared_gate_up:
            merged = (layer.projection(f"{names.shared}.{names.shared_gate_up}", 2 * shared_size),)
        first = layer.linear("shared_expert_gate_up", hidden, *merged, has_bias=has_bias)
        stored = layer.projection(f"{names.shared}.{names.shared_down or names.down}", hidden)
        last = layer.linear("shared_expert_down", shared_size, stored, cut=Cut.IN, has_bias=has_bias)
        gate = None
        if options.has_shared_gate:
            gate = layer.parameter("shared_expert_gate", f"{names.shared_gate}.weight", 1, hidden)
        shared = SharedExpert(ActivatedMlp(None, first, last, MlpActivation(parts.activation, is_gated=True)), gate)
    router = build_router(layer, options)
    loads = torch.zeros(num_experts, dtype=torch.int64, device=layer.allocator.device) if is_counted else None
    routed = RoutedExperts(router, gate_up, down, parts.activation, options.clamped, loads)
    return ExpertMlp(norm, routed, shared)


def build_router(layer: Builder, options: ExpertOptions) -> Router:
    """What chooses the experts of each token."""
    names, hidden, num_experts = layer.names.of_experts, layer.config.hidden_size, options.num_experts
    weight = layer.parameter("router", f"{names.router}.weight", num_experts, hidden)
    bias = None
    if options.has_router_bias:
        bias = layer.parameter("router_bias", f"{names.router}.bias", num_experts)
    if options.grouped is not None:
        if options.grouped.is_sigmoid or options.grouped.has_softmax_bias:
            name, shapes = layer.path(names.router_bias), ((num_experts,), (1, num_experts))  # one row in some
            conversion = Conversion((StoredTensor((name,), FLOATS, shapes),), lambda loaded: loaded.tensor.flatten())
            sources = (Source(name, num_experts, conversion),)
            bias = layer.allocator.parameter("router_bias", num_experts, sources=sources, dtype=torch.float32)
        return GroupedRouter(weight, bias, options.num_per_token, options.renormalizes, options.grouped)
    if options.mixer_jitter is not None:
        return SparseMixer(weight, options.num_per_token, options.mixer_jitter)
    if options.is_beside_mlp:
        scale = layer.parameter("router_scale", names.router_scale, hidden)
        expert_scale = layer.parameter("expert_scale", names.expert_scale, num_experts)
        norm = UnweightedRmsNorm(layer.config.norm_eps)
        return ScaledRouter(weight, options.num_per_token, scale, expert_scale, norm)
    return SoftmaxRouter(weight, options.num_per_token, options.renormalizes, bias)


def build_beside(layer: Builder, mlp: Mlp | None, experts: ExpertMlp) -> MlpBesideExperts:
    """An MLP and experts side by side."""
    assert isinstance(mlp, ActivatedMlp)
    names = layer.names.of_experts
    after_mlp = layer.norm("beside_out_norm", names.norm_after_mlp)
    return MlpBesideExperts(mlp, after_mlp, experts, layer.norm("experts_out_norm", names.norm_after))


def _stacked_projections(layer: Builder, options: ExpertOptions) -> tuple[tuple[Projection], tuple[Projection]]:
    """Gates with ups, and downs, of all experts of a layer: one tensor each."""
    names, quantization = layer.names.of_experts, layer.config.quantization
    gate_up, down = f"{names.experts}.{names.gate_up}", f"{names.experts}.{names.down}"
    scheme = None if quantization is None else quantization.scheme_of(layer.path(gate_up))

    def layout(is_interleaved: bool) -> StackedExperts:
        if names.has_plain_stack:
            return StackedExperts(options.num_experts, is_interleaved=False, is_transposed=False)
        return StackedExperts(options.num_experts, is_interleaved, is_transposed=not isinstance(scheme, Mxfp4Scheme))

    num_rows = 2 * options.num_experts * options.intermediate_size
    return (layer.projection(gate_up, num_rows, layout(True)),), (
        layer.projection(down, options.num_experts * layer.config.hidden_size, layout(False)),
    )


def build_residual(layer: Builder, o: Linear, mlp: Mlp | None) -> AfterAttention:
    """The second half of a layer, around its output projection and its MLP."""
    names, parts = layer.names, layer.config.parts
    if parts.residual is ResidualKind.PARALLEL:
        return ParallelResidual(o, mlp)
    if not parts.has_norms_after and parts.residual is ResidualKind.SEQUENTIAL:
        return SequentialResidual(o, mlp, multiplier=parts.residual_multiplier)
    if parts.residual is ResidualKind.NORMED:
        attention_norm = layer.norm("attention_out_norm", names.attention_norm)
        return NormedResidual(o, attention_norm, mlp, layer.norm("mlp_out_norm", names.mlp_norm))
    after_attention = layer.norm("attention_out_norm", names.norm_after_attention)
    after_mlp = layer.norm("mlp_out_norm", names.norm_after_mlp)
    scalar = layer.parameter("layer_scalar", names.layer_scalar, 1) if parts.has_layer_scalar else None
    return SequentialResidual(o, mlp, after_attention, after_mlp, parts.residual_multiplier, layer_scalar=scalar)


def build_head(model: Builder, table: Parameter) -> Head:
    """The final norm and the lm_head, which is the embedding's tensor if the two are tied."""
    config, names, parts = model.config, model.names, model.config.parts
    merged = (model.projection(names.head, config.vocab_size, UnitRows() if parts.has_unit_head else None),)
    norm = projection = None
    if parts.residual is not ResidualKind.NORMED:
        norm = model.norm("final_norm", names.final_norm)
    if parts.embedding_size is not None:
        narrowing = model.projection(names.head_projection, parts.embedding_size)
        projection = model.linear("head_projection", config.hidden_size, narrowing)
    if not config.tie_word_embeddings:
        weight = model.allocator.weight("lm_head", config.embedding_size, merged)
    else:
        weight = PlainWeight(Parameter("lm_head", table.data))
    bias = None
    if parts.head_bias:
        sources = (Source(f"{names.head}.bias", config.vocab_size),)
        if config.encoder is not None:
            sources = (optional_zeros(names.of_encoder.logits_bias, config.vocab_size, (1, config.vocab_size)),)
        bias = model.allocator.parameter("lm_head_bias", config.vocab_size, sources=sources)
    lm_head = Linear("lm_head", config.embedding_size, config.vocab_size, merged, Cut.OUT, weight, bias)
    return Head(norm, lm_head, parts.logit_multiplier, parts.logit_softcap, projection)


def _weight_layout(names: CheckpointNames) -> StoredLayout | None:
    return Transposed() if names.has_transposed_weights else None


def _shared(norm: Norm | None) -> Norm:
    """The same norm with the same tensors, under the names of the MLP's inputs. No tensor of a checkpoint fills it."""
    assert isinstance(norm, LayerNorm), "only families with LayerNorm share it"
    bias = None if norm.bias is None else Parameter("post_norm_bias", norm.bias.data)
    return LayerNorm(Parameter("post_norm", norm.weight.data), bias, norm.eps)
