"""Segments and TorchBackend, compared with whole transformers models. The test computes attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.segments import behind_lookup, bind_weights, segments_of
from services.dense_worker.model.torch_operations import TorchOperations
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt.onnx_segments import TracedSegment
from tests.support.models import FAMILIES, make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
NUM_TOKENS = 13
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    ("llama", {"num_hidden_layers": 1}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 32, "tie_word_embeddings": True}),
]


class HuggingFaceAttention:
    """Attention for one sequence, by the rotary module of transformers and torch's SDPA."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self.model, self.config = model, config

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv [n, qkv_size] -> [n, attn_size]."""
        config, n = self.config, len(qkv)
        heads = qkv.unflatten(1, (-1, config.head_dim)).transpose(0, 1)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        positions = torch.arange(n)
        cos, sin = (table[0] for table in self.model.model.rotary_emb(qkv, positions[None]))

        def rotated(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-second, first], dim=-1) * sin

        distance = positions[:, None] - positions[None, :]
        visible = (distance >= 0) & (distance < (config.sliding_windows[layer] or n))
        out = F.scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=visible, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def load_truth(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()


def logits_by_backend(
    path: Path, model: PreTrainedModel, token_ids: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Runs one step of the backend with buffers like a channel's: larger than the step, with old contents."""
    config = load_model_config(path)
    backend = TorchBackend(load_weights(path, config, dtype, CPU))
    attention = HuggingFaceAttention(model, config)
    n = len(token_ids)
    channel_qkv = torch.full((n + 3, config.qkv_size), torch.nan, dtype=dtype)
    channel_attn_out = torch.full((n + 3, config.attn_size), torch.nan, dtype=dtype)
    qkv, attn_out = channel_qkv[:n], channel_attn_out[:n]
    residual = backend.first(token_ids, qkv)
    for layer in range(config.num_layers):
        attn_out.copy_(attention(layer, qkv))
        if layer + 1 < config.num_layers:
            residual = backend.middle(layer, attn_out, residual, qkv)
    logits = backend.last(attn_out, residual, rows)
    assert channel_qkv[n:].isnan().all()
    return logits


def random_prompt() -> torch.Tensor:
    return torch.randint(160, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_backend_gives_the_logits_of_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any], mode: type[AbstractContextManager]
) -> None:
    path = make_model_dir(tmp_path, family, **fields)
    model, token_ids = load_truth(path), random_prompt()
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0]
    with mode(), torch.no_grad():
        found = logits_by_backend(path, model, token_ids, torch.arange(NUM_TOKENS), torch.float32)
    assert found.dtype == torch.float32
    # In float32 only the order of sums differs. The standard deviation of the logits is 0.6 to 0.9.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def root_mean_square(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_accurate_as_transformers(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    path = make_model_dir(tmp_path, family)
    model, token_ids = load_truth(path, dtype), random_prompt()
    with torch.inference_mode():
        exact = load_truth(path).to(dtype).float()(token_ids[None]).logits[0]
        expected = model(token_ids[None]).logits[0].float()
        found = logits_by_backend(path, model, token_ids, torch.arange(NUM_TOKENS), dtype)
    # Both round after the same operations, but another order of sums changes the last bits. So both must be equally
    # close to float32 arithmetic with the same rounded weights, and to each other. Root mean squares are compared,
    # because single logits scatter. Over several seeds the ratios were 0.84 to 1.22.
    transformers_error = root_mean_square(expected - exact)
    assert root_mean_square(found - exact) <= 1.4 * transformers_error
    assert root_mean_square(found - expected) <= 1.4 * transformers_error
    assert found.dtype == torch.float32


def test_last_computes_only_the_requested_rows(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "qwen2")
    model, token_ids = load_truth(path), random_prompt()
    rows = torch.tensor([NUM_TOKENS - 1, 4, 4])
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0][rows]
        found = logits_by_backend(path, model, token_ids, rows, torch.float32)
        none = logits_by_backend(path, model, token_ids, rows[:0], torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert none.shape == (0, 160)


def test_shortened_model_equals_transformers_with_fewer_layers(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "qwen3")
    model, token_ids = load_truth(path), random_prompt()
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    config = load_model_config(path, num_layers=2)
    backend = TorchBackend(load_weights(path, config, torch.float32, CPU))
    attention = HuggingFaceAttention(model, config)
    qkv = torch.empty(NUM_TOKENS, config.qkv_size)
    with torch.inference_mode():
        expected = model(token_ids[None], use_cache=False).logits[0]
        residual = backend.first(token_ids, qkv)
        residual = backend.middle(0, attention(0, qkv), residual, qkv)
        found = backend.last(attention(1, qkv), residual, torch.arange(NUM_TOKENS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_qkv_written_in_place_equals_returned_qkv(tmp_path: Path, family: str) -> None:
    path = make_model_dir(tmp_path, family)
    config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    segments, operations = segments_of(weights), TorchOperations()
    attn_out, residual = torch.randn(2, NUM_TOKENS, config.attn_size).unbind()
    kept = attn_out.clone(), residual.clone()
    calls = [
        (segments.first, (random_prompt(),)),
        (segments.middle[1], (attn_out, residual)),
    ]
    for segment, inputs in calls:
        qkv_out = torch.empty(NUM_TOKENS, config.qkv_size)
        in_place, residual_beside = segment.forward(operations, *inputs, qkv_out=qkv_out)
        returned, residual_alone = segment.forward(operations, *inputs)
        assert in_place.data_ptr() == qkv_out.data_ptr()
        torch.testing.assert_close(qkv_out, returned, rtol=1e-6, atol=1e-6)
        assert torch.equal(residual_beside, residual_alone)
    assert torch.equal(attn_out, kept[0]) and torch.equal(residual, kept[1])


def test_weight_names_list_the_inputs_in_order(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "qwen3", attention_bias=True)
    config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    tensors = dict(weights.named_tensors())
    before = ["input_norm", "qkv_weight", "qkv_bias", "q_norm", "k_norm"]
    after = ["o_weight", "o_bias", "post_norm", "gate_up_weight", "down_weight"]
    expected = {
        "first": [f"layers.0.{name}" for name in before],
        "middle": [f"layers.1.{name}" for name in after] + [f"layers.2.{name}" for name in before],
        "last": [f"layers.2.{name}" for name in after] + ["final_norm", "lm_head"],
    }
    parts, bound = segments_of(weights), bind_weights(weights)
    for name, segment in (("first", behind_lookup(parts.first)), ("middle", parts.middle[1]), ("last", parts.last)):
        names, selected = expected[name], bound[name][-1]
        segment = TracedSegment(segment)
        assert list(segment.weight_names) == list(selected) == [name.split(".")[-1] for name in names]
        assert [tensor.data_ptr() for tensor in selected.values()] == [tensors[name].data_ptr() for name in names]
        assert not list(segment.parameters()) and not list(segment.buffers())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_segments_export_for_any_number_of_tokens(tmp_path: Path, family: str) -> None:
    path = make_model_dir(tmp_path, family)
    config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    middle = TracedSegment(segments_of(weights).middle[0])
    selected = tuple(bind_weights(weights)["middle"][0].values())
    tokens = torch.export.Dim("tokens", min=2, max=64)
    inputs = (torch.randn(4, config.attn_size), torch.randn(4, config.hidden_size), *selected)
    dynamic = {"inputs": ({0: tokens}, {0: tokens}, *(None for _ in selected))}
    exported = torch.export.export(middle, inputs, dynamic_shapes=dynamic).module()
    inputs = (torch.randn(37, config.attn_size), torch.randn(37, config.hidden_size), *selected)
    for found, expected in zip(exported(*inputs), middle(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
