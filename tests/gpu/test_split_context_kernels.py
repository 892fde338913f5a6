"""Parts of a sequence in several KV caches on a GPU: what each makes of its own, merged, is attention over all keys."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.attention.harness import TOLERANCES
from tests.support.attention.split_harness import SplitHarness

pytestmark = pytest.mark.timeout(900)  # for Triton's interpreter


@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_parts_merged_are_attention_over_the_whole_context(
    tmp_path: Path, kernel_device: torch.device, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    if kernel_device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    from services.attn_worker.split_context.parted_triton_attention import PartedTritonAttention  # needs triton

    make_backend = partial(PartedTritonAttention, max_num_seqs=8, max_num_tokens=64)
    SplitHarness(tmp_path, heads, dtype, make_backend, kernel_device).check_all_kinds_of_steps()
