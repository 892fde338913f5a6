"""Families of an encoder and a decoder with cross attention: T5, BART, Marian, FairSeq's NMT, Whisper, Nougat, others.

A layer of their decoders counts as two: self attention alone, then cross attention with the MLP.
"""

from __future__ import annotations

from dataclasses import replace

from services.common.families.base import read_base
from services.common.families.fields import MAX_LAYERS, ConfigFields
from services.common.families.rope import no_rope
from services.common.families.shape import (
    Activation,
    AttentionOptions,
    EncoderConfig,
    LayerHeads,
    LayerParts,
    ModelConfig,
    NormKind,
    RelativeBias,
    ResidualKind,
    SinusoidalPositions,
    SwinConfig,
)

_T5_POSITIONS = 512  # of most models, whose relative bias has no limit of its own
_T5_ACTIVATIONS = {"relu": Activation.RELU, "gelu_new": Activation.GELU_TANH, "silu": Activation.SILU}


def read_t5(fields: ConfigFields) -> ModelConfig:
    """T5, T5 1.1, Flan-T5 and mT5: RMSNorm, a relative bias, and unscaled scores."""
    num_positions = fields.raw.get("n_positions", _T5_POSITIONS)
    if type(num_positions) is not int or num_positions < 1:
        raise fields.error("n_positions", num_positions, "expected a whole number of at least 1")
    fields.ignore("n_positions", "feed_forward_proj", "classifier_dropout", "output_past")
    function = fields["dense_act_fn"]
    if function not in _T5_ACTIVATIONS:
        raise fields.error("feed_forward_proj", fields["feed_forward_proj"], "supported: relu, gated-gelu, gated-silu")
    config = read_base(
        fields,
        eps="layer_norm_epsilon",
        activation=_T5_ACTIVATIONS[function],
        intermediate_size=fields.size("d_ff"),
        num_kv_heads=fields.size("num_heads"),
        head_dim=fields.size("d_kv"),
        num_positions=num_positions,
        rope=no_rope(fields.size("d_kv"), num_positions),
    )
    bias = RelativeBias(
        fields.size("relative_attention_num_buckets"), fields.size("relative_attention_max_distance")
    )
    if bias.num_buckets % 4 or bias.max_distance <= bias.num_buckets // 2:
        name = "relative_attention_num_buckets"
        raise fields.error(name, bias.num_buckets, f"with max_distance {bias.max_distance}: expected a multiple of 4")
    parts = replace(config.parts, is_gated=fields.flag("is_gated_act"))
    # T5 1.1 says that its head is not tied, and then its logits are not scaled. mT5's class never scales them.
    if fields.flag("scale_decoder_outputs"):
        parts = replace(parts, logit_multiplier=config.hidden_size**-0.5)
    encoder = EncoderConfig(
        num_layers=fields.size("num_layers", MAX_LAYERS),
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_source_len=num_positions,
        has_final_norm=True,
        vocab_size=config.vocab_size,
    )
    options = AttentionOptions(scale=1.0, relative_bias=bias)
    return _with_encoder(config, parts, options, encoder, fields.size("num_decoder_layers", MAX_LAYERS), has_bias=False)


def read_bart(fields: ConfigFields) -> ModelConfig:
    """BART: norms of sums, and norms of the embeddings."""
    return _read_bart(fields, normalizes_sums=True, has_embedding_norm=True)


def read_mbart(fields: ConfigFields) -> ModelConfig:
    """mBART: norms before attention and the MLP, of the embeddings, and at the end."""
    return _read_bart(fields, normalizes_sums=False, has_embedding_norm=True)


def read_marian(fields: ConfigFields) -> ModelConfig:
    """Marian: norms of sums, and positions by a formula."""
    is_shared = fields.flag("share_encoder_decoder_embeddings")
    if not is_shared:
        fields.only("tie_word_embeddings", True, False)
    vocab_size = fields.get("decoder_vocab_size") or fields.size("vocab_size")
    if is_shared and vocab_size != fields.size("vocab_size"):
        raise fields.error("decoder_vocab_size", vocab_size, f"expected the vocab_size {fields.size('vocab_size')}")
    config = _read_bart(
        fields, normalizes_sums=True, has_embedding_norm=False, positions=SinusoidalPositions(reaches_base=False)
    )
    assert config.encoder is not None
    encoder = replace(config.encoder, has_own_embedding=not is_shared)
    return replace(config, vocab_size=vocab_size, encoder=encoder)


def read_fsmt(fields: ConfigFields) -> ModelConfig:
    """FairSeq's models of translation: norms of sums, positions by a formula, two vocabularies."""
    fields.ignore("langs", "tie_word_embeddings")  # the class ties the decoder's projection, whatever this says
    padding = fields["pad_token_id"]
    if type(padding) is not int or padding < 0:
        raise fields.error("pad_token_id", padding, "expected a token id")
    positions = SinusoidalPositions(reaches_base=True, first_row=padding + 1)
    config = _read_bart(fields, normalizes_sums=True, has_embedding_norm=False, positions=positions)
    assert config.encoder is not None
    encoder = replace(config.encoder, has_own_embedding=True, vocab_size=fields.size("src_vocab_size"))
    parts = replace(config.parts, head_bias=False)
    return replace(config, tie_word_embeddings=True, parts=parts, encoder=encoder)


def read_whisper(fields: ConfigFields) -> ModelConfig:
    """Whisper: an encoder of sound, and learned positions."""
    fields.only("scale_embedding", False)
    fields.ignore(
        *("suppress_tokens", "begin_suppress_tokens", "use_weighted_layer_sum", "classifier_proj_size"),
        *("apply_spec_augment", "median_filter_width", "forced_decoder_ids", "max_length", "alignment_heads"),
        *(f"mask_{kind}_{field}" for kind in ("time", "feature") for field in ("prob", "length", "min_masks")),
    )
    num_rows = fields.size("max_source_positions")
    config = _read_bart(fields, normalizes_sums=False, has_embedding_norm=False, positions_field="max_target_positions")
    assert config.encoder is not None
    parts = replace(config.parts, head_bias=False, learned_position_offset=0, has_key_bias=False)
    encoder = replace(
        config.encoder,
        max_source_len=num_rows,
        num_learned_positions=num_rows,
        vocab_size=0,
        num_mel_bins=fields.size("num_mel_bins"),
    )
    return replace(config, parts=parts, encoder=encoder)


def read_vision_encoder_decoder(fields: ConfigFields) -> ModelConfig:
    """Nougat and Donut: an encoder of pictures, and the decoder of mBART alone."""
    names = "encoder", "decoder"
    inner, kinds = [fields[name] for name in names], ("donut-swin", "mbart")
    for name, each, kind in zip(names, inner, kinds, strict=True):
        if each.model_type != kind:
            raise fields.error(f"{name}.model_type", each.model_type, f"supported: {kind}")
    encoder, decoder = inner
    of_decoder = ConfigFields(fields.family, fields.raw["decoder"], decoder, fields.path)
    of_decoder.ignore("add_cross_attention")
    config = _read_bart(of_decoder, normalizes_sums=False, has_embedding_norm=True)
    of_decoder.check_all_understood()
    swin = _read_swin(ConfigFields(fields.family, fields.raw["encoder"], encoder, fields.path))
    hidden_size = swin.embed_dim * 2 ** (len(swin.depths) - 1)
    if hidden_size != config.hidden_size:
        raise fields.error("encoder.hidden_size", hidden_size, f"expected the decoder's d_model {config.hidden_size}")
    assert config.encoder is not None
    rows = replace(config.encoder, max_source_len=swin.num_outputs, num_learned_positions=0, vocab_size=0, swin=swin)
    return replace(config, parts=replace(config.parts, head_bias=False), encoder=rows)


def _read_swin(fields: ConfigFields) -> SwinConfig:
    fields.only("num_channels", 3)
    fields.only("use_absolute_embeddings", False)
    fields.ignore("drop_path_rate", "path_norm", "num_layers", "hidden_size")
    size, depths, num_heads = fields["image_size"], fields["depths"], fields["num_heads"]
    height, width = (size, size) if isinstance(size, int) else size
    if not 1 <= len(depths) <= 8 or len(num_heads) != len(depths) or not 1 <= min(depths) <= max(depths) <= MAX_LAYERS:
        raise fields.error("depths", depths, f"expected up to 8 numbers, as many as num_heads {num_heads}")
    if fields["hidden_act"] != "gelu":
        raise fields.unsupported("hidden_act", fields["hidden_act"], "gelu")
    swin = SwinConfig(
        height=height,
        width=width,
        patch_size=fields.size("patch_size"),
        embed_dim=fields.size("embed_dim"),
        depths=tuple(depths),
        num_heads=tuple(num_heads),
        window_size=fields.size("window_size"),
        mlp_ratio=float(fields["mlp_ratio"]),
        has_qkv_bias=fields.flag("qkv_bias"),
        activation=Activation.GELU,
        norm_eps=float(fields["layer_norm_eps"]),
    )
    smallest = min(swin.grid(len(depths) - 1))
    if smallest < swin.window_size:
        raise fields.error("window_size", swin.window_size, f"expected at most the last stage's {smallest} rows")
    for stage, count in enumerate(num_heads):
        if swin.embed_dim * 2**stage % count:
            raise fields.error("num_heads", num_heads, f"expected divisors of {swin.embed_dim} and its doubles")
    fields.check_all_understood()
    return swin


def _read_bart(
    fields: ConfigFields,
    *,
    normalizes_sums: bool,
    has_embedding_norm: bool,
    positions: SinusoidalPositions | None = None,
    positions_field: str = "max_position_embeddings",
) -> ModelConfig:
    """A model with biases, LayerNorm, and no gates. `positions`: None: tables of the checkpoint."""
    fields.ignore("forced_eos_token_id", "forced_bos_token_id", "static_position_embeddings", "normalize_embedding")
    fields.ignore("max_length", "num_beams", "length_penalty", "early_stopping", "encoder_layerdrop")
    fields.ignore("decoder_layerdrop", "add_final_layer_norm", "normalize_before", "add_bias_logits")
    hidden, num_heads = fields.size("d_model"), fields.size("decoder_attention_heads")
    num_encoder_heads, num_positions = fields.size("encoder_attention_heads"), fields.size(positions_field)
    for name, count in (("decoder_attention_heads", num_heads), ("encoder_attention_heads", num_encoder_heads)):
        if hidden % count:
            raise fields.error(name, count, f"expected a divisor of d_model {hidden}")
    config = read_base(
        fields,
        eps=1e-5,
        activation="activation_function",
        intermediate_size=fields.size("decoder_ffn_dim"),
        num_kv_heads=num_encoder_heads,  # as many as the class calls the model's heads
        head_dim=hidden // num_heads,
        num_positions=num_positions,
        rope=no_rope(hidden // num_heads, num_positions),
    )
    parts = replace(
        config.parts,
        norm=NormKind.LAYER,
        is_gated=False,
        num_learned_positions=num_positions if positions is None else 0,
        learned_position_offset=2,  # after the rows of two special tokens
        sinusoidal_positions=positions,
        has_embedding_norm=has_embedding_norm,
        residual=ResidualKind.NORMED if normalizes_sums else ResidualKind.SEQUENTIAL,
        has_norms_before=not normalizes_sums,
        head_bias=True,
        embedding_multiplier=hidden**0.5 if fields.flag("scale_embedding") else 1.0,
        is_multiplier_of_table=True,
    )
    encoder = EncoderConfig(
        num_layers=fields.size("encoder_layers", MAX_LAYERS),
        num_heads=num_encoder_heads,
        head_dim=hidden // num_encoder_heads,
        intermediate_size=fields.size("encoder_ffn_dim"),
        max_source_len=num_positions,
        has_final_norm=not normalizes_sums,
        num_learned_positions=num_positions if positions is None else 0,
        vocab_size=fields.size("vocab_size"),
    )
    config = replace(config, num_heads=num_heads, num_kv_heads=num_heads)
    num_layers = fields.size("decoder_layers", MAX_LAYERS)
    return _with_encoder(config, parts, AttentionOptions(), encoder, num_layers, has_bias=True)


def _with_encoder(
    config: ModelConfig,
    parts: LayerParts,
    options: AttentionOptions,
    encoder: EncoderConfig,
    num_layers: int,
    *,
    has_bias: bool,
) -> ModelConfig:
    """The model with twice as many layers, of self attention and of cross attention by turns."""
    heads = LayerHeads(config.num_heads, config.num_kv_heads, config.head_dim)
    num_strokes = 2 * num_layers
    attention = replace(
        options,
        layer_ropes=(None,) * num_strokes,
        layer_heads=(heads, replace(heads, is_cross=True)) * num_layers,
    )
    return replace(
        config,
        num_layers=num_strokes,
        sliding_windows=(None,) * num_strokes,
        parts=parts,
        attention=attention,
        encoder=encoder,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
    )
