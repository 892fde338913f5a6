"""Variants of families without a class in transformers: a tiny model of another family, whose tensors are rearranged.

The model itself is the truth. It is kept in a directory beside the rearranged files, see `family_models`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Renamed:
    """How the files of a family are made of those of another family's model."""

    model_type: str  # of the other family
    architecture: str
    fields: Callable[[PretrainedConfig], dict[str, Any]]  # of config.json, besides model_type and architectures
    tensors: Callable[[Tensors, PretrainedConfig], Tensors]
    prepare: Callable[[PreTrainedModel], None] = lambda model: None  # changes the weights first


def like_llama(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of config.json that Llama, Baichuan, InternLM and others spell alike."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
    )
    return {name: getattr(config, name) for name in names} | {"rope_theta": config.rope_parameters["rope_theta"]}


def renamed(tensors: Tensors, *names: tuple[str, str]) -> Tensors:
    """With the first of each pair replaced by the second in the tensors' names."""
    result = {}
    for name, tensor in tensors.items():
        for old, new in names:
            name = name.replace(old, new)
        result[name] = tensor
    return result


def merged(tensors: Tensors, own: tuple[str, ...], into: str) -> Tensors:
    """With the tensors of these modules of each layer in one, row after row."""
    result = dict(tensors)
    for name in tensors:
        if own[0] in name:
            parts = [result.pop(name.replace(own[0], each)) for each in own]
            result[name.replace(own[0], into)] = torch.cat(parts)
    return result


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def baichuan_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    return merged(tensors, _QKV, "self_attn.W_pack")


def baichuan_13b_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {
        ("model_max_length" if name == "max_position_embeddings" else name): value
        for name, value in like_llama(config).items()
        if name not in ("rope_theta", "num_key_value_heads")
    }


def chatglm_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "padded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "kv_channels": config.head_dim,
        "num_attention_heads": config.num_attention_heads,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "seq_length": config.max_position_embeddings,
        "layernorm_epsilon": config.rms_norm_eps,
        "rope_ratio": config.rope_parameters["rope_theta"] / 1e4,
        "add_qkv_bias": True,
        **dict.fromkeys(("rmsnorm", "post_layer_norm", "original_rope"), True),
        **dict.fromkeys(("add_bias_linear", "apply_residual_connection_post_layernorm"), False),
        **dict.fromkeys(("apply_query_key_layer_scaling", "attention_softmax_in_fp32"), True),
        "tie_word_embeddings": False,
    }


def chatglm_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    found = renamed(
        merged(tensors, _QKV, "self_attention.query_key_value"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.norm", "transformer.encoder.final_layernorm"),
        ("model.layers", "transformer.encoder.layers"),
        ("lm_head", "transformer.output_layer"),
    )
    return found | {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}


def internlm2_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Each kv head after its q heads in one tensor."""
    found = renamed(
        tensors,
        ("model.embed_tokens", "model.tok_embeddings"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("lm_head", "output"),
    )
    for name in [name for name in found if _QKV[0] in name]:
        q, k, v = (found.pop(name.replace(_QKV[0], each)) for each in _QKV)
        groups = [part.unflatten(0, (config.num_key_value_heads, -1)) for part in (q, k, v)]
        found[name.replace(_QKV[0], "attention.wqkv")] = torch.cat(groups, dim=1).flatten(0, 1).contiguous()
    return found


def qwen_fields(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **like_llama(config),
        "intermediate_size": 2 * config.intermediate_size,
        "max_position_embeddings": 4 * config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "layer_norm_epsilon": config.rms_norm_eps,
        "rotary_emb_base": config.rope_parameters["rope_theta"],
        "kv_channels": config.hidden_size // config.num_attention_heads,
        **dict.fromkeys(("use_dynamic_ntk", "use_logn_attn", "no_bias", "scale_attn_weights"), True),
        "rotary_pct": 1.0,
    }


def qwen_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    return renamed(
        merged(tensors, _QKV, "attn.c_attn"),
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp.gate_proj", "mlp.w2"),
        ("mlp.up_proj", "mlp.w1"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("model.embed_tokens", "transformer.wte"),
        ("model.norm", "transformer.ln_f"),
        ("model.layers", "transformer.h"),
    )


MPT_KV_HEADS = 2


def mpt_fields(config: PretrainedConfig) -> dict[str, Any]:
    names = ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size", "no_bias", "tie_word_embeddings")
    options = {"attn_type": "grouped_query_attention", "kv_n_heads": MPT_KV_HEADS, "alibi": True}
    return {name: getattr(config, name) for name in names} | {"attn_config": options}


def repeat_kv_heads(model: PreTrainedModel) -> None:
    """Gives the heads of a group the same keys and values."""
    num_heads = model.config.n_heads
    for block in model.transformer.blocks:
        heads = block.attn.Wqkv.weight.data.unflatten(0, (3, MPT_KV_HEADS, num_heads // MPT_KV_HEADS, -1))
        heads[1:] = heads[1:, :, :1]


def mpt_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    found = dict(tensors)
    for name in [name for name in found if "Wqkv" in name]:
        q, k, v = found[name].unflatten(0, (3, MPT_KV_HEADS, config.n_heads // MPT_KV_HEADS, -1))
        found[name] = torch.cat([q.flatten(0, 2), k[:, 0].flatten(0, 1), v[:, 0].flatten(0, 1)])
    return found


def as_they_are(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    return dict(tensors)


RENAMED: dict[str, Renamed] = {  # by name of the variant
    "baichuan-7b": Renamed("llama", "BaiChuanForCausalLM", like_llama, baichuan_tensors),
    "baichuan-13b": Renamed("llama", "BaichuanForCausalLM", baichuan_13b_fields, baichuan_tensors),
    "chatglm": Renamed("glm", "ChatGLMModel", chatglm_fields, chatglm_tensors),
    "internlm": Renamed(
        "llama",
        "InternLMForCausalLM",
        lambda config: like_llama(config) | {"bias": True, "rotary": {"type": "dynamic", "base": 5e4}},
        as_they_are,
    ),
    "internlm2": Renamed(
        "llama", "InternLM2ForCausalLM", lambda config: like_llama(config) | {"bias": False}, internlm2_tensors
    ),
    "kimi_k2": Renamed("deepseek_v3", "DeepseekV3ForCausalLM", lambda config: config.to_dict(), as_they_are),
    "mpt-grouped": Renamed("mpt", "MPTForCausalLM", mpt_fields, mpt_tensors, repeat_kv_heads),
    "qwen": Renamed("qwen2", "QWenLMHeadModel", qwen_fields, qwen_tensors),
    "skywork": Renamed("llama", "SkyworkForCausalLM", like_llama, as_they_are),
}


class AlibiLlama(LlamaForCausalLM):
    """A Llama without rotation, whose scores get ALiBi's bias (arXiv:2108.12409) for a power of two of heads."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """For one sequence. Masks and positions that are given are not used."""
        num_heads, given = self.config.num_attention_heads, input_ids if inputs_embeds is None else inputs_embeds
        num_tokens = given.shape[1]
        past = options.get("past_key_values")
        num_cached = 0 if past is None else past.get_seq_length()
        keys = torch.arange(num_cached + num_tokens, device=self.device)
        distances = (keys - keys[num_cached:, None]).float()
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)], device=self.device)
        mask = (slopes[:, None, None] * distances).masked_fill(distances > 0, -torch.inf)
        options["attention_mask"] = mask[None].to(self.dtype)
        options["position_ids"] = torch.zeros(1, num_tokens, dtype=torch.int64, device=self.device)
        return super().forward(input_ids, inputs_embeds=inputs_embeds, **options)
