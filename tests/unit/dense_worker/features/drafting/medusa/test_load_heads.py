"""Medusa heads from checkpoints of every published layout, and the errors for those of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import ModelError
from services.common.model_config import ModelConfig
from services.dense_worker.features.drafting.medusa.heads import MedusaHeads
from services.dense_worker.features.drafting.medusa.load_heads import StoredHeads
from tests.support.dense.medusa_heads import (
    Head,
    Tensors,
    in_layout_of_medusa,
    in_layout_of_vllm,
    random_heads,
    write_heads,
)
from tests.support.model_configs import small_config

MODEL: ModelConfig = small_config("llama")
HIDDEN, VOCAB = MODEL.hidden_size, MODEL.vocab_size
NUM_HEADS = 3
SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB}
OF_MEDUSA = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}
OF_VLLM = {"model_type": "medusa", "num_heads": NUM_HEADS, "num_hidden_layers": 1} | SIZES


@pytest.fixture(scope="module")
def heads() -> list[Head]:
    return random_heads(NUM_HEADS, HIDDEN, VOCAB)


def load(path: Path, max_num_heads: int = 64, dtype: torch.dtype = torch.float32) -> MedusaHeads:
    return StoredHeads.find(path, MODEL, dtype, torch.device("cpu"), max_num_heads).load()


def check_heads(found: MedusaHeads, expected: list[Head]) -> None:
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(5))
    assert found.draft(hidden).tolist() == [[head.draft(row) for head in expected] for row in hidden]
    assert found.num_heads == len(expected)


def with_prefix(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def test_heads_in_the_layout_of_medusa(tmp_path: Path, heads: list[Head]) -> None:
    config = OF_MEDUSA | {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    check_heads(load(write_heads(tmp_path, in_layout_of_medusa(heads), **config)), heads)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_heads_in_the_layout_of_vllm(tmp_path: Path, heads: list[Head], prefix: str) -> None:
    tensors = with_prefix(in_layout_of_vllm(heads), prefix)
    check_heads(load(write_heads(tmp_path, tensors, "model.safetensors", **OF_VLLM)), heads)


def test_several_residual_blocks(tmp_path: Path) -> None:
    deep = random_heads(2, HIDDEN, VOCAB, num_blocks=3)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 3}
    check_heads(load(write_heads(tmp_path / "a", in_layout_of_medusa(deep), **config)), deep)
    config = OF_VLLM | {"num_heads": 2, "num_hidden_layers": 3}
    check_heads(load(write_heads(tmp_path / "b", in_layout_of_vllm(deep), "model.safetensors", **config)), deep)


def test_blocks_without_biases(tmp_path: Path, heads: list[Head]) -> None:
    tensors = {name: each for name, each in in_layout_of_vllm(heads).items() if not name.endswith("bias")}
    plain = [Head([(weight, torch.zeros(HIDDEN)) for weight, _ in head.blocks], head.lm_head) for head in heads]
    check_heads(load(write_heads(tmp_path, tensors, "model.safetensors", **OF_VLLM)), plain)


@pytest.mark.parametrize("keeps_others", [False, True])
def test_one_lm_head_for_all(tmp_path: Path, heads: list[Head], keeps_others: bool) -> None:
    """vLLM reads the first head's."""
    tensors = in_layout_of_vllm(heads)
    if not keeps_others:
        del tensors["lm_heads.1.weight"], tensors["lm_heads.2.weight"]
    shared = [Head(head.blocks, heads[0].lm_head) for head in heads]
    path = write_heads(tmp_path, tensors, "model.safetensors", **OF_VLLM, original_lm_head=True)
    check_heads(load(path), shared)


def test_all_heads_of_the_file_count_even_if_the_config_says_fewer(tmp_path: Path, heads: list[Head]) -> None:
    config = OF_MEDUSA | {"medusa_num_heads": 2}
    check_heads(load(write_heads(tmp_path, in_layout_of_medusa(heads), **config)), heads)


def test_only_as_many_heads_as_a_sequence_may_have_drafts(tmp_path: Path, heads: list[Head]) -> None:
    check_heads(load(write_heads(tmp_path, in_layout_of_medusa(heads), **OF_MEDUSA), 2), heads[:2])


def test_heads_have_the_dtype_of_the_model(tmp_path: Path, heads: list[Head]) -> None:
    found = load(write_heads(tmp_path, in_layout_of_medusa(heads), **OF_MEDUSA), dtype=torch.bfloat16)
    assert found.lm_head.dtype == found.blocks[0].weight.dtype == found.blocks[0].bias.dtype == torch.bfloat16
    assert torch.equal(found.lm_head[1], heads[1].lm_head.bfloat16())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"medusa_num_layers": 1}, "medusa_num_heads None, expected an integer from 1 to 64"),
        (OF_MEDUSA | {"medusa_num_heads": 65}, "medusa_num_heads 65, expected an integer from 1 to 64"),
        (OF_MEDUSA | {"medusa_num_heads": 0}, "medusa_num_heads 0"),
        (OF_MEDUSA | {"medusa_num_heads": True}, "medusa_num_heads True"),
        (OF_MEDUSA | {"medusa_num_heads": "3"}, "medusa_num_heads '3'"),
        (OF_MEDUSA | {"medusa_num_layers": 17}, "medusa_num_layers 17, expected an integer from 1 to 16"),
        (OF_MEDUSA | {"hidden_size": HIDDEN + 1}, f"hidden_size {HIDDEN + 1}, the model's is {HIDDEN}"),
        (OF_VLLM | {"vocab_size": VOCAB + 1}, f"vocab_size {VOCAB + 1}, the model's is {VOCAB}"),
        (OF_VLLM | {"truncated_vocab_size": 50}, "truncated_vocab_size 50"),
        (OF_VLLM | {"original_lm_head": "yes"}, "original_lm_head 'yes'"),
        (OF_MEDUSA | {"medusa_num_heads": 4}, "lacks 2 tensors of 4 Medusa heads with 1 residual blocks each"),
        (OF_MEDUSA | {"medusa_num_layers": 2}, "lacks 6 tensors of 3 Medusa heads with 2 residual blocks"),
    ],
)
def test_configs_of_other_heads_are_refused(
    tmp_path: Path, heads: list[Head], config: dict[str, Any], named: str
) -> None:
    path = write_heads(tmp_path, in_layout_of_medusa(heads), **config)
    with pytest.raises(ModelError) as raised:
        load(path)
    assert named in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("1.0.linear.weight", torch.zeros(HIDDEN, HIDDEN + 1), f"shape ({HIDDEN}, {HIDDEN + 1})"),
        ("2.1.weight", torch.zeros(VOCAB + 1, HIDDEN), f"2.1.weight in {{path}} has shape ({VOCAB + 1}, {HIDDEN})"),
        ("0.0.linear.bias", torch.zeros(1, HIDDEN), f"shape (1, {HIDDEN})"),
        ("0.1.weight", torch.zeros(VOCAB, HIDDEN, dtype=torch.int8), "dtype I8"),
        ("token_map", torch.zeros(9, dtype=torch.int64), "holds token_map, for which config.json has no place"),
        ("0.1.linear.weight", torch.zeros(HIDDEN, HIDDEN), "holds 0.1.linear.weight"),
        ("70.1.weight", torch.zeros(1), "has 71 Medusa heads, at most 64"),
        ("9" * 5000 + ".1.weight", torch.zeros(1), "for which config.json has no place"),
        ("4.1.weight", torch.zeros(1), "lacks 3 tensors of 5 Medusa heads"),
    ],
)
def test_tensors_of_other_heads_are_refused(
    tmp_path: Path, heads: list[Head], name: str, tensor: torch.Tensor, named: str
) -> None:
    path = write_heads(tmp_path, in_layout_of_medusa(heads) | {name: tensor}, **OF_MEDUSA)
    with pytest.raises(ModelError) as raised:
        load(path)
    assert named.format(path=path / "medusa_lm_head.safetensors") in str(raised.value)


def test_other_layouts_are_refused_with_the_names_of_those_that_are_known(tmp_path: Path, heads: list[Head]) -> None:
    path = write_heads(tmp_path, {"fc.weight": torch.zeros(3), "layers.0.mlp.weight": torch.zeros(3)}, **OF_MEDUSA)
    with pytest.raises(ModelError, match=r"fc\.weight, layers.*0\.0\.linear\.weight or blocks\.0\.layers\.0\.weight"):
        load(path)


def test_pickled_heads_are_never_loaded(tmp_path: Path, heads: list[Head]) -> None:
    path = write_heads(tmp_path, {}, **OF_MEDUSA)
    os.remove(path / "medusa_lm_head.safetensors")
    torch.save(in_layout_of_medusa(heads), path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match=r"found medusa_lm_head\.pt, supported: safetensors.*never loaded"):
        load(path)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_directory_without_a_config_is_refused(tmp_path: Path, heads: list[Head], text: str | None) -> None:
    path = write_heads(tmp_path, in_layout_of_medusa(heads))
    (path / "config.json").unlink() if text is None else (path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(path)


def test_a_truncated_file_is_refused(tmp_path: Path, heads: list[Head]) -> None:
    file = write_heads(tmp_path, in_layout_of_medusa(heads), **OF_MEDUSA) / "medusa_lm_head.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match="truncated"):
        load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == OF_MEDUSA
