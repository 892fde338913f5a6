"""One lane against several: output tokens/s, and how the strokes of both workers lie in time.

    python bench/lanes.py                                # on this CPU: each worker on a core of its own
    python bench/lanes.py --gpus --load 1024x1024:128/128         # one GPU; two GPUs, one lane; two GPUs, two lanes
    python bench/lanes.py --stages 2                     # on this CPU: one step at a time, and one for each stage
    python bench/lanes.py --stages 2 --gpus --load 1024x1024:128/128        # the same, each stage on a GPU

On two GPUs, two lanes must give 1.6 times the tokens/s of one GPU; 1.85 is the goal. `bench/ratio.py` predicts them.
Load goes straight to the dense worker (`bench/core.py`). The workers of a CPU write down when each lane's parts run:
what is printed is the share of each worker's time in which the other one computes, too. On GPUs, and with stages, it is
the ratio of tokens/s to those of the first arrangement, for each load.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.models import FORMATS, SHAPES, Load, parse_load, run_core, write_model
from tests.support.cluster import running_cluster

_CPU = ("model.dtype=float32", "dense.device=cpu", "attention.device=cpu")
_CPU += ("dense.num_threads=1", "attention.num_threads=1")
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 600.0, 30.0
_ROLES = ("attn_worker", "dense_worker")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--stages", type=int, metavar="N", help="of a pipeline, instead of two workers")
    parser.add_argument("--shape", choices=SHAPES, help="by default tiny-llama, or llama-2-7b with --gpus")
    parser.add_argument("--format", choices=FORMATS, default="stored")
    parser.add_argument("--load", type=parse_load, action="append", metavar="RxC:P/O")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a server's setting")
    parser.add_argument("--only", action="append", metavar="NAME", help="of the servers' arrangements (all)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keeps the servers' logs there, whatever happens")
    args = parser.parse_args(argv)
    shape = args.shape or ("llama-2-7b" if args.gpus else "tiny-llama")
    args.load = args.load or [Load(64, 32, 64, 64)]
    if args.stages:
        stages = (f"dense.pipeline_parallel_size={args.stages}", *(() if args.gpus else _CPU))
        counts = (1, args.stages)
        run_servers(args, shape, {f"{args.stages} stages, lanes: {each}": (*stages, lanes(each)) for each in counts})
    elif args.gpus:
        run_servers(args, shape, ON_GPUS)
    else:
        run_on_cores(args, shape)


def lanes(count: int) -> str:
    """The setting."""
    return f"scheduler.num_lanes={count}"


# Each arrangement by name; the first one is what the others are compared with.
ON_GPUS = {
    "one GPU": ("dense.device=cuda:0", "attention.device=cuda:0", lanes(1)),
    "two GPUs, one lane": ("dense.device=cuda:0", "attention.device=cuda:1", lanes(1)),
    "two GPUs, two lanes": ("dense.device=cuda:0", "attention.device=cuda:1", lanes(2)),
}


def run_servers(args: argparse.Namespace, shape: str, arrangements: Mapping[str, Sequence[str]]) -> None:
    """A server of each arrangement, one after the other, and the ratio of its tokens/s to those of the first one."""
    first: list[float] = []
    if unknown := set(args.only or ()).difference(arrangements):
        raise SystemExit(f"lanes: no arrangement {', '.join(sorted(unknown))}; there are {', '.join(arrangements)}")
    for name, own in arrangements.items():
        if args.only and name not in args.only:
            continue
        print(f"\n{name}", flush=True)
        with tempfile.TemporaryDirectory() as text:
            directory = Path(text)
            settings, figures = settings_of(args, shape, directory), directory / "figures.json"
            found = []
            try:
                with running_cluster(directory, *settings, *own, *args.set):
                    for load in args.load:
                        run_core(f"unix:{directory}/dense.sock", load, figures)
                        found.append(json.loads(figures.read_text())["figures"]["output_throughput"])
            finally:
                if args.logs is not None:
                    shutil.copy(directory / "log", args.logs / f"{name.replace(' ', '-')}.log")
        first = first or found
        for load, rate, compared in zip(args.load, found, first, strict=True):
            print(f"{load}: {rate / compared:.2f} times the tokens/s of the first", flush=True)


def run_on_cores(args: argparse.Namespace, shape: str) -> None:
    """Both workers on a core of their own, with one lane and with two."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    for name, num_lanes in {"two cores, one lane": 1, "two cores, two lanes": 2}.items():
        print(f"\n{name}", flush=True)
        with tempfile.TemporaryDirectory() as text:
            directory = Path(text)
            settings = settings_of(args, shape, directory)
            with workers(directory, [*settings, *_CPU, lanes(num_lanes), *args.set], cores):
                for load in args.load:
                    run_core(f"unix:{directory}/dense.sock", load)
            if num_lanes > 1:
                print_overlap(directory)


def settings_of(args: argparse.Namespace, shape: str, directory: Path) -> list[str]:
    """What all servers have. A step has room for a token of each sequence, and on GPUs for prompts besides."""
    num_seqs = max(load.concurrency for load in args.load)
    num_tokens = max(num_seqs, 2048 if args.gpus else 512)
    model = write_model(directory / "model", shape, args.format)
    sizes = (f"scheduler.max_num_seqs={num_seqs}", f"scheduler.max_num_batched_tokens={num_tokens}")
    return [f"model.path={model}", "model.load_format=dummy", *sizes, *FORMATS[args.format]]


@contextlib.contextmanager
def workers(directory: Path, settings: Sequence[str], cores: Sequence[int]) -> Iterator[None]:
    """Both workers, each pinned to a core; ready when this is entered."""
    addresses = [f"{name}.address=unix:{directory}/{name}.sock" for name in ("dense", "attention")]
    options = [word for setting in (*addresses, *settings) for word in ("--set", setting)]
    processes = []
    try:
        for index, role in enumerate(_ROLES):
            core = str(cores[index % len(cores)])
            command = [sys.executable, __file__, "worker", role, core, str(directory), *options]
            with (directory / f"{role}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stderr=log))
        deadline = time.monotonic() + _START_TIMEOUT_S
        log_file = directory / "dense_worker.log"
        while "serving" not in log_file.read_text():
            if time.monotonic() > deadline or any(each.poll() is not None for each in processes):
                raise SystemExit("\n".join((directory / f"{role}.log").read_text()[-2000:] for role in _ROLES))
            time.sleep(0.1)
        yield
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)


def run_worker(role: str, core: str, directory: Path, options: Sequence[str]) -> None:
    """A worker's process, which writes to ROLE.trace: a line with lane, begin and end of each part."""
    os.sched_setaffinity(0, {int(core)})
    from services.channel.turns import Turns

    file, lanes = (directory / f"{role}.trace").open("w", buffering=1), dict[int, int]()
    go_on = Turns.go_on

    def traced(turns: Turns) -> bool:
        begin_s = time.monotonic()
        has_run = go_on(turns)
        if has_run:
            channel = next(reversed(turns._lanes))  # whose turn it was
            print(lanes.setdefault(id(channel), len(lanes)), begin_s, time.monotonic(), file=file)
        return has_run

    Turns.go_on = traced  # type: ignore[method-assign]
    sys.argv = [f"services.{role}", *options]
    importlib.import_module(f"services.{role}.__main__").main()


def print_overlap(directory: Path) -> None:
    """How much of each worker's time lies in that of the other."""
    lines = ((directory / f"{role}.trace").read_text().splitlines() for role in _ROLES)
    attention, dense = ([[float(word) for word in line.split()] for line in each] for each in lines)
    dense_s, attention_s = (sum(end - begin for _, begin, end in each) for each in (dense, attention))
    both = num_inside = first = 0
    for _, begin, end in dense:
        while first < len(attention) and attention[first][2] <= begin:
            first += 1
        index, covered = first, 0.0
        while index < len(attention) and attention[index][1] < end:
            covered += min(end, attention[index][2]) - max(begin, attention[index][1])
            index += 1
        both += covered
        num_inside += covered > 0
    print(f"{num_inside} of {len(dense)} dense parts run beside attention")
    print(f"{both / dense_s:.0%} of the dense worker's time, {both / attention_s:.0%} of the attention worker's")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        run_worker(sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
    else:
        main()
