"""What a form of answers costs: TPOT with and without, the time to compile a form, and masks per second.

    python bench/structured.py --streams 1 16 64                        # on this machine, with the embedded model
    python bench/structured.py --shape llama-2-7b --rounds 3            # on a GPU, with random weights
    python bench/structured.py --address HOST:PORT --model DIR          # against a running server, of this model
    python bench/structured.py --forced --streams 1 8                   # what tokens bring that the form forces

Rounds with and without a form alternate; the ratio is the median over pairs of rounds. In *mixed* rounds every second
stream has a form; the figure is that of the others, which have none.

With `--forced` a second server samples all tokens one by one, also those that the form forces. The answers of both,
which must be equal, alternate; the ratio is the median over pairs of rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import numpy as np

from bench.load.own_server import add_server_options, open_server
from services.common.model_config import load_model_config
from services.common.sampling_params import SamplingParams
from services.common.structured_output import Constraint, StructuredOutput
from services.dense_worker.features.grammar.grammars import Grammars
from services.gateway.text.grammar_trials import GrammarTrials
from services.grammar.matcher import GrammarMatcher
from services.grammar.vocabulary import read_vocabulary
from services.pb import gateway_pb2, gateway_pb2_grpc, sampling_pb2
from services.step import SequenceSpec

# It cannot end before max_tokens, so that every round has the same number of steps.
ENDLESS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    },
}
# Answers of a fixed schema, as programs ask for them.
NAME = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {
        "first_name": NAME,
        "last_name": NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {
            "type": "object",
            "properties": {"street": NAME, "city": NAME, "country_code": {"type": "string", "pattern": "^[A-Z]{2}$"}},
            "required": ["street", "city", "country_code"],
            "additionalProperties": False,
        },
        "is_customer": {"type": "boolean"},
        "preferred_language": {"enum": ["english", "german", "french", "japanese"]},
    },
    "required": ["first_name", "last_name", "age", "address", "is_customer", "preferred_language"],
    "additionalProperties": False,
}
RATING = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": ["positive", "negative", "neutral"]},
        "confidence": {"enum": ["low", "medium", "high"]},
        "contains_personal_data": {"type": "boolean"},
        "number_of_topics": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["sentiment", "confidence", "contains_personal_data", "number_of_topics"],
    "additionalProperties": False,
}
COMPACT = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
FIXED = {
    "person": PERSON,
    "person, no spaces": PERSON | COMPACT,
    "rating": RATING,
    "rating, no spaces": RATING | COMPACT,
}
MAX_FIXED_TOKENS = 400
PLAIN, FORMED, MIXED = "plain", "formed", "mixed"
PROMPT_TOKENS = 32
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


def random_schema(generator: random.Random, depth: int = 0) -> dict[str, object]:
    """A schema such as programs have: objects of up to ten properties, at most three deep."""
    kinds = ["string", "integer", "number", "boolean", "enum"] + ["object", "array"] * (depth < 3)
    kind = "object" if depth == 0 else generator.choice(kinds)
    if kind == "enum":
        return {"enum": [f"value {generator.randrange(1000)}" for _ in range(generator.randint(2, 20))]}
    if kind == "array":
        return {"type": "array", "items": random_schema(generator, depth + 1), "maxItems": generator.randint(1, 20)}
    if kind != "object":
        return {"type": kind}
    names = [f"field_{generator.randrange(10_000)}" for _ in range(generator.randint(1, 10))]
    properties = {name: random_schema(generator, depth + 1) for name in names}
    required = [name for name in properties if generator.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def make_request(seed: int, max_tokens: int, has_form: bool) -> gateway_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(temperature=1.0, seed=seed)
    if has_form:
        sampling.structured_output.json_schema = json.dumps(ENDLESS)
    token_ids = [3 + (seed * 7 + i) % 200 for i in range(PROMPT_TOKENS)]
    return gateway_pb2.GenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(ids=token_ids), sampling=sampling, max_tokens=max_tokens, ignore_eos=True
    )


async def time_round(gateway: gateway_pb2_grpc.GatewayStub, kind: str, num_streams: int, max_tokens: int) -> float:
    """Median TPOT in milliseconds over the streams that count."""

    async def stream(index: int, has_form: bool) -> float:
        async for chunk in gateway.GenerateStream(make_request(index, max_tokens, has_form)):
            if chunk.HasField("finish"):
                assert chunk.finish.usage.num_output_tokens == max_tokens, "an answer ended early"
                return chunk.finish.timings.per_token_ms
        raise AssertionError("a stream had no end")

    has_form = [kind == FORMED or (kind == MIXED and i % 2 == 1) for i in range(num_streams)]
    tpots = await asyncio.gather(*map(stream, range(num_streams), has_form))
    return statistics.median(tpot for tpot, formed in zip(tpots, has_form, strict=True) if formed == (kind == FORMED))


async def measure_tpot(address: str, streams: Sequence[int], rounds: int, max_tokens: int) -> None:
    print("| streams | TPOT plain, ms | with a form, ms | ratio | plain beside as many with a form, ms | ratio |")
    print("|---|---|---|---|---|---|")
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        gateway = gateway_pb2_grpc.GatewayStub(channel)
        for num_streams in streams:
            kinds = (PLAIN, FORMED, MIXED) if num_streams > 1 else (PLAIN, FORMED)
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for kind in kinds:  # warm up
                await time_round(gateway, kind, num_streams, max_tokens // 4)
            for _ in range(rounds):
                for kind in kinds:
                    times[kind].append(await time_round(gateway, kind, num_streams, max_tokens))
            cells = [f"{statistics.median(times[PLAIN]):.3f}"]
            for kind in (FORMED, MIXED):
                if kind not in times:
                    cells += ["–", "–"]
                    continue
                ratios = [other / plain for other, plain in zip(times[kind], times[PLAIN], strict=True)]
                cells += [f"{statistics.median(times[kind]):.3f}", f"{statistics.median(ratios):.3f}"]
            print(f"| {num_streams} | {' | '.join(cells)} |", flush=True)


async def answer_all(
    gateway: gateway_pb2_grpc.GatewayStub, schema: object, num_streams: int, first_seed: int
) -> tuple[float, list[list[int]]]:
    """How long whole answers by a schema take at once, in seconds, and their tokens."""

    async def answer(seed: int) -> list[int]:
        request = make_request(seed, MAX_FIXED_TOKENS, False)
        request.sampling.structured_output.json_schema = json.dumps(schema)
        request.ignore_eos = False
        [completion] = (await gateway.Generate(request)).completions
        json.loads(completion.text)
        return list(completion.token_ids)

    start = time.perf_counter()
    answers = await asyncio.gather(*map(answer, range(first_seed, first_seed + num_streams)))
    return time.perf_counter() - start, answers


async def measure_forced(addresses: Sequence[str], streams: Sequence[int], rounds: int) -> None:
    """addresses: of the server that takes forced tokens without sampling, and of the one that samples all"""
    print("| schema | streams | tokens per answer | ms per answer, sampled one by one | forced ones taken | ratio |")
    print("|---|---|---|---|---|---|")
    async with contextlib.AsyncExitStack() as stack:
        gateways = []
        for address in addresses:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS))
            gateways.append(gateway_pb2_grpc.GatewayStub(channel))
        for (name, schema), num_streams in itertools.product(FIXED.items(), streams):
            times: list[list[float]] = [[], []]
            num_tokens = list[int]()
            for number in range(-2, rounds):  # those below 0 warm up: the server learns what steps cost
                measured = [await answer_all(each, schema, num_streams, 1000 * number + 5000) for each in gateways]
                assert measured[0][1] == measured[1][1], "the answers differ"
                if number >= 0:
                    for kept, (took_s, _) in zip(times, measured, strict=True):
                        kept.append(took_s)
                    num_tokens += map(len, measured[0][1])
            ratio = statistics.median(slow / fast for fast, slow in zip(*times, strict=True))
            fast_ms, slow_ms = (1e3 * statistics.median(each) for each in times)
            cells = [name, num_streams, f"{statistics.mean(num_tokens):.0f}", f"{slow_ms:.0f}", f"{fast_ms:.0f}"]
            print(f"| {' | '.join(map(str, cells))} | {ratio:.2f} |", flush=True)


async def measure_compiling(model: Path, is_optional: bool, num_forms: int) -> None:
    config = load_model_config(model)
    vocabulary = {
        "path": str(model.resolve()),
        "vocab_size": config.vocab_size,
        "eos_token_ids": config.eos_token_ids,
        "is_optional": is_optional,
    }
    trials = GrammarTrials(vocabulary)
    generator, times = random.Random(0), []
    try:
        start = time.perf_counter()
        await trials.compile(StructuredOutput(Constraint.JSON_OBJECT))
        start_s = time.perf_counter() - start
        for _ in range(num_forms):
            form = StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(random_schema(generator)))
            start = time.perf_counter()
            await trials.compile(form)
            times.append(1e3 * (time.perf_counter() - start))
    finally:
        await trials.close()
    times.sort()
    p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    print(f"{num_forms} schemas, trial included: P50 {p50:.1f} ms, P99 {p99:.1f} ms, longest {times[-1]:.1f} ms")
    print(f"first form, which starts the process: {start_s:.2f} s")


async def measure_masks(
    model: Path, is_optional: bool, batch_sizes: Sequence[int], num_steps: int, num_threads: int | None = None
) -> None:
    config = load_model_config(model)
    vocabulary = read_vocabulary(model, config.vocab_size, config.eos_token_ids, is_optional)
    grammars = Grammars(lambda: vocabulary, num_threads)
    form = StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(ENDLESS))
    generator = np.random.default_rng(0)
    print(f"Threads that find masks: {num_threads or 'as the server has'}\n")
    print("| matchers | masks, µs per step: median | mean | greatest | masks per second | tokens, µs: median |")
    print("|---|---|---|---|---|---|")
    for batch_size in batch_sizes:
        spec = SequenceSpec("", [1], SamplingParams(structured_output=form), num_steps)
        matchers = [await grammars.make(spec, ()) for _ in range(batch_size)]
        masks = np.empty((batch_size, matchers[0].num_words), dtype=np.uint32)
        fill_s, consume_s = [], []
        for _ in range(num_steps):
            start = time.perf_counter()
            GrammarMatcher.fill_masks(matchers, masks)
            filled = time.perf_counter()
            sampled = [(matcher, _random_token(mask, generator)) for matcher, mask in zip(matchers, masks, strict=True)]
            chosen = time.perf_counter()
            GrammarMatcher.consume(sampled)
            consume_s.append(time.perf_counter() - chosen)
            fill_s.append(filled - start)
        fills = (statistics.median(fill_s), statistics.mean(fill_s), max(fill_s))
        cells = [f"{1e6 * each:,.0f}" for each in fills]
        cells += [f"{batch_size / statistics.mean(fill_s):,.0f}", f"{1e6 * statistics.median(consume_s):,.0f}"]
        print(f"| {batch_size} | {' | '.join(cells)} |", flush=True)
    grammars.close()


def _random_token(mask: np.ndarray, generator: np.random.Generator) -> int:
    return int(generator.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_options(parser)
    parser.add_argument("--dummy", action="store_true", help="the model has dummy weights and may have no tokenizer")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="streams at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind; the median counts")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--num-forms", type=int, default=200, help="schemas to compile")
    parser.add_argument("--num-steps", type=int, default=200, help="steps of the masks alone")
    parser.add_argument("--mask-threads", type=int, nargs="+", help="measure masks alone with these numbers of threads")
    parser.add_argument("--forced", action="store_true", help="only measure what forced tokens bring")
    options = parser.parse_args()
    if options.forced:
        undrafted = {"services.dense_worker": "tests.support.workers.undrafted_dense_worker"}
        with open_server(options) as server, open_server(options, modules=undrafted) as other:
            asyncio.run(measure_forced([server.address, other.address], options.streams, options.rounds))
        return
    with open_server(options, f"scheduler.max_num_seqs={max(options.streams)}") as server:
        vocab_size = load_model_config(server.model).vocab_size
        print(f"{os.cpu_count()} cores, vocabulary of {vocab_size}, shape {options.shape or server.model.name}\n")
        asyncio.run(measure_tpot(server.address, options.streams, options.rounds, options.max_tokens))
        print()
        for num_threads in options.mask_threads or [None]:
            asyncio.run(
                measure_masks(server.model, options.dummy, options.streams, options.num_steps, num_threads)
            )
            print()
        asyncio.run(measure_compiling(server.model, options.dummy, options.num_forms))


if __name__ == "__main__":
    main()
