"""Two lanes on two GPUs, kernel by kernel: how far their strokes overlap, by the order in which kernels take turns.

    python bench/lane_turns.py

A GPU runs one kernel at a time: the one that could begin first, or that of the first lane if its stream has priority.
How long each takes is a figure of a 7B shape on an H200 (`bench/results/two-gpus.md`). Needs no GPU.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_LAYERS = 16
HANDOFF_US = 4.0
# A layer's kernels of a lane, in microseconds, in their order: of a step of 872 tokens, 436 of them of prompts.
DENSE = (25, 44, 10, 236, 18, 118, 10, 132)  # fetch, o, norm, gate and up, activation, down, norm, qkv
DECODE_FIRST = (330, 10, 20, 7, 2)  # attention of sequences that decode, then of prompts, and a kernel sets the flag
DECODE_LAST = (10, 20, 7, 330)  # the queue sets the flag
# Of a step of 512 sequences that decode.
DENSE_OF_DECODES = (15, 26, 10, 139, 11, 70, 10, 78)
DECODES = (400,)
DENSE_GPU, ATTENTION_GPU = 0, 1
_NUM_WARM_UPS, _NUM_STEPS = 4, 30
_JITTER = 0.03  # no kernel takes equally long each time


@dataclass(frozen=True, slots=True)
class Overlap:
    step_ms: float  # for a step of each lane
    busy: tuple[float, float]  # the part of the time in which each GPU runs a kernel


@dataclass(slots=True)
class _Lane:
    kernel: int = 0  # of its step, that runs or comes next
    num_steps: int = 0  # that have ended
    ready_us: float = 0.0  # when its next kernel could begin
    waits: bool = False  # for the other lane: steps are committed in the order of their plans


def overlap(
    dense: Sequence[float], attention: Sequence[float], prior: Sequence[int] = (), num_lanes: int = 2, seed: int = 0
) -> Overlap:
    """How lanes overlap whose layers have these kernels. `prior`: the GPUs on which the first lane has priority."""
    layer = [(DENSE_GPU, us) for us in dense] + [(ATTENTION_GPU, us) for us in attention]
    kernels, jitter = layer * NUM_LAYERS, random.Random(seed)
    lanes = [_Lane() for _ in range(num_lanes)]
    running: list[tuple[float, int]] = []  # ends, with the lane
    is_free, busy_us, now_us, begin_us = [True, True], [0.0, 0.0], 0.0, 0.0
    while min(lane.num_steps for lane in lanes) < _NUM_WARM_UPS + _NUM_STEPS:
        for gpu in (DENSE_GPU, ATTENTION_GPU):
            active = {index for _, index in running}
            able = [
                index
                for index, lane in enumerate(lanes)
                if index not in active and not lane.waits and kernels[lane.kernel][0] == gpu and lane.ready_us <= now_us
            ]
            if is_free[gpu] and able:
                index = min(able, key=lambda each: each if gpu in prior else lanes[each].ready_us)
                duration_us = kernels[lanes[index].kernel][1] * jitter.uniform(1 - _JITTER, 1 + _JITTER)
                heapq.heappush(running, (now_us + duration_us, index))
                is_free[gpu] = False
                busy_us[gpu] += duration_us
        active = {index for _, index in running}
        later = [each.ready_us for i, each in enumerate(lanes) if i not in active and each.ready_us > now_us]
        next_us = min([*later, *(end for end, _ in running[:1])])
        now_us = next_us
        while running and running[0][0] <= now_us:
            _, index = heapq.heappop(running)
            _end_kernel(lanes, index, kernels, now_us, is_free)
        if begin_us == 0.0 and min(lane.num_steps for lane in lanes) == _NUM_WARM_UPS:
            begin_us, busy_us = now_us, [0.0, 0.0]
    elapsed_us = now_us - begin_us
    return Overlap(elapsed_us / _NUM_STEPS / 1e3, (busy_us[0] / elapsed_us, busy_us[1] / elapsed_us))


def _end_kernel(
    lanes: Sequence[_Lane], index: int, kernels: Sequence[tuple[int, float]], now_us: float, is_free: list[bool]
) -> None:
    lane = lanes[index]
    gpu = kernels[lane.kernel][0]
    is_free[gpu] = True
    lane.kernel += 1
    if lane.kernel == len(kernels):
        lane.kernel, lane.num_steps = 0, lane.num_steps + 1
        for each in lanes:
            each.waits = each.num_steps > min(other.num_steps for other in lanes) + 1
    lane.ready_us = now_us + HANDOFF_US * (kernels[lane.kernel][0] != gpu)


def main() -> None:
    for name, dense, attention in (
        ("872 tokens, decode first, kernels set flags", DENSE, DECODE_FIRST),
        ("872 tokens, decode last, queues set flags", DENSE, DECODE_LAST),
        ("512 tokens of sequences that decode, queues set flags", DENSE_OF_DECODES, DECODES),
    ):
        alone = overlap(dense, attention, num_lanes=1)
        print(f"{name}: a lane alone {alone.step_ms:.1f} ms")
        for where, prior in (
            ("nowhere", ()),
            ("on the attention worker's GPU", (ATTENTION_GPU,)),
            ("on the dense worker's GPU", (DENSE_GPU,)),
            ("on both", (DENSE_GPU, ATTENTION_GPU)),
        ):
            found = overlap(dense, attention, prior)
            shares = ", ".join(f"{share:.0%}" for share in found.busy)
            print(f"  two lanes, priority {where}: {found.step_ms:.1f} ms for a step of each; GPUs busy {shares}")


if __name__ == "__main__":
    main()
