"""Two lanes under a load that comes at once: what the size of steps and the dealing of sequences change.

    python bench/lane_waves.py                     # the loads of bench/results/two-gpus.md, and what was tried there
    python bench/lane_waves.py --random            # lengths of 64 to 192 tokens instead of 128 each

Step by step: each lane's dense stroke by its rows, attention by tokens of context, and both lanes together take as
long as the dense worker's GPU, or the other one, or one lane alone. The limit of power is in it: a step takes at least
as long as its energy needs. Times and energy are fitted to two H200 and 16 layers of a 7B shape. Needs no GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

POWER_W, IDLE_W = 693.0, 130.0
AT_ONCE, PROMPT, OUTPUT = 1024, 128, 128
FULL_TOKENS = 102_400  # of context, of 512 sequences


@dataclass(frozen=True, slots=True)
class Strokes:
    """Of 16 layers; a step of a lane."""

    dense_ms: tuple[float, ...]  # by `ROWS`, at the highest clock
    row_mj: tuple[float, ...]  # energy of a row beside what an idle GPU uses

    ROWS = (1, 128, 256, 512, 1024, 2048, 4096)

    def dense(self, rows: int) -> tuple[float, float]:
        """Milliseconds, and millijoules."""
        if not rows:
            return 0.0, 0.0
        return float(np.interp(rows, self.ROWS, self.dense_ms)), rows * float(np.interp(rows, self.ROWS, self.row_mj))

    @staticmethod
    def attention(context: int, prompt_tokens: int) -> float:
        decode_ms = 0.12 + 6.55 * context / FULL_TOKENS if context else 0.0
        return decode_ms + (0.9 + 0.0004 * prompt_tokens if prompt_tokens else 0.0)


STROKES = {
    "bfloat16": Strokes((1.7, 2.3, 2.9, 5.4, 10.2, 19.2, 37.5), (60, 9.5, 8.0, 6.7, 6.2, 5.84, 5.6)),
    "FP8": Strokes((1.0, 1.4, 1.8, 3.3, 6.2, 12.2, 24.0), (35, 6.0, 5.0, 4.2, 3.8, 3.6, 3.5)),
}


@dataclass(frozen=True, slots=True)
class Served:
    tokens_per_s: float
    ttft_ms: float  # mean, from the moment when a request comes, which is when another one has ended
    longest_ms: float  # P99 of the time between two tokens


def serve(
    strokes: Strokes,
    num_requests: int,
    step_tokens: int,
    num_lanes: int = 2,
    takes_turns: bool = False,
    lengths: tuple[np.ndarray, np.ndarray] | None = None,
) -> Served:
    """Serves a load.

    step_tokens: most tokens of a step of a lane
    takes_turns: one lane is filled after the other, and prompts are computed in one lane at a time, in their order
    lengths: of prompts and outputs
    """
    prompts, outputs = lengths or (np.full(num_requests, PROMPT), np.full(num_requests, OUTPUT))
    ids = left = written = lane = np.zeros(0, int)  # of running sequences; left: tokens of prompts
    begin_ms = np.zeros(num_requests)  # of each request
    next_id, now_ms, first_ms, gaps = 0, 0.0, list[float](), list[np.ndarray]()
    while next_id < num_requests or len(ids):
        num_new = min(num_requests - next_id, AT_ONCE - len(ids))
        share = -(-(len(ids) + num_new) // num_lanes)
        for _ in range(num_new):
            counts = np.bincount(lane, minlength=num_lanes)
            chosen = int(np.argmax(np.where(counts < share, counts, -1)) if takes_turns else np.argmin(counts))
            ids, lane = np.append(ids, next_id), np.append(lane, chosen)
            left, written = np.append(left, prompts[next_id]), np.append(written, 0)
            begin_ms[next_id] = now_ms
            next_id += 1
        turn = lane[np.argmax(left > 0)] if takes_turns and left.any() else None
        parts, strokes_ms = np.zeros_like(left), []
        for each in range(num_lanes):
            decodes = (lane == each) & (left == 0)
            room = max(0, step_tokens - int(decodes.sum())) if turn in (None, each) else 0
            own = np.where(lane == each, left, 0)
            own = np.clip(room - (np.cumsum(own) - own), 0, own)
            parts += own
            context = int((prompts[ids[decodes]] + written[decodes]).sum())
            dense_ms, energy_mj = strokes.dense(int(decodes.sum() + own.sum()))
            strokes_ms.append((dense_ms, energy_mj, strokes.attention(context, int(own.sum()))))
        step_ms = _step_ms(strokes_ms, len(ids))
        now_ms += step_ms
        left = left - parts
        decodes = left == 0
        first_ms += (now_ms - begin_ms[ids[decodes & (written == 0)]]).tolist()
        gaps.append(np.full(int((decodes & (written > 0)).sum()), step_ms))
        written = written + decodes
        goes_on = written < outputs[ids]
        ids, left, written, lane = ids[goes_on], left[goes_on], written[goes_on], lane[goes_on]
    longest_ms = float(np.percentile(np.concatenate(gaps), 99))
    return Served(1000 * float(outputs.sum()) / now_ms, float(np.mean(first_ms)), longest_ms)


def _step_ms(strokes_ms: list[tuple[float, float, float]], num_running: int) -> float:
    """Of all lanes, beside each other. One lane shares its GPU with attention."""
    dense_ms, energy_mj, attention_ms = (sum(each) for each in zip(*strokes_ms, strict=True))
    if len(strokes_ms) == 1:
        energy_mj += 400 * attention_ms
        return max(dense_ms + attention_ms + 0.3 + 0.0005 * num_running, energy_mj / (POWER_W - IDLE_W)) + 0.2
    alone_ms = max(dense + attention + 0.8 for dense, _, attention in strokes_ms)
    return max(dense_ms + 0.4, energy_mj / (POWER_W - IDLE_W), attention_ms + 0.3, alone_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", action="store_true", help="lengths")
    is_random = parser.parse_args().random
    for name, strokes in STROKES.items():
        for num_requests in (1024, 2048, 4096):
            random = np.random.default_rng(0)
            lengths = (random.integers(64, 193, num_requests), random.integers(64, 193, num_requests))
            own = lengths if is_random else None
            one = serve(strokes, num_requests, 2048, num_lanes=1, lengths=own)
            print(f"{name}, {num_requests} requests: one GPU {one.tokens_per_s:,.0f} tok/s")
            for what, step_tokens, takes_turns in (
                ("steps of 2,048", 2048, False),
                ("steps of 4,096", 4096, False),
                ("steps of 1,024", 1024, False),
                ("one lane's prompts at a time, steps of 2,048", 2048, True),
            ):
                found = serve(strokes, num_requests, step_tokens, takes_turns=takes_turns, lengths=own)
                ratio = found.tokens_per_s / one.tokens_per_s
                print(f"  two lanes, {what}: {found.tokens_per_s:,.0f} ({ratio:.2f}), gaps {found.longest_ms:.0f} ms")


if __name__ == "__main__":
    main()
