"""The host tier on a GPU: blocks and checksums are those of a CPU, copies keep their place between steps, and streams
go on from it after the attention worker was killed.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")
pytest.importorskip("cuda", reason="needs cuda-bindings")

from services.attn_worker.cache.block_storage import BlockStorage
from services.attn_worker.cache.tiers.block_copier import CpuBlockCopier
from services.attn_worker.cache.tiers.cuda_block_copier import CudaBlockCopier
from services.attn_worker.cache.tiers.pinned_file import PinnedFile
from services.attn_worker.cache.tiers.region import TierRegion
from services.channel.region import SHM_DIR
from tests.gpu.gpu_cluster import DEVICE, gpu_cluster
from tests.support.clients.streams import collect_all
from tests.support.cluster import free_port, request
from tests.support.reference import make_served_model, random_prompts, reference_tokens
from tests.support.scrape import Scrape
from tests.unit.attn_worker.cache.tiers.test_block_copier import PLAIN, SPECS, random_storage, tensors_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

SLEEP_CYCLES = 200_000_000  # about a tenth of a second
BLOCK_SIZE, NUM_BLOCKS = 16, 200
NUM_TOKENS = 600


def on_gpu(storage: BlockStorage, spec: object) -> BlockStorage:
    copy = BlockStorage(spec, spec.token_major_block, torch.device(DEVICE, 0))
    for target, source in zip(tensors_of(copy), tensors_of(storage), strict=True):
        target.copy_(source)
    return copy


def memory_for(storage: BlockStorage, num_rows: int) -> torch.Tensor:
    """Rows that begin with a page, in memory that another process could share."""
    row_bytes = 8 * storage.block_words
    memory = mmap.mmap(-1, num_rows * row_bytes)
    return torch.frombuffer(memory, dtype=torch.int64).view(num_rows, storage.block_words)


@pytest.mark.parametrize("can_pin", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_blocks_and_checksums_are_those_of_a_cpu(name: str, can_pin: bool) -> None:
    storage = random_storage(SPECS[name])
    on_cpu = torch.zeros(2, storage.block_words, dtype=torch.int64)
    checksums = CpuBlockCopier(storage, on_cpu).read([3, 1], [0, 1])
    gpu_storage, rows = on_gpu(storage, SPECS[name]), memory_for(storage, 600)
    copier = CudaBlockCopier(gpu_storage, rows, torch.device(DEVICE, 0))
    copier._pins._can_pin = can_pin
    copier.load_kernels()
    assert copier.read([3, 1], [599, 7]) == checksums
    assert torch.equal(rows[[599, 7]], on_cpu) and rows.count_nonzero() == on_cpu.count_nonzero()
    assert copier.finish([copier.write([5], [599]), copier.write([0], [7])]) == checksums
    for after, before in zip(tensors_of(gpu_storage), tensors_of(storage), strict=True):
        assert torch.equal(after[5].cpu(), before[3]) and torch.equal(after[0].cpu(), before[1])
        assert torch.equal(after[[1, 2, 3, 4, 6, 7]].cpu(), before[[1, 2, 3, 4, 6, 7]])
    assert bool(copier._pins._pieces) is can_pin
    copier.close()


def test_a_standby_pins_the_file_of_the_worker_that_serves(tmp_path: Path) -> None:
    storage = on_gpu(random_storage(PLAIN), PLAIN)
    block_bytes = 8 * storage.block_words
    with tempfile.NamedTemporaryFile(dir=SHM_DIR) as file:
        path = Path(file.name)
        assert PinnedFile.open(tmp_path / "none") is None and PinnedFile.open(path) is None
        region = TierRegion.open(path, 2**20, block_bytes, {})
        copier = CudaBlockCopier(storage, region.rows(), torch.device(DEVICE, 0), are_pinned=region.is_pinned)
        pinned = PinnedFile.open(path)
        assert pinned is not None and not region.is_pinned
        checksums = copier.read([3, 1], [500, 7])
        copier.close()
        region.close()
        region = TierRegion.open(path, 2**20, block_bytes, {}, pinned=pinned)
        assert region.is_pinned
        copier = CudaBlockCopier(storage, region.rows(), torch.device(DEVICE, 0), are_pinned=True)
        assert copier.finish([copier.write([5, 0], [500, 7])]) == checksums
        assert not copier._pins._pieces
        copier.close()
        region.close()
        assert not TierRegion.open(path, 2**19, block_bytes, {}, pinned=pinned).is_pinned, "of another size"
        assert pinned._memory is None, "the pages of the former file are given back"


def test_a_load_begins_after_the_steps_that_were_launched_before() -> None:
    storage = on_gpu(random_storage(PLAIN), PLAIN)
    copier = CudaBlockCopier(storage, memory_for(storage, 1), torch.device(DEVICE, 0))
    copier.read([1], [0])
    keys_and_values = tensors_of(storage)[0]  # as bytes: random ones are NaN in places, which equals nothing
    before, expected = keys_and_values[2].clone(), keys_and_values[1].clone()
    torch.cuda.synchronize()
    steps = torch.cuda.Stream()
    with torch.cuda.stream(steps):
        torch.cuda._sleep(SLEEP_CYCLES)
        read_by_step = keys_and_values[2].clone()
        fence = steps.record_event()
    copier.wait_for(fence)
    copier.finish([copier.write([2], [0])])
    torch.cuda.synchronize()
    assert torch.equal(read_by_step, before) and torch.equal(keys_and_values[2], expected)
    copier.close()


def test_streams_and_evicted_prompts_go_on_from_the_tier(tmp_path: Path) -> None:
    model = make_served_model(tmp_path / "model", "llama", hidden_size=128, head_dim=32, max_position_embeddings=2048)
    address = f"127.0.0.1:{free_port()}"
    settings = (
        f"model.path={model}",
        "model.dtype=float32",
        f"attention.block_size={BLOCK_SIZE}",
        f"attention.num_blocks={NUM_BLOCKS}",
        f"attention.host_kv_bytes={2**28}",
        f"attention.metrics_address={address}",
    )
    with gpu_cluster(tmp_path, *settings) as cluster:
        prompts = random_prompts(4, longest=150, seed=6)[1:]
        messages = [request(prompt, NUM_TOKENS, ignore_eos=True) for prompt in prompts]
        undisturbed = collect_all(cluster.gateway, messages)
        for message in messages:
            message.cache_salt = "again"

        def kill() -> None:
            time.sleep(0.3)
            cluster.kill("attn_worker")

        for collected, expected in zip(collect_all(cluster.gateway, messages, kill), undisturbed, strict=True):
            collected.assert_equals(expected)
        status = cluster.wait_idle()
        assert status.num_cached_tokens >= sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts)

        first, *others = random_prompts(4, longest=1500, seed=7)[1:]
        assert cluster.generate(first, 8, ignore_eos=True).token_ids == reference_tokens(model, first, 8)
        time.sleep(1.0)
        for other in others * 2:
            cluster.generate(other, 8, ignore_eos=True, cache_salt=str(time.monotonic_ns()))
        loaded = Scrape(address).value("twostroke_attention_loaded_tokens_total")
        assert cluster.generate(first, 8, ignore_eos=True).token_ids == reference_tokens(model, first, 8)
        assert Scrape(address).value("twostroke_attention_loaded_tokens_total") > loaded
        assert Scrape(address).value("twostroke_attention_host_kv_corrupt_blocks_total") == 0
