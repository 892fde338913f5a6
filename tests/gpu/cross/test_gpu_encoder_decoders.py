"""Encoders with decoders by the kernels for CUDA, in one process: the logits of transformers with the same weights.

Prompts run in chunks, decode steps in a CUDA graph, except those of models with a relative bias.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.families.gpu_model import GpuModel
from tests.support.dense.encoder_decoder_models import (
    ENCODER_DECODERS,
    load_true_encoder_decoder,
    make_encoder_decoder,
    random_source,
    true_decoder_logits,
)

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("triton", reason="needs triton")

BOUND = 1e-4  # float32: sums in another order, and exponentials of the GPU's own. Relative to the largest logit
PROMPTS = {1: [3, 9, 8, 7, 6, 5, 11, 12, 13], 2: [3, 40]}
NUM_DECODED = 5


@pytest.mark.parametrize("variant", ENCODER_DECODERS)
def test_logits_and_greedy_tokens(variant: str, kernel_device: torch.device, tmp_path: Path) -> None:
    path = make_encoder_decoder(tmp_path, variant)
    truth, model = load_true_encoder_decoder(path), GpuModel(path, torch.float32, kernel_device)
    sources = {1: random_source(truth, 17, seed=1), 2: random_source(truth, 5, seed=2)}
    for seq_id, prompt in PROMPTS.items():
        model.open(seq_id, prompt, source=sources[seq_id])
    rows = [model.step((1, 4, 0))[0]]
    last, other = model.step((1, len(PROMPTS[1]) - 4, 4), (2, 2, 0))
    found, tokens = {1: [*rows, last], 2: [other]}, {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
    for _ in range(NUM_DECODED):
        for seq_id, answer in tokens.items():
            answer.append(int(found[seq_id][-1][-1].argmax()))
        for seq_id, logits in zip(tokens, model.decode(tokens), strict=True):
            found[seq_id].append(logits[None].clone())
    for seq_id, answer in tokens.items():
        expected, logits = true_decoder_logits(truth, sources[seq_id], answer), torch.cat(found[seq_id]).cpu()
        bound = BOUND * expected.abs().max()
        assert (logits - expected).abs().max() <= bound
        chosen, best = expected[:-1].gather(1, torch.tensor(answer[1:])[:, None])[:, 0], expected[:-1].amax(1)
        assert (best - chosen)[len(PROMPTS[seq_id]) - 1 :].max() <= 2 * bound, "these are not the best tokens"
