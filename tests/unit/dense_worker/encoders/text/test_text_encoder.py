"""Encoders of all families equal transformers, in float32, with several inputs of other lengths in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForTokenClassification

from services.common.config import ModelSection
from services.common.encoders.encoder_config import read_encoder_config
from services.common.errors import ModelError
from services.common.pooling.pooling_config import PoolingConfig, PoolingMethod, read_pooling
from services.dense_worker.encoders.text.load_encoder import load_encoder
from services.dense_worker.encoders.text.text_encoder import EncoderRun
from tests.support.encoders import SIZES, VOCAB_SIZE, make_colbert, make_encoder

DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SIZES),
    "bert-tanh": ("bert", SIZES | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "roberta": ("roberta", SIZES | {"type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", SIZES | {"type_vocab_size": 1}),
    "distilbert": ("distilbert", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 96, "pad_token_id": 1} | DISTIL),
    "mpnet": ("mpnet", SIZES | {"max_position_embeddings": 400}),
    "modernbert": ("modernbert", SIZES | {"num_hidden_layers": 4, "local_attention": 10}),
    "modernbert-biased": ("modernbert", SIZES | {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
}
DEBERTA = SIZES | {"relative_attention": True, "type_vocab_size": 0, "pos_att_type": ["p2c", "c2p"], "pad_token_id": 0}
V3 = {"position_biased_input": False, "share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
GEMMA = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 12}
VARIANTS |= {
    "deberta": ("deberta-v2", DEBERTA | V3),
    "deberta-unshared": ("deberta-v2", DEBERTA | {"type_vocab_size": 2, "max_relative_positions": 30}),
    "deberta-of-queries": ("deberta-v2", DEBERTA | V3 | {"pos_att_type": ["c2p"], "share_att_key": False}),
    "gemma": ("gemma3_text", GEMMA | {"num_hidden_layers": 7, "use_bidirectional_attention": True}),
}
LENGTHS = (1, 17, 90, 5)
METHODS = {"cls": PoolingMethod.CLS, "mean": PoolingMethod.MEAN, "last": PoolingMethod.LAST}


def random_inputs(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def run(
    path: Path, inputs: list[list[int]], method: PoolingMethod | None = None, second: list[int] | None = None
) -> torch.Tensor:
    pooling = read_pooling(ModelSection(path=path))
    assert pooling is not None
    encoder = load_encoder(path, read_encoder_config(path), pooling, torch.float32, torch.device("cpu"))
    states = EncoderRun(encoder, inputs, second or [0] * len(inputs))
    while not states.is_done:
        states.advance()
    return states.pool(method or pooling.method)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_states_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """All three ways to pool."""
    model, inputs = make_encoder(tmp_path, *VARIANTS[name]), random_inputs()
    wanted = [model(torch.tensor([each])).last_hidden_state[0] for each in inputs]
    ways = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "last": lambda x: x[-1]}
    for way, pick in ways.items():
        found = run(tmp_path, inputs, METHODS[way])
        torch.testing.assert_close(found, torch.stack([pick(each) for each in wanted]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "deberta"])
@torch.inference_mode()
def test_classifiers_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Also of pairs, which BERT tells by the types of tokens."""
    model, inputs = make_encoder(tmp_path, *VARIANTS[name], num_labels=3), random_inputs()
    second = [0, 9, 40, 0]
    wanted = []
    for each, start in zip(inputs, second, strict=True):
        types = {"token_type_ids": torch.tensor([[int(i >= start > 0) for i in range(len(each))]])}
        wanted.append(model(torch.tensor([each]), **(types if name == "bert" else {})).logits[0])
    torch.testing.assert_close(run(tmp_path, inputs, second=second), torch.stack(wanted), rtol=0, atol=5e-5)


@torch.inference_mode()
def values_of_tokens(path: Path, inputs: list[list[int]], indexes: list[int]) -> tuple[PoolingConfig, torch.Tensor]:
    pooling = read_pooling(ModelSection(path=path))
    assert pooling is not None
    encoder = load_encoder(path, read_encoder_config(path), pooling, torch.float32, torch.device("cpu"))
    states = EncoderRun(encoder, inputs, [0] * len(inputs))
    while not states.is_done:
        states.advance()
    return pooling, states.tokens(indexes)


@pytest.mark.parametrize("name", ["bert", "roberta"])
@torch.inference_mode()
def test_a_classifier_of_inputs_has_values_for_each_token(name: str, tmp_path: Path) -> None:
    """Its layers read the first state that they are given."""
    model, inputs = make_encoder(tmp_path, *VARIANTS[name], num_labels=3), random_inputs()
    states = model.base_model(torch.tensor([inputs[1]])).last_hidden_state
    read = [states[:, start:] for start in range(states.shape[1])]
    if name == "bert":
        read = [model.bert.pooler(each) for each in read]
    wanted = torch.cat([model.classifier(each) for each in read])
    _, found = values_of_tokens(tmp_path, inputs, [1])
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "deberta"])
@torch.inference_mode()
def test_classifiers_of_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of some inputs of a run."""
    model = make_encoder(tmp_path, *VARIANTS[name], num_labels=3, classifier=AutoModelForTokenClassification)
    inputs, indexes = random_inputs(), [1, 3]
    wanted = torch.cat([model(torch.tensor([inputs[index]])).logits[0] for index in indexes])
    pooling, found = values_of_tokens(tmp_path, inputs, indexes)
    assert pooling.has_each_token and len(pooling.labels) == 3 and not pooling.is_scorer
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)


@torch.inference_mode()
def test_colbert_gives_a_short_vector_for_each_token(tmp_path: Path) -> None:
    model, linear = make_colbert(tmp_path, SIZES, 12)
    inputs = random_inputs()
    pooling, found = values_of_tokens(tmp_path, inputs, [0, 1, 2, 3])
    assert pooling.has_each_token and pooling.normalizes and not pooling.is_classifier
    wanted = torch.cat([model(torch.tensor([each])).last_hidden_state[0] @ linear.T for each in inputs])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_modules_without_pooling_give_a_vector_for_each_token(tmp_path: Path) -> None:
    """As PyLate writes them for ModernBERT."""
    model = make_encoder(tmp_path, *VARIANTS["modernbert"])
    linear = torch.randn(12, 32, generator=torch.Generator().manual_seed(6))
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"path": "1_Dense", "type": "pylate.models.Dense.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Dense").mkdir()
    dense = {"in_features": 32, "out_features": 12, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": linear}, tmp_path / "1_Dense" / "model.safetensors")
    inputs = random_inputs()
    pooling, found = values_of_tokens(tmp_path, inputs, [0, 2])
    assert pooling.has_each_token and pooling.normalizes
    wanted = torch.cat([model(torch.tensor([inputs[i]])).last_hidden_state[0] @ linear.T for i in (0, 2)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", ["roberta", "mpnet"])
@torch.inference_mode()
def test_padding_within_an_input_has_no_position_of_its_own(name: str, tmp_path: Path) -> None:
    """As in transformers, which counts the other tokens only. Clients may write it."""
    model, inputs = make_encoder(tmp_path, *VARIANTS[name]), [[5, 1, 7, 1, 1, 9], [1], [8, 9]]
    wanted = [model(torch.tensor([each])).last_hidden_state[0].mean(0) for each in inputs]
    found = run(tmp_path, inputs, PoolingMethod.MEAN)
    torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=2e-5)


def test_positions_end_where_the_table_ends(tmp_path: Path) -> None:
    make_encoder(tmp_path, *VARIANTS["roberta"])
    assert read_encoder_config(tmp_path).max_input_tokens == 94


@pytest.mark.parametrize(
    "field, value, part",
    [
        ("position_embedding_type", "relative_key", "absolute"),
        ("hidden_act", "quick_gelu", "gelu"),
        ("is_decoder", True, "none"),
        ("num_attention_heads", 5, "multiple of its 5"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(field: str, value: Any, part: str, tmp_path: Path) -> None:
    AutoConfig.for_model("bert", **SIZES | {field: value}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=part):
        read_encoder_config(tmp_path)


@pytest.mark.parametrize(("family", "kind"), [("bert", "alibi"), ("xlm-roberta", "rotary")])
def test_jina_colbert_is_refused_because_of_its_class(family: str, kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family, **SIZES).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    own = {"auto_map": {"AutoModel": "jinaai/some-implementation--modeling.Model"}, "architectures": ["HF_ColBERT"]}
    (tmp_path / "config.json").write_text(json.dumps(fields | own | {"position_embedding_type": kind}))
    words = f"position_embedding_type '{kind}', and the class 'jinaai/some-implementation--modeling.Model': remote code"
    with pytest.raises(ModelError, match=words):
        read_encoder_config(tmp_path)
