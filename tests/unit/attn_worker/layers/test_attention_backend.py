"""Which attention backend the worker selects, and the error for a model that its kernels cannot run."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from services.attn_worker.layers.select import select_backend
from services.common.config import AttentionSection, ModelSection
from services.common.errors import ConfigError
from services.common.resolve import ResolvedModel, resolve_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def make_model(device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> ResolvedModel:
    model = resolve_model(ModelSection(), "cpu")
    rope = dataclasses.replace(model.config.rope, rotary_dim=head_dim)
    config = dataclasses.replace(model.config, head_dim=head_dim, rope=rope)
    return dataclasses.replace(model, config=config, device=device, dtype=dtype)


def test_torch_runs_on_a_cpu_and_triton_on_a_gpu() -> None:
    assert select_backend(AttentionSection(), make_model(CPU)) == "torch"
    assert select_backend(AttentionSection(), make_model(GPU)) == "triton"


def test_fp8_needs_a_gpu_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this one")
    for capability, is_enough in (((8, 0), False), ((8, 9), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert select_backend(AttentionSection(kv_cache_dtype="int8"), make_model(GPU)) == "triton"
        if is_enough:
            assert select_backend(AttentionSection(kv_cache_dtype="fp8"), make_model(GPU)) == "triton"
        else:
            with pytest.raises(ConfigError, match=r"from compute capability 9\.0 on, this one has 8\.[09]"):
                select_backend(AttentionSection(kv_cache_dtype="fp8"), make_model(GPU))


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_triton_refuses_odd_halves_of_heads_with_a_kv_cache_of_8_bits(kv_cache_dtype: str) -> None:
    for head_dim in (50, 126):
        model = make_model(GPU, head_dim=head_dim)
        assert select_backend(AttentionSection(), model) == "triton"
        with pytest.raises(ConfigError, match=f"multiple of 4, it is {head_dim}, and the KV cache is {kv_cache_dtype}"):
            select_backend(AttentionSection(kv_cache_dtype=kv_cache_dtype), model)
