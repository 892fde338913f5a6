"""Measures the core model alone: sends token ids directly to the dense worker, without tokenizer or gateway.

`python bench/core.py --request-rate 10 token-norm-dist --num-requests 5000 --input-mean 128 --input-stdev 5
--output-mean 20 --output-stdev 2` draws lengths, `python bench/core.py dataset --dataset FILE` takes them from a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import uvloop

from bench.load.dense_load import DenseLoad, DenseRequest, open_dense
from bench.load.options import non_negative, non_negative_number, positive, run_facts, save_run, whole_number
from bench.load.stats import CoreFigures, RequestRecord, ServingFigures, core_figures, serving_figures
from bench.load.transport import LoadError
from bench.load.workload import (
    LengthDistribution,
    Prompt,
    WorkloadError,
    arrival_times,
    dataset_prompts,
    load_encode,
    random_prompts,
)
from services.common.cli import dashed
from services.common.config import EMBEDDED_MODEL, DenseSection
from services.pb import dense_pb2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if anything failed, 130 after Ctrl-C."""
    arguments = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return uvloop.run(_run(arguments))
    except (WorkloadError, LoadError) as error:
        print(f"core: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _run(arguments: argparse.Namespace) -> int:
    facts = run_facts(arguments)
    async with open_dense(arguments.address) as channel:
        load = DenseLoad(channel, arguments.temperature, cache_salt=secrets.token_hex(8))
        model = await load.info()
        warmup, requests = make_requests(arguments, model)
        limits = (arguments.max_concurrency, arguments.timeout)
        print(f"Warming up with {len(warmup)} requests.", file=sys.stderr)
        if warmup:
            _check_all_answered((await load.replay(warmup, *limits))[0])
        print(f"Sending {len(requests)} requests to {arguments.address}.", file=sys.stderr)
        records, _ = await load.replay(requests, *limits)
    figures, token_figures = core_figures(records), serving_figures(records)
    print(format_table(figures))
    print(format_token_latencies(token_figures))
    if token_figures.num_failed:
        print(f"core: {token_figures.num_failed} failed, first: {token_figures.first_error}", file=sys.stderr)
    if arguments.json:
        by_name = {"figures": dataclasses.asdict(figures), "token_figures": dataclasses.asdict(token_figures)}
        save_run(arguments.json, facts, model, records, **by_name)
    if arguments.plot:
        from bench.load.plots import save_run_plot  # it needs matplotlib

        save_run_plot(records, f"dense worker alone, {arguments.request_rate:g} requests/s", arguments.plot)
    return 1 if token_figures.num_failed else 0


def make_requests(
    arguments: argparse.Namespace, model: dense_pb2.DenseInfo
) -> tuple[list[DenseRequest], list[DenseRequest]]:
    """The requests of the warm-up and those of the run. Raises `WorkloadError`."""
    prompts = _prompts(arguments, model.vocab_size, arguments.num_requests, arguments.seed)
    for prompt in prompts:
        if prompt.num_tokens + prompt.max_tokens > model.max_model_len:
            raise WorkloadError(
                f"a request has {prompt.num_tokens} prompt and {prompt.max_tokens} output tokens, "
                f"max_model_len is {model.max_model_len}"
            )
    process = "poisson" if arguments.arrivals == "exponential" else "constant"
    due_s = arrival_times(len(prompts), arguments.request_rate, process, arguments.seed)
    warmup = _prompts(arguments, model.vocab_size, min(arguments.warmup, arguments.num_requests), arguments.seed + 1)
    return _requests(warmup, [0.0] * len(warmup)), _requests(prompts, due_s)


def format_table(figures: CoreFigures) -> str:
    """A table with the rows of the core-model benchmark of TensorRT-LLM's Triton backend."""
    latency = figures.latency_ms
    rows = [
        ("Requests/Sec", figures.request_throughput),
        ("OP tokens/sec", figures.output_throughput),
        ("Avg. latency (ms)", None if latency is None else latency.mean),
        ("P99 latency (ms)", None if latency is None else latency.p99),
        ("P90 latency (ms)", None if latency is None else latency.p90),
        ("Avg. IP tokens per request", figures.input_tokens_per_request),
        ("Avg. OP tokens per request", figures.output_tokens_per_request),
        ("Total latency (ms)", figures.total_latency_ms),
        ("Total requests", float(figures.num_requests)),
    ]
    border = f"+{'-' * 30}+{'-' * 14}+"
    cells = [f"| {label:^28} | {'-' if value is None else f'{value:.2f}':>12} |" for label, value in rows]
    return "\n".join([border, f"| {'Stat':^28} | {'Value':>12} |", border, *cells, border])


def format_token_latencies(figures: ServingFigures) -> str:
    """Lines with figures that the table lacks: time to first token and between tokens."""
    lines = []
    for name, summary in (("TTFT", figures.ttft_ms), ("TPOT", figures.tpot_ms), ("ITL", figures.itl_ms)):
        if summary is not None:
            lines.append(
                f"{name} (ms): mean {summary.mean:.2f}, median {summary.median:.2f}, P90 {summary.p90:.2f}, "
                f"P99 {summary.p99:.2f}"
            )
    return "\n".join(lines)


def _prompts(arguments: argparse.Namespace, vocab_size: int, count: int, seed: int) -> list[Prompt]:
    if arguments.source == "dataset":
        encode = load_encode(arguments.tokenizer_dir)
        prompts = dataset_prompts(arguments.dataset, count, encode, seed, arguments.output_len)
        return [dataclasses.replace(each, token_ids=list(encode(each.text or ""))) for each in prompts]
    inputs = LengthDistribution("normal", arguments.input_mean, arguments.input_stdev / arguments.input_mean)
    outputs = LengthDistribution("normal", arguments.output_mean, arguments.output_stdev / arguments.output_mean)
    return random_prompts(count, inputs, outputs, vocab_size, seed)


def _requests(prompts: Sequence[Prompt], due_s: Sequence[float]) -> list[DenseRequest]:
    return [
        DenseRequest(prompt.token_ids or [], prompt.max_tokens, due) for prompt, due in zip(prompts, due_s, strict=True)
    ]


def _check_all_answered(records: Sequence[RequestRecord]) -> None:
    for record in records:
        if record.error is not None:
            raise LoadError(f"a warm-up request failed: {record.error}")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Long options may be written with dashes or underscores, and so may the names of the sources."""
    words = [argument.replace("_", "-") if argument == "token_norm_dist" else argument for argument in argv]
    return _parser().parse_args(dashed(words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/core.py",
        description="Sends load directly to a running dense worker; prints latencies and throughput.",
        epilog="Every request runs to its full length: nothing ends it early.",
    )
    add = parser.add_argument
    add("-u", "--address", default=DenseSection().address, help="address of the dense worker (%(default)s)")
    add(
        "-i",
        "--protocol",
        choices=["grpc"],
        default="grpc",
        help="protocol; the dense worker has only this one (%(default)s)",
    )
    add("--request-rate", type=positive, default=math.inf, metavar="R", help="requests/s; inf: all at once (inf)")
    add(
        "--arrivals",
        choices=["exponential", "constant"],
        default="exponential",
        help="distribution of gaps between requests (%(default)s)",
    )
    add("--max-concurrency", type=whole_number, metavar="N", help="maximum number of requests in flight (no limit)")
    add("--temperature", type=non_negative_number, default=0.0, help="0 is greedy (%(default)g)")
    add("--warmup", type=non_negative, default=10, metavar="N", help="requests before the run (%(default)s)")
    add("--seed", type=non_negative, default=0, help="seed of tokens, lengths and arrivals (%(default)s)")
    add(
        "--timeout",
        type=positive,
        default=3600.0,
        metavar="S",
        help="time limit of the whole run in seconds (%(default)g)",
    )
    add("--json", type=Path, metavar="FILE", help="saves figures, options, versions and the time of every token")
    add("--plot", type=Path, metavar="FILE.png", help="saves latencies over time and distributions")
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    dataset = sources.add_parser("dataset", help="prompts and answer lengths of a file")
    dataset.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="JSON; see bench/load/workload.py")
    dataset.add_argument(
        "--tokenizer-dir", type=Path, default=EMBEDDED_MODEL, metavar="DIR", help="model directory (the embedded one)"
    )
    dataset.add_argument(
        "--output-len", type=whole_number, metavar="N", help="tokens to generate (as many as the file's answers have)"
    )
    normal = sources.add_parser("token-norm-dist", help="random tokens, lengths normally distributed")
    normal.add_argument("--input-mean", type=whole_number, default=128, metavar="N", help="prompt tokens (128)")
    normal.add_argument(
        "--input-stdev", type=non_negative_number, default=0.0, metavar="N", help="standard deviation; 0: all equal (0)"
    )
    normal.add_argument("--output-mean", type=whole_number, default=128, metavar="N", help="tokens to generate (128)")
    normal.add_argument(
        "--output-stdev",
        type=non_negative_number,
        default=0.0,
        metavar="N",
        help="standard deviation; 0: all equal (0)",
    )
    for source in (dataset, normal):
        source.add_argument(
            "--num-requests", type=whole_number, default=512, metavar="N", help="requests to send (512)"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
