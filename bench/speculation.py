"""What speculation brings: services with and without it get the same requests in turns, and the ratio counts.

Two services run without it: how far their ratio is from 1 shows what the machine's other work does to the ratios.

    python bench/speculation.py                                              # on this CPU, with the embedded model
    python bench/speculation.py --set model.path=/models/7b --set dense.device=cuda --set attention.device=cuda \
        --set attention.kv_cache_memory_fraction=0.2                         # on a GPU, with an MPS daemon running

Texts: *copied* answers were given before to the same client; *repeating* answers come from prompts that repeat
themselves, with the most likely token each; *unpredictable* ones are sampled with a new seed each. The second table
forces drafts: their number in each step of one stream, and how many are right, are given. `--heads DIR` adds services
with Medusa heads, whose guesses are right as often as the texts are like those that the heads were trained with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.pb import gateway_pb2
from tests.support.plain_services import PlainServices, plain_services
from tests.support.workers.forced_drafts_dense_worker import VARIABLE

TIMEOUT_S = 600.0
LOG_TIMEOUT_S = 5.0
STEP_LOG = "steps.jsonl"
PROMPT_TOKENS, PHRASE_TOKENS = 96, 12
MODES = {"off": "off", "off again": "off", "ngram": "ngram", "suffix": "suffix"}  # scheduler.speculation, by name
TEXTS = ("copied", "repeating", "unpredictable")
FORCED = ((0, 0.0), (3, 0.0), (3, 0.5), (3, 1.0), (7, 0.0), (7, 0.5), (7, 1.0))  # number of drafts, part that is right


def make_request(text: str, stream: int, round_number: int, max_tokens: int) -> gateway_pb2.GenerateRequest:
    """The same in every round, but for unpredictable texts."""
    is_new = text == "unpredictable"
    generator = random.Random(f"{text} {stream} {round_number if is_new else 0}")
    phrase = [generator.randrange(3, 250) for _ in range(PROMPT_TOKENS if is_new else PHRASE_TOKENS)]
    request = gateway_pb2.GenerateRequest(max_tokens=max_tokens, ignore_eos=True)
    request.prompt_token_ids.ids.extend((phrase * PROMPT_TOKENS)[:PROMPT_TOKENS])
    request.sampling.temperature = 0.0 if text == "repeating" else 1.0
    request.sampling.seed = generator.randrange(2**32)
    return request


def run_round(services: PlainServices, requests: Sequence[gateway_pb2.GenerateRequest]) -> tuple[float, int]:
    """Seconds for all these requests at once, and the number of steps."""
    before = services.dense_status().num_steps
    with ThreadPoolExecutor(len(requests)) as threads:
        start = time.perf_counter()
        for _ in threads.map(lambda request: services.gateway.Generate(request, timeout=TIMEOUT_S), requests):
            pass
        seconds = time.perf_counter() - start
    return seconds, services.dense_status().num_steps - before


def compare(
    directory: Path,
    overrides: Sequence[str],
    modes: Mapping[str, Sequence[str]],
    streams: Sequence[int],
    rounds: int,
    max_tokens: int,
) -> None:
    """Rounds of all modes in turns; prints the ratio to `off`, the median over rounds, and what the steps were like."""
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(_services(directory, name, (*overrides, *mode))) for name, mode in modes.items()
        }
        print("| text | streams | off, tok/s | mode | mode / off | tokens per step | held back | with drafts |")
        print("|---|---|---|---|---|---|---|---|")
        for text in TEXTS:
            for num_streams in streams:
                times: dict[str, list[float]] = {name: [] for name in modes}
                first_steps: dict[str, int] = {}
                for round_number in range(-2, rounds):  # two to warm up: the second one has answers to copy from
                    requests = [make_request(text, stream, round_number, max_tokens) for stream in range(num_streams)]
                    for name, services in random.sample(list(running.items()), len(running)):
                        if round_number == 0:
                            first_steps[name] = services.dense_status().num_steps + 1
                        seconds, _ = run_round(services, requests)
                        if round_number >= 0:
                            times[name].append(seconds)
                off = statistics.median(times["off"])
                for name, services in list(running.items())[1:]:
                    ratio = statistics.median(off / on for off, on in zip(times["off"], times[name], strict=True))
                    steps = read_steps(directory / name, first_steps[name], services.dense_status().num_steps)
                    cells = [text, num_streams, f"{num_streams * max_tokens / off:,.0f}", name, f"{ratio:.2f}"]
                    cells += [f"{max_tokens * rounds / len(steps):.2f}"]
                    # The first step of a round follows a pause, not a step that it had to wait for.
                    cells += [f"{(sum(step['gap_ms'] > 0 for step in steps) - rounds) / len(steps):.1%}"]
                    cells += [f"{sum(step['num_sampled'] > step['num_seqs'] for step in steps) / len(steps):.1%}"]
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def read_steps(directory: Path, first: int, last: int) -> list[dict[str, float]]:
    """The lines of the step log for these steps that computed tokens, once they have been written."""
    deadline = time.monotonic() + LOG_TIMEOUT_S
    while True:
        steps = [json.loads(line) for line in (directory / STEP_LOG).read_text().splitlines()]
        if (steps and steps[-1]["step_id"] >= last) or time.monotonic() > deadline:
            return [step for step in steps if first <= step["step_id"] <= last and step["num_seqs"]]
        time.sleep(0.1)


def force(directory: Path, overrides: Sequence[str], rounds: int, max_tokens: int) -> None:
    """Time of a step of one stream with drafts that are right or wrong as given."""
    request = make_request("repeating", 0, 0, max_tokens)
    rows, answer = [], list[int]()
    for num_drafts, acceptance in FORCED:
        name = f"forced-{num_drafts}-{acceptance}"
        file = directory / f"{name}.json"
        answers = [(list(request.prompt_token_ids.ids), answer)]  # the first services give it, without drafts
        file.write_text(json.dumps({"answers": answers, "num_drafts": num_drafts, "acceptance": acceptance}))
        os.environ[VARIABLE] = str(file)
        module = "tests.support.workers.forced_drafts_dense_worker"
        with _services(directory, name, overrides, module=module) as services:
            answer = list(services.gateway.Generate(request, timeout=TIMEOUT_S).completions[0].token_ids)
            measured = [run_round(services, [request]) for _ in range(rounds)]
        step_ms = 1e3 * statistics.median(seconds / steps for seconds, steps in measured)
        rows.append((num_drafts, acceptance, step_ms, max_tokens / measured[-1][1]))
    print("| drafts | right | ms per step | to no drafts | tokens per step |")
    print("|---|---|---|---|---|")
    for num_drafts, acceptance, step_ms, tokens_per_step in rows:
        ratio = step_ms / rows[0][2]
        print(f"| {num_drafts} | {acceptance:.0%} | {step_ms:.3f} | {ratio:.3f} | {tokens_per_step:.2f} |")


@contextlib.contextmanager
def _services(
    directory: Path, name: str, overrides: Sequence[str], module: str = "services.dense_worker"
) -> Iterator[PlainServices]:
    own = directory / name
    own.mkdir()
    log = f"dense.step_log={own / STEP_LOG}"
    with plain_services(own, *overrides, log, modules={"dense_worker": module}) as services:
        yield services


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the services")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="streams at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--skip-forced", action="store_true", help="only compare texts")
    parser.add_argument("--heads", type=Path, metavar="DIR", help="also compare these Medusa heads")
    options = parser.parse_args()
    modes = {name: (f"scheduler.speculation={method}",) for name, method in MODES.items()}
    if options.heads is not None:
        modes["medusa"] = "scheduler.speculation=medusa", f"scheduler.speculation_model={options.heads}"
    with tempfile.TemporaryDirectory(prefix="spec-") as directory:
        compare(Path(directory), options.set, modes, options.streams, options.rounds, options.max_tokens)
        if not options.skip_forced:
            print()
            force(Path(directory), options.set, options.rounds, options.max_tokens)


if __name__ == "__main__":
    main()
