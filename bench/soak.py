"""A soak: mixed load on the embedded model for a long time, to see that nothing grows.

The load consists of streams and unary answers over gRPC and HTTP, clients that leave in mid-stream, and requests that
must be refused. Meanwhile the memory, open files and answer time of every service are sampled. A line is fitted to each
of them; it is flat if its rise from the end of the settling time to the end of the run is within the limit.
`python bench/soak.py --minutes 30 --output-dir bench/results` writes soak.md, soak.json and soak.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx2

from bench.load.options import non_negative, positive, ratio, run_facts, whole_number
from bench.load.process_load import cpu_s, num_files, resident_bytes
from bench.load.soak_load import SoakRequest, run_soak_load
from bench.load.stats import Trend, summarize, trend
from services.pb import attn_pb2, dense_pb2, gateway_pb2
from tests.support.cluster import Cluster, running_cluster

ROLES = ("gateway", "dense_worker", "attn_worker")
MB = 1e6
NUM_WINDOWS = 24  # parts of the judged time, each with one median of a latency
STOP_TIMEOUT_S = 90.0  # for the last requests to end
PROBE_TIMEOUT_S = 30.0
# Few blocks, so that all are used early: blocks first used later would look like growing memory.
SETTINGS = ("attention.num_blocks=512", "log.level=warning")


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of all services at one moment."""

    time_s: float  # since the start of the load
    memory_mb: dict[str, float]  # resident, by role
    num_files: dict[str, int]  # open, by role
    cpu_s: dict[str, float]  # since the start of the process, by role
    probe_ms: dict[str, float]  # time of a small call to each service


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one figure stayed flat."""

    name: str
    unit: str
    trend: Trend
    limit: float  # for the rise of the line, in the figure's unit

    @property
    def is_flat(self) -> bool:
        return self.trend.change <= self.limit


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if something grew or answered wrongly, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    facts = run_facts(arguments)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="twostroke-soak-") as name,
            running_cluster(Path(name), *SETTINGS, *arguments.set) as cluster,
        ):
            samples, requests = soak(cluster, Path(name), arguments)
            leftovers = find_leftovers(cluster)
    except KeyboardInterrupt:
        return 130
    verdicts = judge(samples, requests, arguments)
    report = format_report(verdicts, samples, requests, leftovers, arguments)
    print(report)
    if arguments.output_dir is not None:
        _save(arguments.output_dir, facts, report, verdicts, samples, requests, leftovers)
    has_errors = any(request.error is not None for request in requests)
    return 1 if has_errors or leftovers or not all(verdict.is_flat for verdict in verdicts) else 0


def soak(cluster: Cluster, directory: Path, arguments: argparse.Namespace) -> tuple[list[Sample], list[SoakRequest]]:
    """Loads the cluster for `arguments.minutes` and samples it meanwhile."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pipe, far_end = context.Pipe()
    addresses = (f"unix:{directory}/gateway.sock", f"unix:{directory}/http.sock")
    options = (*addresses, arguments.clients, arguments.think_ms / 1e3, arguments.seed)
    client = context.Process(target=run_soak_load, args=(*options, far_end), daemon=True)
    client.start()
    far_end.close()
    try:
        samples = _sample(cluster, directory, arguments)
        pipe.send("stop")
        requests = _receive(pipe)
    finally:
        client.kill()
        client.join()
    return samples, requests


def find_leftovers(cluster: Cluster) -> list[str]:
    """The resources that services still hold after all clients have left; there should be none."""
    leftovers = []
    try:
        cluster.wait_idle(30.0)
    except AssertionError as error:
        leftovers.append(str(error))
    status = cluster.dense_status()
    if status.num_waiting or status.num_running:
        leftovers.append(f"{status.num_waiting} waiting and {status.num_running} running sequences")
    return leftovers


def judge(samples: Sequence[Sample], requests: Sequence[SoakRequest], arguments: argparse.Namespace) -> list[Verdict]:
    """A verdict on each figure, from the end of the settling time on."""
    settled_s = arguments.settle * samples[-1].time_s
    kept = [sample for sample in samples if sample.time_s >= settled_s]
    times_s = [sample.time_s for sample in kept]
    verdicts = []
    for role in ROLES:
        line = trend(times_s, [sample.memory_mb[role] for sample in kept])
        limit = max(arguments.max_memory_growth * line.start, arguments.min_memory_mb)
        verdicts.append(Verdict(f"{role}: memory", "MB", line, limit))
    for role in ROLES:
        line = trend(times_s, [float(sample.num_files[role]) for sample in kept])
        verdicts.append(Verdict(f"{role}: open files", "files", line, arguments.max_more_files))
    for name in kept[0].probe_ms:
        points = [(sample.time_s, sample.probe_ms[name]) for sample in kept]
        verdicts.append(_latency_verdict(f"{name}: answer time", points, arguments))
    for protocol in ("grpc", "http"):
        settled = [each for each in requests if each.protocol == protocol and each.end_s >= settled_s]
        streams = [(each.end_s, each.ttft_ms) for each in settled if each.ttft_ms is not None]
        verdicts.append(_latency_verdict(f"{protocol}: time to first token", streams, arguments))
    return verdicts


def format_report(
    verdicts: Sequence[Verdict],
    samples: Sequence[Sample],
    requests: Sequence[SoakRequest],
    leftovers: Sequence[str],
    arguments: argparse.Namespace,
) -> str:
    """The report in Markdown."""
    lines = [
        "| figure | after settling | rise of the line to the end | limit | slope an hour | noise | |",
        "|---|---|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        line, unit = verdict.trend, verdict.unit
        lines.append(
            f"| {verdict.name} | {line.start:.1f} {unit} | {line.change:+.2f} | {verdict.limit:.2f} "
            f"| {line.slope_per_hour:+.2f} | {line.noise:.2f} | {'flat' if verdict.is_flat else '**grew**'} |"
        )
    lines += [
        "",
        "| requests | number | errors | latency P50 / P99, ms | TTFT P50 / P99, ms |",
        "|---|---|---|---|---|",
    ]
    for (protocol, kind), count in sorted(Counter((each.protocol, each.kind) for each in requests).items()):
        group = [each for each in requests if (each.protocol, each.kind) == (protocol, kind)]
        num_errors = sum(each.error is not None for each in group)
        latency = _percentiles([each.latency_ms for each in group])
        ttft = _percentiles([each.ttft_ms for each in group if each.ttft_ms is not None])
        lines.append(f"| {protocol} {kind} | {count} | {num_errors} | {latency} | {ttft} |")
    first_error = next((each.error for each in requests if each.error is not None), None)
    duration_s = samples[-1].time_s
    cores = {role: (samples[-1].cpu_s[role] - samples[0].cpu_s[role]) / duration_s for role in ROLES}
    lines += [
        "",
        f"{duration_s / 60:.1f} minutes, {len(samples)} samples, {arguments.clients} clients, {len(requests)} requests "
        f"({len(requests) / duration_s:.1f} a second); the first {100 * arguments.settle:.0f} % of the time are not "
        "judged.",
        "Cores used: " + ", ".join(f"{role} {used:.2f}" for role, used in cores.items()) + ".",
        f"Wrong answers or unexpected errors: {sum(each.error is not None for each in requests)}"
        + ("." if first_error is None else f"; the first: {first_error}"),
        "Left behind after the load: " + ("; ".join(leftovers) if leftovers else "no sequence and no block") + ".",
    ]
    return "\n".join(lines)


def _sample(cluster: Cluster, directory: Path, arguments: argparse.Namespace) -> list[Sample]:
    start_s = time.monotonic()
    samples: list[Sample] = []
    pids = {role: cluster.pid_of(role) for role in ROLES}
    transport = httpx2.HTTPTransport(uds=f"{directory}/http.sock")
    with httpx2.Client(transport=transport, base_url="http://gateway", timeout=PROBE_TIMEOUT_S) as http:
        probes: dict[str, Callable[[], Any]] = {
            "gateway, gRPC": lambda: cluster.gateway.ModelInfo(gateway_pb2.ModelInfoRequest(), timeout=PROBE_TIMEOUT_S),
            "gateway, HTTP": lambda: http.get("/live").raise_for_status(),
            "dense_worker": lambda: cluster.dense.GetStatus(dense_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S),
            "attn_worker": lambda: cluster.attention.GetStatus(attn_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S),
        }
        while (now_s := time.monotonic() - start_s) < 60 * arguments.minutes:
            samples.append(
                Sample(
                    time_s=now_s,
                    memory_mb={role: resident_bytes(pid) / MB for role, pid in pids.items()},
                    num_files={role: num_files(pid) for role, pid in pids.items()},
                    cpu_s={role: cpu_s(pid) for role, pid in pids.items()},
                    probe_ms={name: _milliseconds(probe) for name, probe in probes.items()},
                )
            )
            time.sleep(max(0.0, start_s + len(samples) * arguments.interval - time.monotonic()))
    return samples


def _milliseconds(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start_s)


def _receive(pipe: Connection) -> list[SoakRequest]:
    if not pipe.poll(STOP_TIMEOUT_S):
        raise TimeoutError(f"the clients did not end within {STOP_TIMEOUT_S:g} s")
    return pipe.recv()


def _latency_verdict(name: str, points: Sequence[tuple[float, float]], arguments: argparse.Namespace) -> Verdict:
    """The verdict on latencies (time in s, ms). The line is fitted to medians of equal windows, so that single stalls
    do not tilt it.

    A rise within three standard errors of the fit is not significant: for n evenly spread medians the standard error of
    the rise is their noise times sqrt(12 / n).
    """
    medians = window_medians(points, NUM_WINDOWS)
    line = trend(*zip(*medians, strict=True))
    fit_error = 3 * line.noise * (12 / len(medians)) ** 0.5
    return Verdict(name, "ms", line, max(arguments.max_latency_growth * line.start, fit_error))


def window_medians(points: Sequence[tuple[float, float]], num_windows: int) -> list[tuple[float, float]]:
    """Median time and value in each of `NUM_WINDOWS` equal windows that has points."""
    start, end = min(points)[0], max(points)[0]
    windows: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for time_s, value in points:
        windows[min(num_windows - 1, int(num_windows * (time_s - start) / (end - start)))].append((time_s, value))
    return [
        (statistics.median(time_s for time_s, _ in window), statistics.median(value for _, value in window))
        for _, window in sorted(windows.items())
    ]


def _percentiles(values: Sequence[float]) -> str:
    summary = summarize(values)
    return "-" if summary is None else f"{summary.median:.1f} / {summary.p99:.1f}"


def _save(
    directory: Path,
    facts: dict[str, Any],
    report: str,
    verdicts: Sequence[Verdict],
    samples: Sequence[Sample],
    requests: Sequence[SoakRequest],
    leftovers: Sequence[str],
) -> None:
    from bench.load.plots import save_trend_plot  # it needs matplotlib

    title = f"Soak of the embedded model, {samples[-1].time_s / 60:.0f} minutes of mixed load"
    (directory / "soak.md").write_text(f"# {title}, {facts['date'][:10]}\n\n{report}\n\n![samples](soak.png)\n")
    document = facts | {
        "verdicts": [dataclasses.asdict(each) | {"is_flat": each.is_flat} for each in verdicts],
        "leftovers": list(leftovers),
        "samples": [_rounded(dataclasses.asdict(each)) for each in samples],
        "request_fields": [each.name for each in dataclasses.fields(SoakRequest)],
        "requests": [_rounded(list(dataclasses.astuple(each))) for each in requests],
    }
    (directory / "soak.json").write_text(json.dumps(document, separators=(",", ":")))
    minutes = [sample.time_s / 60 for sample in samples]
    panels = [
        ("Resident memory, MB", [(role, [each.memory_mb[role] for each in samples]) for role in ROLES]),
        ("Open files", [(role, [each.num_files[role] for each in samples]) for role in ROLES]),
        (
            "Answer time of a small call, ms (running median)",
            [(name, _running_median([each.probe_ms[name] for each in samples])) for name in samples[0].probe_ms],
        ),
        ("Time to first token, ms (running median)", _ttft_lines(samples, requests)),
    ]
    save_trend_plot(minutes, panels, title, directory / "soak.png")


def _ttft_lines(samples: Sequence[Sample], requests: Sequence[SoakRequest]) -> list[tuple[str, list[float]]]:
    window_s = 5 * (samples[-1].time_s / max(1, len(samples) - 1))
    lines = []
    for protocol in ("grpc", "http"):
        points = [(each.end_s, each.ttft_ms) for each in requests if each.protocol == protocol and each.ttft_ms]
        medians = []
        for sample in samples:
            near = [ttft for end_s, ttft in points if abs(end_s - sample.time_s) <= window_s]
            summary = summarize(near)
            medians.append(float("nan") if summary is None else summary.median)
        lines.append((protocol, medians))
    return lines


def _running_median(values: Sequence[float]) -> list[float]:
    return [sorted(near)[len(near) // 2] for i in range(len(values)) if (near := values[max(0, i - 4) : i + 5])]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=positive, default=30.0, metavar="M", help="minutes of load (%(default)g)")
    add(
        "--clients",
        type=whole_number,
        default=8,
        metavar="N",
        help="clients, half over gRPC, half over HTTP (%(default)s)",
    )
    add(
        "--think-ms", type=positive, default=500.0, metavar="MS", help="mean pause of a client in ms (%(default)g)"
    )
    add("--interval", type=positive, default=5.0, metavar="S", help="seconds between samples (%(default)g)")
    add(
        "--settle",
        type=ratio,
        default=0.2,
        metavar="SHARE",
        help="fraction of the time that is not judged (%(default)g)",
    )
    add(
        "--max-memory-growth",
        type=ratio,
        default=0.02,
        metavar="SHARE",
        help="allowed rise, as a fraction of the memory (%(default)g)",
    )
    add(
        "--min-memory-mb",
        type=positive,
        default=3.0,
        metavar="MB",
        help="a rise in MB that always passes (%(default)g)",
    )
    add("--max-more-files", type=positive, default=2.0, metavar="N", help="allowed rise of open files (%(default)g)")
    add(
        "--max-latency-growth",
        type=positive,
        default=0.25,
        metavar="SHARE",
        help="allowed rise, as a fraction of the latency (%(default)g)",
    )
    add("--seed", type=non_negative, default=0, help="seed of the choice of requests (%(default)s)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override of the services' config")
    add("--output-dir", type=Path, metavar="DIR", help="writes soak.md, soak.json and soak.png there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
