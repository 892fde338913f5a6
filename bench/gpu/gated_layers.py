"""Times the kernels of a gated delta layer, with the heads of Qwen3-Next and Qwen3.5: token by token, and in chunks.

    python bench/gpu/gated_layers.py            # on a GPU
    TRITON_INTERPRET=1 python bench/gpu/gated_layers.py --tiny    # on a CPU: does it run?

The last column is the largest difference between the two, of the largest output.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from services.attn_worker.cache.state_group import zero_slot
from services.attn_worker.layers.recurrent.state_storage import StateStorage
from services.attn_worker.layers.recurrent.triton_gated_delta import run_parts
from services.attn_worker.layers.recurrent.triton_gated_delta_chunks import ChunkTiles, run_chunked_parts
from services.attn_worker.layers.recurrent.triton_gated_delta_convolution import Convolved, convolve_items
from services.attn_worker.layers.recurrent.triton_recurrences import chunks_of, items_of
from services.common.families.shape import GatedDelta
from tests.support.attention.gated_layers import make_gated_spec, random_gated_weights, random_rows

PUBLISHED = GatedDelta(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_size=4)
TINY = GatedDelta(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, conv_size=4)
STEPS = (*((1, tokens) for tokens in (8, 16, 32, 64, 256, 2048, 8192)), (8, 16), (8, 512), (64, 16), (64, 128))
WARMUP, REPEATS = 3, 10


@torch.inference_mode()
def time_step(sizes: GatedDelta, num_seqs: int, num_tokens: int, dtype: torch.dtype, device: torch.device) -> str:
    """A line of the table."""
    spec = make_gated_spec(sizes, num_seqs)
    storage, total = StateStorage(spec, device), num_seqs * num_tokens
    storage.use_weights({0: random_gated_weights(sizes)})
    convolved = Convolved(
        torch.empty(total, sizes.conv_dim, dtype=dtype, device=device),
        torch.empty(total, 2 * sizes.num_key_heads, device=device),
        torch.empty(total, 2 * sizes.num_value_heads, device=device),
    )
    tiles = ChunkTiles.empty(total, sizes, device)
    rows = random_rows(sizes, total).to(device, dtype)
    one_by_one, chunked = (torch.empty(total, sizes.value_size, dtype=dtype, device=device) for _ in range(2))
    table = np.array([(i * num_tokens, num_tokens, zero_slot(num_seqs), i) for i in range(num_seqs)], np.int32)
    parts, items, chunks = (torch.from_numpy(each).to(device) for each in (table, items_of(table), chunks_of(table)))
    times = [
        time_us(device, lambda: convolve_items(rows, convolved, items, storage, 0, sizes)),
        time_us(device, lambda: run_parts(convolved, one_by_one, parts, storage, 0, sizes)),
        time_us(device, lambda: run_chunked_parts(convolved, tiles, chunked, parts, chunks, storage, 0, sizes)),
    ]
    error = (one_by_one.float() - chunked.float()).abs().max() / one_by_one.float().abs().max()
    name = str(dtype).removeprefix("torch.")
    return f"{name:8} {num_seqs:5} x {num_tokens:<5}" + "".join(f"{each:12.1f}" for each in times) + f"{error:12.1e}"


def time_us(device: torch.device, launch: Callable[[], None]) -> float:
    """The median of some runs, with nothing else on the device."""
    times = []
    for _ in range(WARMUP + REPEATS if device.type == "cuda" else 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)  # so that the launches are enqueued before they run
            started.record()
            launch()
            ended.record()
            ended.synchronize()
            times.append(started.elapsed_time(ended) * 1e3)
        else:
            began = time.perf_counter()
            launch()
            times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[-REPEATS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few tokens of small heads")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, steps = (TINY, ((1, 20), (2, 70))) if args.tiny else (PUBLISHED, STEPS)
    print(f"{sizes}\n{'dtype':8} {'seqs':>5} x {'tokens':5}{'convolution':>12}{'one by one':>12}{'chunks':>12}  (us)")
    for dtype in (torch.float32,) if args.tiny else (torch.bfloat16, torch.float16, torch.float32):
        for num_seqs, num_tokens in steps if dtype == torch.bfloat16 or args.tiny else ((1, 64), (1, 2048)):
            print(time_step(sizes, num_seqs, num_tokens, dtype, device), flush=True)


if __name__ == "__main__":
    main()
