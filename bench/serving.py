"""Sends load to a running gateway over gRPC or HTTP and measures latencies and throughput at the clients.

`python bench/serving.py --num-prompts 500 --request-rate 16 --json FILE` prints the table and saves the timestamps of
every chunk, from which all figures can be computed again. The definitions are in `bench.load.stats`. With several
rates, as in `--request-rate 1,4,16`, one run follows the other, and table and plot show the figures over the rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvloop

from bench.load.live_view import live_view
from bench.load.load import Load, LoadResult, run_load
from bench.load.options import goodput_limit, non_negative, positive, rates, ratio, run_facts, save_run, whole_number
from bench.load.reference import nearest_run
from bench.load.stats import (
    NS_PER_MS,
    NS_PER_S,
    RequestRecord,
    ServingFigures,
    Summary,
    request_goodput,
    serving_figures,
)
from bench.load.transport import PROTOCOLS, LoadError, TimedRequest, Transport, open_transport, served_model
from bench.load.vllm_result import vllm_result
from bench.load.workload import (
    LengthDistribution,
    Prompt,
    WorkloadError,
    arrival_times,
    dataset_prompts,
    load_encode,
    random_prompts,
)
from services.common.config import GatewaySection
from services.pb import gateway_pb2, sampling_pb2

DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 235, 212  # means of ShareGPT's first turns
DEFAULT_ADDRESSES = {"grpc": GatewaySection().address, "http": GatewaySection().http_address}
MAX_CLIENT_LOAD = 0.7  # fraction of one core; a busier client process adds delays itself
TABLE_WIDTH = 50


def main(argv: Sequence[str] | None = None, program: str = "bench/serving.py") -> int:
    """Returns the exit status: 0, 1 if anything failed, 130 after Ctrl-C. `program` is its name in its usage."""
    parser = make_parser(program)
    arguments = parser.parse_args(argv)
    _check(arguments, parser)
    try:
        return _run(arguments)
    except (WorkloadError, LoadError) as error:
        print(f"{Path(program).stem}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    runs = [_run_rate(arguments, rate) for rate in arguments.request_rate]
    if len(runs) > 1:
        print(format_rates(runs))
    if arguments.plot:
        from bench.load.plots import save_rate_plot, save_run_plot  # they need matplotlib

        first, rate = runs[0], arguments.request_rate[0]
        title = f"{first.model}, {len(first.records)} requests over {arguments.protocol}"
        if len(runs) == 1:
            reference = nearest_run(rate) if arguments.reference else None
            save_run_plot(first.records, f"{title}, {rate:g} requests/s", arguments.plot, reference)
        else:
            save_rate_plot([(run.rate, run.figures) for run in runs], title, arguments.plot, arguments.reference)
    return 1 if any(run.figures.num_failed for run in runs) else 0


@dataclasses.dataclass(frozen=True, slots=True)
class RateRun:
    """The run at one request rate."""

    rate: float
    model: str
    records: list[RequestRecord]
    figures: ServingFigures
    goodput: float | None  # requests/s within the limits of --goodput; None: there are none


def _run_rate(arguments: argparse.Namespace, rate: float) -> RateRun:
    facts = run_facts(argparse.Namespace(**vars(arguments) | {"request_rate": rate}))
    model, load = uvloop.run(_ask_and_prepare(arguments, rate))
    title = f"{len(load.requests)} requests to {model.model} at {load.address} over {load.protocol}"
    print(title if math.isinf(rate) else f"{title}, {rate:g}/s", file=sys.stderr)
    with live_view("all at once" if math.isinf(rate) else f"{rate:g} requests/s", len(load.requests)) as show:
        result = run_load(load, arguments.client_processes, show)
    figures, limits_ms = serving_figures(result.records), dict(arguments.goodput)
    goodput = request_goodput(result.records, limits_ms) if limits_ms else None
    client = client_figures(result, figures, load.max_concurrency is None)
    has_many = len(arguments.request_rate) > 1
    if arguments.json:
        file = rate_file(arguments.json, rate) if has_many else arguments.json
        of_run = {"figures": dataclasses.asdict(figures), "goodput": goodput, "client": client}
        save_run(file, facts, model, result.records, **of_run)
    if arguments.save_result:
        document = vllm_result(
            result.records,
            model=model.model,
            protocol=load.protocol,
            request_rate=rate,
            max_concurrency=load.max_concurrency,
            is_poisson=arguments.arrivals == "poisson",
            limits_ms=limits_ms,
        )
        file = rate_file(arguments.save_result, rate) if has_many else arguments.save_result
        file.write_text(json.dumps(document, allow_nan=False))
    print(format_table(figures, goodput))
    print(_format_client(figures, client))
    if client["max_load"] > MAX_CLIENT_LOAD:
        print("serving: the client may be the bottleneck: give it more --client-processes", file=sys.stderr)
    return RateRun(rate, model.model, result.records, figures, goodput)


def rate_file(file: Path, rate: float) -> Path:
    """The file of one of several rates, such as result-2qps.json for result.json."""
    return file.with_name(f"{file.stem}-{rate:g}qps{file.suffix}")


async def _ask_and_prepare(
    arguments: argparse.Namespace, rate: float
) -> tuple[gateway_pb2.ModelInfoResponse, Load]:
    async with open_transport(arguments.protocol, arguments.address) as transport:
        model = await served_model(transport, arguments.address)
        return model, make_load(arguments, rate, model, transport)


def make_load(
    arguments: argparse.Namespace, rate: float, model: gateway_pb2.ModelInfoResponse, transport: Transport
) -> Load:
    """All requests of the run, encoded. Raises `WorkloadError`."""
    count, seed = arguments.num_prompts, arguments.seed
    prompts = _prompts(arguments, model, count, seed)
    warmup_prompts = _prompts(arguments, model, arguments.warmup, seed + 1)
    for prompt in prompts:
        if prompt.num_tokens + prompt.max_tokens > model.max_model_len:
            raise WorkloadError(
                f"a request has {prompt.num_tokens} prompt and {prompt.max_tokens} output tokens, "
                f"max_model_len is {model.max_model_len}"
            )
    due_s = arrival_times(count, rate, arguments.arrivals, seed)
    salt = secrets.token_hex(8)  # so that prefixes cached in an earlier run are not used
    return Load(
        protocol=arguments.protocol,
        address=arguments.address,
        warmup=_requests(warmup_prompts, [0.0] * len(warmup_prompts), f"{salt}-warmup", arguments, transport),
        requests=_requests(prompts, due_s, salt, arguments, transport),
        max_concurrency=arguments.max_concurrency,
        request_timeout_s=arguments.request_timeout,
    )


def client_figures(result: LoadResult, figures: ServingFigures, has_free_slots: bool) -> dict[str, float | None]:
    """The CPU load of the client processes, and their delays in sending, unless requests waited for a slot."""
    delays_ns = [record.send_ns - record.scheduled_ns for record in result.records]
    return {
        "num_processes": len(result.cpu_s),
        "cpu_us_per_token": 1e6 * sum(result.cpu_s) / max(1, figures.total_output_tokens),
        "max_load": max(result.cpu_s) / figures.duration_s,  # of the busiest process, in cores
        "max_send_delay_ms": max(delays_ns) / NS_PER_MS if has_free_slots else None,
    }


def format_table(figures: ServingFigures, goodput: float | None = None) -> str:
    """A table with the rows of `vllm bench serve`, in its order."""
    lines = [
        f"{' Serving Benchmark Result ':=^{TABLE_WIDTH}}",
        _row("Successful requests:", figures.num_successful),
        _row("Benchmark duration (s):", figures.duration_s),
        _row("Total input tokens:", figures.total_input_tokens),
        _row("Total generated tokens:", figures.total_output_tokens),
        _row("Request throughput (req/s):", figures.request_throughput),
        *([] if goodput is None else [_row("Request goodput (req/s):", goodput)]),
        _row("Input token throughput (tok/s):", figures.input_throughput),
        _row("Output token throughput (tok/s):", figures.output_throughput),
        *_summary_rows("Time to First Token", "TTFT", figures.ttft_ms),
        *_summary_rows("Time per Output Token (excl. 1st token)", "TPOT", figures.tpot_ms),
        *_summary_rows("Inter-token Latency", "ITL", figures.itl_ms),
        "=" * TABLE_WIDTH,
    ]
    return "\n".join(lines)


def format_rates(runs: Sequence[RateRun]) -> str:
    """A table with a line for each rate."""
    has_goodput = runs[0].goodput is not None
    titles = ["requests/s", "done/s", *(["good/s"] if has_goodput else []), "tokens/s"]
    titles += ["TTFT ms", "P99", "TPOT ms", "P99", "failed"]
    lines = ["  ".join(f"{title:>10}" for title in titles)]
    for run in runs:
        figures = run.figures
        cells: list[float | None] = [run.rate, figures.request_throughput]
        cells += [*([run.goodput] if has_goodput else []), figures.output_throughput]
        for summary in (figures.ttft_ms, figures.tpot_ms):
            cells += [None, None] if summary is None else [summary.median, summary.p99]
        cells.append(figures.num_failed)
        lines.append("  ".join(f"{'-' if cell is None else format(cell, '.5g'):>10}" for cell in cells))
    return "\n".join(lines)


def _summary_rows(title: str, name: str, summary: Summary | None) -> list[str]:
    return [
        f"{title:-^{TABLE_WIDTH}}",
        _row(f"Mean {name} (ms):", None if summary is None else summary.mean),
        _row(f"Median {name} (ms):", None if summary is None else summary.median),
        _row(f"P99 {name} (ms):", None if summary is None else summary.p99),
    ]


def _format_client(figures: ServingFigures, client: dict[str, float | None]) -> str:
    lines = [_row("Failed requests:", figures.num_failed)]
    if figures.first_error is not None:
        lines.append(f"  the first: {figures.first_error}")
    if figures.total_cached_tokens:
        lines.append(_row("Input tokens from the prefix cache:", figures.total_cached_tokens))
    lines += [
        _row("Client CPU per output token (us):", client["cpu_us_per_token"]),
        _row("Busiest client process (cores):", client["max_load"]),
        _row("Most that a request was sent late (ms):", client["max_send_delay_ms"]),
    ]
    return "\n".join(lines)


def _row(label: str, value: float | None) -> str:
    text = "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40} {text}"


def _prompts(
    arguments: argparse.Namespace, model: gateway_pb2.ModelInfoResponse, count: int, seed: int
) -> list[Prompt]:
    if arguments.dataset is not None:
        encode = load_encode(arguments.tokenizer)
        return dataset_prompts(arguments.dataset, count, encode, seed, arguments.output_len)
    prompt_lengths, output_lengths = (
        LengthDistribution(arguments.len_distribution, mean, arguments.len_range_ratio)
        for mean in (arguments.input_len or DEFAULT_INPUT_LEN, arguments.output_len or DEFAULT_OUTPUT_LEN)
    )
    return random_prompts(count, prompt_lengths, output_lengths, model.vocab_size, seed)


def _requests(
    prompts: Sequence[Prompt],
    due_s: Sequence[float],
    salt: str,
    arguments: argparse.Namespace,
    transport: Transport,
) -> list[TimedRequest]:
    requests = []
    for index, (prompt, due) in enumerate(zip(prompts, due_s, strict=True)):
        message = gateway_pb2.GenerateRequest(
            request_id=f"bench-{salt}-{index}",
            sampling=sampling_pb2.SamplingParams(temperature=arguments.temperature),
            max_tokens=prompt.max_tokens,
            ignore_eos=arguments.ignore_eos,
            cache_salt=salt,
        )
        if prompt.text is not None:
            message.prompt = prompt.text
        else:
            message.prompt_token_ids.ids.extend(prompt.token_ids)
        requests.append(TimedRequest(index, round(due * NS_PER_S), message.request_id, transport.encode(message)))
    return requests


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends the process with one line if options contradict each other, before any load runs."""
    if (arguments.dataset is None) != (arguments.tokenizer is None):
        parser.error("--dataset and --tokenizer belong together")
    if arguments.dataset is not None and arguments.input_len is not None:
        parser.error("--input-len is for prompts without a --dataset")
    for module, option, is_used in (
        ("tokenizers", "--dataset", arguments.dataset is not None),
        ("matplotlib", "--plot", arguments.plot is not None),
        ("httpx2", "--protocol http", arguments.protocol == "http"),
    ):
        if is_used and importlib.util.find_spec(module) is None:
            parser.error(f"{option} needs the package {module}: pip install 'twostroke[bench]'")
    for file in (arguments.json, arguments.save_result, arguments.plot):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"{file} cannot be written: no such directory")
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            parser.error(f"{file} cannot be written: permission denied")
    if arguments.address is None:
        arguments.address = DEFAULT_ADDRESSES[arguments.protocol]
    if arguments.ignore_eos is None:
        arguments.ignore_eos = arguments.dataset is None


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Sends load to a running gateway; prints TTFT, TPOT, ITL and throughput at the clients.",
        epilog="ITL is counted per chunk: one value for each chunk after the first, also where a chunk carries "
        "several tokens. Requests wait in the client where --max-concurrency is reached; their times count from "
        "when they are sent.",
    )
    add = parser.add_argument
    add("--protocol", choices=PROTOCOLS, default="grpc", help="GenerateStream, or /v1/completions (%(default)s)")
    add(
        "--address",
        help="address of the gateway for this protocol, host:port or unix:PATH "
        f"({DEFAULT_ADDRESSES['grpc']}; http: {DEFAULT_ADDRESSES['http']})",
    )
    add("--num-prompts", type=whole_number, default=100, metavar="N", help="requests to send (%(default)s)")
    add(
        "--request-rate",
        type=rates,
        default=[math.inf],
        metavar="R[,R...]",
        help="requests/s; inf: all at once (inf); several: one run for each, with the same requests",
    )
    add(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="distribution of gaps between requests (%(default)s)",
    )
    add(
        "--goodput",
        type=goodput_limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="also count the requests/s within all of these limits: ttft, tpot, e2el, in ms, as in ttft:200 tpot:50",
    )
    add("--max-concurrency", type=whole_number, metavar="N", help="maximum number of requests in flight (no limit)")
    add("--input-len", type=whole_number, metavar="MEAN", help=f"prompt tokens ({DEFAULT_INPUT_LEN})")
    add(
        "--output-len",
        type=whole_number,
        metavar="MEAN",
        help=f"tokens to generate ({DEFAULT_OUTPUT_LEN}); with --dataset, for every request instead of its own",
    )
    add(
        "--len-distribution",
        choices=("uniform", "normal", "constant"),
        default="uniform",
        help="distribution of both lengths (%(default)s)",
    )
    add(
        "--len-range-ratio",
        type=ratio,
        default=0.5,
        metavar="RATIO",
        help="uniform: from (1 - RATIO) to (1 + RATIO) times the mean; normal: standard deviation over mean "
        "(%(default)s)",
    )
    add("--dataset", type=Path, metavar="FILE", help="prompts and answer lengths from ShareGPT's JSON schema")
    add("--tokenizer", type=Path, metavar="DIR", help="model directory whose tokenizer counts a dataset's tokens")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate to the full length (on, but off with --dataset)",
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--seed", type=non_negative, default=0, help="seed of prompts, lengths and arrivals (%(default)s)")
    add("--warmup", type=non_negative, default=1, metavar="N", help="requests before the run (%(default)s)")
    add(
        "--client-processes",
        type=whole_number,
        default=1,
        metavar="N",
        help="client processes; --max-concurrency is divided among them (%(default)s)",
    )
    add(
        "--request-timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="time limit of a request in seconds (%(default)g)",
    )
    add("--json", type=Path, metavar="FILE", help="saves figures, config, versions and the times of every chunk")
    add("--save-result", type=Path, metavar="FILE", help="saves the result in the format of `vllm bench serve`")
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="saves latencies and throughput, with several rates over the rate; needs matplotlib",
    )
    add("--reference", action="store_true", help="add vLLM's figures of the nearest load to the plot")
    return parser


if __name__ == "__main__":
    sys.exit(main())
