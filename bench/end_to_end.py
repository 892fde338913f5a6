"""Checks a running server from text to text: its parts agree, it warms up, and a data set is timed.

1. Functionality: the gateway's text equals that of its parts called separately (tokenize, dense worker, detokenize),
   streamed and not.
2. Warm-up: the first prompts are answered without an error.
3. Benchmark: all prompts at once. The total latency runs from sending the first to the end of the last.

`python bench/end_to_end.py --dataset FILE --address HOST:PORT --dense-address HOST:PORT`. Without a data set it uses
prompts from the training texts of the embedded model.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import uvloop

from bench.load.dense_load import DenseLoad, DenseRequest, open_dense
from bench.load.grpc_transport import CHANNEL_OPTIONS, GrpcTransport
from bench.load.load import Load, replay
from bench.load.options import non_negative, positive, run_facts, save_run, whole_number
from bench.load.stats import RequestRecord, core_figures, serving_figures
from bench.load.transport import CONNECT_TIMEOUT_S, LoadError, TimedRequest
from bench.load.workload import Prompt, WorkloadError, dataset_prompts, load_encode
from services.common.cli import dashed
from services.common.config import EMBEDDED_MODEL, DenseSection, GatewaySection
from services.pb import gateway_pb2, gateway_pb2_grpc, sampling_pb2

NUM_BUILT_IN_TOKENS = 32  # to generate for each built-in prompt


class CheckError(Exception):
    """A check failed; the message says which and how."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a check failed, 130 after Ctrl-C."""
    arguments = _parser().parse_args(dashed(sys.argv[1:] if argv is None else argv))
    try:
        return uvloop.run(_run(arguments))
    except (CheckError, LoadError, WorkloadError) as error:
        print(f"end_to_end: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _run(arguments: argparse.Namespace) -> int:
    facts = run_facts(arguments)
    prompts = _prompts(arguments)
    async with (
        grpc.aio.insecure_channel(arguments.address, options=CHANNEL_OPTIONS) as channel,
        open_dense(arguments.dense_address) as dense_channel,
    ):
        gateway = gateway_pb2_grpc.GatewayStub(channel)
        model = await _model_info(gateway, arguments.address)
        dense = DenseLoad(dense_channel, temperature=0.0, cache_salt=secrets.token_hex(8))
        for prompt in prompts[: arguments.num_functionality]:
            await check_parts_agree(gateway, dense, prompt, list(model.eos_token_ids), arguments.timeout)
        print(f"Functionality: passed with {min(len(prompts), arguments.num_functionality)} prompts.")
        _check_answered("warm-up", await _replay(channel, prompts[: arguments.warmup], arguments))
        print(f"Warm-up: passed with {min(len(prompts), arguments.warmup)} prompts.")
        print(f"Benchmark: {len(prompts)} prompts.")
        records = await _replay(channel, prompts, arguments)
        _check_answered("benchmark", records)
    figures, token_figures = core_figures(records), serving_figures(records)
    print(f"Total latency: {figures.total_latency_ms:.3f} ms")
    print(
        f"{figures.request_throughput:.2f} requests/s, {figures.output_throughput:.2f} output tokens/s, "
        f"{figures.output_tokens_per_request:.2f} tokens an answer"
    )
    if arguments.json:
        by_name = {"figures": dataclasses.asdict(figures), "token_figures": dataclasses.asdict(token_figures)}
        save_run(arguments.json, facts, model, records, **by_name)
    if arguments.plot:
        from bench.load.plots import save_run_plot  # it needs matplotlib

        save_run_plot(records, f"{len(prompts)} prompts at once, from text to text", arguments.plot)
    return 0


async def check_parts_agree(
    gateway: gateway_pb2_grpc.GatewayStub, dense: DenseLoad, prompt: Prompt, eos_token_ids: list[int], timeout_s: float
) -> None:
    """Raises `CheckError` if an answer of the gateway differs from that of its parts."""
    text = prompt.text or ""
    tokenized = await gateway.Tokenize(gateway_pb2.TokenizeRequest(text=text), timeout=timeout_s)
    request = DenseRequest(list(tokenized.token_ids), prompt.max_tokens, 0.0, tuple(eos_token_ids))
    [record], [token_ids] = await dense.replay([request], None, timeout_s)
    if record.error is not None:
        raise CheckError(f"functionality: the dense worker failed on {text!r}: {record.error}")
    text_token_ids = token_ids[:-1] if token_ids[-1] in eos_token_ids else token_ids
    texts = [
        await _decode(gateway, ids, timeout_s) for ids in (request.token_ids, [*request.token_ids, *text_token_ids])
    ]
    expected = (texts[1].removeprefix(texts[0]), token_ids)
    message = _request("", prompt)
    message.cache_salt = secrets.token_hex(8)
    whole = await gateway.Generate(message, timeout=timeout_s)
    pieces, streamed_ids = [], []
    async for chunk in gateway.GenerateStream(message, timeout=timeout_s):
        pieces.append(chunk.text)
        streamed_ids += chunk.token_ids
    [completion] = whole.completions
    for kind, answer in (
        ("whole", (completion.text, list(completion.token_ids))),
        ("streamed", ("".join(pieces), streamed_ids)),
    ):
        if answer != expected:
            raise CheckError(f"functionality: the {kind} answer to {text!r} is {answer}, its parts give {expected}")


async def _decode(gateway: gateway_pb2_grpc.GatewayStub, token_ids: list[int], timeout_s: float) -> str:
    request = gateway_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=True)
    return (await gateway.Detokenize(request, timeout=timeout_s)).text


async def _replay(
    channel: grpc.aio.Channel, prompts: Sequence[Prompt], arguments: argparse.Namespace
) -> list[RequestRecord]:
    salt = secrets.token_hex(8)
    transport = GrpcTransport(channel)
    requests = []
    for index, prompt in enumerate(prompts):
        message = _request(f"end-to-end-{salt}-{index}", prompt, salt)
        requests.append(TimedRequest(index, 0, message.request_id, transport.encode(message)))
    load = Load("grpc", arguments.address, [], requests, arguments.max_concurrency, arguments.timeout)
    return await replay(transport, load, time.monotonic_ns())


def _check_answered(name: str, records: Sequence[RequestRecord]) -> None:
    for record in records:
        if record.error is not None:
            raise CheckError(f"{name}: prompt {record.index} failed: {record.error}")


def _request(request_id: str, prompt: Prompt, salt: str = "") -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        request_id=request_id,
        prompt=prompt.text,
        sampling=sampling_pb2.SamplingParams(temperature=0.0),
        max_tokens=prompt.max_tokens,
        cache_salt=salt,
    )


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    encode = load_encode(arguments.tokenizer_dir)
    if arguments.dataset is not None:
        return dataset_prompts(arguments.dataset, arguments.num_prompts, encode, arguments.seed, arguments.output_len)
    lines = (EMBEDDED_MODEL / "documents.txt").read_text(encoding="utf-8").splitlines()
    openings = [" ".join(line.split()[:6]) for line in lines if len(line.split()) > 12]
    texts = [openings[index % len(openings)] for index in range(arguments.num_prompts)]
    num_tokens = arguments.output_len or NUM_BUILT_IN_TOKENS
    return [Prompt(None, text, len(encode(text)), num_tokens) for text in texts]


async def _model_info(gateway: gateway_pb2_grpc.GatewayStub, address: str) -> gateway_pb2.ModelInfoResponse:
    try:
        return await gateway.ModelInfo(gateway_pb2.ModelInfoRequest(), timeout=CONNECT_TIMEOUT_S, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        raise LoadError(f"gateway at {address}: {error.code().name}: {error.details()}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/end_to_end.py", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--address", default=GatewaySection().address, help="address of the gateway (%(default)s)")
    add("--dense-address", default=DenseSection().address, help="address of the dense worker (%(default)s)")
    add("--dataset", type=Path, metavar="FILE", help="JSON, as in bench/load/workload.py (built-in prompts)")
    add("--tokenizer-dir", type=Path, default=EMBEDDED_MODEL, metavar="DIR", help="model directory (the embedded one)")
    add("--num-prompts", type=whole_number, default=125, metavar="N", help="prompts of the benchmark (%(default)s)")
    add(
        "--output-len",
        type=whole_number,
        metavar="N",
        help="maximum number of tokens of an answer (as in the data set)",
    )
    add("--num-functionality", type=whole_number, default=8, metavar="N", help="prompts of the check (%(default)s)")
    add("--warmup", type=whole_number, default=10, metavar="N", help="prompts before the benchmark (%(default)s)")
    add("--max-concurrency", type=whole_number, metavar="N", help="maximum number of requests in flight (no limit)")
    add("--seed", type=non_negative, default=0, help="seed of the choice from a data set (%(default)s)")
    add(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="time limit of one request in seconds (%(default)g)",
    )
    add("--json", type=Path, metavar="FILE", help="saves figures, options and the time of every chunk")
    add("--plot", type=Path, metavar="FILE.png", help="saves latencies over time and distributions")
    return parser


if __name__ == "__main__":
    sys.exit(main())
