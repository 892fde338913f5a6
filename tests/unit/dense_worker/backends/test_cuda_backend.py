"""CudaBackend with kernels computed by torch: which kernels it launches, in which order, and its logits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from services.common.errors import DeviceError
from services.common.model_config import ModelConfig
from services.dense_worker.backends import DenseBackend, InputEmbeds
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear import matmul_choice
from services.dense_worker.kernels.linear.linear import Linear
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel, row_bucket
from services.dense_worker.kernels.stroke.row_stroke import StrokeShape
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import empty_weights
from services.step import StepPlan
from tests.support.dense.fake_triton_kernels import LaunchRecorder, fake_triton_kernels
from tests.support.dense.steps import Step, make_noisy, relative_error, run_step
from tests.support.model_configs import VARIANTS, small_config

torch.set_num_threads(1)
CPU = torch.device("cpu")
MAX_NUM_TOKENS = 100
# The launches of a step with n tokens and r sampled rows: at its beginning, in each further layer, and at its end.
CUBLAS = """
index_select {n}x64, add_norm norm {n}x64, mm {n}x128
mm {n}x64, add_norm norm add {n}x64, mm {n}x192, activate gated {n}x96, mm {n}x64,\
 add_norm norm add {n}x64, mm {n}x128
index_select {r}x64, index_select {r}x64, mm {r}x64, add_norm norm add {r}x64, mm {r}x192, activate gated {r}x96,\
 mm {r}x64, add_norm norm add {r}x64, mm {r}x160
"""
ONE_ROW = """
index_select 1x64, gemv norm 1x96, normalize_heads 1x96
gemv add 1x64, gemv norm gated 1x96, gemv add 1x64, gemv norm 1x96, normalize_heads 1x96
index_select 1x64, index_select 1x64, gemv add 1x64, gemv norm gated 1x96, gemv add 1x64, gemv norm 1x160
"""
FEW_ROWS = """
index_select {n}x64, add_norm norm {n}x64, skinny_linear {n}x192
skinny_linear add {n}x64, add_norm norm {n}x64, skinny_linear gated {n}x96, skinny_linear add {n}x64,\
 add_norm norm {n}x64, skinny_linear {n}x192
index_select {r}x64, index_select {r}x64, skinny_linear add {r}x64, add_norm norm {r}x64,\
 skinny_linear gated {r}x96, skinny_linear add {r}x64, add_norm norm {r}x64, skinny_linear {r}x160
"""
# In bfloat16 the norms between products are computed by these, in halves.
HALF_NORMS = """
index_select {n}x64, add_norm norm {n}x64, skinny_linear {n}x192
skinny_linear add half_norm_after {n}x64, skinny_linear gated half_norm {n}x96,\
 skinny_linear add half_norm_after {n}x64, skinny_linear half_norm {n}x192
index_select {r}x64, index_select {r}x64, skinny_linear add half_norm_after {r}x64,\
 skinny_linear gated half_norm {r}x96, skinny_linear add half_norm_after {r}x64, skinny_linear half_norm {r}x160
"""
# cuBLAS multiplies a long prompt; the streaming kernels multiply its single sampled row.
LONG_PROMPT = """
index_select {n}x64, add_norm norm {n}x64, addmm {n}x128
mm {n}x64, add_norm norm add {n}x64, mm {n}x192, activate gated {n}x96, mm {n}x64,\
 add_norm norm add {n}x64, addmm {n}x128
index_select 1x64, index_select 1x64, gemv add 1x64, gemv norm gated 1x96, gemv add 1x64, gemv norm 1x160
"""
# Norms after attention and the MLP, activations other than SwiGLU, LayerNorms and parallel residuals.
OTHER_FAMILIES = ("gemma2", "gemma3_text", "gpt_neox", "starcoder2", "olmo2", "cohere")
OTHER_VARIANTS = {family: (family, {}) for family in OTHER_FAMILIES}
OTHER_VARIANTS["granite"] = ("granite", {"residual_multiplier": 0.5})
ALL_VARIANTS = VARIANTS | OTHER_VARIANTS
# A norm after attention or the MLP, the addition, and the norm before the next product are one launch.
GEMMA_3 = """
index_select 1x64, mul 1x64, gemv norm 1x128, normalize_heads 1x128
gemv 1x64, add_norm norm add normed 1x64, gemv gated 1x96, gemv 1x64, add_norm norm add normed 1x64, gemv 1x128,\
 normalize_heads 1x128
index_select 1x64, index_select 1x64, gemv 1x64, add_norm norm add normed 1x64, gemv gated 1x96, gemv 1x64,\
 add_norm norm add normed 1x64, gemv 1x160
"""
GEMMA_3_CUBLAS = """
index_select {n}x64, mul {n}x64, add_norm norm {n}x64, mm {n}x128, normalize_heads {n}x128
mm {n}x64, add_norm norm add normed {n}x64, mm {n}x192, activate gated {n}x96, mm {n}x64,\
 add_norm norm add normed {n}x64, mm {n}x128, normalize_heads {n}x128
index_select {r}x64, index_select {r}x64, mm {r}x64, add_norm norm add normed {r}x64, mm {r}x192,\
 activate gated {r}x96, mm {r}x64, add_norm norm add normed {r}x64, mm {r}x160
"""
# As many as Llama: the LayerNorm and the GELU are fused with the product between them.
GPT_NEOX = """
index_select 1x64, gemv norm 1x192
gemv norm activated 1x96, gemv add 1x64, gemv add 1x64, gemv norm 1x192
index_select 1x64, index_select 1x64, gemv norm activated 1x96, gemv add 1x64, gemv add 1x64, gemv norm 1x160
"""
STARCODER_2 = """
index_select {n}x64, add_norm norm {n}x64, skinny_linear {n}x128
skinny_linear add {n}x64, add_norm norm {n}x64, skinny_linear activated {n}x96, skinny_linear add {n}x64,\
 add_norm norm {n}x64, skinny_linear {n}x128
index_select {r}x64, index_select {r}x64, skinny_linear add {r}x64, add_norm norm {r}x64,\
 skinny_linear activated {r}x96, skinny_linear add {r}x64, add_norm norm {r}x64, skinny_linear {r}x160
"""


@pytest.fixture
def launches() -> Iterator[LaunchRecorder]:
    with fake_triton_kernels() as recorder:
        yield recorder


def choose(monkeypatch: pytest.MonkeyPatch, kernel: LinearKernel) -> None:
    """Makes every layer use this kernel, without a measurement."""
    monkeypatch.setattr(LinearChoice, "measure", lambda choice, linears, *_: choice.set_all(linears, kernel))


@pytest.fixture(params=[LinearKernel.CUBLAS, LinearKernel.STREAMED], ids=lambda kernel: kernel.value)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LinearKernel:
    choose(monkeypatch, request.param)
    return request.param


def make(variant: str, dtype: torch.dtype = torch.float16) -> tuple[ModelConfig, ModelWeights]:
    family, overrides = ALL_VARIANTS[variant]
    config = small_config(family, **overrides)
    return config, make_noisy(empty_weights(config, dtype, CPU))


def make_backend(weights: ModelWeights, config: ModelConfig) -> DenseBackend:
    from services.dense_worker.backends.cuda_backend import CudaBackend

    return CudaBackend(weights, config, MAX_NUM_TOKENS)


@pytest.mark.parametrize(
    ("variant", "chosen", "dtype", "num_tokens", "num_rows", "expected"),
    [
        ("llama", LinearKernel.CUBLAS, torch.float16, 5, 3, CUBLAS),
        ("llama", LinearKernel.CUBLAS, torch.bfloat16, 1, 1, CUBLAS),
        ("qwen3", LinearKernel.STREAMED, torch.bfloat16, 1, 1, ONE_ROW),
        ("llama-biased", LinearKernel.STREAMED, torch.float16, 5, 3, FEW_ROWS),
        ("llama-biased", LinearKernel.STREAMED, torch.float16, 64, 2, FEW_ROWS),
        ("llama-biased", LinearKernel.STREAMED, torch.bfloat16, 5, 3, HALF_NORMS),
        ("llama-biased", LinearKernel.STREAMED, torch.bfloat16, 64, 2, HALF_NORMS),
        ("qwen2", LinearKernel.STREAMED, torch.bfloat16, 65, 1, LONG_PROMPT),
        ("gemma3_text", LinearKernel.STREAMED, torch.float16, 1, 1, GEMMA_3),
        ("gemma3_text", LinearKernel.CUBLAS, torch.float16, 5, 3, GEMMA_3_CUBLAS),
        ("gpt_neox", LinearKernel.STREAMED, torch.float16, 1, 1, GPT_NEOX),
        ("starcoder2", LinearKernel.STREAMED, torch.bfloat16, 5, 3, STARCODER_2),
    ],
)
def test_a_step_launches_the_expected_kernels_in_order(
    launches: LaunchRecorder,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    chosen: LinearKernel,
    dtype: torch.dtype,
    num_tokens: int,
    num_rows: int,
    expected: str,
) -> None:
    choose(monkeypatch, chosen)
    config, weights = make(variant, dtype)
    backend = make_backend(weights, config)
    qkv, attn_out = (torch.zeros(num_tokens, size, dtype=dtype) for size in (config.qkv_size, config.attn_size))
    token_ids, rows = torch.arange(num_tokens), torch.arange(num_rows)
    launches.launches.clear()
    with launches:
        residual = backend.first(token_ids, qkv)
        for layer in range(config.num_layers - 1):
            residual = backend.middle(layer, attn_out, residual, qkv)
        backend.last(attn_out, residual, rows)
    first, middle, last = expected.format(n=num_tokens, r=num_rows).strip().splitlines()
    lines = [first, *[middle] * (config.num_layers - 1), last]
    assert launches.launches == [launch for line in lines for launch in line.split(", ")]


def test_cublas_adds_products_of_many_rows_to_the_residual(
    launches: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_linear = importlib.import_module("services.dense_worker.backends.cuda_linear")  # with these kernels
    choose(monkeypatch, LinearKernel.CUBLAS)
    config, weights = make("llama")
    token_ids, attn_out = torch.arange(5), torch.randn(5, config.attn_size).half()
    found = []
    for fewest in (6, 5):
        monkeypatch.setattr(cuda_linear, "_ADDED_FROM_ROWS", fewest)
        backend, qkv = make_backend(weights, config), torch.zeros(5, config.qkv_size).half()
        launches.launches.clear()
        with launches:
            backend.middle(0, attn_out, backend.first(token_ids, qkv), qkv)
        found.append((" ".join(map(str, launches.launches)), qkv))
    assert "addmm" not in found[0][0] and found[1][0].count("addmm") == 2, "of attention and of the MLP"
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_logits_are_those_of_the_torch_backend(
    launches: LaunchRecorder, kernel: LinearKernel, variant: str, dtype: torch.dtype
) -> None:
    config, weights = make(variant, dtype)
    backend, reference = make_backend(weights, config), TorchBackend(weights)
    for num_tokens, rows in ((1, [0]), (5, [4, 1, 1]), (64, [63, 0]), (MAX_NUM_TOKENS, [7, 99])):
        token_ids = list(range(num_tokens))
        expected = run_step(reference, config, dtype, token_ids, rows)
        found = run_step(backend, config, dtype, token_ids, rows)
        assert found.dtype == backend.logits_dtype
        assert relative_error(found, expected) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert run_step(backend, config, dtype, [1, 2], []).shape == (0, config.vocab_size)


HAVE_HALF_NORMS = {"llama": True, "qwen3": True, "llama-biased": True, "gemma2": False, "olmo2": False, "cohere": False}
HAVE_HALF_NORMS |= {"granite": False, "starcoder2": False}  # a multiplier before the addition, LayerNorms


@pytest.mark.parametrize("variant", HAVE_HALF_NORMS)
def test_halves_of_norms_are_as_exact_as_whole_ones(
    launches: LaunchRecorder, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Against float32. Other kinds of norms and of residuals are not halved."""
    choose(monkeypatch, LinearKernel.STREAMED)
    config, weights = make(variant, torch.bfloat16)
    wide = empty_weights(config, torch.float32, CPU)
    for (_, tensor), (_, rounded) in zip(wide.named_tensors(), weights.named_tensors(), strict=True):
        tensor.copy_(rounded)
    token_ids, rows = list(range(33)), [32, 5, 9]
    exact = run_step(TorchBackend(wide), config, torch.float32, token_ids, rows)
    errors = []
    for has_halves in (False, True):
        with monkeypatch.context() as context:
            if not has_halves:
                module = importlib.import_module("services.dense_worker.backends.cuda_linear")
                context.setattr(module.CudaLinear, "splits_norm", lambda *_: False)
            launches.launches.clear()
            found = run_step(make_backend(weights, config), config, torch.bfloat16, token_ids, rows)
            errors.append(((found.double() - exact).norm() / exact.norm()).item())
        assert any("half_norm" in line for line in launches.launches) == (has_halves and HAVE_HALF_NORMS[variant])
    assert errors[0] < 0.05 and errors[1] < 1.1 * errors[0], errors


def test_a_norm_is_not_halved_where_the_next_product_cannot_end_it(
    launches: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of cuBLAS, that of rows with adapters, and one behind what is added between layers."""
    by_cublas = {"gate_up"}

    def measure(choice: LinearChoice, linears: Sequence[Linear], *_: object) -> None:
        choice.set_all(linears, LinearKernel.STREAMED)
        choice.set_all([linear for linear in linears if linear.name in by_cublas], LinearKernel.CUBLAS)

    monkeypatch.setattr(LinearChoice, "measure", measure)
    config, weights = make("llama", torch.bfloat16)
    backend, reference = make_backend(weights, config), TorchBackend(weights)
    token_ids, rows = list(range(7)), [6, 2]
    launches.launches.clear()
    found = run_step(backend, config, torch.bfloat16, token_ids, rows)
    assert relative_error(found, run_step(reference, config, torch.bfloat16, token_ids, rows)) < 0.03
    halves = [line for line in launches.launches if "half_norm" in line]
    assert [line.split()[1:-1] for line in halves] == [["add", "half_norm_after"], ["half_norm"]] * config.num_layers

    attn_out, residual = (torch.randn(7, size).bfloat16() for size in (config.attn_size, config.hidden_size))
    added = InputEmbeds(torch.tensor([3, 4]), torch.randn(2, config.hidden_size).bfloat16())
    results = []
    for each in (backend, reference):
        qkv = torch.zeros(7, config.qkv_size).bfloat16()
        results.append((each.middle(0, attn_out, residual.clone(), qkv, added), qkv))
    for of_backend, expected in zip(*results, strict=True):
        assert relative_error(of_backend, expected) < 0.03

    monkeypatch.setattr(type(backend._operations.products), "adds_deltas", True)
    launches.launches.clear()
    run_step(backend, config, torch.bfloat16, token_ids, rows)
    assert launches.launches and not any("half_norm" in line for line in launches.launches)


def test_interleaved_steps_do_not_change_each_other(launches: LaunchRecorder, kernel: LinearKernel) -> None:
    """The backend keeps no residual, so steps that run segment by segment in turn give the same logits as alone."""
    config, weights = make("qwen3")
    backend = make_backend(weights, config)
    inputs = [([5, 6, 7], [2, 0]), ([8], [0]), (list(range(70)), [69])]
    expected = [run_step(backend, config, torch.float16, *each) for each in inputs]
    steps = [Step(backend, config, torch.float16, token_ids) for token_ids, _ in inputs]
    for step in steps:
        step.begin()
    for layer in range(config.num_layers - 1):
        for step in reversed(steps):
            step.middle(layer)
    for step, (_, rows), alone in zip(steps, inputs, expected, strict=True):
        assert torch.equal(step.logits(rows), alone)
        assert torch.equal(step.logits(rows), alone), "a second call, as for a prompt's log-probabilities"


def test_a_step_beyond_the_workspaces_is_refused_before_it_runs(launches: LaunchRecorder) -> None:
    config, weights = make("llama", torch.float32)
    backend = make_backend(weights, config)
    backend.begin_step(StepPlan(1), MAX_NUM_TOKENS)
    with pytest.raises(AssertionError, match="101 tokens, workspaces for 100"):
        backend.begin_step(StepPlan(2), MAX_NUM_TOKENS + 1)


@pytest.mark.parametrize("error", [DeviceError("no NVRTC"), OSError(30, "Read-only file system", "cache")], ids=repr)
def test_products_serve_where_the_kernel_of_a_stroke_cannot_be_had(
    launches: LaunchRecorder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    module = importlib.import_module("services.dense_worker.backends.cuda_backend")  # with these kernels
    config, weights = make("llama")
    shape = StrokeShape(config.hidden_size, config.attn_size, config.intermediate_size, config.qkv_size, is_fp8=False)
    monkeypatch.setattr(module.CudaBackend, "_shapes_of_strokes", lambda backend: [shape] * (config.num_layers - 1))
    for name in ("compile_stroke", "RowStroke"):
        monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(module, "time_in_graph_us", lambda run: 1.0)
    choose(monkeypatch, LinearKernel.CUBLAS)
    expected = run_step(TorchBackend(weights), config, torch.float16, [3], [0])
    found = run_step(make_backend(weights, config), config, torch.float16, [3], [0])
    assert relative_error(found, expected) < 5e-3


@pytest.mark.parametrize("variant", ["llama", "llama-biased", "gemma3_text", "gpt_neox", "starcoder2"])
def test_all_kernels_of_measured_steps_have_been_compiled_before(
    launches: LaunchRecorder, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    measured: set[str] = set()
    compiled: set[str] = set()

    def run_and_count(run: Callable[[], object]) -> float:
        compiled.update(launches.launches if not measured else ())
        num_before = len(launches.launches)
        run()
        measured.update(launches.launches[num_before:])
        return 1.0

    monkeypatch.setattr("services.dense_worker.kernels.linear.linear_choice.time_in_graph_us", run_and_count)
    config, weights = make(variant, torch.bfloat16)
    make_backend(weights, config)
    assert measured and measured <= compiled


def test_products_are_chosen_once_for_each_graph_with_prompts_and_for_no_others(
    launches: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.dense_worker.backends.cuda_backend import CudaBackend

    measured = set[tuple[int, int]]()

    class Library:
        def candidates(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor, most: int) -> list[object]:
            measured.add((len(x), len(matrix)))
            return []

    choose(monkeypatch, LinearKernel.CUBLAS)
    monkeypatch.setattr(matmul_choice, "CublasLt", lambda device: Library())
    monkeypatch.setattr(matmul_choice, "time_of_us", lambda run: 1.0)
    monkeypatch.setattr(matmul_choice, "_ALIGNMENT", 1)
    config, weights = make("llama")
    backend = CudaBackend(weights, config, MAX_NUM_TOKENS, rows_of_graphs=(8, 64, 72, 96))
    assert not measured, "the worker serves first"
    for num_rows in (8, 64, 72, 80, 96):
        backend.choose_products(num_rows)
    sizes = {config.qkv_size, config.hidden_size, 2 * config.intermediate_size}
    assert measured >= {(num_rows, size) for num_rows in (72, 96) for size in sizes}
    assert {num_rows for num_rows, _ in measured} == {65, 72, 96}, "65: the head, of longer steps too"
    measured.clear()
    backend.choose_products(96)
    run_step(backend, config, torch.float16, [*range(90)], [0])
    assert not measured, "no step waits for a measurement"


def test_kernels_of_several_rows_are_chosen_once_before_their_first_graph(
    launches: LaunchRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS is the faster one here, as soon as it is measured."""
    from services.dense_worker.backends.cuda_backend import CudaBackend

    measured = list[int]()

    def measure(choice: LinearChoice, linears: Sequence[Linear], num_rows: int, run: Callable[[], object]) -> None:
        measured.append(num_rows)
        choice._kernels |= {key: LinearKernel.CUBLAS for key in choice._kernels if key[-1] == row_bucket(num_rows)}

    monkeypatch.setattr(LinearChoice, "measure", measure)
    config, weights = make("llama")
    CudaBackend(weights, config, MAX_NUM_TOKENS)
    assert measured == [1, 16, 32, 64], "there are no graphs"
    measured.clear()
    backend = CudaBackend(weights, config, MAX_NUM_TOKENS, rows_of_graphs=(1, 8, 16, 24))
    assert measured == [1, 64], "of 64 there is none"

    def launched(num_rows: int) -> str:
        launches.launches.clear()
        run_step(backend, config, torch.float16, [*range(num_rows)], [0])
        return " ".join(launches.launches)

    assert "skinny" in launched(8) and "skinny" in launched(24), "ours until then"
    for num_rows in (1, 16, 8, 16):
        backend.choose_products(num_rows)
    assert measured == [1, 64, 16]
    assert "skinny" not in launched(8) and "skinny" in launched(24)
    backend.choose_products(24)
    assert measured == [1, 64, 16, 32]
    assert "skinny" not in launched(24)
