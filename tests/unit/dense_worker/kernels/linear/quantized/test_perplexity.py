"""The perplexity of the embedded model on its own texts, quantized by the formulas of the tests.

The workers' tensors run through the torch backend; the perplexity without quantization is that of transformers.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from services.common.config import EMBEDDED_MODEL
from services.common.model_config import ModelConfig, load_model_config
from services.common.quantization.schemes import on_the_fly_fp8
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt.export_check import OneSequenceAttention
from tests.support.examples import examples
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

torch.set_num_threads(1)
CPU = torch.device("cpu")
MAX_TOKENS = 400  # of each text
# The greatest ratio to the perplexity without quantization.
LIMITS = {
    "fp8 channel, token": 1.01,
    "fp8 of transformers, dynamic": 1.01,
    "fp8 blocks": 1.01,
    "int8 channel, token": 1.01,
    "int8 channel, weight only": 1.01,
    "int4 g32": 1.03,
    "int4 g64 with zeros": 1.03,
    "awq g32": 1.03,
    "gptq g32, act-order": 1.03,
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    """The token ids of the texts that the model was trained on, in `make test` of every third one."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    documents = list(filter(None, (EMBEDDED_MODEL / "documents.txt").read_text().strip().split("\n")))
    chosen = documents[:: -(-len(documents) // examples(len(documents), 8))]
    return [torch.tensor(tokenizer(document)["input_ids"][:MAX_TOKENS]) for document in chosen]


def perplexity(logits: list[torch.Tensor], texts: list[torch.Tensor]) -> float:
    """exp of the mean negative log-likelihood of all tokens but the first of each text."""
    losses = [
        -rows[:-1].double().log_softmax(-1).gather(1, text[1:, None]) for rows, text in zip(logits, texts, strict=True)
    ]
    return math.exp(torch.cat(losses).mean().item())


@pytest.fixture(scope="module")
def unquantized(model: PreTrainedModel, texts: list[torch.Tensor]) -> float:
    with torch.inference_mode():
        return perplexity([model(text[None]).logits[0] for text in texts], texts)


def logits_of(
    weights: ModelWeights, config: ModelConfig, model: PreTrainedModel, text: torch.Tensor
) -> torch.Tensor:
    backend, attention = TorchBackend(weights), OneSequenceAttention(model, config)
    qkv = torch.empty(len(text), config.qkv_size)
    residual = backend.first(text, qkv)
    for layer in range(config.num_layers - 1):
        residual = backend.middle(layer, attention(layer, qkv), residual, qkv)
    return backend.last(attention(config.num_layers - 1, qkv), residual, torch.arange(len(text)))


@pytest.mark.hypothesis  # so that `make chaos` takes all texts
@pytest.mark.parametrize("name", [*LIMITS, "on the fly"])
def test_perplexity_grows_by_little(
    name: str, model: PreTrainedModel, texts: list[torch.Tensor], unquantized: float, tmp_path: Path
) -> None:
    if name == "on the fly":
        path, config = EMBEDDED_MODEL, replace(load_model_config(EMBEDDED_MODEL), quantization=on_the_fly_fp8())
    else:
        path = shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
        quantize_model_dir(path, FORMATS[name])
        config = load_model_config(path)
    weights = load_weights(path, config, torch.float32, CPU)
    with torch.inference_mode():
        found = perplexity([logits_of(weights, config, model, text) for text in texts], texts)
    assert found != unquantized
    assert found / unquantized < LIMITS.get(name, 1.01)
