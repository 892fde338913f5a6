"""All rows of the table of required figures, each model in turn: latencies, throughput, start, load and context.

    python bench/gpu/table.py 7b 7b-fp8 --json table.json           # on a GPU, random weights at true shapes
    python bench/gpu/table.py 7b --shape tiny-llama --part 0.02     # on this CPU: tries the program

Streams come over HTTP through one gateway, as token ids; the tokenizer covers the whole vocabulary, so that every token
has text. Rows "into the dense worker" are those of `bench/core.py`. Each figure is printed as soon as it is there, and
the median with its range after the last round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.models import FORMATS, SHAPES, Load, parse_load, write_model
from bench.load.options import describe_commit
from bench.load.own_server import write_vocabulary
from tests.support.cluster import Cluster, running_cluster

BENCH = Path(__file__).parents[1]
# Experts: the larger the step, the more rows share what is read of each one. Long prompts: fewer steps have some.
LARGE_STEPS = "scheduler.max_num_batched_tokens=8192"
LONGEST_FIRST = "scheduler.head_start_s=0.05"
LARGE_CACHE = "attention.kv_cache_memory_fraction=0.95"
# A cache that has no room for all: who waits has its blocks in 36 GiB of host memory.
IN_TURNS = (
    "scheduler.policy=take_turns",
    "attention.host_kv_bytes=38654705664",
    "attention.enable_prefix_cache=true",
    LARGE_CACHE,
)
COMMON = ("scheduler.max_num_batched_tokens=2048", "attention.enable_prefix_cache=false")
MIN_PART_PROMPTS = 2
CONTEXT_OUTPUT = 256  # tokens; most steps of such a run only decode
MAX_WARMUP = 16
CAPTURED, NUM_WORKERS, MAX_CAPTURE_S = "captured graphs", 2, 10.0  # the event of each worker's log
PINNED, MAX_PIN_S = "the host tier's memory is pinned", 60.0
CPU = "CPU"  # where there are no graphs


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table, or a part of one. Without required figures it is only measured."""

    name: str
    path: str  # in the figures of the load's program
    required: float | None = None
    goal: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A load, its figures, and how often it is sent."""

    load: tuple[str, ...] | Load  # options of bench/serving.py, or what goes into the dense worker
    figures: tuple[Figure, ...]
    rounds: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The rows of one server."""

    shape: str
    number_format: str
    settings: tuple[str, ...]
    rows: tuple[Row, ...]


def alone(num_prompts: int, *figures: Figure) -> Row:
    return Row(("--num-prompts", str(num_prompts), "--max-concurrency", "1"), figures)


def rate(requests_per_s: float, num_prompts: int, *figures: Figure) -> Row:
    return Row(("--num-prompts", str(num_prompts), "--request-rate", str(requests_per_s)), figures)


def core(load: str, name: str, required: float | None, goal: float | None, rounds: int = 2) -> Row:
    return Row(parse_load(load), (Figure(f"{name}, tok/s", "output_throughput", required, goal),), rounds)


def at_context(num_tokens: int, num_streams: int) -> Row:
    """Streams that decode behind so many tokens; the median step is one of decoding alone."""
    load = Load(num_streams, num_streams, num_tokens, CONTEXT_OUTPUT)
    return Row(load, (Figure(f"{num_streams} streams behind {num_tokens} tokens, median ITL ms", "itl_ms.median"),))


def _of_16(tpot: tuple[float, float] | None, ttft: tuple[float, float] | None, num_prompts: int = 160) -> Row:
    return rate(
        16,
        num_prompts,
        Figure("16 requests/s, TPOT ms", "tpot_ms.mean", *(tpot or ())),
        Figure("16 requests/s, TTFT ms", "ttft_ms.mean", *(ttft or ())),
    )


FIRST_TOKEN = Row(
    ("--num-prompts", "40", "--max-concurrency", "1", "--len-distribution", "constant", "--output-len", "16"),
    (Figure("235 tokens alone, TTFT ms", "ttft_ms.mean", 10, 8.6),),
    rounds=2,
)
# A single process opens all connections before it sends most requests, which takes up to a second.
AT_ONCE = ("--num-prompts", "1000", "--client-processes", "4")
RATES = (1, 2, 4, 8, 16, 32, 64)
SWEEP_S, MIN_SWEEP_PROMPTS = 9, 12
# Streams and tokens. Few steps of a run may have prompts, or the median step would be one of those.
CONTEXTS = (
    *((1, tokens) for tokens in (128, 2048, 7900)),
    *((16, tokens) for tokens in (128, 512, 2048, 7900)),
    *((64, tokens) for tokens in (128, 512, 2048)),
)
GROUPS = {
    "7b": Group(
        "llama-2-7b",
        "stored",
        ("scheduler.max_num_seqs=512", LARGE_STEPS, LONGEST_FIRST),
        (
            alone(10, Figure("one stream, TPOT ms", "tpot_ms.mean", 3.70, 3.50)),
            FIRST_TOKEN,
            _of_16((4.8, 4.6), (16, 13.5)),
            Row(AT_ONCE, (Figure("1,000 at once, tok/s", "output_throughput", 11_300, 12_000),)),
            core("64x64:512/512", "64 x 512/512 into the dense worker", 5_700, 6_000),
            core("512x512:128/128", "512 x 128/128 into the dense worker", 14_800, 15_500),
        ),
    ),
    "7b-fp8": Group(
        "llama-2-7b",
        "fp8",
        ("scheduler.max_num_seqs=512", LARGE_STEPS, LONGEST_FIRST, LARGE_CACHE),
        (
            alone(10, Figure("one stream, TPOT ms", "tpot_ms.mean", 2.3, 2.1)),
            _of_16((4.0, 3.6), None),
            Row(AT_ONCE, (Figure("1,000 at once, tok/s", "output_throughput", 14_500, 16_000),)),
        ),
    ),
    "7b-fp8-kv": Group(
        "llama-2-7b",
        "fp8-and-kv",
        ("scheduler.max_num_seqs=512", LARGE_STEPS, LONGEST_FIRST),
        (Row(AT_ONCE, (Figure("1,000 at once, KV in FP8, tok/s", "output_throughput"),)),),
    ),
    "13b-fp8": Group(
        "llama-2-13b",
        "fp8-and-kv",
        ("scheduler.max_num_seqs=1024", LARGE_STEPS),
        (
            alone(8, Figure("one stream, TPOT ms", "tpot_ms.mean", 4.25, 3.9)),
            core("64x64:2048/128", "64 x 2,048/128 into the dense worker", 1_420, 1_700),
            core("1024x1024:128/128", "1,024 x 128/128 into the dense worker", 14_500, 16_000),
        ),
    ),
    "8b-fp8": Group(
        "llama-3.1-8b",
        "fp8-and-kv",
        ("scheduler.max_num_seqs=1024",),
        (core("2048x1024:128/128", "2,048 x 128/128, 1,024 at once, into the dense worker", 29_500, 32_000, rounds=3),),
    ),
    "30b-a3b": Group(
        "qwen3-30b-a3b",
        "stored",
        ("scheduler.max_num_seqs=768", LARGE_STEPS, *IN_TURNS),
        (
            alone(6, Figure("one stream, tok/s", "output_throughput", 290, 350)),
            core("768x768:1000/300", "768 x 1,000/300 into the dense worker", 9_500, 12_000, rounds=1),
            _of_16(None, None),
        ),
    ),
    "30b-a3b-kv": Group(
        "qwen3-30b-a3b",
        "stored",
        ("scheduler.max_num_seqs=768", LARGE_STEPS, "attention.kv_cache_dtype=fp8"),
        (core("768x768:1000/300", "768 x 1,000/300, KV in FP8, into the dense worker", 9_500, 12_000, rounds=1),),
    ),
    "7b-int4": Group(
        "llama-2-7b",
        "int4",
        ("scheduler.max_num_seqs=64",),
        (alone(10, Figure("one stream, TPOT ms", "tpot_ms.mean", 1.9, 1.5)),),
    ),
    "7b-fp16-tensorrt": Group(
        "llama-2-7b",
        "stored",
        ("model.dtype=float16", "dense.backend=tensorrt", "scheduler.max_num_seqs=64", "model.max_model_len=1024"),
        (
            alone(
                10,
                Figure("one stream, TPOT ms", "tpot_ms.mean", 4.2, 4.0),
                Figure("one stream, TTFT ms", "ttft_ms.mean", 15, 12),
            ),
            _of_16((6.2, 5.5), (26, 20)),
        ),
    ),
    "load": Group(
        "llama-2-7b",
        "stored",
        ("scheduler.max_num_seqs=512",),
        tuple(
            rate(
                each,
                max(MIN_SWEEP_PROMPTS, SWEEP_S * each),
                Figure(f"{each} requests/s, TPOT ms", "tpot_ms.median"),
                Figure(f"{each} requests/s, TTFT ms", "ttft_ms.median"),
                Figure(f"{each} requests/s, tok/s", "output_throughput"),
            )
            for each in RATES
        ),
    ),
    "context": Group(
        "llama-3.1-8b",
        "stored",
        ("scheduler.max_num_seqs=64",),
        tuple(at_context(tokens, streams) for streams, tokens in CONTEXTS),
    ),
}


def of_part(number: int, part: float) -> int:
    """This part of a number of requests, but no fewer than two, if there are two."""
    return max(min(number, MIN_PART_PROMPTS), int(part * number))


def wait_for_graphs(cluster: Cluster) -> None:
    """Waits until both workers have captured their graphs, as they do while nobody has a request: until then a request
    may come during a capture, and its first token takes 20 ms longer.
    """
    deadline = time.monotonic() + MAX_CAPTURE_S
    while cluster.log_file.read_text().count(CAPTURED) < NUM_WORKERS and time.monotonic() < deadline:
        time.sleep(0.1)


def wait_for_pins(cluster: Cluster) -> None:
    """Waits until the host tier's memory is pinned, as it is while nobody has a request."""
    deadline = time.monotonic() + MAX_PIN_S
    while PINNED not in cluster.log_file.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)


def measure_row(directory: Path, row: Row, part: float) -> dict[str, Any]:
    """The figures of the load's program, and what was sent."""
    file = directory / "run.json"
    if isinstance(row.load, Load):
        sizes = {name: of_part(getattr(row.load, name), part) for name in _SIZES}
        load = dataclasses.replace(row.load, **sizes)
        command = ["core.py", "--address", f"unix:{directory}/dense.sock", "--json", str(file)]
        command += ["--max-concurrency", str(load.concurrency), "--warmup", str(min(load.concurrency, MAX_WARMUP))]
        command += ["token-norm-dist", "--num-requests", str(load.num_requests)]
        for side, tokens in (("input", load.input_tokens), ("output", load.output_tokens)):
            command += [f"--{side}-mean", str(tokens), f"--{side}-stdev", "0"]
    else:
        options = list(row.load)
        options[1] = str(of_part(int(options[1]), part))
        command = ["serving.py", "--protocol", "http", "--address", f"unix:{directory}/http.sock", "--json", str(file)]
        command += options
    result = subprocess.run([sys.executable, str(BENCH / command[0]), *command[1:]], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"bench/{command[0]} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    run = json.loads(file.read_text())
    return {"load": run["config"], "figures": run["figures"] | run.get("token_figures", {})}


_SIZES = ("num_requests", "concurrency")


def value_at(figures: Mapping[str, Any], path: str) -> float:
    """The value at a path such as ttft_ms.mean; NaN if the run has none, as the answers had one token each."""
    value: Any = figures
    for name in path.split("."):
        value = math.nan if value is None else value[name]
    return float(value)


def format_row(group: str, figure: Figure, values: Sequence[float]) -> str:
    """A line of the table: the median, all values if there are several, and what is required."""
    median = f"{statistics.median(values):,.5g}" if max(values) < 100 else f"{statistics.median(values):,.0f}"
    several = f" ({min(values):,.5g} to {max(values):,.5g})" if len(values) > 1 else ""
    bounds = ["–" if each is None else f"{each:,g}" for each in (figure.required, figure.goal)]
    return f"| {group}: {figure.name} | {median}{several} | {bounds[0]} | {bounds[1]} |"


class Table:
    """Measures groups and keeps every run in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._runs = options, list[dict[str, Any]]()
        self._facts = {"commit": describe_commit(), "note": options.note, "device": _device()}

    def measure(self, name: str, env: Mapping[str, str] | None = None) -> None:
        """Serves the group's model and sends its loads."""
        group, options = GROUPS[name], self._options
        rows = [row for row in group.rows if any(options.only in figure.name for figure in row.figures)]
        with tempfile.TemporaryDirectory() as path:
            directory = Path(path)
            model = write_model(directory / "model", options.shape or group.shape, group.number_format)
            write_vocabulary(model)
            settings = [f"model.path={model}", "model.load_format=dummy", *COMMON, *group.settings]
            settings += [*FORMATS[group.number_format], *options.set]
            start = time.monotonic()
            with running_cluster(directory, *settings, env=env) as cluster:
                self._print(f"{name}: ready after {time.monotonic() - start:.1f} s")
                self._keep(name, {"ready_s": time.monotonic() - start, "settings": settings[1:]})
                if rows and self._facts["device"] != CPU:
                    wait_for_graphs(cluster)
                    if any("host_kv_bytes" in each for each in group.settings):
                        wait_for_pins(cluster)
                values: dict[Figure, list[float]] = {}
                for number in range(max((row.rounds for row in rows), default=0)):
                    for row in rows:
                        if number < row.rounds:
                            self._send(name, directory, row, values)
        for figure, each in values.items():
            self._print(format_row(name, figure, each))

    def _send(self, name: str, directory: Path, row: Row, values: dict[Figure, list[float]]) -> None:
        run = measure_row(directory, row, self._options.part)
        self._keep(name, run)
        for figure in row.figures:
            values.setdefault(figure, []).append(value_at(run["figures"], figure.path))
            self._print(f"{name}: {figure.name}: {values[figure][-1]:,.5g}")

    def start_twice(self) -> None:
        """The start of 7B with an empty cache of kernels, then with a full one."""
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("first ever", "cached"):
                self._print(f"start, {kind}:")
                self.measure("start", os.environ | {"TRITON_CACHE_DIR": cache})

    def _keep(self, name: str, run: Mapping[str, Any]) -> None:
        self._runs.append({"group": name, **run})
        if self._options.json is not None:
            self._options.json.write_text(json.dumps({**self._facts, "runs": self._runs}, indent=1))

    def _print(self, line: str) -> None:
        print(line, flush=True)


def _device() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        return CPU


GROUPS["start"] = dataclasses.replace(GROUPS["7b"], rows=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="keeps the figures of every run")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with a figure whose name contains this")
    parser.add_argument("--note", help="what else ran on the machine, for the file")
    parser.add_argument("--shape", choices=SHAPES, help="serves this shape in place of each group's own")
    parser.add_argument("--part", type=float, default=1.0, metavar="P", help="sends only this part of each load")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a server's setting")
    options = parser.parse_args()
    table = Table(options)
    for name in options.groups:
        if name == "start":
            table.start_twice()
        else:
            table.measure(name)


if __name__ == "__main__":
    main()
