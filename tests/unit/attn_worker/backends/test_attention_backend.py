"""Which attention backend the worker selects, and the error for one that cannot run."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest
import torch

from services.attn_worker.backends.select import select_backend
from services.common.config import AttentionSection, ModelSection, load_config
from services.common.errors import ConfigError
from services.common.model_config import AttentionOptions
from services.common.resolve import ResolvedModel, resolve_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def make_model(device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> ResolvedModel:
    model = resolve_model(ModelSection(), "cpu")
    rope = dataclasses.replace(model.config.rope, rotary_dim=head_dim)
    config = dataclasses.replace(model.config, head_dim=head_dim, rope=rope)
    return dataclasses.replace(model, config=config, device=device, dtype=dtype)


class Packages:
    """Simulates installed packages and their versions. The import of flashinfer always fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
        self.versions = versions
        monkeypatch.setattr(importlib.metadata, "version", self.version)
        monkeypatch.setattr(importlib, "import_module", self.import_module)

    def version(self, distribution: str) -> str:
        if (name := distribution.removesuffix("-python")) not in self.versions:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return self.versions[name]

    def import_module(self, name: str) -> None:
        raise ImportError("No module named 'tvm_ffi'")


def test_auto_is_torch_on_a_cpu_and_triton_on_a_gpu() -> None:
    assert select_backend(AttentionSection(), make_model(CPU)) == "torch"
    assert select_backend(AttentionSection(), make_model(GPU)) == "triton"


def test_flashinfer_is_selected_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Packages(monkeypatch, flashinfer="0.5.3")
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    section = AttentionSection(backend="flashinfer")
    for dtype in (torch.bfloat16, torch.float16):
        assert select_backend(section, make_model(GPU, dtype)) == "flashinfer"


@pytest.mark.parametrize(
    ("backend", "model", "versions", "words"),
    [
        ("triton", make_model(CPU), {}, "runs on a CUDA device.*device is 'cpu'"),
        ("flashinfer", make_model(CPU), {"flashinfer": "0.5.3"}, "runs on a CUDA device.*device is 'cpu'"),
        ("torch", make_model(GPU), {}, "runs on the CPU alone.*device is 'cuda:0'"),
        ("flashinfer", make_model(GPU), {}, "not installed: `pip install flashinfer-python==0.5.3`"),
        ("flashinfer", make_model(GPU), {"flashinfer": "0.6.1"}, "0.6.1 is installed, not 0.5.3"),
        ("flashinfer", make_model(GPU), {"flashinfer": "0.5.3"}, "cannot be imported: No module named 'tvm_ffi'"),
        ("flashinfer", make_model(GPU, torch.float32), {}, "bfloat16 or float16, and model.dtype is float32"),
        ("flashinfer", make_model(GPU, head_dim=96), {}, "64, 128 or 256 dimensions, and the model's have 96"),
    ],
)
def test_a_backend_that_cannot_run_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, backend: str, model: ResolvedModel, versions: dict[str, str], words: str
) -> None:
    Packages(monkeypatch, **versions)
    with pytest.raises(ConfigError, match=f"attention.backend is '{backend}', but .*{words}"):
        select_backend(AttentionSection(backend=backend), model)


def test_the_error_names_an_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r"attention.backend = 'xformers'.*'flashinfer'"):
        load_config(None, ["attention.backend=xformers"])


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_flashinfer_refuses_a_kv_cache_of_8_bits(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    Packages(monkeypatch, flashinfer="0.5.3")
    section = AttentionSection(backend="flashinfer", kv_cache_dtype=kv_cache_dtype)
    with pytest.raises(ConfigError, match=f"'flashinfer', but .* the KV cache is {kv_cache_dtype}: set"):
        select_backend(section, make_model(GPU))


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


def test_flashinfer_refuses_learned_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    Packages(monkeypatch, flashinfer="0.5.3")
    model = make_model(GPU)
    config = dataclasses.replace(model.config, attention=AttentionOptions(has_sinks=True))
    with pytest.raises(ConfigError, match=r"'flashinfer', but its kernels lack what 'llama' needs: learned sinks"):
        select_backend(AttentionSection(backend="flashinfer"), dataclasses.replace(model, config=config))


def test_flashinfer_refuses_layers_with_different_heads() -> None:
    model = make_model(GPU)
    heads = tuple(dataclasses.replace(model.config.heads, kv_layer=layer or None) for layer in range(2))
    config = dataclasses.replace(model.config, attention=AttentionOptions(layer_heads=heads))
    model = dataclasses.replace(model, config=config)
    assert select_backend(AttentionSection(), model) == "triton"
    with pytest.raises(ConfigError, match=r"lack what 'llama' needs: layers with heads of their own"):
        select_backend(AttentionSection(backend="flashinfer"), model)
