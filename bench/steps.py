"""Host time of a step, by batch: scheduler, plan, codec, KV cache and runner. Needs no GPU and no model.

    python bench/steps.py --batch 1 64 512

Every sequence decodes one token per step. The backend does nothing, so the device's work is not included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.servicer import describe_opened
from services.common.sampling_params import SamplingParams
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import Session
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.sampling.sampler import Sampler
from services.pb import step_pb2
from services.step import RaggedTokens, StepResult
from services.step.codec import decode_plan, encode_plan

PARTS = ("schedule", "encode", "decode", "plan blocks", "commit", "prepare", "update")
BLOCK_SIZE, PROMPT_LEN, MAX_TOKENS, VOCAB_SIZE = 16, 128, 4096, 512
WARM_UP = 20


def measure(batch: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of each part of a decode step of `batch` sequences."""
    cache = build_cache(batch * 300, BLOCK_SIZE, PROMPT_LEN + MAX_TOKENS)
    limits = SchedulerLimits(batch, batch + PROMPT_LEN, PROMPT_LEN + MAX_TOKENS, batch, "guaranteed_no_evict")
    scheduler = Scheduler(limits)
    counts = (BLOCK_SIZE, cache.num_blocks, cache.num_free_blocks)
    scheduler.begin(Session(Attachment(1, 1, {}, *counts, {}, cache.max_model_len)))
    runner = ModelRunner(None, Sampler(batch, VOCAB_SIZE, "cpu"), 1, batch)  # type: ignore[arg-type]
    runner.attach(())
    for seq_id in range(1, batch + 1):
        scheduler.add(Sequence(seq_id, f"r{seq_id}", list(range(PROMPT_LEN)), SamplingParams(), MAX_TOKENS))
    for sequence in scheduler.next_to_open():
        new = sequence.describe()
        opened = cache.open_sequence(new.seq_id, new.token_ids, new.num_prompt_tokens)
        scheduler.opened(describe_opened(new.seq_id, opened))
        runner.open(new)

    times: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(part: str, function: Callable[..., object], *arguments: object) -> object:
        start = time.perf_counter()
        result = function(*arguments)
        times[part].append(time.perf_counter() - start)
        return result

    num_decodes = 0
    while num_decodes < WARM_UP + num_steps:
        published = timed("schedule", scheduler.schedule)
        plan = published.plan
        data = timed("encode", lambda plan=plan: encode_plan(plan).SerializeToString())
        received = timed("decode", lambda data=data: decode_plan(step_pb2.StepPlan.FromString(data)))
        timed("plan blocks", cache.plan_step, received)
        timed("commit", cache.commit_step)
        step = timed("prepare", lambda plan=plan: runner.prepare(runner.bind(plan)))
        result = StepResult(RaggedTokens.of([7] * entry.num_logits for entry in plan.entries))
        for sequence, tokens in zip(step.bound.sequences, result.token_ids.rows(), strict=True):
            sequence.token_ids += tokens
        timed("update", scheduler.update, published, result)
        is_decode = plan.num_tokens == len(plan.entries) == batch
        num_decodes += is_decode
        if not is_decode or num_decodes <= WARM_UP:
            for values in times.values():
                values.clear()
    return {part: 1e6 * statistics.median(values) for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 512], help="sequences in a step")
    parser.add_argument("--num-steps", type=int, default=200, help="number of steps; the median counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'microseconds':>14}" + "".join(f"{part:>13}" for part in PARTS) + f"{'sum':>10}")
    for batch in options.batch:
        parts = measure(batch, options.num_steps)
        print(f"{batch:>14}" + "".join(f"{parts[part]:>13.0f}" for part in PARTS) + f"{sum(parts.values()):>10.0f}")


if __name__ == "__main__":
    main()
