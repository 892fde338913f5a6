"""Vectors of decoders, from prompts in chunks, equal those of transformers; so do the layers after pooling."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from services.common.config import EMBEDDED_MODEL, ModelSection
from services.common.errors import ConfigError, InvalidRequest, ModelError
from services.common.pooling.pooling_config import PoolingConfig, PoolingMethod, TokenHead, read_pooling
from services.common.sampling_params import SamplingParams
from services.dense_worker.encoders.text.pooled_text import TextPooling
from services.dense_worker.features.pooling.pooling_feature import PooledSequence, PoolingFeature
from services.dense_worker.features.pooling.pooling_head import PoolingHead, load_pooling_head
from services.dense_worker.features.step_part import FeatureRows, StepView
from services.pb import dense_pb2, pooling_pb2
from services.step import NO_ROWS, PlanEntries, PlanEntry, StepResult
from tests.support.dense.sequences import new_sequence
from tests.support.dense.whole_model import WholeModel
from tests.support.encoders import SIZES as ENCODER_SIZES
from tests.support.encoders import make_bge_m3

VOCAB_SIZE = 96
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
PROMPTS = {1: list(range(5, 22)), 2: [9], 3: list(range(40, 70))}
# Steps of entries (seq_id, num_tokens, position).
STEPS = [[(1, 4, 0), (2, 1, 0)], [(1, 9, 4), (3, 11, 0)], [(3, 1, 11), (1, 3, 13)], [(3, 18, 12), (1, 1, 16)]]
POOL = {
    PoolingMethod.LAST: lambda states: states[-1],
    PoolingMethod.CLS: lambda states: states[0],
    PoolingMethod.MEAN: lambda states: states.mean(0),
    PoolingMethod.ALL: lambda states: states,
}
MODULES = ["Transformer", "Pooling", "Dense", "Normalize"]


class Recording:
    """A backend that remembers what its last part reads."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def last(self, attn_out: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor, hidden: Any = None) -> Any:
        if hidden is None:
            self.seen = attn_out.clone(), residual.clone()
        return self._backend.last(attn_out, residual, rows, hidden)


def make_decoder(path: Path, family: str, maker: Any = AutoModelForCausalLM, **fields: Any) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = maker.from_config(AutoConfig.for_model(family, **SIZES | fields)).eval()
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def pooled_vectors(path: Path, pooling: PoolingConfig, head: PoolingHead) -> dict[int, torch.Tensor]:
    """The vector of each prompt, from the reports of all steps."""
    model, feature = WholeModel(path), PoolingFeature(pooling, head)
    recording = model.dense = Recording(model.dense)
    sequences = {seq_id: PooledSequence(len(prompt), pooling.method) for seq_id, prompt in PROMPTS.items()}
    for seq_id, prompt in PROMPTS.items():
        model.open(seq_id, prompt)
    found = dict[int, torch.Tensor]()
    for entries in STEPS:
        model.step(*entries)
        plan = PlanEntries.of([PlanEntry(seq_id, position, count, 0) for seq_id, count, position in entries])
        view = StepView(plan, np.zeros(0, np.int64), (), np.zeros(0, np.int64))
        rows = FeatureRows(np.arange(len(entries)), [sequences[seq_id] for seq_id, _, _ in entries])
        part = feature.prepare_step(view, rows)
        if part is not None:
            hidden = torch.empty(len(part.hidden_rows), model.config.hidden_size)
            model.dense.hidden(*recording.seen, torch.from_numpy(part.hidden_rows), hidden)
            part.take_hidden(hidden)
            result = StepResult(NO_ROWS)
            part.read(result)
            for each in result.reports:
                rows = torch.from_numpy(each.rows.copy())
                if pooling.method is PoolingMethod.ALL:
                    before = found.get(each.seq_id, rows[:0])
                    assert each.start == len(before)
                    found[each.seq_id] = torch.cat([before, rows])
                else:
                    assert each.seq_id not in found and each.start == 0 and len(rows) == 1
                    found[each.seq_id] = rows[0]
    return found


@pytest.mark.parametrize("method", PoolingMethod)
@torch.inference_mode()
def test_prompts_in_chunks_give_the_vectors_of_transformers(method: PoolingMethod, tmp_path: Path) -> None:
    truth = make_decoder(tmp_path, "qwen3")
    found = pooled_vectors(tmp_path, PoolingConfig(method, False), PoolingHead())
    assert found.keys() == PROMPTS.keys()
    for seq_id, prompt in PROMPTS.items():
        states = truth(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(found[seq_id], POOL[method](states), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@torch.inference_mode()
def test_a_checkpoint_without_language_head_pools_the_last_token(family: str, tmp_path: Path) -> None:
    """As e5-mistral's; also with the names of tensors that `AutoModel` gives them, without `model.`."""
    truth = make_decoder(tmp_path, family, AutoModel, tie_word_embeddings=False)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling == PoolingConfig(PoolingMethod.LAST, normalizes=True)
    found = pooled_vectors(tmp_path, pooling, PoolingHead())
    for seq_id, prompt in PROMPTS.items():
        state = truth(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(found[seq_id], state, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_labels", [1, 3])
@torch.inference_mode()
def test_a_classifier_gives_the_values_of_transformers(num_labels: int, tmp_path: Path) -> None:
    truth = make_decoder(tmp_path, "qwen3", AutoModelForSequenceClassification, num_labels=num_labels)
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling is not None and len(pooling.labels) == num_labels
    head = load_pooling_head(pooling, tmp_path, 32, torch.device("cpu"), None)
    found = pooled_vectors(tmp_path, pooling, head)
    for seq_id, prompt in PROMPTS.items():
        torch.testing.assert_close(found[seq_id], truth(torch.tensor([prompt])).logits[0], rtol=0, atol=2e-5)
    of_tokens = pooled_vectors(tmp_path, replace(pooling, method=PoolingMethod.ALL), head)
    for seq_id, prompt in PROMPTS.items():
        values = truth.score(truth.model(torch.tensor([prompt])).last_hidden_state)[0]
        torch.testing.assert_close(of_tokens[seq_id], values, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_a_classifier_of_tokens_gives_the_values_of_transformers(tmp_path: Path) -> None:
    truth = make_decoder(tmp_path, "qwen3", AutoModelForTokenClassification, num_labels=3)
    torch.nn.init.normal_(truth.score.bias)
    truth.save_pretrained(tmp_path)
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling is not None and pooling.has_each_token and len(pooling.labels) == 3
    head = load_pooling_head(pooling, tmp_path, 32, torch.device("cpu"), None)
    for seq_id, values in pooled_vectors(tmp_path, pooling, head).items():
        torch.testing.assert_close(values, truth(torch.tensor([PROMPTS[seq_id]])).logits[0], rtol=0, atol=2e-5)


@torch.inference_mode()
def test_a_classifier_of_two_tokens_is_the_odds_of_the_second(tmp_path: Path) -> None:
    """So that its sigmoid is the softmax of both."""
    truth = make_decoder(tmp_path, "qwen3", vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, tmp_path)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = [token for token, token_id in vocab.items() if token_id in (500, 700)]
    pooling = read_pooling(ModelSection(path=tmp_path, classifier_from_token=(no, yes)))
    assert pooling is not None and pooling.is_scorer
    head = load_pooling_head(pooling, tmp_path, 32, torch.device("cpu"), truth.lm_head.weight)
    found = pooled_vectors(tmp_path, pooling, head)
    for seq_id, prompt in PROMPTS.items():
        logits = truth(torch.tensor([prompt])).logits[0, -1]
        softmax = logits[[vocab[no], vocab[yes]]].softmax(0)[1]
        torch.testing.assert_close(found[seq_id][0].sigmoid(), softmax, rtol=0, atol=2e-5)


def write_modules(path: Path, kinds: list[str], pooling: dict[str, Any], dense: dict[str, Any] | None = None) -> None:
    """The files of sentence-transformers."""
    modules = []
    for index, kind in enumerate(kinds):
        folder = "" if kind == "Transformer" else f"{index}_{kind}"
        modules.append({"idx": index, "path": folder, "type": f"sentence_transformers.models.{kind}"})
        (path / folder).mkdir(exist_ok=True)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    if dense is not None:
        (path / "2_Dense" / "config.json").write_text(json.dumps(dense))


def test_the_prompts_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    make_decoder(tmp_path, "qwen3")
    file, prompts = tmp_path / "config_sentence_transformers.json", {"query": "Instruct: find\nQuery:", "document": ""}
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    pooling = read_pooling(ModelSection(path=tmp_path, runner="pooling"))
    assert pooling is not None and pooling.prompts == prompts
    write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True})
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling is not None and pooling.prompts == prompts
    file.write_text(json.dumps({"prompts": {"query": 5}}))
    with pytest.raises(ModelError, match="expected texts by name"):
        read_pooling(ModelSection(path=tmp_path))


@torch.inference_mode()
def test_the_files_of_sentence_transformers_say_what_follows(tmp_path: Path) -> None:
    truth = make_decoder(tmp_path, "qwen3")
    layer = torch.nn.Linear(32, 7)
    dense = {"in_features": 32, "out_features": 7, "activation_function": "torch.nn.modules.activation.Tanh"}
    write_modules(tmp_path, MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, dense)
    weights = {"linear.weight": layer.weight.data, "linear.bias": layer.bias.data}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling is not None and pooling.method is PoolingMethod.MEAN and pooling.normalizes
    head = load_pooling_head(pooling, tmp_path, 32, torch.device("cpu"), None)
    for seq_id, found in pooled_vectors(tmp_path, pooling, head).items():
        states = truth(torch.tensor([PROMPTS[seq_id]]), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(found, layer(states.mean(0)).tanh(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "kinds, pooling, part",
    [
        (["Transformer"], {}, "expected first Transformer, then Pooling or Dense"),
        (["Transformer", "Pooling", "WordWeights"], {"pooling_mode": "mean"}, "WordWeights"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "max_tokens"),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "lasttoken"),
        (["Transformer", "Pooling", "Normalize", "Dense"], {"pooling_mode": "mean"}, "Dense"),
    ],
)
def test_what_cannot_be_pooled_is_refused_by_name(
    kinds: list[str], pooling: dict[str, Any], part: str, tmp_path: Path
) -> None:
    AutoConfig.for_model("qwen3", **SIZES).save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    write_modules(tmp_path, kinds, pooling)
    with pytest.raises(ModelError, match=part):
        read_pooling(ModelSection(path=tmp_path))


def test_folders_outside_of_the_model_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", **SIZES).save_pretrained(tmp_path)
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "../other", "type": "x.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="expected a folder of the model"):
        read_pooling(ModelSection(path=tmp_path))


def test_the_config_says_what_the_checkpoint_does_not(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3", **SIZES, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    assert read_pooling(ModelSection(path=tmp_path)) is None
    assert read_pooling(ModelSection(path=tmp_path, runner="pooling")) is not None
    with pytest.raises(ConfigError, match="3 tokens"):
        read_pooling(ModelSection(path=tmp_path, classifier_from_token=("a", "b", "c")))
    one = read_pooling(ModelSection(path=tmp_path, classifier_from_token=("yes",)))
    assert one is not None and one.is_scorer and one.template is None
    with pytest.raises(ConfigError, match=r"model\.runner is generate"):
        read_pooling(ModelSection(path=tmp_path, runner="generate", classifier_from_token=("no", "yes")))


def test_layers_for_tokens_lie_beside_the_checkpoint_and_are_no_pickles(tmp_path: Path) -> None:
    make_bge_m3(tmp_path, ENCODER_SIZES | {"bos_token_id": 2, "eos_token_id": 3})
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling is not None and pooling.token_heads == tuple(TokenHead) and pooling.edge_token_ids == (2, 3)
    (tmp_path / "sparse_linear.safetensors").unlink()
    pooling = read_pooling(ModelSection(path=tmp_path))
    assert pooling is not None and pooling.token_heads == (TokenHead.COLBERT,)
    with pytest.raises(InvalidRequest, match=r"has no sparse_linear\.safetensors"):
        request = pooling_pb2.PoolingRequest(all_tokens=True, token_head=pooling_pb2.TOKEN_HEAD_SPARSE)
        spec = replace(
            new_sequence(1, "r", [5, 6], SamplingParams(), 1).spec, features={"pooling": request.SerializeToString()}
        )
        TextPooling(pooling.token_heads).admit(spec, dense_pb2.Submit(), 0)
    (tmp_path / "sparse_linear.pt").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"sparse_linear\.pt is a file of pickled tensors.*convert it"):
        read_pooling(ModelSection(path=tmp_path))
