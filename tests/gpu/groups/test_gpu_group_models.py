"""Models in which some layers have a window, by the kernels for CUDA, at many times the window: as by transformers.

The layers with a window have as few blocks of their own as two sequences may need. Decode steps are a CUDA graph, which
finds longer and shorter tables in each replay.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.common.kv_cache.sliding_window import SlidingWindow
from tests.gpu.families.gpu_model import MAX_NUM_TOKENS, GpuModel
from tests.support.dense.family_models import load_true_model, make_family_model
from tests.support.dense.whole_model import BLOCK_SIZE

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("triton", reason="needs triton")
BOUND = 1e-4  # see `test_gpu_families.py`
WINDOW, NUM_DECODED = 6, 12
NUM_WINDOW_BLOCKS = SlidingWindow(BLOCK_SIZE, WINDOW).pool_blocks(2, MAX_NUM_TOKENS)
TOKENS = torch.randint(3, 96, (70,), generator=torch.Generator().manual_seed(6)).tolist()
PROMPTS = {1: TOKENS, 2: TOKENS[:41] + TOKENS[:4]}


@pytest.mark.parametrize("variant", ["gemma3", "gpt_oss", "gemma4-shared"])
def test_logits_and_greedy_tokens(variant: str, kernel_device: torch.device, tmp_path: Path) -> None:
    path = make_family_model(tmp_path, variant)
    model = GpuModel(path, torch.float32, kernel_device, NUM_WINDOW_BLOCKS)
    last: dict[int, torch.Tensor] = {}
    for seq_id, prompt in PROMPTS.items():
        position = model.open(seq_id, prompt)
        while position < len(prompt):
            count = min(MAX_NUM_TOKENS - 3, len(prompt) - position)
            last[seq_id] = model.step((seq_id, count, position))[0][-1]
            position += count
    tokens = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
    for _ in range(NUM_DECODED):
        for seq_id, answer in tokens.items():
            answer.append(int(last[seq_id].argmax()))
        last = {seq_id: row.clone() for seq_id, row in zip(tokens, model.decode(tokens), strict=True)}
    truth = load_true_model(path)
    for seq_id, answer in tokens.items():
        with torch.inference_mode():
            expected = truth(torch.tensor([answer]), use_cache=False).logits[0]
        bound = BOUND * expected.abs().max()
        assert (last[seq_id].cpu() - expected[-1]).abs().max() <= bound
        chosen, best = expected[:-1].gather(1, torch.tensor(answer[1:])[:, None])[:, 0], expected[:-1].amax(1)
        assert (best - chosen)[len(PROMPTS[seq_id]) - 1 :].max() <= 2 * bound, "these are not the best tokens"
