"""EAGLE-3 heads from checkpoints of every supported layout, and the errors for others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.config import SchedulerSection
from services.common.errors import ConfigError, ModelError
from services.common.model_config import ModelConfig
from services.common.resolve import ResolvedModel
from services.dense_worker.features.drafting.eagle.load_eagle import (
    LoadedHead,
    StoredHead,
    find_eagle_head,
    make_eagle_model,
)
from services.dense_worker.features.drafting.kv_cache.draft_blocks import BLOCK_SIZE
from tests.support.dense.eagle_head import (
    PlainHead,
    Tensors,
    config_of,
    config_of_speculators,
    in_layout_of_vllm,
    random_head,
    write_head,
)
from tests.support.model_configs import small_config

MODEL: ModelConfig = small_config("llama", num_hidden_layers=12)
HIDDEN, VOCAB = MODEL.hidden_size, MODEL.vocab_size
LAYERS = (3, 0, 11)
HEAD = random_head(HIDDEN, VOCAB, layers=LAYERS, draft_vocab_size=100, has_embedding=True)
CONFIG = config_of(HEAD, VOCAB)
BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 16 * 4  # keys and values, heads, dimensions, float32


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedHead:
    return StoredHead.find(path, MODEL, dtype, torch.device("cpu")).load().without_same_ids()


def write(path: Path, changed: Tensors | None = None, without: tuple[str, ...] = (), **config: Any) -> Path:
    tensors = {name: tensor for name, tensor in HEAD.tensors.items() if name not in without} | (changed or {})
    return write_head(path, tensors, CONFIG | config)


def check_one_row(loaded: LoadedHead, head: PlainHead, embedding: torch.Tensor) -> None:
    """A row that attends only to itself: there the output of attention is its own v."""
    generator = torch.Generator().manual_seed(5)
    residuals, token = torch.randn(1, 3, HIDDEN, generator=generator), torch.tensor([17])
    layer = loaded.with_embedding(embedding)
    hidden = layer.join(residuals)
    logits, output = layer.forward(
        token, hidden, lambda qkv: qkv[:, -32:].view(2, 16).repeat_interleave(2, 0).view(1, 64)
    )
    row = head.times("fc", residuals.flatten(1))
    expected = head.layer(embedding[token], row, torch.tensor([0]))
    assert torch.allclose(output[0], expected, atol=1e-4, rtol=1e-4)
    expected_logits = head.logits(expected, VOCAB)
    assert torch.equal(logits[0].isinf(), expected_logits.isinf())
    assert torch.allclose(logits[0], expected_logits, atol=1e-4, rtol=1e-4)
    keys_values = layer.keys_values(token, hidden)
    assert keys_values.shape == (1, 64)


@pytest.mark.parametrize("draft_vocab_size", [100, None])
@pytest.mark.parametrize("has_embedding", [True, False])
@pytest.mark.parametrize("is_speculator", [True, False])
def test_heads_of_all_layouts(
    tmp_path: Path, draft_vocab_size: int | None, has_embedding: bool, is_speculator: bool
) -> None:
    head = random_head(
        HIDDEN,
        VOCAB,
        layers=LAYERS,
        draft_vocab_size=draft_vocab_size,
        has_embedding=has_embedding,
        norm_before_residual=is_speculator,
    )
    if is_speculator:
        path = write_head(tmp_path, in_layout_of_vllm(head), config_of_speculators(head, VOCAB))
    else:
        path = write_head(tmp_path, head.tensors, config_of(head, VOCAB))
    loaded = load(path)
    assert loaded.has_embedding == has_embedding and loaded.config.residual_layers == LAYERS
    embedding = head.tensors.get("embed_tokens.weight", torch.randn(VOCAB, HIDDEN))
    check_one_row(loaded, head, embedding)


def test_it_has_the_dtype_of_the_served_model(tmp_path: Path) -> None:
    layer = load(write(tmp_path), torch.bfloat16).layer
    assert {layer.fc.dtype, layer.qkv.dtype, layer.embedding.dtype, layer.lm_head.dtype} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 6, 9)),
        ({"eagle_aux_hidden_state_layer_ids": []}, (2, 6, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [5, 5, 0]}, (5, 5, 0)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
            },
            (2, 6, 9),
        ),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [],
                    "use_aux_hidden_state": True,
                    "use_input_layernorm_in_first_layer": True,
                    "use_last_layernorm": True,
                    "use_mtp_layernorm": False,
                },
            },
            (2, 6, 9),
        ),
    ],
)
def test_layers_are_counted_as_their_place_in_the_file_says(
    tmp_path: Path, config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert load(write(tmp_path, **config)).config.residual_layers == layers


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hidden_size": 48}, rf"hidden_size 48, the model's is {HIDDEN}"),
        ({"target_hidden_size": 48}, rf"target_hidden_size 48, the model's is {HIDDEN}"),
        ({"vocab_size": 161}, rf"vocab_size 161, the model's is {VOCAB}"),
        ({"draft_vocab_size": VOCAB + 1}, rf"draft_vocab_size {VOCAB + 1}, expected an integer from 1 .* {VOCAB}"),
        ({"draft_vocab_size": True}, "draft_vocab_size True"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2, supported: 1"),
        ({"model_type": "qwen3"}, "model_type 'qwen3', supported: llama"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM.*LlamaForCausalLMEagle3"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"parallel_drafting": True}, "parallel_drafting True"),
        ({"norm_before_residual": "yes"}, "norm_before_residual 'yes', supported: False, True"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"\[1, 2\], expected 3 layers from 0 to 11 of 12"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 12]}, r"\[1, 2, 12\], expected 3 layers from 0 to 11 of 12"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]}, r"\[-1, 2, 3\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False, supported: True"),
        ({"eagle_config": {"next_thing": 1}}, "eagle_config has next_thing 1, supported: none"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-2, 2, 3]},
            },
            r"eagle_config has eagle_aux_hidden_state_layer_ids \[-2, 2, 3\], expected 3 layers from -1 to 10 of 12",
        ),
        ({"rope_scaling": {"rope_type": "no such"}}, "no such"),
        ({"transformer_layer_config": {}}, "speculators_model_type None, supported: eagle3"),
    ],
)
def test_configs_of_other_heads_are_refused_with_the_value(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as raised:
        load(write(tmp_path, **config))
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_before_residual": None}, "norm_before_residual None"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type 'eagle', supported: eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures .*, supported: Eagle3Speculator"),
    ],
)
def test_configs_of_other_speculators_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    write_head(tmp_path, in_layout_of_vllm(HEAD), config_of_speculators(HEAD, VOCAB) | change)
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


def test_other_fields_of_published_configs_change_nothing(tmp_path: Path) -> None:
    fields = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "max_window_layers": 36,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "sliding_window": None,
        "target_hidden_size": HIDDEN,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.1",
        "use_cache": True,
        "use_sliding_window": False,
    }
    check_one_row(load(write(tmp_path, **fields)), HEAD, HEAD.tensors["embed_tokens.weight"])
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    found = load(write(tmp_path, **fields | {"rope_theta": 5e5, "rope_scaling": scaling})).config.layer.rope
    assert (found.rope_type, found.theta) == ("llama3", 5e5)


def test_a_small_model_must_name_its_layers(tmp_path: Path) -> None:
    """The default of L - 3 does not exist."""
    path = write(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(ModelError, match=r"\[2, 1, -1\], expected 3 layers from 0 to 1 of 2"):
        StoredHead.find(path, small_config("llama", num_hidden_layers=2), torch.float32, torch.device("cpu"))


OFFSETS = HEAD.tensors["d2t"]
BEYOND, BELOW, TWICE = OFFSETS.clone(), OFFSETS.clone(), OFFSETS.clone()
BEYOND[99], BELOW[3] = VOCAB - 99, -4
TWICE[8] = TWICE[7] - 1


@pytest.mark.parametrize(
    ("changed", "without", "named"),
    [
        ({}, ("fc.weight",), r"lacks 1 tensors of an EAGLE-3 head, such as fc\.weight"),
        ({}, ("midlayer.hidden_norm.weight", "norm.weight"), r"lacks 2 .*midlayer\.hidden_norm.*layers\.0\."),
        ({}, ("d2t",), "lacks 1 tensors of an EAGLE-3 head, such as d2t"),
        ({"fc.bias": torch.zeros(HIDDEN)}, (), r"holds fc\.bias, for which an EAGLE-3 head has no place"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(1)}, (), r"holds layers\.1\.mlp\.up_proj\.weight"),
        ({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, (), rf"fc\.weight .*shape \({HIDDEN}, {2 * HIDDEN}\)"),
        ({"midlayer.self_attn.k_proj.weight": torch.zeros(32, HIDDEN)}, (), r"k_proj\.weight .*shape \(32, 64\)"),
        ({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, (), rf"lm_head\.weight .*\({VOCAB}, {HIDDEN}\).*\(100, "),
        ({"embed_tokens.weight": torch.zeros(9, HIDDEN)}, (), r"embed_tokens\.weight .*shape \(9, 64\)"),
        ({"norm.weight": torch.zeros(HIDDEN, dtype=torch.int64)}, (), r"norm\.weight .*dtype I64"),
        ({"d2t": OFFSETS[:7].clone()}, (), r"d2t .*shape \(7,\).*\(100,\)"),
        ({"d2t": OFFSETS.float()}, (), "d2t .*dtype F32, supported: I64, I32"),
        ({"d2t": BEYOND}, (), f"d2t .*token 99 of the head token {VOCAB} of the model, whose vocabulary has {VOCAB}"),
        ({"d2t": BELOW}, (), "d2t .*token 3 of the head token -1 of the model"),
        ({"d2t": TWICE}, (), f"d2t .*several tokens of the head token {7 + int(OFFSETS[7])} of the model"),
        ({"t2d": torch.ones(7, dtype=torch.bool)}, (), r"t2d .*shape \(7,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, changed: Tensors, without: tuple[str, ...], named: str
) -> None:
    with pytest.raises(ModelError, match=named) as raised:
        load(write(tmp_path, changed, without))
    assert str(tmp_path) in str(raised.value)


def test_pickled_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path)
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"found pytorch_model\.bin.*pickled tensors are never loaded"):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ModelError, match=f"{file} is missing, truncated or damaged"):
        load(tmp_path)


def test_its_cache_has_room_for_all_sequences_but_no_more_than_it_may_have(tmp_path: Path) -> None:
    model = ResolvedModel(MODEL, torch.float32, torch.device("cpu"), 512)
    write(tmp_path)

    def num_blocks(**options: Any) -> int:
        section = SchedulerSection(speculation="eagle3", speculation_model=tmp_path, **options)
        return make_eagle_model(find_eagle_head(section, model).load(), torch.empty(0), section, model).num_blocks

    assert num_blocks(max_num_seqs=3) == 1 + 3 * 512 // BLOCK_SIZE
    assert num_blocks(draft_cache_bytes=5 * BLOCK_BYTES + 1) == 5
    with pytest.raises(ConfigError, match=f"draft_cache_bytes is {2 * BLOCK_BYTES - 1}, .*{2 * BLOCK_BYTES}"):
        num_blocks(draft_cache_bytes=2 * BLOCK_BYTES - 1)
