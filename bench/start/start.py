"""What the processes of a start do when, until the launcher says that it serves: by process, begin and end of phases.

    python bench/start/start.py --set dense.device=cpu
    python bench/start/start.py --starts 3 -- --model DIR --set model.load_format=dummy

All other arguments, or those behind `--`, are the launcher's. A phase within another one is indented. Noting takes some
milliseconds of a start. With `--starts` the phases are those of the last start.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
SERVES = "Serving "  # how the launcher's line begins
TIMEOUT_S = 600.0
DENSE, ATTENTION, LAUNCH = "services.dense_worker", "services.attn_worker", "services.launch"
PHASES = (  # module and function; the module alone is its import
    "torch",
    "triton",
    "transformers",
    "services.rpc.server",
    "services.common.early_start await_arguments",
    "services.common.cli parse_service_args",
    "services.common.open_gpu _open",
    "services.common.open_gpu _keep_triton_key",
    "services.common.ready_shape read_decoder",
    "services.common.compile_kernels _compile_in_processes",
    f"{LAUNCH}.service",
    f"{LAUNCH}.arguments parse_args",
    f"{LAUNCH}.service Launcher.start",
    f"{LAUNCH}.service Launcher._check_config",
    f"{LAUNCH}.service Launcher._find_mps",
    f"{LAUNCH}.service Launcher._wait_started",
    f"{LAUNCH}.service Launcher._check_mps",
    f"{DENSE}.service",
    f"{DENSE}.service DenseWorker.start",
    f"{DENSE}.service DenseWorker._make_engine",
    f"{DENSE}.build prepare_model",
    f"{DENSE}.build load_model_weights",
    f"{DENSE}.build PreparedModel.load",
    f"{DENSE}.build _compile_sampling",
    f"{DENSE}.backends.cuda_backend",
    f"{DENSE}.backends.cuda_backend CudaBackend._choose_kernels",
    f"{DENSE}.backends.cuda_backend CudaBackend._choose_strokes",
    f"{DENSE}.backends.select PreparedBackend.load",
    f"{DENSE}.kernels.linear.linear_choice LinearChoice.measure",
    f"{DENSE}.runner.cuda_model_runner CudaModelRunner.attach",
    f"{DENSE}.engine.attention_client AttentionClient._attach_once",
    f"{DENSE}.service GatewayWorker.ready",
    f"{ATTENTION}.service",
    f"{ATTENTION}.service AttentionWorker.start",
    f"{ATTENTION}.build load_kernels_ahead",
    f"{ATTENTION}.build build_engine",
    f"{ATTENTION}.servicer AttentionServicer.Attach",
    "services.gateway.service",
    "services.gateway.service Gateway.start",
    "services.gateway.service Gateway._announce",
    "services.gateway.text.tokenizer load_tokenizer",
)


class Phase(NamedTuple):
    """Seconds since the launcher's start."""

    begin_s: float
    end_s: float | None  # None: it had not ended when the launcher served
    name: str


def start(arguments: Sequence[str], notes: Path | None) -> float:
    """Starts a launcher, waits until it serves, and stops it. Returns the seconds from its start to the line."""
    environment = dict(os.environ)
    if notes is not None:
        places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"START_FILE": str(notes), "START_PHASES": "\n".join(PHASES), "PYTHONPATH": os.pathsep.join(places)}
        environment |= own
    command = [sys.executable, "-m", "services.launch", *arguments]
    begin_ns = time.monotonic_ns()
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith(SERVES):
                break
        else:
            raise SystemExit("".join(lines) + "the launcher has ended")
        took_s = (time.monotonic_ns() - begin_ns) / 1e9
        if notes is not None:
            notes.with_suffix(".begin").write_text(f"{begin_ns} {time.monotonic_ns()}")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    return took_s


def phases_of(notes: Path) -> dict[str, list[Phase]]:
    """The phases of each service, in the order of their begin."""
    begin_ns, serves_ns = map(int, notes.with_suffix(".begin").read_text().split())
    services, begun, found = dict[str, str](), dict[tuple[str, str], list[int]](), dict[str, list[Phase]]()
    for line in notes.read_text().splitlines():
        pid, at, what, name = line.split(" ", 3)
        at_ns = int(at)
        if at_ns > serves_ns:
            continue
        if what == "process":
            services[pid] = name
            found.setdefault(f"{name} {pid}", []).append(Phase((at_ns - begin_ns) / 1e9, None, "its interpreter runs"))
        elif what == "begin":
            begun.setdefault((pid, name), []).append(at_ns)
        else:
            began_ns = begun[pid, name].pop()
            phase = Phase((began_ns - begin_ns) / 1e9, (at_ns - begin_ns) / 1e9, name)
            found[f"{services[pid]} {pid}"].append(phase)
    for (pid, name), rest in begun.items():
        for began_ns in rest:
            found[f"{services[pid]} {pid}"].append(Phase((began_ns - begin_ns) / 1e9, None, name))
    return {
        service: sorted(each, key=lambda phase: (phase.begin_s, -(phase.end_s or 1e9)))
        for service, each in found.items()
    }


def rows(phases: Sequence[Phase]) -> Iterator[str]:
    """Begin, end, seconds, and the name, indented by the phases around it."""
    around: list[float] = []
    for begin_s, end_s, name in phases:
        while around and begin_s >= around[-1]:
            around.pop()
        if end_s is None:
            yield f"{begin_s:8.2f}{'':16}  {'  ' * len(around)}{name}"
            continue
        yield f"{begin_s:8.2f}{end_s:8.2f}{end_s - begin_s:8.2f}  {'  ' * len(around)}{name}"
        around.append(end_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=1, help="in turn; the last one is shown by phase (1)")
    options, arguments = parser.parse_known_args()
    arguments = [each for each in arguments if each != "--"]
    with tempfile.TemporaryDirectory() as directory:
        for index in range(options.starts):
            notes = Path(directory) / f"{index}.notes"
            print(f"serves after {start(arguments, notes):.2f} s", flush=True)
        for service, phases in phases_of(notes).items():
            print(f"\n{service}\n   begin     end seconds")
            print("\n".join(rows(phases)))


if __name__ == "__main__":
    main()
