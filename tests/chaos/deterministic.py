"""`python -m tests.chaos.deterministic`: what `dense.deterministic` promises on a CPU, until the first failure.

Each family that it covers in 200 random steps, in float32 and bfloat16; then whole servers with 64 streams and kills.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from services.pb import gateway_pb2
from tests.support.clients.streams import Collected, collect, collect_all
from tests.support.cluster import request
from tests.support.dense.family_models import RECURRENT, VARIANTS, make_family_model
from tests.support.dense.random_steps import RandomSteps, compute_alone, deterministic_model, differing_rows
from tests.support.plain_services import PlainServices, plain_services

NUM_STREAMS, MAX_TOKENS = 64, 60
LATENT = ("deepseek", "kimi", "youtu", "glm4_moe_lite")
REFUSED = ("qwen2_moe", "gemma4-shared", "qwen3_next", "qwen3_5", *LATENT, *RECURRENT)
SETTINGS = {
    "dense.deterministic": "true",
    "scheduler.policy": "max_utilization",
    "scheduler.max_num_batched_tokens": 128,
    "scheduler.max_num_seqs": 48,
    "scheduler.speculation": "ngram",
    "attention.num_blocks": 300,  # of 16 tokens: fewer than all requests together need
}
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. What is the capital of "


def check_family(variant: str, dtype: torch.dtype, num_steps: int) -> int:
    """Compares the logits of random steps with those of each text alone; the number of rows."""
    draw = random.Random(variant)
    prefix = [draw.randrange(96) for _ in range(30)]
    with tempfile.TemporaryDirectory() as directory:
        path = make_family_model(Path(directory), variant)
        texts = []
        for shared, length in ((30, 20), (17, 60), (0, 90)):
            token_ids = [*prefix[:shared], *(draw.randrange(96) for _ in range(length))]
            texts.append(compute_alone(deterministic_model(path, dtype), token_ids))
        steps = RandomSteps(deterministic_model(path, dtype), texts)
        for logits, expected in steps.run(num_steps):
            assert differing_rows(logits, expected) == 0, (variant, dtype)
        return steps.num_computed


def messages() -> list[gateway_pb2.GenerateRequest]:
    prompts = [PROMPT * (1 + index % 5) + str(index // 2) for index in range(NUM_STREAMS)]
    return [
        request(prompt, MAX_TOKENS, temperature=0.8 * (index % 2), seed=index, logprobs=2, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


def assert_same_bits(found: list[Collected], expected: list[Collected]) -> None:
    for each, alone in zip(found, expected, strict=True):
        assert each.token_ids == alone.token_ids
        assert each.logprobs == alone.logprobs


def check_server(services: PlainServices, num_rounds: int) -> None:
    """Answers at once, through kills of either worker and of both, are those of each request alone."""
    alone = [collect(services.gateway, message) for message in messages()]
    assert_same_bits(collect_all(services.gateway, messages()), alone)
    for number in range(num_rounds):
        killed = (("dense_worker",), ("attn_worker",), ("dense_worker", "attn_worker"))[number % 3]
        start_s = time.monotonic()
        disturbed = collect_all(services.gateway, messages(), lambda killed=killed: services.kill(*killed))
        assert_same_bits(disturbed, alone)
        print(f"killed {' and '.join(killed)}: {time.monotonic() - start_s:.1f} s", flush=True)
        services.wait_idle(timeout_s=60.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.deterministic", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each family and dtype, %(default)s by default")
    parser.add_argument("--kills", type=int, default=6, help="of each server, %(default)s by default")
    parser.add_argument("--family", choices=VARIANTS, nargs="*", help="by default all that are not refused")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    covered = [each for each in VARIANTS if not each.startswith(REFUSED)]
    for variant in covered if arguments.family is None else arguments.family:
        for dtype in (torch.float32, torch.bfloat16):
            print(f"{variant}, {dtype}: {check_family(variant, dtype, arguments.steps)} rows", flush=True)
    for dtype in ("float32", "bfloat16"):
        settings = [f"{key}={value}" for key, value in SETTINGS.items()]
        with (
            tempfile.TemporaryDirectory() as directory,
            plain_services(Path(directory), f"model.dtype={dtype}", *settings) as services,
        ):
            check_server(services, arguments.kills)
        print(f"server, {dtype}: {NUM_STREAMS} streams, {arguments.kills} kills", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
