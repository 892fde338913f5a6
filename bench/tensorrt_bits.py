"""Whether TensorRT gives a token the same bits whatever else is in a step: why `dense.deterministic` refuses it.

    python bench/tensorrt_bits.py

Runs the segments of the first, the middle and the last layers of Llama-2-7B's shape (or of `--model DIR`), random
weights, on the first rows of the same random inputs: steps of 1 to 2,048 tokens, in which the first token is always the
same. Prints for each set of profiles and each size how many of that token's numbers differ from those that it gets
alone, and how far; then what one profile for all sizes costs, beside the profiles that are the default.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.tensorrt_check import Subject, make_subject, read_config, run_segments
from services.common.config import DenseSection
from services.common.errors import TwostrokeError
from services.dense_worker.model.weights import random_weights
from services.dense_worker.tensorrt.api import load_tensorrt
from services.dense_worker.tensorrt.gpu import current_gpu
from services.dense_worker.tensorrt.measure import measure_segments, time_on_gpu
from services.dense_worker.tensorrt.profiles import Limits, parse_profiles

SIZES = (1, 2, 3, 4, 8, 15, 16, 17, 32, 63, 64, 100, 128, 129, 200, 256, 512, 1024, 2048)
ONE_PROFILE = f"1-{SIZES[-1]}@{{best}}"


def first_token(subject: Subject, inputs: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """What the first token gets in a step of the first `size` rows of the inputs, by the names of the outputs."""
    step = {name: value[:size] for name, value in inputs.items() if name != "rows"}
    step["rows"] = torch.zeros(1, dtype=inputs["rows"].dtype, device=subject.device)
    outputs = run_segments(subject.tensorrt, subject.config, step, subject.dtype)
    return {name: value[0].float().clone() for name, value in outputs.items()}


def print_differences(subject: Subject, title: str) -> None:
    """A row for each size: of every output how many numbers of the first token differ from those it gets alone."""
    inputs = subject.inputs(SIZES[-1])
    alone = first_token(subject, inputs, 1)
    again = first_token(subject, inputs, 1)
    assert all(torch.equal(again[name], value) for name, value in alone.items()), "the same step differs from itself"
    print(f"\n{title}\n| tokens | " + " | ".join(alone) + " |\n|---|" + "---|" * len(alone))
    for size in SIZES:
        if size > subject.profiles[-1].high:
            break
        cells = []
        for name, found in first_token(subject, inputs, size).items():
            difference = (found - alone[name]).abs()
            count, scale = int(difference.count_nonzero()), float(alone[name].abs().max())
            cells.append(f"{count} of {len(found)}, {float(difference.max()) / scale:.1e}" if count else "equal")
        print(f"| {size} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="shapes of this model; default: Llama-2-7B")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--best", type=int, nargs="+", default=[1, 64], help="what one profile for all is tuned for")
    parser.add_argument("--output-dir", type=Path, metavar="PLANS", help="default: a temporary directory")
    args = parser.parse_args()
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    gpu = current_gpu(device)
    if gpu is None:
        sys.exit(f"bench/tensorrt_bits.py: torch {torch.__version__} sees no CUDA device, nothing was measured")
    plans = args.output_dir or Path(tempfile.mkdtemp(prefix="plans-"))
    try:
        api, config = load_tensorrt(), read_config(args.model)
        print(f"{api.name}, {gpu.name}, {args.dtype}", flush=True)
        default = DenseSection().profiles
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
            weights, backends = random_weights(config, dtype, device, 0), {}
            for text in (default, *(ONE_PROFILE.format(best=best) for best in args.best)):
                subject, _ = make_subject(api, config, dtype, weights, parse_profiles(text), plans)
                print_differences(subject, f"profiles {text}")
                backends[text] = subject.tensorrt
            limits = Limits(SIZES[-1], 1)
            times = measure_segments(backends, config, dtype, device, limits, time_on_gpu)
    except TwostrokeError as error:
        sys.exit(f"bench/tensorrt_bits.py: {error}")
    print("\nmicroseconds of the middle segment\n| tokens | " + " | ".join(backends) + " |")
    print("|---|" + "---|" * len(backends))
    for size, us in times["middle"].items():
        print(f"| {size} | " + " | ".join(str(us[text]) for text in backends) + " |")


if __name__ == "__main__":
    main()
