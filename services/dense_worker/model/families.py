"""Builds the parts of a model from its `ModelConfig` and the names in its family's checkpoints.

A family that is made of existing parts is a page of names and a reader of its config, both in
`services/common/families/`. Another part, or another arrangement of parts, is a case here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from services.common.families.names import CheckpointNames, ExpertNames, FusedHeads, mixer_name, mlp_name, names_of
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
from services.dense_worker.kernels.linear.linear import Cut, Linear, Projection
from services.dense_worker.kernels.linear.plain_weight import PlainWeight
from services.dense_worker.kernels.linear.quantized.layer import FLOATS
from services.dense_worker.kernels.norm.norm import HeadNorms, LayerNorm, Norm, UnweightedRmsNorm
from services.dense_worker.model.allocator import WeightAllocator, optional_zeros
from services.dense_worker.model.expert_mlp import ExpertMlp, MlpBesideExperts, SharedExpert
from services.dense_worker.model.gated.build import build_gated_output, build_gated_rows
from services.dense_worker.model.head import Embedding, Head, LayerInputs, LearnedPositions
from services.dense_worker.model.latent.build import build_latent_output, build_latent_qkv
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
from services.dense_worker.model.mlp import GatedMlp, PlainMlp, XieluMlp
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.selective.build import build_convolution_stroke
from services.dense_worker.model.stored_layout import GroupedHeads, PartsByHead, StackedExperts, Transposed, UnitRows
from services.dense_worker.parameters import Conversion, Parameter, Source, StoredLayout, StoredTensor


def build_decoder(config: ModelConfig, allocator: WeightAllocator) -> ModelWeights:
    """The model of any family: what it is made of is in `config.parts`."""
    names = names_of(config)
    table = build_embedding_table(config, allocator, names)
    encoder = None
    if config.encoder is not None:
        encoder = build_source_encoder(config, config.encoder, allocator, names, table)
    return ModelWeights(
        build_embedding(config, allocator, names, table),
        tuple(build_layer(config, allocator, names, i) for i in range(config.num_layers)),
        build_head(config, allocator, names, table),
        encoder,
    )


def build_embedding_table(config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames) -> Parameter:
    """The embedding table, [vocab, embedding_size]."""
    sources = (Source(f"{names.embedding}.weight", config.vocab_size),)
    return allocator.parameter("embed", config.vocab_size, config.embedding_size, sources=sources)


def build_embedding(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, table: Parameter
) -> Embedding:
    """The embedding, with what is done to it before layer 0."""
    parts, hidden = config.parts, config.hidden_size
    positions = norm = None
    if parts.num_learned_positions:
        num_rows = parts.num_learned_positions + parts.learned_position_offset
        sources = (Source(f"{names.positions}.weight", num_rows),)
        rows = allocator.parameter("positions", num_rows, hidden, sources=sources)
        positions = LearnedPositions(rows, parts.learned_position_offset)
    if parts.sinusoidal_positions is not None:
        num_rows = config.max_position_embeddings
        rows = sinusoidal_table("positions", parts.sinusoidal_positions, num_rows, hidden, allocator)
        positions = LearnedPositions(rows, 0)
    if parts.has_embedding_norm:
        norm = allocator.norm("embedding_norm", names.embedding_norm, hidden, config.norm_eps, parts.norm)
    multiplier = _rounded(parts.embedding_multiplier, allocator)
    inputs = None if parts.layer_inputs is None else build_layer_inputs(config, parts.layer_inputs, allocator, names)
    projection = None
    if parts.embedding_size is not None:
        merged = (Projection(names.embedding_projection, hidden),)
        projection = allocator.linear("embedding_projection", parts.embedding_size, merged, Cut.OUT, False)
    return Embedding(table, multiplier, positions, norm, parts.is_multiplier_of_table, inputs, projection)


def build_layer_inputs(
    config: ModelConfig, options: LayerInputOptions, allocator: WeightAllocator, names: CheckpointNames
) -> LayerInputs:
    """What makes the inputs of all layers."""
    size, width = options.size, options.num_layers * options.size
    sources = (Source(f"{names.layer_inputs}.weight", options.vocab_size),)
    table = allocator.parameter("layer_inputs", options.vocab_size, width, sources=sources)
    merged = (Projection(names.layer_inputs_projection, width),)
    projection = allocator.linear("layer_inputs_projection", config.hidden_size, merged, Cut.OUT, False)
    norm = allocator.norm("layer_inputs_norm", names.layer_inputs_norm, size, config.norm_eps, config.parts.norm)
    return LayerInputs(table, projection, norm, _rounded(size**0.5, allocator))


def build_layer(config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, index: int) -> DecoderLayer:
    """One layer, counted from 0."""
    if config.encoder is not None:
        return build_stroke(config, allocator, names, index)
    layer, mlp_layer = mixer_name(config, names, index), mlp_name(config, names, index)
    heads = config.layer_heads[index]
    if index in config.parts.key_value_layers:
        names = replace(names, qkv=(*names.qkv[:2], names.qkv[1]))  # the same rows twice
    latent, experts = config.parts.latent, config.parts.experts
    if isinstance(heads.recurrence, ShortConvolution) and heads.recurrence.is_activated:
        return build_convolution_stroke(config, allocator, names, layer, heads.recurrence)
    is_gated = config.parts.has_attention_gate or heads.recurrence is not None
    if is_gated:
        norms = build_head_norms(config, allocator, names, layer, heads) if heads.recurrence is None else None
        before: BeforeAttention = build_gated_rows(config, allocator, names, layer, heads, norms)
    elif latent is None:
        before = build_normed_qkv(config, allocator, names, layer, heads)
    else:
        before = build_latent_qkv(config, latent, allocator, names, layer)
    o = build_o(config, allocator, names, layer, heads)
    has_experts = experts is not None and index in experts.layers
    mlp: Mlp | None = None
    if index not in config.parts.layers_without_mlp and (not has_experts or experts.is_beside_mlp):
        sizes = config.parts.layer_intermediate_sizes
        intermediate = sizes[index] if sizes else config.intermediate_size
        mlp = build_mlp(config, allocator, names, mlp_layer, before.norm, intermediate)
    if has_experts:
        # The last layer computes only the tokens that need logits, and does not count them.
        is_counted = index < config.num_layers - 1
        routed = build_experts(config, experts, allocator, names, layer, is_counted)
        mlp = build_beside(config, allocator, names, layer, mlp, routed) if experts.is_beside_mlp else routed
    after = build_residual(config, allocator, names, layer, o, mlp)
    if config.parts.layer_inputs is not None:
        assert isinstance(after, SequentialResidual), "only families with a sequential residual have such inputs"
        after = replace(after, added_input=build_added_input(config, allocator, names, index))
    if latent is not None:
        after = build_latent_output(config, latent, allocator, names, layer, after)
    if is_gated:
        after = build_gated_output(config, allocator, names, layer, heads, after)
    return DecoderLayer(before, after)


def build_stroke(config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, index: int) -> DecoderLayer:
    """Half a layer of a decoder with cross attention: self attention alone, or cross attention and the MLP."""
    parts, page, layer = config.parts, names.of_encoder, f"{names.layers}.{index // 2}"
    heads = config.layer_heads[index]
    if heads.is_cross:
        names = replace(names, qkv=page.cross_qkv, o=page.cross_o, attention_norm=page.cross_norm)
    before = build_normed_qkv(config, allocator, names, layer, heads)
    o = build_o(config, allocator, names, layer, heads)
    norm = None
    if parts.residual is ResidualKind.NORMED:
        name = f"{layer}.{names.attention_norm}"
        norm = allocator.norm("attention_sum_norm", name, config.hidden_size, config.norm_eps, parts.norm)
    if not heads.is_cross:
        return DecoderLayer(before, AttentionAlone(o, norm))
    mlp = build_mlp(config, allocator, names, layer, before.norm, config.intermediate_size)
    if norm is None:
        return DecoderLayer(before, SequentialResidual(o, mlp))
    name = f"{layer}.{names.mlp_norm}"
    mlp_norm = allocator.norm("mlp_sum_norm", name, config.hidden_size, config.norm_eps, parts.norm)
    return DecoderLayer(before, NormedResidual(o, norm, mlp, mlp_norm))


def build_added_input(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, index: int
) -> AddedInput:
    """What a layer does with its own input."""
    parts, hidden, layer = config.parts, config.hidden_size, f"{names.layers}.{index}"
    merged = (Projection(f"{layer}.{names.input_gate}", parts.layer_inputs.size),)
    gate = allocator.linear("input_gate", hidden, merged, Cut.OUT, False)
    merged = (Projection(f"{layer}.{names.input_projection}", hidden),)
    projection = allocator.linear("input_projection", parts.layer_inputs.size, merged, Cut.IN, False)
    norm = allocator.norm("input_out_norm", f"{layer}.{names.norm_after_input}", hidden, config.norm_eps, parts.norm)
    return AddedInput(index, gate, projection, norm, parts.activation)


def build_normed_qkv(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: str, heads: LayerHeads
) -> NormedQkv:
    """The first half of a layer."""
    parts = config.parts
    sizes = (heads.attn_size, heads.kv_size, heads.kv_size)
    if len(names.qkv) == 1:
        layout: StoredLayout | None = _weight_layout(names)
        if names.fused_heads is FusedHeads.BY_KV_HEAD and heads.num_kv_heads > 1:
            layout = GroupedHeads(heads.num_kv_heads, heads.head_dim)
        elif names.fused_heads is FusedHeads.BY_QUARTER:
            layout = PartsByHead(4, (heads.kv_size // 4,) * 3, (0, 2, 1))
        merged = (Projection(f"{layer}.{names.qkv[0]}", heads.qkv_size, layout),)
    else:
        by_name = zip(names.qkv, sizes, strict=True)
        merged = tuple(Projection(f"{layer}.{name}", size) for name, size in by_name if size)
    norm = None
    if parts.has_norms_before:
        name = f"{layer}.{names.attention_norm}"
        norm = allocator.norm("input_norm", name, config.hidden_size, config.norm_eps, parts.norm)
    qkv = allocator.attention_projections(
        "qkv", config.hidden_size, merged, has_bias=config.qkv_bias, has_key_bias=parts.has_key_bias
    )
    return NormedQkv(norm, qkv, build_head_norms(config, allocator, names, layer, heads) if config.qk_norm else None)


def build_head_norms(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: str, heads: LayerHeads
) -> HeadNorms:
    """The norms of q and k, and in some families of v."""
    kind, num_heads, num_kv_heads = config.parts.qk_norm, heads.num_heads, heads.num_kv_heads
    sizes: tuple[int | tuple[int, int], ...] = (heads.head_dim, heads.head_dim)
    if kind is QkNormKind.ALL_HEADS:
        sizes, num_heads, num_kv_heads = (heads.attn_size, heads.kv_size), 1, 1
    elif kind is QkNormKind.OWN_HEADS:
        sizes = ((num_heads, heads.head_dim), (num_kv_heads, heads.head_dim))
    eps, norm = config.norm_eps, config.parts.norm
    q_norm = allocator.norm("q_norm", f"{layer}.{names.q_norm}", sizes[0], eps, norm)
    if not heads.kv_size:
        return HeadNorms(q_norm, None, num_heads, num_kv_heads)
    k_norm = allocator.norm("k_norm", f"{layer}.{names.k_norm}", sizes[1], eps, norm)
    v_norm = UnweightedRmsNorm(eps) if config.parts.has_v_norm else None
    return HeadNorms(q_norm, k_norm, num_heads, num_kv_heads, v_norm)


def build_o(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: str, heads: LayerHeads
) -> Linear:
    """The projection of the output of attention, or of a recurrence."""
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
    merged = (Projection(f"{layer}.{name}", config.hidden_size, _weight_layout(names)),)
    latent = config.parts.latent
    in_features = heads.attn_size if latent is None else heads.num_heads * latent.value_dim
    return allocator.linear("o", in_features, merged, Cut.IN, has_bias)


def build_mlp(
    config: ModelConfig,
    allocator: WeightAllocator,
    names: CheckpointNames,
    layer: str,
    attention_norm: Norm | None,
    intermediate: int,
) -> Mlp:
    """The MLP and the norm before it, which some families share with attention."""
    parts, hidden = config.parts, config.hidden_size
    layout = _weight_layout(names)
    norm = None
    if parts.shares_norm:
        norm = _shared(attention_norm)
    elif parts.has_norms_before:
        norm = allocator.norm("post_norm", f"{layer}.{names.mlp_norm}", hidden, config.norm_eps, parts.norm)
    num_rows = (1 + parts.is_gated) * intermediate // len(names.mlp_in)
    merged = tuple(Projection(f"{layer}.{name}", num_rows, layout) for name in names.mlp_in)
    down = (Projection(f"{layer}.{names.down}", hidden, layout),)
    first = allocator.linear("gate_up" if parts.is_gated else "up", hidden, merged, Cut.OUT, config.mlp_bias)
    last = allocator.linear("down", intermediate, down, Cut.IN, config.mlp_bias)
    if parts.activation is Activation.XIELU:
        numbers = tuple(build_number(f"{layer}.{name}") for name in names.xielu)
        return XieluMlp(norm, first, last, allocator.parameter("xielu", len(numbers), sources=numbers))
    return (GatedMlp if parts.is_gated else PlainMlp)(norm, first, last, parts.activation)


def build_number(name: str) -> Source:
    """The source of a single number, which files have with or without a dimension."""
    stored = StoredTensor((name,), FLOATS, ((1,), ()))
    return Source(name, 1, Conversion((stored,), lambda loaded: loaded.tensor.view(1)))


def build_experts(
    config: ModelConfig,
    options: ExpertOptions,
    allocator: WeightAllocator,
    names: CheckpointNames,
    layer: str,
    is_counted: bool,
) -> ExpertMlp:
    """The mixture of experts of a layer, and the norm before it. The router and its gate are never quantized."""
    parts, hidden, of_experts = config.parts, config.hidden_size, names.of_experts

    def matrix(name: str, num_rows: int, module: str) -> Parameter:
        return allocator.parameter(name, num_rows, hidden, sources=(Source(f"{layer}.{module}.weight", num_rows),))

    def projections(module: str, size: int) -> tuple[Projection, ...]:
        return tuple(Projection(f"{layer}.{module}.{each}", size) for each in (of_experts.gate, of_experts.up))

    def down(module: str, name: str = "") -> Projection:
        return Projection(f"{layer}.{module}.{name or of_experts.down}", hidden)

    norm_names = ("experts_norm", of_experts.norm) if options.is_beside_mlp else ("post_norm", names.mlp_norm)
    norm = None
    if parts.has_norms_before:
        norm = allocator.norm(norm_names[0], f"{layer}.{norm_names[1]}", hidden, config.norm_eps, parts.norm)
    num_experts, size, has_bias = options.num_experts, options.intermediate_size, config.mlp_bias
    if of_experts.gate_up:
        gates_and_ups, of_down = _stacked_projections(config, options, of_experts, f"{layer}.{of_experts.experts}")
    else:
        modules = [f"{of_experts.experts}.{i}" for i in range(num_experts)]
        gates_and_ups = tuple(each for module in modules for each in projections(module, size))
        of_down = tuple(map(down, modules))
    gate_up = allocator.experts("experts_gate_up", num_experts, hidden, gates_and_ups, has_bias)
    downs = allocator.experts("experts_down", num_experts, size, of_down, has_bias)
    shared, shared_size = None, options.shared_intermediate_size
    if shared_size is not None:
        merged = projections(of_experts.shared, shared_size)
        if of_experts.shared_gate_up:
            merged = (Projection(f"{layer}.{of_experts.shared}.{of_experts.shared_gate_up}", 2 * shared_size),)
        first = allocator.linear("shared_expert_gate_up", hidden, merged, Cut.OUT, has_bias)
        merged = (down(of_experts.shared, of_experts.shared_down),)
        last = allocator.linear("shared_expert_down", shared_size, merged, Cut.IN, has_bias)
        gate = matrix("shared_expert_gate", 1, of_experts.shared_gate) if options.has_shared_gate else None
        shared = SharedExpert(GatedMlp(None, first, last, parts.activation), gate)
    weight = matrix("router", options.num_experts, of_experts.router)
    bias = None
    if options.has_router_bias:
        sources = (Source(f"{layer}.{of_experts.router}.bias", options.num_experts),)
        bias = allocator.parameter("router_bias", options.num_experts, sources=sources)
    router: Router = SoftmaxRouter(weight, options.num_per_token, options.renormalizes, bias)
    if options.grouped is not None:
        if options.grouped.is_sigmoid or options.grouped.has_softmax_bias:
            name, shapes = f"{layer}.{of_experts.router_bias}", ((num_experts,), (1, num_experts))  # one row in some
            conversion = Conversion((StoredTensor((name,), FLOATS, shapes),), lambda loaded: loaded.tensor.flatten())
            sources = (Source(name, num_experts, conversion),)
            bias = allocator.parameter("router_bias", options.num_experts, sources=sources, dtype=torch.float32)
        router = GroupedRouter(weight, bias, options.num_per_token, options.renormalizes, options.grouped)
    elif options.mixer_jitter is not None:
        router = SparseMixer(weight, options.num_per_token, options.mixer_jitter)
    elif options.is_beside_mlp:
        scales = [
            allocator.parameter(name, size, sources=(Source(f"{layer}.{stored}", size),))
            for name, stored, size in (
                ("router_scale", of_experts.router_scale, hidden),
                ("expert_scale", of_experts.expert_scale, num_experts),
            )
        ]
        router = ScaledRouter(weight, options.num_per_token, *scales, UnweightedRmsNorm(config.norm_eps))
    loads = torch.zeros(num_experts, dtype=torch.int64, device=allocator.device) if is_counted else None
    routed = RoutedExperts(router, gate_up, downs, parts.activation, options.clamped, loads)
    return ExpertMlp(norm, routed, shared)


def build_beside(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: str, mlp: Mlp, experts: ExpertMlp
) -> MlpBesideExperts:
    """An MLP and experts side by side."""
    assert isinstance(mlp, GatedMlp)

    def norm(name: str, checkpoint_name: str) -> Norm:
        return allocator.norm(
            name, f"{layer}.{checkpoint_name}", config.hidden_size, config.norm_eps, config.parts.norm
        )

    of_experts = names.of_experts
    after_mlp = norm("beside_out_norm", of_experts.norm_after_mlp)
    return MlpBesideExperts(mlp, after_mlp, experts, norm("experts_out_norm", of_experts.norm_after))


def _stacked_projections(
    config: ModelConfig, options: ExpertOptions, names: ExpertNames, module: str
) -> tuple[tuple[Projection], tuple[Projection]]:
    """Gates with ups, and downs, of all experts of a layer: one tensor each."""
    gate_up, down = f"{module}.{names.gate_up}", f"{module}.{names.down}"
    quantization = config.quantization
    is_quantized = quantization is not None and isinstance(quantization.scheme_of(gate_up), Mxfp4Scheme)

    def layout(is_interleaved: bool) -> StackedExperts:
        if names.has_plain_stack:
            return StackedExperts(options.num_experts, is_interleaved=False, is_transposed=False)
        return StackedExperts(options.num_experts, is_interleaved, is_transposed=not is_quantized)

    num_rows = 2 * options.num_experts * options.intermediate_size
    return (Projection(gate_up, num_rows, layout(True)),), (
        Projection(down, options.num_experts * config.hidden_size, layout(False)),
    )


def build_residual(
    config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, layer: str, o: Linear, mlp: Mlp | None
) -> AfterAttention:
    """The second half of a layer, around its output projection and its MLP."""
    parts = config.parts
    if parts.residual is ResidualKind.PARALLEL:
        return ParallelResidual(o, mlp)
    if not parts.has_norms_after and parts.residual is ResidualKind.SEQUENTIAL:
        return SequentialResidual(o, mlp, multiplier=parts.residual_multiplier)

    def norm(name: str, checkpoint_name: str) -> Norm:
        return allocator.norm(name, f"{layer}.{checkpoint_name}", config.hidden_size, config.norm_eps, parts.norm)

    if parts.residual is ResidualKind.NORMED:
        attention_norm = norm("attention_out_norm", names.attention_norm)
        return NormedResidual(o, attention_norm, mlp, norm("mlp_out_norm", names.mlp_norm))
    after_attention = norm("attention_out_norm", names.norm_after_attention)
    after_mlp = norm("mlp_out_norm", names.norm_after_mlp)
    scalar = None
    if parts.has_layer_scalar:
        scalar = allocator.parameter("layer_scalar", 1, sources=(Source(f"{layer}.{names.layer_scalar}", 1),))
    return SequentialResidual(o, mlp, after_attention, after_mlp, parts.residual_multiplier, layer_scalar=scalar)


def build_head(config: ModelConfig, allocator: WeightAllocator, names: CheckpointNames, table: Parameter) -> Head:
    """The final norm and the lm_head, which is the embedding's tensor if the two are tied."""
    parts = config.parts
    merged = (Projection(names.head, config.vocab_size, UnitRows() if parts.has_unit_head else None),)
    norm = projection = None
    if parts.residual is not ResidualKind.NORMED:
        norm = allocator.norm("final_norm", names.final_norm, config.hidden_size, config.norm_eps, parts.norm)
    if parts.embedding_size is not None:
        narrowing = (Projection(names.head_projection, parts.embedding_size),)
        projection = allocator.linear("head_projection", config.hidden_size, narrowing, Cut.OUT, False)
    if not config.tie_word_embeddings:
        weight = allocator.weight("lm_head", config.embedding_size, merged)
    else:
        weight = PlainWeight(Parameter("lm_head", table.data))
    bias = None
    if parts.head_bias:
        sources = (Source(f"{names.head}.bias", config.vocab_size),)
        if config.encoder is not None:
            sources = (optional_zeros(names.of_encoder.logits_bias, config.vocab_size, (1, config.vocab_size)),)
        bias = allocator.parameter("lm_head_bias", config.vocab_size, sources=sources)
    lm_head = Linear("lm_head", config.embedding_size, config.vocab_size, merged, Cut.OUT, weight, bias)
    return Head(norm, lm_head, parts.logit_multiplier, parts.logit_softcap, projection)


def _rounded(number: float, allocator: WeightAllocator) -> float:
    """A number in the model's dtype, as transformers rounds the multipliers of embeddings."""
    return torch.tensor(number, dtype=allocator.dtype).item()


def _weight_layout(names: CheckpointNames) -> StoredLayout | None:
    return Transposed() if names.has_transposed_weights else None


def _shared(norm: Norm | None) -> Norm:
    """The same norm with the same tensors, under the names of the MLP's inputs. No tensor of a checkpoint fills it."""
    assert isinstance(norm, LayerNorm), "only families with LayerNorm share it"
    bias = None if norm.bias is None else Parameter("post_norm_bias", norm.bias.data)
    return LayerNorm(Parameter("post_norm", norm.weight.data), bias, norm.eps)
