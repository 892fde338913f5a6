"""Parts of a sequence in several KV caches on a GPU: what each makes of its own, merged, is attention over all keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.layers import BackendSetup
from services.attn_worker.runner import cuda_layer_runner
from services.attn_worker.split_context.parted_cache import PartedKVCache
from services.channel import Flag
from services.common.attention.learned import Learned
from tests.support.attention.harness import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, TOLERANCES, Harness
from tests.support.attention.open_now import open_sequence
from tests.support.attention.split_harness import SplitHarness
from tests.support.dense.without_cuda import TorchWithoutCuda
from tests.support.plans import make_plan

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

    SplitHarness(tmp_path, heads, dtype, PartedTritonAttention, kernel_device).check_all_kinds_of_steps()


class Seam:
    """A `Channel` whose other end gives rows of each layer, and keeps what comes back."""

    def __init__(self, rows: list[torch.Tensor], attn_size: int, device: torch.device) -> None:
        self._rows, self.outputs = rows, list[torch.Tensor]()
        self.qkv = torch.zeros_like(rows[0], device=device)
        self.attn_out = torch.full((len(rows[0]), attn_size), torch.nan, dtype=self.qkv.dtype, device=device)

    def wait(self, flag: Flag) -> None:
        self.qkv.copy_(self._rows[len(self.outputs)])

    def signal(self, flag: Flag) -> None:
        self.outputs.append(self.attn_out.to("cpu", copy=True))

    def check(self) -> None: ...


@torch.inference_mode()
def test_a_step_with_a_part_runs_without_a_graph_in_all_its_rows(
    tmp_path: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.attn_worker.split_context.parted_triton_attention import PartedTritonAttention  # needs triton

    def find(size: object) -> None:
        raise AssertionError(f"a graph of {size}")

    monkeypatch.setattr(cuda_layer_runner, "StepGraphs", lambda *arguments: SimpleNamespace(find=find))
    if kernel_device.type == "cpu":
        monkeypatch.setattr(cuda_layer_runner, "torch", TorchWithoutCuda())
    harness = Harness(tmp_path)
    config, cache = harness.config, build_cache(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, make_cache=PartedKVCache)
    setup = BackendSetup(config, harness.spec, torch.float32, kernel_device, MAX_MODEL_LEN, 8, 64)
    backend = PartedTritonAttention(setup)
    runner = cuda_layer_runner.CudaLayerRunner(backend, config.num_layers, 8, captures_lazily=True)
    for seq_id, prompt_len in ((0, 3), (1, 5)):
        harness.open(seq_id, prompt_len)
    cache.open_part(0, range(0, 40))  # all of it
    open_sequence(cache, 1, [1] * 5, 5)
    planned = cache.plan_step(make_plan([(1, 5, 0), (0, 3, 0)]))
    rows = [torch.cat([harness.inputs[1][layer, :5], harness.inputs[0][layer, :3]]) for layer in range(2)]
    seam = Seam(rows, config.attn_size, kernel_device)
    runner.attach([seam], Learned())
    assert runner.launch(planned.metadata, seam).is_done() or kernel_device.type == "cuda"
    harness.lengths |= {0: 3, 1: 5}
    for layer, out in enumerate(seam.outputs):
        expected = torch.cat([harness.reference(1, layer), harness.reference(0, layer)])
        torch.testing.assert_close(out, expected, **TOLERANCES[torch.float32])
