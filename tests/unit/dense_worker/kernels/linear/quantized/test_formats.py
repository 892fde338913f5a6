"""Every format of quantized weights, against its formula in numpy and transformers on the dequantized weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.linear import Linear, PlainWeight
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights, random_weights
from services.dense_worker.parameters import parts_of_type, tensors_by_name
from services.dense_worker.tensorrt.export_check import OneSequenceAttention
from tests.support.dense.steps import relative_error
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, dequantized_model, quantize_model_dir, unchanged

torch.set_num_threads(1)
CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
NUM_TOKENS = 9
ONE_OF_EACH = ("fp8 tensor, static", "fp8 blocks", "int8 channel, token", "gptq g32, act-order", "mxfp4")


@pytest.fixture(scope="module")
def plain_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Unquantized models by hidden size, each made once."""
    sizes = [SIZES, SIZES | {"hidden_size": 192, "intermediate_size": 320}]
    # Biases and GQA: what merging could mix up.
    return {
        each["hidden_size"]: make_model_dir(tmp_path_factory.mktemp("plain"), "qwen2", **each) for each in sizes
    }


def plain_dir_of(name: str, plain_dirs: dict[int, Path]) -> Path:
    return plain_dirs[FORMATS[name].fields.get("hidden_size", SIZES["hidden_size"])]


def logits(weights: ModelWeights, config: ModelConfig, model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """One prompt through the torch backend; attention is computed with the rotary embedding of transformers."""
    backend, attention = TorchBackend(weights), OneSequenceAttention(model, config)
    qkv = torch.empty(len(token_ids), config.qkv_size)
    residual = backend.first(token_ids, qkv)
    for layer in range(config.num_layers - 1):
        residual = backend.middle(layer, attention(layer, qkv), residual, qkv)
    return backend.last(attention(config.num_layers - 1, qkv), residual, torch.arange(len(token_ids)))


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_means_what_its_formula_says(name: str, plain_dirs: dict[int, Path], tmp_path: Path) -> None:
    used, plain_dir = FORMATS[name], plain_dir_of(name, plain_dirs)
    path = shutil.copytree(plain_dir, tmp_path / "model")
    plain = quantize_model_dir(path, used)
    config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    generator = torch.Generator().manual_seed(5)
    for i, layer in enumerate(weights.layers):
        for linear in parts_of_type(Linear, layer):
            assert not isinstance(linear.weight, PlainWeight)
            x = torch.randn(NUM_TOKENS, linear.in_features, generator=generator)
            bias = None if linear.bias is None else linear.bias.data
            found, parts = linear.weight.multiply(x, bias), []
            for projection in linear.merged_from:
                matrix = plain[f"{projection.name}.weight"].double()
                product = torch.from_numpy(used.round_input(x.double().numpy(), projection.name)) @ matrix.T
                parts.append(product + plain.get(f"{projection.name}.bias", torch.zeros(1)))
            # The same numbers are multiplied; only products and sums in float32 differ from float64.
            assert relative_error(found, torch.cat(parts, dim=1)) < 2e-6, f"layer {i}: {linear.name}"
            out = torch.empty_like(found)
            assert linear.weight.multiply(x, bias, out) is out and torch.allclose(out, found, rtol=1e-5, atol=1e-5)
    model = dequantized_model(plain_dir, plain, used)
    token_ids = torch.randint(160, (NUM_TOKENS,), generator=generator)
    with torch.inference_mode():
        expected = model(token_ids[None]).logits[0]
        error = relative_error(logits(weights, config, model, token_ids), expected)
    # Without rounded inputs only the order of sums differs. With them, a value beside the middle of two codes may be
    # rounded to the other one, which changes it by up to 1 part in 16 (FP8) and the logits by about 1 part in 1000.
    assert error < (1e-5 if used.round_input is unchanged else 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_products_in_half_precision_are_near_those_in_float32(
    name: str, dtype: torch.dtype, plain_dirs: dict[int, Path], tmp_path: Path
) -> None:
    path = shutil.copytree(plain_dir_of(name, plain_dirs), tmp_path / "model")
    quantize_model_dir(path, FORMATS[name])
    config = load_model_config(path)
    wide = load_weights(path, config, torch.float32, CPU).layers[0]
    narrow = load_weights(path, config, dtype, CPU).layers[0]
    for exact, rounded in zip(parts_of_type(Linear, wide), parts_of_type(Linear, narrow), strict=True):
        x = torch.randn(NUM_TOKENS, exact.in_features, generator=torch.Generator().manual_seed(6)).to(dtype)
        found = rounded.weight.multiply(x, None)
        assert found.dtype == dtype
        # Scales, the dequantized weights, inputs and results are rounded, each by up to 1 part in 256 in bfloat16.
        limit = 1.5e-2 if dtype == torch.bfloat16 else 2e-3
        assert relative_error(found, exact.weight.multiply(x.float(), None)) < limit


@pytest.mark.parametrize("name", ["fp8 channel, token", "fp8 tensor, static", "fp8 blocks", "int8 channel, token"])
def test_a_row_has_the_same_product_beside_other_rows(
    name: str, plain_dirs: dict[int, Path], tmp_path: Path
) -> None:
    """Where inputs are quantized: a last bit would move numbers to other codes, and change tokens.

    Only sums that are all but zero may have other last bits, by far less than the distance of two codes of their row.
    """
    path = shutil.copytree(plain_dir_of(name, plain_dirs), tmp_path / "model")
    quantize_model_dir(path, FORMATS[name])
    weights = load_weights(path, load_model_config(path), torch.float32, CPU)
    for linear in parts_of_type(Linear, weights.layers):
        x = torch.randn(64, linear.in_features, generator=torch.Generator().manual_seed(8))
        together = linear.weight.multiply(x, None)
        alone = torch.cat([linear.weight.multiply(x[i : i + 1], None) for i in range(0, 64, 3)])
        difference, greatest = (together[::3] - alone).abs(), alone.abs().amax(1, keepdim=True)
        assert (difference <= 1e-10 * greatest).all(), linear.name


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_have_the_tensors_of_the_checkpoint(
    name: str, plain_dirs: dict[int, Path], tmp_path: Path
) -> None:
    path = shutil.copytree(plain_dir_of(name, plain_dirs), tmp_path / "model")
    quantize_model_dir(path, FORMATS[name])
    config = load_model_config(path)
    loaded, random = load_weights(path, config, torch.float32, CPU), random_weights(config, torch.float32, CPU, seed=1)
    again = dict(random_weights(config, torch.float32, CPU, seed=1).named_tensors())
    for (key, tensor), (other_key, other) in zip(loaded.named_tensors(), random.named_tensors(), strict=True):
        assert (key, tensor.shape, tensor.dtype) == (other_key, other.shape, other.dtype)
        assert torch.equal(other.contiguous().view(torch.uint8), again[key].contiguous().view(torch.uint8)), key
    for linear in parts_of_type(Linear, random.layers):
        x = torch.randn(64, linear.in_features, generator=torch.Generator().manual_seed(7))
        expected = 0.02 * linear.in_features**0.5  # the standard deviation of a sum of products
        assert 0.6 < linear.weight.multiply(x, None).std().item() / expected < 1.6


def test_quantized_tensors_are_stored_in_their_own_size(plain_dirs: dict[int, Path], tmp_path: Path) -> None:
    sizes = {}
    for name in ("fp8 channel, token", "gptq g128", "mxfp4"):
        path = shutil.copytree(plain_dir_of(name, plain_dirs), tmp_path / name)
        quantize_model_dir(path, FORMATS[name])
        weights = load_weights(path, load_model_config(path), torch.bfloat16, CPU)
        linear = next(parts_of_type(Linear, weights.layers[0]))
        num_bytes = sum(tensor.nbytes for tensor in tensors_by_name(linear.weight).values())
        sizes[name] = num_bytes / (linear.in_features * linear.out_features)
    # A byte and 4 bytes for a row of 128; half a byte and a scale of 2 bytes for 128; half a byte and one for 32.
    expected = {"fp8 channel, token": 1 + 4 / 128, "gptq g128": 0.5 + 2 / 128, "mxfp4": 0.5 + 1 / 32}
    assert sizes == pytest.approx(expected)


def test_lm_head_and_embedding_stay_in_the_dtype_of_the_model(plain_dirs: dict[int, Path], tmp_path: Path) -> None:
    path = shutil.copytree(plain_dirs[128], tmp_path / "model")
    quantize_model_dir(path, FORMATS["awq g128"])
    weights = load_weights(path, load_model_config(path), torch.bfloat16, CPU)
    stored = load_file(path / "model.safetensors")
    assert torch.equal(weights.head.lm_head.weight.matrix.data, stored["lm_head.weight"].bfloat16())
    assert torch.equal(weights.embedding.table.data, stored["model.embed_tokens.weight"].bfloat16())
