"""`CudaBackend` with adapters, its kernels computed by torch: no product is fused past a delta, and none without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.model_config import load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.activation import MlpActivation
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.kernels.lora.torch_lora import TorchLora
from services.dense_worker.kernels.norm.norm import SplitNorm
from services.dense_worker.model.weights import load_weights
from services.dense_worker.parameters import parts_of_type
from services.lora.checkpoint import read_adapter
from services.lora.shapes import adapted_shapes
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.steps import relative_error, run_step
from tests.support.models import make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")


class RowsInTorch(TorchLora):
    """The adapters in torch, with the methods that only captured steps and kernels on CUDA need."""

    num_fused = 0

    def start(self, num_rows: int) -> None:
        assert num_rows == len(self._row_slots) or not self.is_active

    def fuses(self, linear: Linear, num_rows: int) -> bool:
        return num_rows <= 64 and linear.name != "lm_head" and linear.weight.kind != torch.float32

    def multiply(
        self,
        linear: Linear,
        x: torch.Tensor,
        out: torch.Tensor,
        activation: MlpActivation | None,
        residual: torch.Tensor | None,
        norm: SplitNorm | None,
        norm_after: SplitNorm | None,
    ) -> None:
        assert norm is None and norm_after is None, "only products of bfloat16 share norms"
        self.num_fused += self.is_active
        y = linear.weight.multiply(x, linear.bias_data)
        self.add(linear, x, y)
        y = y if activation is None else activation.apply(y)
        out.copy_(y if residual is None else y + residual)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        yield

    @contextmanager
    def activated(self, is_active: bool = True) -> Iterator[None]:
        yield


@pytest.mark.parametrize("kernel", [LinearKernel.CUBLAS, LinearKernel.STREAMED])
@pytest.mark.parametrize("num_tokens", [1, 6, 70])
def test_logits_are_those_of_merged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: LinearKernel, num_tokens: int
) -> None:
    monkeypatch.setattr(LinearChoice, "measure", lambda choice, linears, *_: choice.set_all(linears, kernel))
    model = make_model_dir(tmp_path / "model", "llama")
    adapter = make_adapter(tmp_path / "adapter", model, std=0.1)
    config, merged = load_model_config(model), merge_adapter(tmp_path / "merged", model, adapter)
    # PlainGemv multiplies only 16 bits.
    dtype = torch.float32 if kernel is LinearKernel.CUBLAS else torch.float16
    weights = load_weights(model, config, dtype, CPU)
    lora: Any = RowsInTorch(parts_of_type(Linear, weights.layers), 2, dtype, CPU)
    lora.store(1, read_adapter(adapter, adapted_shapes(config), 64))
    reference = {-1: TorchBackend(weights), 1: TorchBackend(load_weights(merged, config, dtype, CPU))}
    slots, token_ids = np.array([1, -1] * num_tokens)[:num_tokens], list(range(num_tokens))
    rows = list(range(num_tokens))
    with fake_triton_kernels() as recorder:
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, 100, lora)
        lora.begin_step(slots)
        found = run_step(backend, config, dtype, token_ids, rows)
        assert bool(lora.num_fused) == (dtype is torch.float16 and num_tokens <= 64)
        lora.begin_step(None)
        recorder.launches.clear()
        with recorder:
            alone = run_step(backend, config, dtype, token_ids, rows)
        with_lora = list(recorder.launches)
        backend = CudaBackend(weights, config, 100)
        recorder.launches.clear()
        with recorder:
            run_step(backend, config, dtype, token_ids, rows)
        assert with_lora == recorder.launches, "a step without adapters launches what it launches without slots"
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for slot, backend_of_slot in reference.items():
        expected = run_step(backend_of_slot, config, dtype, token_ids, rows)
        own = slots == slot
        assert relative_error(found[own], expected[own]) < tolerance if own.any() else True
        if slot == -1:
            assert relative_error(alone, expected) < tolerance


class UnfusedRows(RowsInTorch):
    """As `CudaLora` with `dense.deterministic`."""

    def fuses(self, linear: Linear, num_rows: int) -> bool:
        return False


@pytest.mark.parametrize("num_tokens", [1, 6, 70])
def test_with_deterministic_rows_keep_their_bits_beside_adapters(tmp_path: Path, num_tokens: int) -> None:
    """What a row without an adapter goes through does not depend on whether another one has an adapter."""
    model = make_model_dir(tmp_path / "model", "llama")
    adapter = make_adapter(tmp_path / "adapter", model, std=0.1)
    config, merged = load_model_config(model), merge_adapter(tmp_path / "merged", model, adapter)
    weights = load_weights(model, config, torch.float16, CPU)
    lora: Any = UnfusedRows(parts_of_type(Linear, weights.layers), 2, torch.float16, CPU, row_by_row=True)
    lora.store(1, read_adapter(adapter, adapted_shapes(config), 64))
    slots, token_ids = np.array([1, -1] * num_tokens)[:num_tokens], list(range(num_tokens))
    rows = list(range(num_tokens))
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, 100, lora, is_deterministic=True)
        results = []
        for row_slots in (slots, None, np.full(num_tokens, 1)):
            lora.begin_step(row_slots)
            results.append(run_step(backend, config, torch.float16, token_ids, rows))
    beside, without, adapted = results
    assert torch.equal(beside[slots == -1], without[slots == -1])
    assert torch.equal(beside[slots == 1], adapted[slots == 1])
    reference = TorchBackend(load_weights(merged, config, torch.float16, CPU))
    expected = run_step(reference, config, torch.float16, token_ids, rows)
    assert relative_error(adapted, expected) < 2e-2


def test_kernels_are_measured_without_the_adapters_of_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With them the same kernels would run whatever is chosen, and noise would choose."""

    class ActiveRows(RowsInTorch):
        @contextmanager
        def activated(self, is_active: bool = True) -> Iterator[None]:
            was_active, self.is_active = self.is_active, self.is_active and is_active
            yield
            self.is_active = was_active

    def measure(choice: LinearChoice, linears: list[Linear], num_rows: int, run: Callable[[], object]) -> None:
        measured.append((num_rows, lora.is_active))
        run()

    monkeypatch.setattr(LinearChoice, "measure", measure)
    model = make_model_dir(tmp_path / "model", "llama")
    config = load_model_config(model)
    weights = load_weights(model, config, torch.float16, CPU)
    lora: Any = ActiveRows(parts_of_type(Linear, weights.layers), 2, torch.float16, CPU)
    lora.store(1, read_adapter(make_adapter(tmp_path / "adapter", model), adapted_shapes(config), 64))
    measured = list[tuple[int, bool]]()
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, 100, lora, rows_of_graphs=(1, 8))
        lora.begin_step(np.array([1, -1, 1]))
        measured.clear()
        backend.choose_products(8)
    assert measured == [(16, False)] and lora.is_active
