"""EAGLE-3 heads: checkpoints, and what they draft by the formula of the paper (arXiv:2503.01840), without a cache.

Everything is computed anew for each draft, from the hidden states of Hugging Face's model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from services.common.config import EMBEDDED_MODEL
from services.dense_worker.sampling import gumbel
from tests.support.reference import VOCAB_SIZE, reference_model

Tensors = dict[str, torch.Tensor]
THETA = 10000.0


@dataclass(frozen=True)
class PlainHead:
    """A head with its own tensors, by the names of EAGLE's checkpoints."""

    tensors: Tensors
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[int, int, int]  # the residuals before these layers are read
    eps: float = 1e-6
    norm_before_residual: bool = False

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.tensors[f"{name}.weight"]

    def times(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, head_dim]: each dimension and that half a head away are a complex number, which is turned."""
        half = self.head_dim // 2
        speeds = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
        turns = torch.polar(torch.ones(1, dtype=torch.float64), (positions[:, None] * speeds))[:, None]
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns
        return torch.cat((turned.real, turned.imag), dim=-1).float()

    def layer(self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """embedding, hidden [n, hidden], positions int64 [n], rising -> the layer's output [hidden] of the last row."""
        normed = self.norm("midlayer.hidden_norm", hidden)
        both = torch.cat((self.norm("midlayer.input_layernorm", embedding), normed), dim=-1)
        q, k, v = (
            self.times(f"midlayer.self_attn.{name}_proj", both).view(len(both), -1, self.head_dim) for name in "qkv"
        )
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        of_heads = []
        for head in range(self.num_heads):
            kv = head * self.num_kv_heads // self.num_heads
            scores = k[:, kv] @ q[-1, head] / self.head_dim**0.5
            of_heads.append(scores.softmax(0) @ v[:, kv])
        attended = self.times("midlayer.self_attn.o_proj", torch.cat(of_heads))
        x = (normed if self.norm_before_residual else hidden)[-1] + attended
        y = self.norm("midlayer.post_attention_layernorm", x)
        gate, up = self.times("midlayer.mlp.gate_proj", y), self.times("midlayer.mlp.up_proj", y)
        return x + self.times("midlayer.mlp.down_proj", gate * torch.sigmoid(gate) * up)

    def logits(self, output: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """output [hidden] -> [vocab_size], -inf for tokens that the head does not have."""
        own = self.times("lm_head", self.norm("norm", output))
        if "d2t" not in self.tensors:
            return own
        logits = torch.full((vocab_size,), -torch.inf)
        for token, offset in enumerate(self.tensors["d2t"].tolist()):
            logits[token + offset] = own[token]
        return logits

    @torch.inference_mode()
    def join(self, model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
        """The hidden states [n, hidden] of these tokens, of Hugging Face's residuals."""
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return self.times("fc", torch.cat([states[layer][0] for layer in self.layers], dim=-1))

    @torch.inference_mode()
    def output(self, table: torch.Tensor, hidden: list[torch.Tensor], text: list[int], start: int = 0) -> torch.Tensor:
        """The layer's output [hidden] for the last of these hidden states; from it the token after `text` is drafted.

        table: the embedding; start: the position of the first hidden state
        """
        positions = torch.arange(start, start + len(hidden))
        return self.layer(table[text[start + 1 :]], torch.stack(hidden), positions)

    @torch.inference_mode()
    def draft(
        self,
        model: PreTrainedModel,
        text: list[int],
        num_tokens: int,
        start: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> tuple[int, ...]:
        """How the head continues the text, whose last token the model has just sampled.

        start: position of the first token whose residuals the head knows; temperature, seed: with the served model's
        noise
        """
        table = self.tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
        hidden, text = [*self.join(model, text[:-1])[start:]], list(text)
        for _ in range(num_tokens):
            hidden.append(self.output(table, hidden, text, start))
            text.append(draw(self.logits(hidden[-1], len(table)), len(text), temperature, seed))
        return tuple(text[-num_tokens:])


def draw(logits: torch.Tensor, position: int, temperature: float, seed: int) -> int:
    """The token that the sampler takes at this position."""
    if temperature == 0.0:
        return int(logits.argmax())
    key = np.array([seed], np.uint64), np.array([position], np.uint64)
    return int(gumbel.draw(logits[None], np.array([temperature], np.float32), *key))


def random_head(
    hidden_size: int,
    vocab_size: int,
    *,
    layers: tuple[int, int, int],
    draft_vocab_size: int | None = None,
    has_embedding: bool = False,
    norm_before_residual: bool = False,
    seed: int = 0,
) -> PlainHead:
    """A head of 4 q heads and 2 k heads, whose draft vocabulary is spread over the whole one."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim, intermediate = 4, 2, 16, 96

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 0.5 + 0.3 * torch.randn(hidden_size, generator=generator)

    tensors = {
        "fc.weight": random(hidden_size, 3 * hidden_size),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        # Attention to few tokens, which says much: so a token that is missing or wrong changes the drafts.
        "midlayer.self_attn.q_proj.weight": 3 * random(num_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.k_proj.weight": random(num_kv_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.v_proj.weight": random(num_kv_heads * head_dim, 2 * hidden_size),
        "midlayer.self_attn.o_proj.weight": 4 * random(hidden_size, num_heads * head_dim),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": random(intermediate, hidden_size),
        "midlayer.mlp.up_proj.weight": random(intermediate, hidden_size),
        "midlayer.mlp.down_proj.weight": random(hidden_size, intermediate),
        "norm.weight": norm(),
        "lm_head.weight": random(draft_vocab_size or vocab_size, hidden_size),
    }
    if has_embedding:
        tensors["embed_tokens.weight"] = random(vocab_size, hidden_size) * hidden_size**0.5
    if draft_vocab_size is not None:
        ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), ids)
    return PlainHead(tensors, num_heads, num_kv_heads, head_dim, layers, norm_before_residual=norm_before_residual)


def config_of(head: PlainHead, vocab_size: int) -> dict[str, Any]:
    """config.json, as published heads have it."""
    tensors = head.tensors
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": len(tensors["norm.weight"]),
        "intermediate_size": len(tensors["midlayer.mlp.up_proj.weight"]),
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.eps,
        "rope_theta": THETA,
        "max_position_embeddings": 2048,
        "vocab_size": vocab_size,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": list(head.layers),
    }


def config_of_speculators(head: PlainHead, vocab_size: int) -> dict[str, Any]:
    """config.json, as `speculators` writes it."""
    layer = config_of(head, vocab_size)
    own = {name: layer.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    return own | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": head.norm_before_residual,
        "target_hidden_size": None,
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]},
    }


def in_layout_of_vllm(head: PlainHead) -> Tensors:
    """The names of vLLM and `speculators`."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}


def write_head(path: Path, tensors: Tensors, config: dict[str, Any], file: str = "model.safetensors") -> Path:
    """Writes a directory with config.json and these tensors; returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path / file)
    return path


@torch.inference_mode()
def head_that_knows(path: Path, prompt: str, answer: list[int], num_drafts: int) -> Path:
    """A head of the embedded model, in the directory `path`, that drafts all but the last tokens of one answer right.

    Its layer is random. Least squares fit the projection to the tokens that follow; it has no others.
    """
    model = reference_model(EMBEDDED_MODEL)
    table = model.get_input_embeddings().weight
    known = torch.tensor(sorted(set(answer)))
    head = random_head(table.shape[1], VOCAB_SIZE, layers=(1, 2, 3), draft_vocab_size=len(known))
    prompt_ids = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).encode(prompt)
    joined = head.join(model, prompt_ids + answer)
    features, wanted = [], []
    for num_tokens in range(1, len(answer) - num_drafts + 1):
        text = prompt_ids + answer[:num_tokens]
        hidden = [*joined[: len(text) - 1]]
        for token_id in answer[num_tokens : num_tokens + num_drafts]:
            hidden.append(head.output(table, hidden, text))
            features.append(head.norm("norm", hidden[-1]))
            wanted.append(token_id)
            text.append(token_id)
    assert len(features) <= table.shape[1], "so many can be told apart"
    is_wanted = (torch.tensor(wanted)[:, None] == known).double()
    head.tensors["lm_head.weight"] = torch.linalg.lstsq(torch.stack(features).double(), is_wanted).solution.T.float()
    head.tensors["d2t"] = known - torch.arange(len(known))
    head.tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), known)
    return write_head(path, head.tensors, config_of(head, VOCAB_SIZE))
