"""Quantized weights around the formats: made while loading, their hash, the backends that take or refuse them."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from services.common.config import Config, DenseSection, ModelSection, SchedulerSection
from services.common.errors import ConfigError
from services.common.model_config import load_model_config
from services.common.quantization.schemes import on_the_fly_fp8
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.build import load_model, resolve_dense_model, with_stated_hash
from services.dense_worker.kernels.linear.linear import Linear, PlainWeight
from services.dense_worker.kernels.linear.linear_choice import LinearChoice
from services.dense_worker.model.checkpoint import Checkpoint
from services.dense_worker.model.weights import load_weights, weights_hash
from services.dense_worker.parameters import parts_of_type
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.family_models import make_family_model
from tests.support.dense.steps import relative_error, run_step
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, PARTS, quantize_model_dir
from tests.support.quantized.formulas import input_by_token, scaled

torch.set_num_threads(1)
CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
    return make_model_dir(tmp_path_factory.mktemp("plain"), "llama", dtype=torch.bfloat16, **sizes)


def quantized_dir(plain_dir: Path, path: Path, name: str) -> Path:
    quantize_model_dir(shutil.copytree(plain_dir, path), FORMATS[name])
    return path


def test_fp8_is_made_of_an_unquantized_checkpoint(plain_dir: Path) -> None:
    config = replace(load_model_config(plain_dir), quantization=on_the_fly_fp8())
    weights, tensors = load_weights(plain_dir, config, torch.bfloat16, CPU), load_file(plain_dir / "model.safetensors")
    for linear in parts_of_type(Linear, weights.layers):
        parts = [
            scaled(tensors[f"{each.name}.weight"].double().numpy(), "fp8", "channel").tensors
            for each in linear.merged_from
        ]
        codes = torch.cat([part["weight"] for part in parts])
        assert torch.equal(linear.weight.matrix.data.view(torch.uint8), codes.view(torch.uint8)), linear.name
        assert torch.equal(linear.weight.scale.data, torch.cat([part["weight_scale"] for part in parts]).flatten())
    assert weights.head.lm_head.weight.matrix.data.dtype == torch.bfloat16


@pytest.mark.parametrize("variant", ["gpt2", "gpt_neox", "falcon-new", "phi3", "gemma2"])
def test_fp8_is_made_of_families_that_store_weights_in_another_way(variant: str, tmp_path: Path) -> None:
    """Transposed weights, mixed heads of q, k and v, fused projections, a head of another name."""
    path = make_family_model(tmp_path, variant)
    config = load_model_config(path)
    plain = load_weights(path, config, torch.float32, CPU)
    made = load_weights(path, replace(config, quantization=on_the_fly_fp8()), torch.float32, CPU)
    for linear, original in zip(parts_of_type(Linear, made.layers), parts_of_type(Linear, plain.layers), strict=True):
        expected = scaled(original.weight.matrix.data.double().numpy(), "fp8", "channel")
        assert torch.equal(
            linear.weight.matrix.data.view(torch.uint8), expected.tensors["weight"].view(torch.uint8)
        ), linear.name
        assert torch.equal(linear.weight.scale.data[:, None], expected.tensors["weight_scale"])
    assert isinstance(made.head.lm_head.weight, PlainWeight)


def test_lm_head_is_quantized_if_the_checkpoint_says_so(plain_dir: Path, tmp_path: Path) -> None:
    path = quantized_dir(plain_dir, tmp_path / "model", "fp8 channel, token")
    file, config_file = path / "model.safetensors", path / "config.json"
    tensors = load_file(file)
    head = scaled(tensors["lm_head.weight"].double().numpy(), "fp8", "channel")
    save_file(tensors | {f"lm_head.{rest}": tensor for rest, tensor in head.tensors.items()}, file)
    config_json = json.loads(config_file.read_text())
    config_json["quantization_config"]["ignore"] = []
    config_file.write_text(json.dumps(config_json))
    weight = load_weights(path, load_model_config(path), torch.float32, CPU).head.lm_head.weight
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    expected = torch.from_numpy(input_by_token(x.numpy(), "fp8") @ head.matrix.T)
    assert relative_error(weight.multiply(x, None), expected) < 2e-6


def test_one_unquantized_projection_at_a_time_is_in_memory(plain_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    read, most = Checkpoint.read, 0

    def counting(self: Checkpoint, name: str, *limits: object) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name, *limits)
        if name.rpartition(".")[0].rpartition(".")[2] in PARTS:
            alive.append(weakref.ref(tensor))
            most = max(most, sum(each() is not None for each in alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counting)
    load_weights(
        plain_dir, replace(load_model_config(plain_dir), quantization=on_the_fly_fp8()), torch.bfloat16, CPU
    )
    assert len(alive) >= 2 * len(PARTS) and most <= 2


def dense_config(path: Path, **dense: object) -> Config:
    return Config(
        model=ModelSection(path=path),
        dense=DenseSection(device="cpu", **dense),
        scheduler=SchedulerSection(max_num_seqs=4, max_num_batched_tokens=8),
    )


def test_the_formats_are_logged_at_start(plain_dir: Path) -> None:
    config = dense_config(plain_dir, quantization="fp8", backend="torch")
    with structlog.testing.capture_logs() as logs:
        load_model(config, resolve_dense_model(config), print)
    [entry] = [entry for entry in logs if entry["event"] == "weights are quantized"]
    assert (entry["method"], entry["ScaledWeight"], entry["PlainWeight"]) == ("fp8 on the fly", 8, 1)
    assert entry["multiplied_by"] == "reference in torch"


def test_a_stated_hash_takes_the_place_of_the_own_one_and_is_logged(plain_dir: Path) -> None:
    config = dense_config(plain_dir, quantization="fp8", backend="torch")
    model = load_model(config, resolve_dense_model(config), print)
    assert with_stated_hash(model, None) is model and with_stated_hash(model, model.weights_hash) is model
    with structlog.testing.capture_logs() as logs:
        assert with_stated_hash(model, "c0ffee").weights_hash == "c0ffee"
    [entry] = logs
    assert entry["event"] == "the KV cache of other weights is kept" and entry["own_hash"] == model.weights_hash


def test_a_quantized_checkpoint_is_not_quantized_again(plain_dir: Path, tmp_path: Path) -> None:
    path = quantized_dir(plain_dir, tmp_path / "model", "awq g128")
    with pytest.raises(ConfigError, match=r"dense\.quantization is 'fp8', but the checkpoint .* is quantized already"):
        resolve_dense_model(dense_config(path, quantization="fp8"))
    assert resolve_dense_model(dense_config(path)).config.quantization.method == "awq"


def digest(path: Path) -> str:
    return weights_hash(path, load_model_config(path))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fp8 blocks", f"{Q_PROJ}.weight_scale_inv"),
        ("fp8 tensor, static", f"{Q_PROJ}.input_scale"),
        ("int4 g64 with zeros", f"{Q_PROJ}.weight_zero_point"),
        ("gptq g32, act-order", f"{Q_PROJ}.g_idx"),
        ("awq g128", f"{Q_PROJ}.qzeros"),
    ],
)
def test_the_hash_covers_all_scales(plain_dir: Path, tmp_path: Path, name: str, tensor: str) -> None:
    """Also in a file that is so large that the samples of 4 KiB miss them."""
    path = quantized_dir(plain_dir, tmp_path / "model", name)
    file, seen = path / "model.safetensors", set()
    tensors = load_file(file) | {"padding": torch.zeros(8 << 20, dtype=torch.uint8)}
    for changes in range(3):
        octets = tensors[tensor].contiguous().view(-1).view(torch.uint8)
        octets[len(octets) // 2 - changes] ^= changes > 0
        save_file(tensors | {tensor: octets.view(tensors[tensor].dtype).view(tensors[tensor].shape)}, file)
        seen.add(digest(path))
    assert len(seen) == 3


def test_the_hash_covers_the_scheme(plain_dir: Path, tmp_path: Path) -> None:
    config = load_model_config(plain_dir)
    hashes = {weights_hash(plain_dir, each) for each in (config, replace(config, quantization=on_the_fly_fp8()))}
    path = quantized_dir(plain_dir, tmp_path / "model", "fp8 of transformers, dynamic")
    hashes.add(digest(path))
    file = path / "config.json"
    config_json = json.loads(file.read_text())
    config_json["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    file.write_text(json.dumps(config_json))
    hashes.add(digest(path))
    assert len(hashes) == 4
    dummies = {weights_hash(path, each, dummy_seed=0) for each in (config, load_model_config(path))}
    assert len(dummies) == 2


@pytest.mark.parametrize(
    "name", ["fp8 tensor, static", "fp8 blocks", "int8 channel, token", "gptq g32, act-order", "mxfp4"]
)
def test_the_cuda_backend_multiplies_quantized_layers_by_their_reference(
    plain_dir: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantized_dir(plain_dir, tmp_path / "model", name)
    config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    expected = run_step(TorchBackend(weights), config, torch.float32, [3, 1, 4], [2, 0])
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        monkeypatch.setattr(LinearChoice, "measure", lambda *_: None)
        found = run_step(CudaBackend(weights, config, 64), config, torch.float32, [3, 1, 4], [2, 0])
    # The norms and sums in another order may move a value to the next code: see test_formats.py.
    assert relative_error(found, expected) < 1e-2
