"""Every family by the kernels for CUDA, in one process: the logits of transformers with the same random weights.

Prompts run in chunks and on a cached prefix, decode steps in a CUDA graph.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from services.dense_worker.kernels.linear.linear_choice import LinearChoice, LinearKernel
from tests.gpu.families.gpu_model import GpuModel
from tests.support.dense.family_models import VARIANTS, load_true_model, make_family_model
from tests.support.dense.whole_model import BLOCK_SIZE

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("triton", reason="needs triton")

# In bfloat16 products of few rows are our streaming kernels. Together these have all parts.
IN_BFLOAT16 = (
    *("qwen2_moe", "minimax_m2", "granitemoe", "gpt_oss", "olmo2", "cohere", "phi3", "stablelm", "gemma2", "gemma3"),
    *("gemma4", "gemma4-shared", "gemma4-moe", "gpt_neox", "falcon-rw", "bloom", "deepseek_v2", "deepseek_v3"),
    *("qwen3_next", "qwen3_5", "granitemoehybrid", "nemotron_h", "lfm2", "nemotron", "gptj", "opt-350m"),
)
# float32: sums in another order, and exponentials and roots of the GPU's own. Relative to the largest logit.
BOUND = 1e-4
# bfloat16: both implementations round, not always in the same places. Medians of tokens' errors, relative to that of
# transformers: rounding may choose another expert for a single token. Torch on a CPU has ratios up to 1.3.
ERROR_RATIO = 2.0
# Mamba 2 by torch: on an H200 the logits of transformers 5.17 differed by up to 0.8 from those of 5.23, ours by 1e-6.
WRONG_IN_5_17 = ("mamba2", "bamba", "granitemoehybrid", "granitemoehybrid-plain")
NUM_DECODED = 6
TOKENS = torch.randint(3, 96, (28,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = {1: TOKENS[:21], 2: TOKENS[: 3 * BLOCK_SIZE] + TOKENS[21:]}


@torch.inference_mode()
def true_logits(truth: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return truth(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def run_prompts(model: GpuModel) -> dict[int, torch.Tensor]:
    """The logits of each prompt's tokens; those of the cached prefix are not computed, and zero."""
    model.open(1, PROMPTS[1])
    rows = [model.step((1, 1, 0))[0], model.step((1, 13, 1))[0]]
    num_cached, num_shared = model.open(2, PROMPTS[2]), 3 * BLOCK_SIZE
    if model.config.recurrent_layers:  # they have no state where the prompts part
        assert num_cached == 0
        shared = model.step((2, num_shared, 0))[0]
    else:
        assert num_cached == num_shared
        shared = torch.zeros(num_shared, rows[0].shape[1], device=rows[0].device)
    last, other = model.step((1, 7, 14), (2, len(PROMPTS[2]) - num_shared, num_shared))
    return {1: torch.cat((*rows, last)), 2: torch.cat((shared, other))}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens(variant: str, kernel_device: torch.device, tmp_path: Path) -> None:
    if variant in WRONG_IN_5_17 and transformers.__version__.startswith("5.17."):
        pytest.skip(f"transformers {transformers.__version__} computes {variant} wrongly")
    path = make_family_model(tmp_path, variant)
    truth, model = load_true_model(path, torch.float32), GpuModel(path, torch.float32, kernel_device)
    found = {seq_id: [logits] for seq_id, logits in run_prompts(model).items()}
    tokens = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
    for _ in range(NUM_DECODED):
        for seq_id, answer in tokens.items():
            answer.append(int(found[seq_id][-1][-1].argmax()))
        for seq_id, logits in zip(tokens, model.decode(tokens), strict=True):
            found[seq_id].append(logits[None].clone())
    for seq_id, answer in tokens.items():
        expected, logits = true_logits(truth, answer), torch.cat(found[seq_id]).cpu()
        first = 3 * BLOCK_SIZE if seq_id == 2 else 0
        bound = BOUND * expected.abs().max()
        errors = (logits - expected)[first:].abs().amax(1)
        assert errors.max() <= bound, f"sequence {seq_id}, largest error of each token from {first} on: {errors}"
        chosen, best = expected[:-1].gather(1, torch.tensor(answer[1:])[:, None])[:, 0], expected[:-1].amax(1)
        assert (best - chosen)[len(PROMPTS[seq_id]) - 1 :].max() <= 2 * bound, "these are not the best tokens"


@pytest.mark.parametrize("variant", IN_BFLOAT16)
def test_logits_in_bfloat16(
    variant: str, kernel_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")

    def stream(choice: LinearChoice, linears: list, *_: object) -> None:
        choice.set_all(linears, LinearKernel.STREAMED)

    monkeypatch.setattr(LinearChoice, "measure", stream)
    path = make_family_model(tmp_path, variant)
    truth, rounding = load_true_model(path, torch.float32), load_true_model(path, torch.bfloat16)
    model = GpuModel(path, torch.bfloat16, kernel_device)
    logits = run_prompts(model)
    tokens = {seq_id: [*prompt, 7] for seq_id, prompt in PROMPTS.items()}
    decoded = model.decode(tokens)
    errors, true_errors = [], []
    for place, (seq_id, answer) in enumerate(tokens.items()):
        first = 3 * BLOCK_SIZE if seq_id == 2 else 0
        expected = true_logits(truth, answer)[first:]
        rounded = true_logits(rounding, answer)[first:]
        found = torch.cat((logits[seq_id][first:], decoded[place : place + 1])).cpu()
        errors.append((found - expected).norm(dim=1))
        true_errors.append((rounded - expected).norm(dim=1))
    assert torch.cat(errors).median() <= ERROR_RATIO * torch.cat(true_errors).median()
