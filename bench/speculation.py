"""What speculation brings: services with and without it get the same requests in turns, and the ratio counts.

    python bench/speculation.py                                                  # on this CPU, the embedded model
    python bench/speculation.py --shape llama-2-7b --set dense.backend=torch     # on a GPU, with an MPS daemon running

The mode `off again` is a second service without it: how far their ratio is from 1 shows what other work on the machine
does to the ratios.

Texts: *copied* answers were given before to the same client; *repeating* answers come from prompts that repeat
themselves, with the most likely token each; *unpredictable* ones are sampled with a new seed each. With `--shape` the
weights are random, but the text is known (`tests/support/workers/known_text_dense_worker.py`). Then *edited* answers
are texts of their prompts with every 24th token changed, *unpredictable* ones repeat nothing, and *misleading* ones
have prompts in which each three tokens of the answer occur before a wrong fourth. The second table forces drafts: their
number in each step of one stream, and how many are right, are given. `--heads DIR` adds services with Medusa heads,
whose drafts are right as often as the texts are like those that the heads were trained with; so does `--eagle DIR`
with an EAGLE-3 head. `--draft-model DIR` adds services with a draft model.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.models import SHAPES, write_model
from services.pb import gateway_pb2
from tests.support.plain_services import PlainServices, plain_services
from tests.support.warm_process import warm_server
from tests.support.workers.forced_drafts_dense_worker import VARIABLE

TIMEOUT_S = 600.0
LOG_TIMEOUT_S = 5.0
STEP_LOG = "steps.jsonl"
PROMPT_TOKENS, PHRASE_TOKENS = 96, 12
MODES = {"off": "off", "off again": "off", "ngram": "ngram", "suffix": "suffix"}  # scheduler.speculation, by name
TEXTS = ("copied", "repeating", "unpredictable")
KNOWN_TEXTS = ("edited", "copied", "unpredictable", "misleading")  # with --shape
VOCABULARY = 32_000  # of a shape's model, at least
EDIT_TOKENS = 24  # one of so many is changed
DECOY_TOKENS = 3  # of the answer, before a wrong one
FORCED = ((0, 0.0), (3, 0.0), (3, 0.5), (3, 1.0), (7, 0.0), (7, 0.5), (7, 1.0))  # number of drafts, part that is right


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests are sent."""

    make: Callable[[str, int, int, int], gateway_pb2.GenerateRequest]  # of a text, stream, round, and max_tokens
    texts: Sequence[str]
    streams: Sequence[int]
    rounds: int
    max_tokens: int


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


def make_known_request(text: str, stream: int, round_number: int, max_tokens: int) -> gateway_pb2.GenerateRequest:
    """For the model that counts upwards. Only copied answers may be copied from those of earlier rounds."""
    generator = random.Random(f"{text} {stream}")
    first = generator.randrange(3 + DECOY_TOKENS, VOCABULARY - max_tokens)
    answer = list(range(first, first + max_tokens))
    prompt: list[int]
    match text:
        case "edited":
            prompt = [generator.randrange(3, first) if i % EDIT_TOKENS == 0 else each for i, each in enumerate(answer)]
        case "misleading":
            ends = (range(each - DECOY_TOKENS, each) for each in answer)
            prompt = list(itertools.chain.from_iterable((*end, generator.randrange(3, first - 3)) for end in ends))
        case _:
            prompt = generator.sample(range(3, VOCABULARY), PROMPT_TOKENS)
    request = gateway_pb2.GenerateRequest(max_tokens=max_tokens, ignore_eos=True)
    request.prompt_token_ids.ids.extend([*prompt, first - 1])
    request.sampling.temperature = 0.0
    if text != "copied":
        request.cache_salt = f"{text} {stream} {round_number}"
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


def compare(directory: Path, overrides: Sequence[str], modes: Mapping[str, Sequence[str]], load: Load) -> None:
    """Rounds of all modes in turns; prints the ratio to `off`, the median over rounds, and what the steps were like."""
    warm_server()  # before threads need it: it is one for all
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(modes)) as threads:

        def start(name: str) -> PlainServices:
            return stack.enter_context(_services(directory, name, (*overrides, *modes[name])))

        running = dict(zip(modes, threads.map(start, modes), strict=True))
        print("| text | streams | off, tok/s | mode | mode / off | tokens per step | held back | with drafts |")
        print("|---|---|---|---|---|---|---|---|")
        for text, num_streams in itertools.product(load.texts, load.streams):
            times: dict[str, list[float]] = {name: [] for name in modes}
            first_steps: dict[str, int] = {}
            for round_number in range(-2, load.rounds):  # two to warm up: the second one has answers to copy from
                requests = [load.make(text, stream, round_number, load.max_tokens) for stream in range(num_streams)]
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
                cells = [text, num_streams, f"{num_streams * load.max_tokens / off:,.0f}", name, f"{ratio:.3f}"]
                cells += [f"{load.max_tokens * load.rounds / len(steps):.2f}"]
                # The first step of a round follows a pause, not a step that it had to wait for.
                cells += [f"{(sum(step['gap_ms'] > 0 for step in steps) - load.rounds) / len(steps):.1%}"]
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


def force(directory: Path, overrides: Sequence[str], load: Load) -> None:
    """Time of a step of one stream with drafts that are right or wrong as given.

    What a request takes besides its steps, with the prompt's, counts the more per step the fewer these are.
    """
    request = load.make(load.texts[-1], 0, 0, load.max_tokens)
    file = directory / "forced.json"
    os.environ[VARIABLE] = str(file)

    def choose(num_drafts: int, acceptance: float, answer: list[int]) -> None:
        answers = [(list(request.prompt_token_ids.ids), answer)]
        file.write_text(json.dumps({"answers": answers, "num_drafts": num_drafts, "acceptance": acceptance}))

    choose(0, 0.0, [])
    times: dict[tuple[int, float], list[tuple[float, int]]] = {each: [] for each in FORCED}
    steps_ms: dict[tuple[int, float], list[float]] = {each: [] for each in FORCED}
    with _services(directory, "forced", overrides, "tests.support.workers.forced_drafts_dense_worker") as services:
        answer = list(services.gateway.Generate(request, timeout=TIMEOUT_S).completions[0].token_ids)
        for _ in range(load.rounds):
            for num_drafts, acceptance in FORCED:
                choose(num_drafts, acceptance, answer)
                first = services.dense_status().num_steps + 1
                times[num_drafts, acceptance].append(run_round(services, [request]))
                # Without that of the prompt, before which there is a pause.
                steps = read_steps(directory / "forced", first, services.dense_status().num_steps)[1:]
                steps_ms[num_drafts, acceptance] += [step["gap_ms"] + step["duration_ms"] for step in steps]
    print("| drafts | right | median of steps, ms | to no drafts | whole request, ms per step | tokens per step |")
    print("|---|---|---|---|---|---|")
    no_drafts_ms = 0.0
    for (num_drafts, acceptance), measured in times.items():
        step_ms = statistics.median(steps_ms[num_drafts, acceptance])
        no_drafts_ms = no_drafts_ms or step_ms
        request_ms = 1e3 * statistics.median(seconds / steps for seconds, steps in measured)
        cells = [str(num_drafts), f"{acceptance:.0%}", f"{step_ms:.3f}", f"{step_ms / no_drafts_ms:.3f}"]
        cells += [f"{request_ms:.3f}", f"{load.max_tokens / measured[-1][1]:.2f}"]
        print(f"| {' | '.join(cells)} |")


@contextlib.contextmanager
def _services(
    directory: Path, name: str, overrides: Sequence[str], module: str = "tests.support.workers.known_text_dense_worker"
) -> Iterator[PlainServices]:
    own = directory / name
    own.mkdir()
    log = f"dense.step_log={own / STEP_LOG}"
    with plain_services(own, *overrides, log, modules={"dense_worker": module}) as services:
        yield services


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the services")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, which say a known text")
    parser.add_argument("--modes", nargs="+", choices=list(MODES)[1:], default=list(MODES)[1:])
    parser.add_argument("--texts", nargs="+", choices=dict.fromkeys(KNOWN_TEXTS + TEXTS), help="default: all")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="streams at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--tables", nargs="+", choices=("texts", "forced"), default=["texts", "forced"])
    parser.add_argument("--heads", type=Path, metavar="DIR", help="also compare these Medusa heads")
    parser.add_argument("--eagle", type=Path, metavar="DIR", help="also compare this EAGLE-3 head")
    parser.add_argument("--draft-model", type=Path, metavar="DIR", help="also compare this draft model")
    options = parser.parse_args()
    modes = {name: (f"scheduler.speculation={MODES[name]}",) for name in ("off", *options.modes)}
    if options.heads is not None:
        modes["medusa"] = "scheduler.speculation=medusa", f"scheduler.speculation_model={options.heads}"
    if options.eagle is not None:
        modes["eagle3"] = "scheduler.speculation=eagle3", f"scheduler.speculation_model={options.eagle}"
    if options.draft_model is not None:
        path = options.draft_model
        modes["draft model"] = "scheduler.speculation=draft_model", f"scheduler.draft_model={path}"
    make, texts = (make_request, TEXTS) if options.shape is None else (make_known_request, KNOWN_TEXTS)
    load = Load(make, options.texts or texts, options.streams, options.rounds, options.max_tokens)
    with tempfile.TemporaryDirectory(prefix="spec-") as name:
        directory, settings = Path(name), options.set
        if options.shape is not None:
            model = write_model(directory / "model", options.shape, "stored")
            settings = [f"model.path={model}", "model.load_format=dummy", *settings]
        if "texts" in options.tables:
            compare(directory, settings, modes, load)
        if "forced" in options.tables:
            print()
            force(directory, settings, load)


if __name__ == "__main__":
    main()
