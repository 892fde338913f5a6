"""The hidden states after the final norm, which Medusa heads read: of all backends, and without a change of logits."""

from __future__ import annotations

import pytest
import torch

from services.common.config import DenseSection, ModelSection
from services.common.errors import ConfigError
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.select import prepare_backend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.model.weights import empty_weights
from services.dense_worker.tensorrt.profiles import Limits
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.steps import attend, make_noisy, relative_error
from tests.support.model_configs import VARIANTS, small_config

CPU = torch.device("cpu")
ROWS = ([0], [4, 1, 1])
MODEL = ResolvedModel(small_config("qwen2"), torch.float32, CPU, 64)


@pytest.mark.parametrize("kernel", [LinearKernel.CUBLAS, LinearKernel.STREAMED], ids=lambda kernel: kernel.value)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_backend_for_cuda_gives_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, variant: str, kernel: LinearKernel
) -> None:
    monkeypatch.setattr(LinearChoice, "measure", lambda choice, linears, *_: choice.set_all(linears, kernel))
    family, overrides = VARIANTS[variant]
    config = small_config(family, **overrides)
    weights = make_noisy(empty_weights(config, torch.float32, CPU))
    reference = TorchBackend(weights)

    def run(backend: DenseBackend, rows: list[int], *, has_hidden: bool) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = torch.empty(5, config.qkv_size)
        residual = backend.first(torch.arange(5), qkv)
        hidden = torch.full((len(rows), config.hidden_size), torch.nan)
        out = (hidden,) if has_hidden else ()
        return backend.last(attend(qkv, config), residual, torch.tensor(rows), *out), hidden

    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, 16)
        for rows in ROWS:
            expected_logits, expected = run(reference, rows, has_hidden=True)
            assert torch.equal(run(reference, rows, has_hidden=False)[0], expected_logits)
            logits, hidden = run(backend, rows, has_hidden=True)
            assert relative_error(hidden, expected) < 1e-5
            assert relative_error(logits, expected_logits) < 1e-5


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_tensorrt_with_heads_is_refused_by_name(method: str) -> None:
    message = rf"speculation is '{method}', but TensorRT gives no hidden states: set dense\.backend to torch"
    with pytest.raises(ConfigError, match=message):
        prepare_backend(DenseSection(backend="tensorrt"), ModelSection(), MODEL, Limits(16, 4), print, heads=method)


def test_any_other_backend_with_heads_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("nobody may look for TensorRT")

    monkeypatch.setattr("services.dense_worker.tensorrt.prepare.load_tensorrt", fail)
    for name in ("auto", "torch"):
        section = DenseSection(backend=name)
        assert prepare_backend(section, ModelSection(), MODEL, Limits(16, 4), print, heads="medusa").tensorrt is None
