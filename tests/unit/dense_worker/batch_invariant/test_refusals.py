"""What `dense.deterministic` does not cover is refused at start, by name and with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from services.attn_worker.layers.select import select_backend
from services.common.config import AttentionSection, DenseSection, ModelSection
from services.common.errors import ConfigError
from services.common.quantization.schemes import on_the_fly_fp8
from services.common.resolve import ResolvedModel, resolve_model
from services.dense_worker.backends.select import prepare_backend
from services.dense_worker.batch_invariant.check import check_batch_invariance
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.dense.family_models import make_family_model
from tests.support.model_configs import write_config

GPU = torch.device("cuda", 0)


def resolve(path: Path, attention: AttentionSection | None = None, device: torch.device | None = None) -> ResolvedModel:
    model = resolve_model(ModelSection(path=path), "cpu", attention)
    return model if device is None else replace(model, device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("qwen3_next", "recurrent layers, whose recurrence is computed in chunks that begin where a step does"),
        ("deepseek_v3", "latent attention, whose kernels have several orders of additions"),
    ],
)
def test_the_attention_worker_names_layers_that_depend_on_the_step(tmp_path: Path, variant: str, reason: str) -> None:
    path = make_family_model(tmp_path, variant)
    with pytest.raises(ConfigError, match=rf"^dense\.deterministic is true, but .*{reason}"):
        select_backend(AttentionSection(), resolve(path), is_deterministic=True)


def test_the_attention_worker_names_options_that_depend_on_the_step(tmp_path: Path) -> None:
    path = write_config(tmp_path, "llama")
    streaming = AttentionSection(window=64, sink_tokens=4)
    with pytest.raises(ConfigError, match=r"but attention\.sink_tokens has kernels"):
        select_backend(streaming, resolve(path, streaming), is_deterministic=True)
    int8 = AttentionSection(kv_cache_dtype="int8")
    select_backend(int8, resolve(path), is_deterministic=True)  # a CPU has it
    with pytest.raises(ConfigError, match=r"the KV cache is int8, on a GPU attention\.kv_cache_dtype must be model"):
        select_backend(int8, resolve(path, device=GPU), is_deterministic=True)


@pytest.mark.parametrize(
    ("variant", "reason"),
    [("qwen2_moe", "a gated shared expert, whose gate"), ("gemma4-shared", "inputs of each layer, whose products")],
)
def test_the_dense_worker_names_parts_that_depend_on_the_step(tmp_path: Path, variant: str, reason: str) -> None:
    path = make_family_model(tmp_path, variant)
    with pytest.raises(ConfigError, match=rf"^dense\.deterministic is true, but .*{reason}"):
        check_batch_invariance(resolve(path))


def test_the_dense_worker_names_what_a_gpu_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = MagicMock(shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    model = resolve(write_config(tmp_path / "plain", "llama"), device=GPU)
    check_batch_invariance(model)
    with pytest.raises(ConfigError, match=r"the model's dtype is torch\.float32, its products need bfloat16"):
        check_batch_invariance(replace(model, dtype=torch.float32))
    experts = resolve(write_config(tmp_path / "experts", "mixtral"), device=GPU)
    check_batch_invariance(experts)
    quantized = replace(experts, config=replace(experts.config, quantization=on_the_fly_fp8()))
    with pytest.raises(ConfigError, match=r"is a ScaledWeight, the products of experts are those of 16 bits: dense"):
        check_batch_invariance(quantized)


def test_tensorrt_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = resolve(write_config(tmp_path, "llama"))
    section = DenseSection(deterministic=True, backend="tensorrt")
    with pytest.raises(ConfigError, match=r"TensorRT has kernels of its own for each range .*: set dense\.backend to"):
        prepare_backend(section, ModelSection(path=tmp_path), model, Limits(8, 4), lambda line: None)
