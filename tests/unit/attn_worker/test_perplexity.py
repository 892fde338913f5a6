"""The embedded model on its own texts: what a KV cache of 8 bits adds to the perplexity that transformers finds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.cache.step_metadata import build_step_metadata
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.mha.torch_attention import TorchAttention
from services.common.attention.learned import Learned
from services.common.config import EMBEDDED_MODEL
from services.common.kv_cache.scales import KVScales
from services.common.model_config import load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.weights import load_weights
from tests.support.reference import reference_logprobs, reference_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, CHUNK = 16, 8, 32
MAX_GROWTH = 1.005  # of the perplexity


@pytest.fixture(autouse=True)
def _one_thread_without_gradients() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


class Model:
    """The embedded model, run in chunks of 32 tokens over a paged KV cache."""

    def __init__(self) -> None:
        self.config = load_model_config(EMBEDDED_MODEL)
        self.dense = TorchBackend(load_weights(EMBEDDED_MODEL, self.config, torch.float32, CPU))

    def perplexity(self, texts: list[list[int]], dtype: torch.dtype, scales: KVScales | None = None) -> float:
        """Of all tokens but the first of each text, with keys and values stored in `dtype`."""
        spec = KVCacheSpec.of_model(self.config, dtype, NUM_BLOCKS, BLOCK_SIZE)
        setup = BackendSetup(self.config, spec, torch.float32, CPU, NUM_BLOCKS * BLOCK_SIZE)
        attention = TorchAttention(setup)
        attention.use_learned(Learned(scales or KVScales.ones(self.config.num_layers)))
        logprobs = []
        for token_ids in texts:
            starts = range(0, len(token_ids), CHUNK)
            logits = torch.cat([self._step(attention, token_ids[start : start + CHUNK], start) for start in starts])
            logprobs += logits.log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
        return perplexity(logprobs)

    def _step(self, attention: TorchAttention, token_ids: list[int], start: int) -> torch.Tensor:
        """Logits of all rows of a step of one sequence, which holds all blocks."""
        num_tokens, table = len(token_ids), np.arange(NUM_BLOCKS, dtype=np.int32)[None]
        attention.begin_step(build_step_metadata(*np.array([[num_tokens], [start], [0]]), table, BLOCK_SIZE))
        qkv = torch.empty(num_tokens, self.config.qkv_size)
        attn_out = torch.empty(num_tokens, self.config.attn_size)
        residual = self.dense.first(torch.tensor(token_ids), qkv)
        for layer in range(self.config.num_layers):
            attention.forward(layer, qkv, attn_out)
            if layer + 1 < self.config.num_layers:
                residual = self.dense.middle(layer, attn_out, residual, qkv)
        return self.dense.last(attn_out, residual, torch.arange(num_tokens))


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def calibrated_scales(texts: list[list[int]]) -> KVScales:
    """As tools write them into checkpoints: the largest magnitude of transformers' own keys, or values, / 448."""
    model = reference_model(EMBEDDED_MODEL)
    caches = (model(torch.tensor([token_ids]), use_cache=True).past_key_values.layers for token_ids in texts)
    by_layer = list(zip(*caches, strict=True))
    keys, values = (
        tuple(max(getattr(each, name).abs().max().item() for each in layers) / 448 for layers in by_layer)
        for name in ("keys", "values")
    )
    return KVScales(keys, values)


def test_8_bits_add_at_most_half_a_percent_to_the_perplexity() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    documents = (EMBEDDED_MODEL / "documents.txt").read_text().splitlines()
    texts, model = [tokenizer(document).input_ids for document in documents[::3]], Model()
    truth = perplexity([logprob for token_ids in texts for logprob in reference_logprobs(EMBEDDED_MODEL, token_ids)])
    assert model.perplexity(texts, torch.float32) == pytest.approx(truth, rel=1e-5)
    scales = calibrated_scales(texts)
    assert model.perplexity(texts, torch.float8_e4m3fn) / truth < MAX_GROWTH
    assert model.perplexity(texts, torch.float8_e4m3fn, scales) / truth < MAX_GROWTH
    assert model.perplexity(texts, torch.int8) / truth < MAX_GROWTH
    too_small = KVScales(*(tuple(scale / 8 for scale in each) for each in (scales.keys, scales.values)))
    assert model.perplexity(texts, torch.float8_e4m3fn, too_small) / truth > MAX_GROWTH, "what is cut off is seen"
