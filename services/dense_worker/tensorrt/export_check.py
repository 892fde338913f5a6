"""`export --test`: compares a generation by the exported segments with one by Hugging Face, on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from services.common.errors import ConfigError, ModelError
from services.common.model_config import ModelConfig
from services.dense_worker.backends import DenseBackend

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "seed_oss", "olmo2", "starcoder2")  # with `OneSequenceAttention`


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two greedy continuations of one prompt."""

    expected_ids: list[int]  # from Hugging Face
    found_ids: list[int]
    expected_text: str  # prompt included
    found_text: str

    @property
    def first_difference(self) -> int | None:
        """Index of the first different token; None if the continuations are equal."""
        if self.expected_ids == self.found_ids:
            return None
        pairs = zip(self.expected_ids, self.found_ids, strict=False)
        equal = (index for index, (expected, found) in enumerate(pairs) if expected != found)
        return next(equal, min(len(self.expected_ids), len(self.found_ids)))


def compare_with_hugging_face(
    path: Path, config: ModelConfig, dtype: torch.dtype, backend: DenseBackend, text: str, max_tokens: int
) -> Comparison:
    """Continues `text` by up to `max_tokens` tokens in both ways.

    Raises ModelError if there is no tokenizer, ConfigError for a family whose attention differs from Llama's.
    """
    if config.family not in _FAMILIES:
        raise ConfigError(f"--test computes attention as {', '.join(_FAMILIES)} do, not as {config.family!r} does")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has no tokenizer that transformers can load: {error}") from error
    prompt = tokenizer(text)["input_ids"]
    if not prompt:
        raise ModelError(f"--input {text!r} has no tokens: nothing to continue")
    model = load_hugging_face(path, config, dtype)
    with torch.inference_mode():
        expected = _generate(model, config, prompt, max_tokens)
        found = greedy(backend, OneSequenceAttention(model, config), config, dtype, prompt, max_tokens)
    texts = (tokenizer.decode(prompt + output, skip_special_tokens=True) for output in (expected, found))
    return Comparison(expected, found, *texts)


def load_hugging_face(path: Path, config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model in transformers, with only the first `config.num_layers` layers."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True, trust_remote_code=False
    ).eval()
    model.config.num_hidden_layers = config.num_layers
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = model.config.layer_types[: config.num_layers]
    return model


def greedy(
    backend: DenseBackend,
    attention: OneSequenceAttention,
    config: ModelConfig,
    dtype: torch.dtype,
    prompt: list[int],
    max_tokens: int,
    device: torch.device | None = None,
) -> list[int]:
    """The greedy continuation, up to and including an EOS token. On the CPU by default."""
    output: list[int] = []
    token_ids = torch.tensor(prompt, device=device)
    while len(output) < max_tokens and not (output and output[-1] in config.eos_token_ids):
        qkv = torch.empty(len(token_ids), config.qkv_size, dtype=dtype, device=device)
        residual = backend.first(token_ids, qkv)
        for layer in range(config.num_layers - 1):
            residual = backend.middle(layer, attention(layer, qkv), residual, qkv)
        attn_out = attention(config.num_layers - 1, qkv)
        logits = backend.last(attn_out, residual, torch.tensor([len(token_ids) - 1], device=device))
        output.append(int(logits.argmax()))
        token_ids = torch.tensor(output[-1:], device=device)
    return output


class OneSequenceAttention:
    """The attention stroke for one sequence on the device of `model`, with its rotary embedding."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self._rotary = model.model.rotary_emb
        self._config = config
        self._keys: dict[int, torch.Tensor] = {}  # by layer, [num_kv_heads, num_tokens, head_dim]
        self._values: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """The attention of the sequence's next tokens: qkv [n, qkv_size] -> attn_out [n, attn_size]."""
        config = self._config
        heads = qkv.unflatten(1, (-1, config.head_dim)).transpose(0, 1)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        past = self._keys[layer].shape[1] if layer in self._keys else 0
        length = past + len(qkv)
        positions = torch.arange(past, length, device=qkv.device)
        cos, sin = (table[0] for table in self._rotary(qkv, positions[None]))
        k = _rotated(k, cos, sin)
        if past:
            k, v = torch.cat([self._keys[layer], k], dim=1), torch.cat([self._values[layer], v], dim=1)
        self._keys[layer], self._values[layer] = k, v.clone()
        distance = positions[:, None] - torch.arange(length, device=qkv.device)
        visible = (distance >= 0) & (distance < (config.sliding_windows[layer] or length))
        q = _rotated(q, cos, sin)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return attended.transpose(0, 1).flatten(1).contiguous()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _generate(model: PreTrainedModel, config: ModelConfig, prompt: list[int], max_tokens: int) -> list[int]:
    """Generates greedily, whatever the model's generation_config.json says."""
    eos = list(config.eos_token_ids) or None
    settings = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0)
    token_ids = torch.tensor([prompt])
    output = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), generation_config=settings)
    return output[0, len(prompt) :].tolist()
