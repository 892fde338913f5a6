"""StreamingLLM by the description in arXiv:2309.17453: a cache of unrotated keys, rotated by their places in it.

One token at a time, without blocks, masks or batches.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.support.reference import reference_model


def streaming_attention(
    q: torch.Tensor,  # [num_heads, length, head_dim], not rotated
    k: torch.Tensor,  # [num_kv_heads, length, head_dim], not rotated
    v: torch.Tensor,
    rotary: LlamaRotaryEmbedding,
    num_sink_tokens: int,
    window: int,
    first: int = 0,
) -> torch.Tensor:
    """The attention of the tokens from `first` on, [length - first, num_heads * head_dim], in float64 after rotation.

    When token t is computed, the cache holds the first `num_sink_tokens` tokens and the last `window`, t included.
    """
    repeats = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeats, dim=0), v.repeat_interleave(repeats, dim=0)
    outputs = []
    for t in range(first, q.shape[1]):
        recent_from = max(0, t + 1 - window)
        cached = [*range(min(num_sink_tokens, recent_from)), *range(recent_from, t + 1)]
        places = torch.arange(len(cached))[None]
        cos, sin = rotary(q, places)
        _, keys = apply_rotary_pos_emb(k[None, :, cached], k[None, :, cached], cos, sin)
        query, _ = apply_rotary_pos_emb(q[None, :, t : t + 1], q[None, :, t : t + 1], cos[:, -1:], sin[:, -1:])
        scores = query[0].double() @ keys[0].double().transpose(1, 2) / q.shape[-1] ** 0.5
        outputs.append((scores.softmax(-1) @ v[:, cached].double())[:, 0].flatten())
    return torch.stack(outputs)


@torch.inference_mode()
def streaming_tokens(
    path: Path, prompt: list[int], max_tokens: int, num_sink_tokens: int, window: int
) -> list[int]:
    """The greedy tokens of a Llama whose attention is `streaming_attention`; all else is by transformers."""
    llama = reference_model(path)
    head_dim, rotary = llama.config.head_dim, llama.model.rotary_emb
    caches = [[torch.empty(0)] * 3 for _ in llama.model.layers]  # q, k, v of all tokens, [heads, length, head_dim]
    tokens, num_computed = list(prompt), 0
    while len(tokens) < len(prompt) + max_tokens:
        hidden = llama.model.embed_tokens(torch.tensor(tokens[num_computed:]))
        for layer, cache in zip(llama.model.layers, caches, strict=True):
            normed, attention = layer.input_layernorm(hidden), layer.self_attn
            for index, project in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
                new = project(normed).unflatten(-1, (-1, head_dim)).transpose(0, 1)
                cache[index] = torch.cat((cache[index], new), dim=1) if num_computed else new
            attended = streaming_attention(*cache, rotary, num_sink_tokens, window, first=num_computed)
            hidden = hidden + attention.o_proj(attended.float())
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        num_computed = len(tokens)
        tokens.append(int(llama.lm_head(llama.model.norm(hidden[-1])).argmax()))
    return tokens[len(prompt) :]
