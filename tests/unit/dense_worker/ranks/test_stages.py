"""Each stage of a pipeline loads its layers, and the stages together compute what the whole model does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.config import load_config
from services.common.errors import ModelError
from services.common.model_config import load_model_config
from services.common.rank import Rank, seam_config
from services.common.resolve import ResolvedModel
from services.dense_worker.backends import DenseBackend
from services.dense_worker.build import load_model, resolve_dense_model
from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights, random_weights
from services.dense_worker.ranks.shard_backend import stage_backend
from services.dense_worker.ranks.shard_service import load_shard
from services.dense_worker.ranks.stage_links import StageLinks
from services.dense_worker.ranks.stage_weights import linked_weights
from services.dense_worker.service import attach_options
from tests.support.dense.bytes_read import bytes_read
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.family_models import VARIANTS, load_true_model, make_family_model
from tests.support.dense.thread_ranks import ThreadGroup, run_ranks
from tests.support.dense.whole_model import WholeModel
from tests.support.models import make_model_dir
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
BOUND = 2e-5  # as for one rank
PROMPT = torch.randint(3, 96, (21,), generator=torch.Generator().manual_seed(5)).tolist()
REFUSED = ("gemma4-shared",)  # `check_ranks` refuses inputs for each layer
# Each stage has some keys.
GATED = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2}
CONVOLUTION = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
CHANGES = {
    "qwen3_next": GATED,
    "qwen3_5_moe": GATED,
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 2]},
    "granitemoehybrid": MAMBA,
    "granitemoehybrid-plain": MAMBA,
    "nemotron_h": {"hybrid_override_pattern": "M*-M*-"},
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
}
# Gated delta layers and latent attention, which tensor ranks do not have; positions and a norm of the embedding, a tied
# head, logits that are capped, experts, sinks, and layers that differ.
FEW = ("qwen3_next", "deepseek_v2", "gpt2", "bloom", "gemma2", "gpt_oss")
FEW_BY_KERNELS = ("deepseek_v2", "gpt_oss", "gemma2")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_long = metafunc.config.getoption("--all-families")
    families = [each for each in VARIANTS if not each.startswith(REFUSED)]
    short = {"variant": FEW, "variant_by_kernels": FEW_BY_KERNELS, "quantized": ("int4 g32",)}
    long = {"variant": families, "variant_by_kernels": families, "quantized": list(FORMATS)}
    for name in short.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, (long if is_long else short)[name])


def logits_of(model: WholeModel) -> torch.Tensor:
    """Of a prompt in two chunks."""
    model.open(1, PROMPT)
    return torch.cat([*model.step((1, 9, 0)), *model.step((1, 12, 9))])


def logits_of_stages(path: Path, count: int) -> torch.Tensor:
    return run_stages(path, count)[0]


def run_stages(path: Path, count: int) -> list[torch.Tensor]:
    config = load_model_config(path)

    def make(group: ThreadGroup, weights: ModelWeights) -> DenseBackend:
        model = ResolvedModel(config, torch.float32, CPU, 128, rank=group.rank)
        backend, links = stage_backend(weights, model, 64, None)
        links.use_group(group)
        return backend

    def run(group: ThreadGroup) -> torch.Tensor:
        return logits_of(WholeModel(path, partial(make, group), rank=group.rank))

    return run_ranks(count, run, are_stages=True)


def test_stages_give_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    path = make_family_model(tmp_path / "model", variant, **CHANGES.get(variant, {}))
    with torch.inference_mode():
        expected = load_true_model(path)(torch.tensor([PROMPT]), use_cache=False).logits[0]
    found = logits_of_stages(path, 2)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def test_a_middle_stage_passes_all_rows_on(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", "llama", num_hidden_layers=7, vocab_size=97)
    first, middle, _ = run_stages(path, 3)
    assert torch.equal(first, logits_of(WholeModel(path)))  # the same products in the same order
    assert len(middle) == 0, "nobody reads its logits"


def test_the_kernels_for_cuda_give_the_same(variant_by_kernels: str, tmp_path: Path) -> None:
    """With references in place of the kernels."""
    path = make_family_model(tmp_path / "model", variant_by_kernels, **CHANGES.get(variant_by_kernels, {}))
    config = load_model_config(path)
    expected = logits_of(WholeModel(path))
    with fake_triton_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearChoice, "measure", lambda self, linears, *_: self.set_all(linears, LinearKernel.STREAMED))
        from services.dense_worker.backends.cuda_backend import CudaBackend
        from services.dense_worker.backends.cuda_operations import CudaOperations

        def make(group: ThreadGroup, weights: ModelWeights) -> CudaBackend:
            links, sizes = StageLinks(torch.float32), seam_config(config, group.rank)
            operations = CudaOperations(sizes, 64, torch.float32, CPU)
            backend = CudaBackend(linked_weights(weights, links), sizes, 64, operations=operations)
            links.use_group(group)
            return backend

        def run(group: ThreadGroup) -> torch.Tensor:
            return logits_of(WholeModel(path, partial(make, group), rank=group.rank))

        found = run_ranks(2, run, are_stages=True)[0]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def test_quantized_layers_are_those_of_the_whole(quantized: str, tmp_path: Path) -> None:
    used = FORMATS[quantized]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_key_value_heads": 4, "vocab_size": 96}
    path = tmp_path / "model"
    make_model_dir(path, "llama", num_attention_heads=4, num_hidden_layers=2, **sizes | (used.fields or {}))
    quantize_model_dir(path, used)
    assert torch.equal(logits_of_stages(path, 2), logits_of(WholeModel(path)))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_reads_its_layers_alone(tmp_path: Path, is_tied: bool) -> None:
    path = make_model_dir(
        tmp_path / "model", "llama", num_hidden_layers=5, vocab_size=96, tie_word_embeddings=is_tied
    )
    whole, weights = bytes_read(path, Rank(0, 1))
    by_name = {name: tensor.nbytes for name, tensor in weights.named_tensors()}
    of_layer = sum(size for name, size in by_name.items() if name.startswith("layers.0."))
    expected = [3 * of_layer + by_name["embed"], 2 * of_layer + by_name["embed"] + by_name["final_norm"]]
    for index in range(2):
        read, part = bytes_read(path, Rank(index, 2, is_stage=True))
        assert read == expected[index]
        assert sum(tensor.nbytes for _, tensor in part.named_tensors()) == read, "nothing is read twice"
    assert whole == sum(expected) - is_tied * by_name["embed"]


def test_a_tensor_that_another_stage_lacks_is_missed_by_each(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", "llama", num_hidden_layers=2, vocab_size=96)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors .* model\.layers\.1\.mlp\.down_proj"):
        load_weights(path, load_model_config(path), torch.float32, CPU, rank=Rank(0, 2, is_stage=True))


def test_an_untied_head_of_the_last_stage_is_found(tmp_path: Path) -> None:
    """As transformers does, whatever config.json says."""
    path = make_model_dir(tmp_path / "model", "llama", num_hidden_layers=2, vocab_size=96, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of_stages(path, 2), logits_of(WholeModel(path)))


def test_the_workers_load_their_stages(tmp_path: Path) -> None:
    """All that a dense worker and a shard make of a stage: features, sampler and runner."""
    path = make_model_dir(tmp_path / "model", "llama", num_hidden_layers=3, vocab_size=96)
    settings = ["dense.pipeline_parallel_size=2", "dense.device=cpu", "dense.num_threads=1", "model.load_format=dummy"]
    config = load_config(None, [*settings, f"model.path={path}"])
    leading = load_model(config, resolve_dense_model(config, Rank.of(config.dense, 0)), print)
    assert not leading.gives_hidden_states, "the last stage has them"
    sizes = [attach_options(config, leading, rank).model_fingerprint for rank in range(2)]
    assert sizes[0] != sizes[1], "their attention workers have other numbers of layers"
    _, digest, _ = load_shard(config, resolve_dense_model(config, Rank.of(config.dense, 1)), print, None)
    assert digest == leading.weights_hash


def test_random_weights_differ_between_stages(tmp_path: Path) -> None:
    config = load_model_config(make_model_dir(tmp_path / "model", "llama", num_hidden_layers=2, vocab_size=96))
    first, second = (
        dict(random_weights(config, torch.float32, CPU, 3, rank=Rank(index, 2, is_stage=True)).named_tensors())
        for index in range(2)
    )
    assert not torch.equal(first["layers.0.o_weight"], second["layers.0.o_weight"])
