"""Each rank loads its part of a model, and the parts together compute what the whole model does."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config import load_config
from services.common.errors import ConfigError, ModelError
from services.common.model_config import load_model_config
from services.common.quantization.schemes import on_the_fly_fp8
from services.common.rank import Rank
from services.common.several_ranks import check_divisible
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights, random_weights, whole_embedding
from services.dense_worker.ranks.shard_backend import shard_sizes
from services.dense_worker.ranks.sharded_operations import ShardedOperations
from tests.support.dense.bytes_read import bytes_read
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.family_models import RECURRENT, VARIANTS, load_true_model, make_family_model
from tests.support.dense.thread_ranks import ThreadGroup, run_ranks
from tests.support.dense.whole_model import WholeModel
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir
from tests.support.quantized.stacked_experts import quantize_experts

torch.set_num_threads(1)
CPU = torch.device("cpu")
BOUND = 2e-5  # as for one rank: relative to the largest logit, in another order of sums
PROMPT = torch.randint(3, 96, (21,), generator=torch.Generator().manual_seed(5)).tolist()
# They have gated layers, inputs for each layer, or a narrow embedding: `check_ranks` refuses them.
REFUSED = ("qwen3_next", "qwen3_5", "gemma4-shared", "opt-350m", *RECURRENT)
# Together they have all that is cut in a way of its own: fused and transposed tensors, heads that two ranks share,
# experts one by one and stacked, a shared expert, sinks, ALiBi, biases, norms of heads, and a vocabulary of odd size.
FEW = ("deepseek_v2", "deepseek_v3", "qwen2_moe", "gpt_oss", "falcon-7b", "bloom", "gpt2", "phi3", "olmo2")
FEW_BY_KERNELS = ("gpt_oss", "bloom", "olmo2")
FEW_FORMATS = ("fp8 blocks", "int4 g32", "mxfp4")
# Several ranks would share an order of columns or a block; and a scale for each token is of a rank's own columns.
OTHER_FORMATS = ("act-order", "ragged", "token", "dynamic", "fbgemm")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("--all-families")
    families = [each for each in VARIANTS if not each.startswith(REFUSED)]
    formats = [each for each in FORMATS if not any(word in each for word in OTHER_FORMATS)]
    short = {"variant": FEW, "variant_by_kernels": FEW_BY_KERNELS, "quantized": FEW_FORMATS}
    long = {"variant": families, "variant_by_kernels": families, "quantized": formats}
    if "any_quantized" in metafunc.fixturenames:
        cut = [each for each in FORMATS if "act-order" not in each and "ragged" not in each]
        metafunc.parametrize("any_quantized", cut)
    for name in short.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, (long if is_long else short)[name])


def logits_of(model: WholeModel) -> torch.Tensor:
    """Of a prompt in two chunks."""
    model.open(1, PROMPT)
    steps = [*model.step((1, 9, 0)), *model.step((1, 12, 9))]
    assert all(each.is_contiguous() for each in steps), "editors of logits take them as one row"
    return torch.cat(steps)


def logits_of_ranks(path: Path, count: int) -> torch.Tensor:
    config = load_model_config(path)

    def run(group: ThreadGroup) -> torch.Tensor:
        operations = ShardedOperations(config.vocab_size)
        operations.use_group(group)
        return logits_of(
            WholeModel(path, lambda weights: TorchBackend(weights, operations=operations), rank=group.rank)
        )

    return run_ranks(count, run)[0]


def test_two_ranks_give_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    path = make_family_model(tmp_path / "model", variant)
    check_divisible(load_model_config(path), 2)
    with torch.inference_mode():
        expected = load_true_model(path)(torch.tensor([PROMPT]), use_cache=False).logits[0]
    found = logits_of_ranks(path, 2)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def test_the_kernels_for_cuda_add_up_the_same(variant_by_kernels: str, tmp_path: Path) -> None:
    """With references in place of the kernels; sums are between them."""
    path = make_family_model(tmp_path / "model", variant_by_kernels)
    config = load_model_config(path)
    expected = logits_of(WholeModel(path))
    with fake_triton_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearChoice, "measure", lambda self, linears, *_: self.set_all(linears, LinearKernel.STREAMED))
        from services.dense_worker.backends.cuda_backend import CudaBackend
        from services.dense_worker.ranks.sharded_cuda_operations import ShardedCudaOperations

        def make(group: ThreadGroup, weights: ModelWeights) -> CudaBackend:
            sizes = shard_sizes(config, group.rank)
            operations = ShardedCudaOperations(sizes, config.vocab_size, 64, torch.float32, CPU)
            backend = CudaBackend(weights, sizes, 64, operations=operations)
            operations.use_group(group)
            return backend

        found = run_ranks(2, lambda group: logits_of(WholeModel(path, partial(make, group), rank=group.rank)))[0]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def quantized_model(path: Path, name: str) -> Path:
    """Its heads are as wide as half a block, and of keys there are as many as of queries."""
    used = FORMATS[name]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 4, "vocab_size": 96}
    make_model_dir(path, "llama", num_attention_heads=4, num_hidden_layers=2, **sizes | (used.fields or {}))
    quantize_model_dir(path, used)
    return path


def test_quantized_weights_are_cut_with_their_scales(quantized: str, tmp_path: Path) -> None:
    path = quantized_model(tmp_path / "model", quantized)
    expected, found = logits_of(WholeModel(path)), logits_of_ranks(path, 2)
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "fp8 blocks, ragged": "gate_up_weight in blocks of 128 rows cannot be cut at 0 and 160",
        "gptq g32, act-order": r"o_weight_order, an order of columns \(act-order\), cannot be cut at 0 and 128",
    }.items(),
)
def test_what_several_ranks_would_share_is_refused(name: str, message: str, tmp_path: Path) -> None:
    path = quantized_model(tmp_path / "model", name)
    with pytest.raises(ConfigError, match=f"dense.tensor_parallel_size is 2, but {message}"):
        load_weights(path, load_model_config(path), torch.float32, CPU, rank=Rank(0, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_four_ranks_share_two_heads_of_keys_and_an_odd_vocabulary(tmp_path: Path, tied: bool) -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "tie_word_embeddings": tied}
    path = make_model_dir(tmp_path / "model", "llama", **shape)
    expected, found = logits_of(WholeModel(path)), logits_of_ranks(path, 4)
    assert found.shape == expected.shape and expected.shape[1] == 97
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def test_a_rank_reads_its_slices_alone(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", "llama", num_attention_heads=4, num_key_value_heads=2, vocab_size=96)
    whole, weights = bytes_read(path, Rank(0, 1))
    norms = sum(tensor.nbytes for name, tensor in weights.named_tensors() if name.endswith("norm"))
    for index in range(2):
        read, part = bytes_read(path, Rank(index, 2))
        assert read == (whole - norms) / 2 + norms
        assert sum(tensor.nbytes for _, tensor in part.named_tensors()) == read, "nothing is read twice"


def cut_of(whole: torch.Tensor, name: str, index: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The half of a tensor of `quantized_model`, by what is known of its layers: projections have `sizes` rows."""
    kind = name.rpartition(".")[2]
    if kind in ("embed", "lm_head"):
        return whole.chunk(2)[index]
    if kind.startswith(("qkv", "gate_up")) and "input_scale" not in kind:
        sizes = sizes if kind.startswith("qkv") else (1, 1)
        rows = [size * len(whole) // sum(sizes) for size in sizes]
        return torch.cat([each.chunk(2)[index] for each in whole.split(rows)])
    is_cut = kind.startswith(("o_", "down")) and whole.dim() == 2 and whole.shape[1] > 1
    return whole.chunk(2, dim=1)[index] if is_cut else whole


def test_a_rank_reads_its_slices_of_quantized_weights(any_quantized: str, tmp_path: Path) -> None:
    """They equal slices of the whole, and of all that can be cut it reads half the bytes."""
    path = quantized_model(tmp_path / "model", any_quantized)
    config = load_model_config(path)
    whole = dict(load_weights(path, config, torch.float32, CPU).named_tensors())
    of_all = ("norm.weight", "g_idx", "weight_shape", "weight_zero_point", "input_scale", "activation_scale")
    num_bytes = 0
    for name, stored in load_file(path / "model.safetensors").items():
        is_summed = name.rpartition(".")[0].endswith(("o_proj", "down_proj"))
        is_of_rows = is_summed and (stored.dim() == 1 or 1 in stored.shape)
        is_whole = name.endswith(of_all) or stored.numel() == 1 or is_of_rows
        num_bytes += stored.nbytes if is_whole else stored.nbytes // 2
    for index in range(2):
        read, part = bytes_read(path, Rank(index, 2))
        for name, tensor in part.named_tensors():
            expected = cut_of(whole[name], name, index, (config.q_size, config.kv_size, config.kv_size))
            assert torch.equal(tensor.view(torch.uint8), expected.contiguous().view(torch.uint8)), name
        assert read == num_bytes


def test_parts_of_weights_that_become_fp8_while_they_load(tmp_path: Path) -> None:
    """Scales are of whole rows, of which a rank has columns."""
    path = make_model_dir(tmp_path / "model", "llama", num_attention_heads=4, num_key_value_heads=2, vocab_size=96)
    config = replace(load_model_config(path), quantization=on_the_fly_fp8())
    whole = dict(load_weights(path, config, torch.float32, CPU).named_tensors())
    for index in range(2):
        for name, tensor in load_weights(path, config, torch.float32, CPU, rank=Rank(index, 2)).named_tensors():
            expected = cut_of(whole[name], name, index, (config.q_size, config.kv_size, config.kv_size))
            assert torch.equal(tensor.float(), expected.float()), name


def test_a_bad_scale_is_named_with_the_part_that_has_it(tmp_path: Path) -> None:
    path = quantized_model(tmp_path / "model", "gptq g128")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.scales"
    tensors[name][1, 130] = torch.nan
    save_file(tensors, path / "model.safetensors")
    config = load_model_config(path)
    load_weights(path, config, torch.float32, CPU, rank=Rank(0, 2))
    with pytest.raises(ModelError, match=re.escape(f"{name}[:, 128:256] holds the scale nan at [1, 2]")):
        load_weights(path, config, torch.float32, CPU, rank=Rank(1, 2))


def test_ranks_share_a_tensor_of_quantized_experts(tmp_path: Path) -> None:
    """Its rows of gate and up take turns."""
    path = make_family_model(tmp_path / "model", "gpt_oss")
    quantize_experts(path)
    expected, found = logits_of(WholeModel(path)), logits_of_ranks(path, 2)
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.parametrize("form", ["gpt2", "gpt_oss", "gpt_oss in MXFP4"])
def test_a_rank_reads_its_slices_of_tensors_in_other_orders(form: str, tmp_path: Path) -> None:
    """Transposed ones, and those of all experts: no more bytes than it holds."""
    path = make_family_model(tmp_path / "model", form.split()[0], vocab_size=96)
    if form.endswith("MXFP4"):
        quantize_experts(path)
    for index in range(2):
        read, part = bytes_read(path, Rank(index, 2))
        assert read == sum(tensor.nbytes for _, tensor in part.named_tensors())


def test_the_parts_of_all_ranks_are_the_whole(tmp_path: Path) -> None:
    """Rows or columns, whichever the layer is cut by, side by side."""
    path = make_model_dir(tmp_path / "model", "llama", num_attention_heads=4, num_key_value_heads=2, vocab_size=96)
    config = load_model_config(path)
    whole, *parts = (
        dict(load_weights(path, config, torch.float32, CPU, rank=rank).named_tensors())
        for rank in (Rank(0, 1), Rank(0, 2), Rank(1, 2))
    )
    first, second = parts
    q, k, v = whole["layers.0.qkv_weight"].split([config.q_size, config.kv_size, config.kv_size])
    halves = [torch.cat([each.chunk(2)[index] for each in (q, k, v)]) for index in range(2)]
    assert torch.equal(first["layers.0.qkv_weight"], halves[0]) and torch.equal(
        second["layers.0.qkv_weight"], halves[1]
    )
    for name in ("layers.0.o_weight", "layers.1.down_weight"):
        assert torch.equal(torch.cat([first[name], second[name]], dim=1), whole[name])
    assert torch.equal(torch.cat([first["embed"], second["embed"]]), whole["embed"])
    section = load_config(None, [f"model.path={path}"]).model
    assert torch.equal(whole_embedding(section, config, torch.float32, CPU), whole["embed"])


def test_random_weights_are_the_same_on_all_ranks_where_they_are_not_cut(tmp_path: Path) -> None:
    """Else the ranks would choose different experts, and add up what does not belong together."""
    config = load_model_config(make_family_model(tmp_path / "model", "qwen2_moe"))
    first, second = (
        dict(random_weights(config, torch.float32, CPU, 3, rank=Rank(index, 2)).named_tensors()) for index in range(2)
    )
    whole = dict(random_weights(config, torch.float32, CPU, 3).named_tensors())
    uncut = {name for name in whole if first[name].shape == whole[name].shape}
    assert "layers.1.router" in uncut and "layers.1.o_weight" not in uncut
    for name in whole:
        has_other_values = not name.endswith("norm")
        assert torch.equal(first[name], second[name]) == (name in uncut or not has_other_values), name
