"""`CheckpointNames`: what the modules of a family are called in its checkpoints."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

# Wrappers around the text part of a model of text and images, old and new spelling, and what takes their place.
_WRAPPERS = {"model.language_model.": "model.", "language_model.": ""}
# Constants of old files, and the scales of a quantized KV cache.
_CONSTANT = re.compile(
    r".*(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias|\.attention\.bias|\.[qkv]_scale|\.[kv]_proj\.output_scale)$"
)


class FusedHeads(enum.Enum):
    """The order of the heads in a fused projection of q, k and v."""

    BY_KIND = "by_kind"  # all q heads, all k heads, all v heads
    BY_KV_HEAD = "by_kv_head"  # the q heads of a kv head, its k head, its v head; then the next kv head


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names of modules. Those of a layer are relative to the layer; the defaults are Llama's."""

    base: str = "model"  # the first part of most names, which some files leave out
    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    positions: str = ""  # the table of learned positions
    layers: str = "model.layers"  # the number of the layer follows
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one fused projection
    fused_heads: FusedHeads = FusedHeads.BY_KIND
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    norm_after_attention: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one: fused, or without a gate
    down: str = "mlp.down_proj"
    norm_after_mlp: str = "post_feedforward_layernorm"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    has_transposed_weights: bool = False  # of the linear layers, [in_features, out_features]

    def canonical(self, name: str) -> str:
        """The name of a tensor as this page spells it, without wrappers and with the base."""
        for wrapper, instead in _WRAPPERS.items():
            if name.startswith(wrapper):
                name = instead + name.removeprefix(wrapper)
        return name if name.startswith((f"{self.base}.", f"{self.head}.")) else f"{self.base}.{name}"

    def layer_of(self, name: str) -> int | None:
        """The layer that a canonical name belongs to; None for no layer, and for what no model reads."""
        found = re.match(rf"{re.escape(self.layers)}\.(\d+)\.", name)
        return int(found[1]) if found and not _CONSTANT.match(name) else None


_LLAMA = CheckpointNames()

NAMES: dict[str, CheckpointNames] = {  # by `ModelConfig.family`
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
}
