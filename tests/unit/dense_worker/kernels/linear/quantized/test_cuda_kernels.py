"""The CUDA backend gives each quantized layer to its kernels, which are computed by torch here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import structlog
import torch

from services.common.model_config import load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.model.weights import load_weights
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.steps import relative_error, run_step
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
# Kernels and references in bfloat16 round at nearly the same places. Where an input lies between two codes, either may
# come closer to the codes of float32.
MAX_ERROR_RATIO = 3
CODES, NO_CODES = "product of codes", "dequantized by a kernel"


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Projections begin with a tile, so that each can have an input of its own."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return make_model_dir(tmp_path_factory.mktemp("plain"), "llama", dtype=torch.bfloat16, **sizes, **heads)


@pytest.mark.parametrize(
    ("name", "many_rows", "num_of_codes"),  # products of a layer that multiply few rows as codes of whole rows
    [
        ("fp8 tensor, static", CODES, 2),  # the projections of the other two have inputs of their own
        ("fp8 channel, token", CODES, 4),
        ("fp8 blocks", NO_CODES, 0),
        ("int8 channel, token", CODES, 4),
        ("gptq g32, act-order", NO_CODES, 0),
        ("awq g128", NO_CODES, 0),
        ("mxfp4", NO_CODES, 0),
    ],
)
def test_every_format_runs_by_its_kernels(
    plain_dir: Path, tmp_path: Path, name: str, many_rows: str, num_of_codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(plain_dir, tmp_path / "model")
    quantize_model_dir(path, FORMATS[name])
    config = load_model_config(path)
    weights = load_weights(path, config, torch.bfloat16, CPU)
    reference = TorchBackend(weights)
    wide = TorchBackend(load_weights(path, config, torch.float32, CPU))
    monkeypatch.setattr(
        LinearChoice, "measure", lambda choice, linears, *_: choice.set_all(linears, LinearKernel.STREAMED)
    )
    with fake_triton_kernels() as recorder, structlog.testing.capture_logs() as logs:
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, 80)
        for num_tokens in (1, 5, 80):
            tokens, rows = [token % 50 for token in range(num_tokens)], list(range(num_tokens))
            expected = run_step(wide, config, torch.float32, tokens, rows)
            allowed = MAX_ERROR_RATIO * relative_error(
                run_step(reference, config, torch.bfloat16, tokens, rows), expected
            )
            recorder.launches.clear()
            found = run_step(backend, config, torch.bfloat16, tokens, rows)
            num_tiled = sum(launch.startswith("tiles ") for launch in recorder.launches)
            assert num_tiled == (4 * config.num_layers if num_tokens == 80 and many_rows == NO_CODES else 0)
            found_codes = sum(launch.startswith("skinny_linear ") and "codes" in launch for launch in recorder.launches)
            assert found_codes == (num_of_codes * config.num_layers if num_tokens == 5 else 0)
            assert relative_error(found, expected) < allowed < 0.5, num_tokens
    entries = [entry for entry in logs if entry["event"] == "kernels of a quantized layer"]
    assert {entry["layer"] for entry in entries} == {"qkv", "o", "gate_up", "down"}
    assert all(entry["few_rows"] == "streamed, or as many rows" for entry in entries), entries
    assert all(entry["many_rows"].startswith(many_rows) for entry in entries), entries
    tiled = "as many rows: codes of whole rows are" if many_rows == CODES else "tiled, or as many rows"
    assert all(entry["more_rows"].startswith(tiled) for entry in entries), entries


@pytest.mark.parametrize(
    ("name", "num_tokens", "is_fused"),
    [
        ("fp8 channel, token", 80, True),
        ("fp8 tensor, static", 80, True),
        ("fp8 blocks", 80, True),
        ("int8 channel, token", 80, True),
        ("awq g128", 80, True),
        ("int8 channel, weight only", 80, False),  # its products read rows as they are
        ("fp8 channel, token", 5, True),
        ("mxfp4", 5, True),
    ],
)
def test_norm_and_silu_need_no_kernels_of_their_own_where_inputs_are_prepared(
    plain_dir: Path, tmp_path: Path, name: str, num_tokens: int, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(plain_dir, tmp_path / "model")
    quantize_model_dir(path, FORMATS[name])
    config = load_model_config(path)
    weights = load_weights(path, config, torch.bfloat16, CPU)
    monkeypatch.setattr(
        LinearChoice, "measure", lambda choice, linears, *_: choice.set_all(linears, LinearKernel.STREAMED)
    )
    with fake_triton_kernels() as recorder:
        from services.dense_worker.backends.cuda_backend import CudaBackend

        backend = CudaBackend(weights, config, 80)
        recorder.launches.clear()
        run_step(backend, config, torch.bfloat16, [i % 50 for i in range(num_tokens)], list(range(num_tokens)))
    kernels = [launch.split()[0] for launch in recorder.launches]
    num_layers = config.num_layers
    assert kernels.count("add_norm") == 1 + (0 if is_fused else 2 * num_layers), "one before lm_head, unquantized"
    assert kernels.count("activate") == (0 if is_fused else num_layers)


@pytest.mark.parametrize(
    ("name", "max_num_tokens", "expected"),
    [
        ("awq g128", 80, [1, 16, 32, 64, 80]),
        ("awq g128", 300, [1, 16, 32, 64, 128, 256, 300]),
        ("awq g128", 2000, [1, 16, 32, 64, 128, 256, 512, 1024]),
        ("awq g128", 64, [1, 16, 32, 64]),
        ("fp8 channel, token", 300, [1, 16, 32, 64]),
    ],
)
def test_kernels_are_measured_at_the_most_rows_of_each_bucket_that_steps_can_have(
    plain_dir: Path,
    tmp_path: Path,
    name: str,
    max_num_tokens: int,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = shutil.copytree(plain_dir, tmp_path / "model")
    quantize_model_dir(path, FORMATS[name])
    config = load_model_config(path)
    measured = []
    monkeypatch.setattr(LinearChoice, "measure", lambda choice, linears, num_rows, run: measured.append(num_rows))
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        CudaBackend(load_weights(path, config, torch.bfloat16, CPU), config, max_num_tokens)
    assert measured == expected
