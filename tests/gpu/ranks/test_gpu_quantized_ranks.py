"""Quantized checkpoints on two GPUs: each rank reads its slices alone, and the logits are those of whole weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_streams import small_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import request
from tests.support.quantized.checkpoints import FORMATS, dequantized_model, quantize_model_dir
from tests.support.reference import make_served_model, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank needs a GPU of its own"),
]

PROMPTS = random_prompts(4, longest=150, seed=6)
NUM_TOKENS = 60
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
# How far below the largest logit that of a token may be, as a part of the largest one: float16 through two layers.
# Where inputs are rounded to FP8, an error of 1e-4 before that, less than float16's, moves some to the next code: with
# such errors the reference itself chooses tokens that are up to 8 % below. Those of weights that are cut wrongly are
# anywhere.
BOUND, BOUND_OF_ROUNDED_INPUTS = 0.05, 0.15


# One of each kind of slices: scales of blocks, rows and groups, and words of eight codes along columns or rows.
NAMES = ("fp8 blocks", "fp8 channel, weight only", "int4 g64 with zeros", "awq g32", "gptq g128")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_dequantized_weights(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    plain_path = make_served_model(tmp_path / "plain", "llama", **sizes, **HEADS)
    path = shutil.copytree(plain_path, tmp_path / "model")
    plain = quantize_model_dir(path, FORMATS[name])
    model = dequantized_model(plain_path, plain, FORMATS[name])
    messages = [request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    with small_cluster(path, tmp_path, "dense.tensor_parallel_size=2", "model.dtype=float16") as cluster:
        collected = collect_all(cluster.gateway, messages)
        cluster.wait_idle()
    for prompt, each in zip(PROMPTS, collected, strict=True):
        token_ids = each.token_ids[0]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        largest = logits.max(1).values
        missing = largest - logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        assert len(token_ids) == NUM_TOKENS
        bound = BOUND_OF_ROUNDED_INPUTS if name == "fp8 blocks" else BOUND
        assert (missing <= bound * logits.abs().max()).all(), missing
