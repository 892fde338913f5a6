"""The cost of two processes: a decode step through both workers' graphs, minus the same kernels in one process.

`python bench/seam.py --batch 1 64 --context 512` runs the product's segments, attention kernels and channel on a
model's shape with random weights. The single process runs the same functions, but attention follows the dense kernels
in one stream instead of a handoff. `--timeline` also lists every kernel and gap of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import structlog
import torch

from bench.dense import MODELS
from bench.gpu.device_rates import describe_environment, require_gpu
from bench.gpu.step_timeline import format_timeline
from bench.handoff import run_under_mps
from bench.load.options import whole_number
from services.channel import CUDA_KINDS
from services.common.errors import TwostrokeError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-2-7b", help="shape (llama-2-7b)")
    parser.add_argument("--num-layers", type=whole_number, help="number of layers (all layers of the model)")
    parser.add_argument("--batch", type=whole_number, nargs="+", default=[1, 16, 64], help="sequences (1 16 64)")
    parser.add_argument("--context", type=whole_number, default=512, help="tokens of each sequence (512)")
    parser.add_argument("--steps", type=whole_number, default=100, help="steps to time (100)")
    parser.add_argument("--attention-device", default="cuda:0", help="GPU of the attention worker (cuda:0)")
    parser.add_argument("--channel", choices=CUDA_KINDS, help="how flags are waited for (as the workers choose it)")
    parser.add_argument("--timeline", action="store_true", help="kernels and gaps of one step through two processes")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG or SVG of the figures; needs matplotlib")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except TwostrokeError as error:
        raise SystemExit(f"seam: {error}") from error


def _run(arguments: argparse.Namespace) -> None:
    require_gpu("triton", "cuda.bindings")
    # They need both packages.
    from bench.gpu.seam_sides import DenseSide, Task, measure_one_process, measure_two_processes, run_peer

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if arguments.peer is not None:
        run_peer(Task(**json.loads(arguments.peer)), arguments.epoch)
        return
    shares_gpu = arguments.attention_device == "cuda:0"
    if shares_gpu and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        run_under_mps()
        return
    task = Task(
        arguments.model,
        arguments.num_layers or MODELS[arguments.model].num_layers,
        sorted(arguments.batch),
        arguments.context,
        arguments.steps,
        arguments.timeline,
        arguments.attention_device,
        arguments.channel,
    )
    with torch.inference_mode():
        dense = DenseSide(task)
        one = measure_one_process(task, dense)
        torch.cuda.empty_cache()
        two, timelines = measure_two_processes(task, dense)
    print(f"{'batch':>5}{'one process, ms':>17}{'two, ms':>10}{'seam, us a layer':>18}")
    seam = {batch: 1e3 * (two[batch] - one[batch]) / task.num_layers for batch in task.batches}
    for batch in task.batches:
        print(f"{batch:5}{one[batch]:17.3f}{two[batch]:10.3f}{seam[batch]:18.2f}")
    for batch, timeline in timelines.items():
        print(f"\nOne step of batch {batch}, context {task.context}, medians over the layers:")
        print(format_timeline(timeline))
    figures = {
        "environment": describe_environment(torch.device("cuda")),
        "task": asdict(task),
        "one_process_ms": one,
        "two_processes_ms": two,
        "seam_us_per_layer": seam,
        "timelines": {batch: [asdict(span) for span in timeline] for batch, timeline in timelines.items()},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    if arguments.plot:
        save_plot(figures, arguments.plot)


def save_plot(figures: dict[str, Any], file: Path) -> None:
    """Draws the figures of one run, as PNG or SVG: a step's time by batch, and the cost of the seam per layer."""
    from matplotlib.figure import Figure  # needed here only

    batches = [str(batch) for batch in figures["one_process_ms"]]
    one, two = list(figures["one_process_ms"].values()), list(figures["two_processes_ms"].values())
    left, right = (figure := Figure(figsize=(9, 3.5), layout="constrained")).subplots(1, 2)
    left.bar(batches, one, label="the same kernels in one process")
    left.bar(batches, [a - b for a, b in zip(two, one, strict=True)], bottom=one, label="the seam")
    left.set(xlabel="batch", ylabel="decode step (ms)")
    left.legend()
    right.bar(batches, list(figures["seam_us_per_layer"].values()), color="tab:orange")
    right.set(xlabel="batch", ylabel="seam, a layer (µs)")
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
    task = figures["task"]
    figure.suptitle(f"{task['model']}, context {task['context']}, {figures['environment']['gpu']}")
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
