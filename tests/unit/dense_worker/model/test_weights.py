"""Loaded weights, compared with the state dict of transformers, and the errors of damaged checkpoints."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.common.errors import ModelError
from services.common.json_files.read_json import MAX_JSON_BYTES
from services.common.model_config import ModelConfig, load_model_config
from services.common.quantization.schemes import on_the_fly_fp8
from services.dense_worker.model import weights as weights_module
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights, random_weights, weights_hash
from tests.support.models import FAMILIES, make_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def model_dir(llama_dir: Path, tmp_path: Path) -> Path:
    """A Llama checkpoint in one file, which the test may damage."""
    return shutil.copytree(llama_dir, tmp_path / "model")


def load(path: Path, dtype: torch.dtype = torch.float32, num_layers: int | None = None) -> ModelWeights:
    return load_weights(path, load_model_config(path, num_layers), dtype, CPU)


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_equal_to_transformers(weights: ModelWeights, path: Path, dtype: torch.dtype) -> None:
    truth = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(dtype)
    state = truth.state_dict()

    def merged(prefix: str, names: tuple[str, ...], kind: str) -> torch.Tensor | None:
        parts = [state.get(f"{prefix}.{name}.{kind}") for name in names]
        return None if parts[0] is None else torch.cat(parts)

    expected = {"embed": state["model.embed_tokens.weight"], "final_norm": state["model.norm.weight"]}
    if truth.lm_head.weight is not truth.model.embed_tokens.weight:
        expected["lm_head"] = state["lm_head.weight"]
    for i in range(len(weights.layers)):
        prefix = f"model.layers.{i}"
        fields = {
            "input_norm": state[f"{prefix}.input_layernorm.weight"],
            "post_norm": state[f"{prefix}.post_attention_layernorm.weight"],
            "q_norm": state.get(f"{prefix}.self_attn.q_norm.weight"),
            "k_norm": state.get(f"{prefix}.self_attn.k_norm.weight"),
        }
        for kind in ("weight", "bias"):
            fields |= {
                f"qkv_{kind}": merged(f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj"), kind),
                f"o_{kind}": merged(f"{prefix}.self_attn", ("o_proj",), kind),
                f"gate_up_{kind}": merged(f"{prefix}.mlp", ("gate_proj", "up_proj"), kind),
                f"down_{kind}": merged(f"{prefix}.mlp", ("down_proj",), kind),
            }
        expected |= {f"layers.{i}.{name}": tensor for name, tensor in fields.items() if tensor is not None}
    found = dict(weights.named_tensors())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype and tensor.is_contiguous() and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_equal_those_of_transformers(tmp_path: Path, family: str, max_shard_size: str) -> None:
    path = make_model_dir(tmp_path, family, max_shard_size=max_shard_size)
    assert (path / "model.safetensors").exists() == (max_shard_size == "1GB")
    assert_equal_to_transformers(load(path), path, torch.float32)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {"attention_bias": True})],
)
def test_optional_biases_are_loaded(tmp_path: Path, family: str, fields: dict[str, bool]) -> None:
    path = make_model_dir(tmp_path, family, **fields)
    assert_equal_to_transformers(load(path), path, torch.float32)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_while_loading(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    path = make_model_dir(tmp_path, "qwen2", dtype=stored)
    assert_equal_to_transformers(load(path, dtype), path, dtype)


def test_tied_lm_head_is_the_embedding_itself(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama", tie_word_embeddings=True)
    weights = load(path)
    assert weights.head.lm_head.weight.matrix.data is weights.embedding.table.data
    assert_equal_to_transformers(weights, path, torch.float32)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_lm_head_of_a_tied_model_is_used_where_it_differs_from_the_embedding(tmp_path: Path, shift: float) -> None:
    path = make_model_dir(tmp_path, "llama", tie_word_embeddings=True)
    edit_tensors(path, lambda each: each.update({"lm_head.weight": each["model.embed_tokens.weight"] + shift}))
    weights = load(path)
    lm_head = weights.head.lm_head.weight.matrix.data
    assert (lm_head is weights.embedding.table.data) == (shift == 0.0)
    assert_equal_to_transformers(weights, path, torch.float32)


def test_layers_beyond_num_layers_are_not_loaded(model_dir: Path) -> None:
    weights = load(model_dir, num_layers=1)
    assert len(weights.layers) == 1
    assert_equal_to_transformers(weights, model_dir, torch.float32)


def test_rotary_constant_of_old_checkpoints_is_skipped(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(model_dir, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert_equal_to_transformers(load(model_dir), model_dir, torch.float32)


def test_missing_weight_file_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor .*found no weights"):
        load(model_dir)


def test_other_checkpoint_formats_are_refused_by_name(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    message = r"found pytorch_model\.bin, supported: safetensors.*never loaded: loading one can run any program"
    with pytest.raises(ModelError, match=message):
        load(model_dir)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama", max_shard_size="50KB")
    shard = sorted(path.glob("model-*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load(path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_broken_index_is_named(tmp_path: Path, index: str) -> None:
    path = make_model_dir(tmp_path, "llama", max_shard_size="50KB")
    (path / "model.safetensors.index.json").write_text(index)
    message = r"model\.safetensors\.index\.json (is not a safetensors index|cannot be read as JSON|holds a JSON list)"
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, 10_000, -1])
def test_truncated_file_is_named(model_dir: Path, num_bytes: int) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors is missing, truncated or damaged"):
        load(model_dir)


def test_missing_tensor_is_named(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.pop(UP_PROJ))
    with pytest.raises(ModelError, match=f"lacks 1 tensors .*{UP_PROJ}"):
        load(model_dir)


def test_untied_model_without_lm_head_is_refused(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load(model_dir)


def test_config_of_other_shapes_names_tensor_and_both_shapes(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text()) | {"intermediate_size": 128}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mlp\.\w+\.weight in .* has shape .*96.* calls for .*128"):
        load(model_dir)


def test_transposed_tensor_is_refused(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.update({UP_PROJ: tensors[UP_PROJ].t().contiguous()}))
    with pytest.raises(ModelError, match=rf"{UP_PROJ} in .* has shape \(64, 96\), .* calls for \(96, 64\)"):
        load(model_dir)


def test_tensor_that_the_config_does_not_know_is_refused(model_dir: Path) -> None:
    name = "model.layers.2.self_attn.q_proj.bias"  # config.json says attention_bias is false
    edit_tensors(model_dir, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(ModelError, match=f"{name}, for which config.json has no place"):
        load(model_dir)
    assert len(load(model_dir, num_layers=2).layers) == 2


def test_integer_weights_are_refused(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.update({UP_PROJ: tensors[UP_PROJ].to(torch.int8)}))
    with pytest.raises(ModelError, match=f"{UP_PROJ} in .* has dtype I8, supported: F64, F32, F16, BF16"):
        load(model_dir)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_the_shapes_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    path = make_model_dir(tmp_path, family)
    weights = random_weights(load_model_config(path), torch.bfloat16, CPU, seed=1)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.named_tensors()}
    assert shapes == {name: (t.shape, t.dtype) for name, t in load(path, torch.bfloat16).named_tensors()}


def test_random_weights_depend_only_on_the_seed(llama_dir: Path) -> None:
    def draw(seed: int) -> torch.Tensor:
        weights = random_weights(load_model_config(llama_dir), torch.float32, CPU, seed)
        return torch.cat([tensor.flatten() for _, tensor in weights.named_tensors()])

    before = torch.get_rng_state()
    first = draw(7)
    torch.rand(3)
    assert torch.equal(first, draw(7))
    assert not torch.equal(first, draw(8))
    torch.set_rng_state(before)
    draw(9)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_weights_are_small_and_norms_are_one(tmp_path: Path) -> None:
    weights = random_weights(load_model_config(make_model_dir(tmp_path, "qwen3")), torch.float32, CPU, seed=0)
    for name, tensor in weights.named_tensors():
        if tensor.dim() == 1:
            assert torch.all(tensor == 1), name
        else:  # with 4096 samples or more the estimates have errors of 1.1 % and std / 64
            assert tensor.std().item() == pytest.approx(0.02, rel=0.06), name
            assert abs(tensor.mean().item()) < 0.002, name


def digest(path: Path, config: ModelConfig | None = None) -> str:
    return weights_hash(path, config or load_model_config(path))


def test_hash_is_the_same_for_a_copy(llama_dir: Path, model_dir: Path) -> None:
    assert digest(llama_dir) == digest(model_dir)
    assert len(bytes.fromhex(digest(llama_dir))) == 32


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.5, 0.99, 1.0])
def test_hash_changes_with_any_byte_of_a_small_file(model_dir: Path, offset: float) -> None:
    file = model_dir / "model.safetensors"
    content = bytearray(file.read_bytes())
    before = digest(model_dir)
    content = content[: 256 * 1024]  # the samples cover the whole file up to this size
    file.write_bytes(content)
    cut = digest(model_dir)
    content[int(offset * (len(content) - 1))] ^= 1
    file.write_bytes(content)
    assert len({before, cut, digest(model_dir)}) == 3


@pytest.mark.parametrize("offset", [8, 19_999, -1, -4096])
def test_hash_changes_with_header_and_ends_of_a_large_file(model_dir: Path, offset: int) -> None:
    file = model_dir / "model.safetensors"
    content = bytearray((20_000).to_bytes(8, "little") + bytes(4_000_000))
    file.write_bytes(content)
    before = digest(model_dir)
    content[offset] ^= 1
    file.write_bytes(content)
    assert digest(model_dir) != before


def test_hash_changes_with_the_size_alone(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(bytes(4_000_000))
    before = digest(model_dir)
    file.write_bytes(bytes(4_000_004))
    assert digest(model_dir) != before


def test_hash_changes_with_names_and_order_of_shards(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama", max_shard_size="50KB")
    seen = {digest(path)}
    first, second = sorted(path.glob("model-*.safetensors"))[:2]
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    seen.add(digest(path))
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first.name, "a.safetensors"))  # still the first one by name
    first.rename(path / "a.safetensors")
    seen.add(digest(path))
    assert len(seen) == 3


def test_hash_changes_with_config_num_layers_and_dummy_seed(model_dir: Path) -> None:
    config = load_model_config(model_dir)
    cut = dataclasses.replace(config, num_layers=2)
    seen = {digest(model_dir), digest(model_dir, cut)}
    seen |= {weights_hash(model_dir, c, dummy_seed=seed) for c in (config, cut) for seed in (0, 1)}
    file = model_dir / "config.json"
    file.write_text(file.read_text().replace("10000.0", "20000.0"))
    seen |= {digest(model_dir), weights_hash(model_dir, config, dummy_seed=0)}
    assert len(seen) == 8


def test_dummy_hash_needs_no_weight_file(model_dir: Path) -> None:
    config = load_model_config(model_dir)
    expected = weights_hash(model_dir, config, dummy_seed=0)
    (model_dir / "model.safetensors").unlink()
    assert weights_hash(model_dir, config, dummy_seed=0) == expected
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        weights_hash(model_dir, config)


def test_hash_of_a_missing_shard_names_it(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, "llama", max_shard_size="50KB")
    shard = sorted(path.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        digest(path)


@pytest.mark.parametrize("claimed", [4_000_001, 2**40, 2**63, 2**64 - 1])
def test_hash_of_a_header_that_is_longer_than_its_file_names_both(model_dir: Path, claimed: int) -> None:
    (model_dir / "model.safetensors").write_bytes(claimed.to_bytes(8, "little") + bytes(4_000_000))
    with pytest.raises(ModelError, match=rf"its header has {claimed} bytes, at most 4000000 expected"):
        digest(model_dir)


def test_hash_of_a_header_beyond_the_limit_names_both(model_dir: Path) -> None:
    with (model_dir / "model.safetensors").open("wb") as stream:
        stream.write((2**32).to_bytes(8, "little"))
        stream.truncate(2**33)  # takes no room on a disk
    with pytest.raises(ModelError, match=r"its header has 4294967296 bytes, at most 100000000 expected"):
        digest(model_dir)


@pytest.mark.parametrize("offsets", [[0, 2**50], [100, 4], [-90, 8], [0, 4_000_001]])
def test_hash_of_scales_outside_of_their_file_is_refused(model_dir: Path, offsets: list[int]) -> None:
    header = json.dumps({"a.weight_scale": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4_000_000)
    (model_dir / "model.safetensors").write_bytes(content)
    config = dataclasses.replace(load_model_config(model_dir), quantization=on_the_fly_fp8())
    start, end = (8 + len(header) + offset for offset in offsets)
    with pytest.raises(ModelError, match=rf"a tensor lies at {start} to {end} of {len(content)} bytes"):
        digest(model_dir, config)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_file_of_json_beyond_the_limit_is_not_read(tmp_path: Path, name: str) -> None:
    path = make_model_dir(tmp_path, "llama", max_shard_size="50KB")
    with (path / name).open("wb") as stream:
        stream.truncate(2**35)  # takes no room on a disk
    with pytest.raises(ModelError, match=rf"{name} has 34359738368 bytes, at most {MAX_JSON_BYTES} allowed"):
        load(path)


def test_json_that_is_nested_too_deeply_is_named(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("[" * 1_000_000)
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        load(model_dir)


def test_each_percent_that_is_loaded_is_reported_once(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    arguments = model_dir, load_model_config(model_dir), torch.float32, CPU
    load_weights(*arguments, report=lines.append)
    assert not lines, "it takes a moment"
    monkeypatch.setattr(weights_module, "REPORT_S", 0.0)
    load_weights(*arguments, report=lines.append)
    percents = [int(re.fullmatch(r"weights: (\d+) %", line)[1]) for line in lines]
    assert percents == sorted(set(percents)) and percents[-1] == 100
