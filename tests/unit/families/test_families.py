"""Every family with its true parts in both workers, compared with transformers on the same random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.common.errors import ConfigError
from services.common.families.shape import Activation
from services.common.model_config import load_model_config
from services.dense_worker.backends.onnxruntime_backend import OnnxRuntimeBackend
from services.dense_worker.features.prompt_embeds.embeds_loader import LoadedEmbeds
from services.dense_worker.tensorrt.api import load_tensorrt
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.export_check import compare_with_hugging_face
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.dense.fake_triton_kernels import fake_triton_kernels
from tests.support.dense.family_models import VARIANTS, load_true_model, make_family_model
from tests.support.dense.whole_model import BLOCK_SIZE, WholeModel

torch.set_num_threads(1)
# Both compute in float32, in another order of sums, of a few hundred numbers each: relative to the largest logit.
BOUND = 2e-5
NUM_DECODED = 5
generator = torch.Generator().manual_seed(5)
PROMPT = torch.randint(3, 96, (21,), generator=generator).tolist()
OTHER_PROMPT = PROMPT[: 3 * BLOCK_SIZE] + torch.randint(3, 96, (7,), generator=generator).tolist()


@pytest.fixture(scope="module", params=VARIANTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def truth(path: Path) -> PreTrainedModel:
    return load_true_model(path)


@torch.inference_mode()
def true_logits(truth: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return truth(torch.tensor([token_ids]), use_cache=False).logits[0]


def check_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= BOUND * expected.abs().max()


def test_chunks_decoding_and_prefix_cache(path: Path, truth: PreTrainedModel) -> None:
    """Two sequences in one batch: one in chunks, the other on a cached prefix; then both decode greedily."""
    model = WholeModel(path)
    model.open(1, PROMPT)
    rows = [model.step((1, 9, 0))[0], model.step((1, 5, 9))[0]]
    num_cached = model.open(2, OTHER_PROMPT)
    has_states = bool(model.config.recurrent_layers)  # which are kept at a prompt's last block only
    assert num_cached == (0 if has_states else 3 * BLOCK_SIZE)
    first, second = model.step((1, 7, 14), (2, len(OTHER_PROMPT) - num_cached, num_cached))
    rows.append(first)
    check_logits(torch.cat(rows), true_logits(truth, PROMPT))
    check_logits(second, true_logits(truth, OTHER_PROMPT)[num_cached:])
    token_ids = {1: list(PROMPT), 2: list(OTHER_PROMPT)}
    for _ in range(NUM_DECODED):
        sampled = [(1, int(first[-1].argmax())), (2, int(second[-1].argmax()))]
        for seq_id, token_id in sampled:
            token_ids[seq_id].append(token_id)
        entries = [(seq_id, 1, len(each) - 1) for seq_id, each in token_ids.items()]
        first, second = model.step(*entries, sampled=sampled)
    for prompt, each, last in ((PROMPT, token_ids[1], first), (OTHER_PROMPT, token_ids[2], second)):
        expected = true_logits(truth, each)
        assert each[len(prompt) :] == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        check_logits(last, expected[-1:])


def test_decoding_goes_on_after_the_loss_of_the_weights_or_of_the_cache(path: Path, truth: PreTrainedModel) -> None:
    """As after the death of a dense worker, and of an attention worker: a new cache gets all tokens so far."""
    tokens = list(PROMPT)

    def decode(model: WholeModel, num_computed: int) -> None:
        for _ in range(NUM_DECODED):
            sampled = [(1, tokens[-1])] if len(tokens) > num_known else []
            (logits,) = model.step((1, len(tokens) - num_computed, num_computed), sampled=sampled)
            num_computed = len(tokens)
            tokens.append(int(logits[-1].argmax()))

    model, num_known = WholeModel(path), len(tokens)
    model.open(1, tokens)
    decode(model, 0)
    model.replace_dense()
    decode(model, len(tokens) - 1)
    model, num_known = WholeModel(path), len(tokens)
    model.open(1, tokens)
    decode(model, 0)
    expected = true_logits(truth, tokens)[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert tokens[len(PROMPT) :] == expected and len(expected) == 3 * NUM_DECODED


@torch.inference_mode()
def prompt_with_vectors(truth: PreTrainedModel, vocab_size: int) -> tuple[list[int], LoadedEmbeds, torch.Tensor]:
    """A prompt of tokens and vectors, the table of its vectors, and its logits by transformers."""
    embedding = truth.get_input_embeddings()
    own = embedding(torch.tensor(PROMPT))
    rows = own[:6] + own.std() * torch.randn(6, own.shape[1], generator=torch.Generator().manual_seed(8))
    table = LoadedEmbeds("", vocab_size, rows)
    prompt = [vocab_size + 2, vocab_size, *PROMPT[2:8], vocab_size + 5, *PROMPT[9:12], vocab_size + 2, *PROMPT[13:]]
    vectors = own.clone()
    vectors[[0, 1, 8, 12]] = rows[[2, 0, 5, 2]]
    inputs = {"inputs_embeds": vectors[None], "use_cache": False}
    if getattr(truth.config, "hidden_size_per_layer_input", 0):  # transformers gives images the row of the padding
        token_ids = torch.tensor([[token_id if token_id < vocab_size else 0 for token_id in prompt]])
        inputs["per_layer_inputs"] = truth.get_decoder().get_per_layer_inputs(token_ids, None)
    return prompt, table, truth(**inputs).logits[0]


def test_vectors_in_place_of_tokens(path: Path, truth: PreTrainedModel) -> None:
    """As transformers' `inputs_embeds`: in chunks that begin and end within vectors, beside a sequence of tokens."""
    model = WholeModel(path)
    prompt, table, expected = prompt_with_vectors(truth, model.config.vocab_size)
    model.open(1, prompt, table)
    model.open(2, OTHER_PROMPT)
    first, other = model.step((1, 1, 0), (2, len(OTHER_PROMPT), 0))
    rows = [first, model.step((1, 8, 1))[0], model.step((1, 12, 9))[0]]
    check_logits(torch.cat(rows), expected)
    check_logits(other, true_logits(truth, OTHER_PROMPT))
    assert (expected - true_logits(truth, PROMPT)).abs().max() > 100 * BOUND * expected.abs().max()


# Together they have all parts and operations that are exported. The others run with --all-families.
EXPORTED = ("olmo2", "gemma2", "cohere", "phi", "mpt", "bloom", "granite")
NOT_EXPORTED = ("experts", "latent", "layer_inputs", "num_learned_positions", "has_v_norm")  # of `LayerParts`


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "exported" in metafunc.fixturenames:
        variants = VARIANTS if metafunc.config.getoption("--all-families") else EXPORTED
        metafunc.parametrize("exported", variants)


def test_segments_by_onnx_and_tensorrt_rtx(exported: str, tmp_path: Path) -> None:
    """By onnxruntime they give the logits of transformers; TensorRT-RTX builds them, which needs no GPU."""
    path = make_family_model(tmp_path / "model", exported)
    config = load_model_config(path)
    is_learned = config.parts.activation is Activation.XIELU
    if is_learned or config.attention.layer_heads or any(getattr(config.parts, name) for name in NOT_EXPORTED):
        with pytest.raises(ConfigError, match="not exported to ONNX"):
            export_networks(config, torch.float32)
        return
    model = WholeModel(path, lambda weights: OnnxRuntimeBackend(export_networks(config, torch.float32), weights))
    model.open(1, PROMPT)
    (logits,) = model.step((1, len(PROMPT), 0))
    check_logits(logits, true_logits(load_true_model(path), PROMPT))
    cache, networks = EnginePlanCache(tmp_path / "plans"), export_networks(config, torch.bfloat16)
    builder = EnginePlanBuilder(load_tensorrt(), None, parse_profiles("1-16"), cache)
    plans = builder.find_or_build(networks, torch.bfloat16, None, lambda line: None)
    assert list(plans) == ["first", "middle", "last"] and all(len(each.plan) > 10_000 for [each] in plans.values())


@pytest.mark.parametrize(
    "variant",
    [
        *("olmo2", "gemma2", "gemma4-shared", "gemma4-moe", "cohere", "bloom", "granite", "gpt2", "opt-350m"),
        *("deepseek_v2-groups", "deepseek_v3", "qwen3_next", "qwen3_5"),
    ],
)
def test_parts_by_the_operations_for_cuda(variant: str, tmp_path: Path) -> None:
    """`CudaOperations` with its kernels replaced by torch: which residual is added when, and by which norm."""
    path = make_family_model(tmp_path, variant)
    with fake_triton_kernels():
        from services.dense_worker.backends.cuda_backend import CudaBackend

        model = WholeModel(path, lambda weights: CudaBackend(weights, load_model_config(path), 64))
        model.open(1, PROMPT)
        rows = [model.step((1, 20, 0))[0], model.step((1, 1, 20))[0]]
        truth = load_true_model(path)
        prompt, table, expected = prompt_with_vectors(truth, model.config.vocab_size)
        model.open(2, prompt, table)
        with_vectors = model.step((2, 9, 0))[0], model.step((2, 12, 9))[0]
    check_logits(torch.cat(rows), true_logits(truth, PROMPT))
    check_logits(torch.cat(with_vectors), expected)


def test_products_of_late_layers_run_before_the_first_step(tmp_path: Path) -> None:
    """Else their kernels would be compiled while a CUDA graph is captured, which is an error."""
    kinds = ["sliding_attention", "full_attention"] * 7
    path = make_family_model(tmp_path, "gemma4-shared", num_hidden_layers=len(kinds), layer_types=kinds)
    with fake_triton_kernels() as recorder:
        from services.dense_worker.backends.cuda_backend import CudaBackend

        with recorder:
            model = WholeModel(path, lambda weights: CudaBackend(weights, load_model_config(path), 64))
            at_start = set(recorder.launches)
            recorder.launches.clear()
            model.open(1, PROMPT)
            model.step((1, 16, 0))
    products = {launch for launch in recorder.launches if launch.startswith(("mm", "addmm", "linear"))}
    assert products and products <= at_start


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_not_exported(family: str, tmp_path: Path) -> None:
    config = load_model_config(make_family_model(tmp_path, family))
    with pytest.raises(ConfigError, match=f"learned positions of '{family}' are not exported to ONNX"):
        export_networks(config, torch.float32)


def test_layers_with_different_heads_are_not_exported(tmp_path: Path) -> None:
    config = load_model_config(make_family_model(tmp_path, "gemma4"))
    with pytest.raises(ConfigError, match=r"heads or inputs of their own \('gemma4_text'\) are not exported to ONNX"):
        export_networks(config, torch.float32)


def test_the_check_of_an_export_refuses_attention_that_it_cannot_compute(tmp_path: Path) -> None:
    path = make_family_model(tmp_path, "gemma2")
    config = load_model_config(path)
    with pytest.raises(ConfigError, match=r"--test computes attention as llama, .* do, not as 'gemma2' does"):
        compare_with_hugging_face(path, config, torch.float32, WholeModel(path).dense, "x", 1)
