"""What `dense.deterministic` costs: time per output token at several numbers of streams, on and off in turn.

    python bench/deterministic.py --shape tiny-llama --streams 1 4 --rounds 1           # on this CPU
    python bench/deterministic.py --shape llama-2-7b --format stored fp8 --streams 1 16 256

Every round starts a server without the option and one with it. All loads go to the dense worker (`bench/core.py`),
without tokenizer and gateway: so many requests of one length at once. TPOT is the median over requests, ITL over steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.models import FORMATS, MAX_WARMUP, SHAPES, write_model
from tests.support.cluster import running_cluster

CORE = Path(__file__).parent / "core.py"
ON, OFF = "true", "false"


def measure(address: str, num_streams: int, prompt: int, output: int, directory: Path) -> tuple[float, float]:
    """Sends one request for each stream; median TPOT and ITL in ms."""
    figures = directory / "figures.json"
    command = [sys.executable, str(CORE), "--address", address, "--max-concurrency", str(num_streams)]
    command += ["--warmup", str(min(num_streams, MAX_WARMUP)), "--json", str(figures)]
    command += ["token-norm-dist", "--num-requests", str(max(num_streams, 4) if num_streams > 1 else 4)]
    for side, tokens in (("input", prompt), ("output", output)):
        command += [f"--{side}-mean", str(tokens), f"--{side}-stdev", "0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads(figures.read_text())["token_figures"]
    return found["tpot_ms"]["median"], found["itl_ms"]["median"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["llama-2-7b", "llama-3.1-8b"])
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["stored", "fp8"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a server's setting")
    args = parser.parse_args()
    print("| shape, format | streams | off: TPOT, ITL (ms) | on: TPOT, ITL (ms) | ratios |\n|---|---|---|---|---|")
    for shape in args.shape:
        for number_format in args.format:
            times: dict[tuple[int, str], list[tuple[float, float]]] = {}
            for _ in range(args.rounds):
                for option in (OFF, ON):
                    with tempfile.TemporaryDirectory() as name:
                        directory = Path(name)
                        model = write_model(directory / "model", shape, number_format)
                        settings = [f"model.path={model}", "model.load_format=dummy", "dense.backend=torch"]
                        settings += [f"scheduler.max_num_seqs={max(args.streams)}", *FORMATS[number_format]]
                        settings += [f"dense.deterministic={option}", *args.set]
                        with running_cluster(directory, *settings):
                            for num_streams in args.streams:
                                address = f"unix:{directory}/dense.sock"
                                found = measure(address, num_streams, args.prompt, args.output, directory)
                                times.setdefault((num_streams, option), []).append(found)
            for num_streams in args.streams:
                off, on = (
                    tuple(map(statistics.median, zip(*times[num_streams, option], strict=True))) for option in (OFF, ON)
                )
                ratios = ", ".join(f"{b / a:.3f}" for a, b in zip(off, on, strict=True))
                cells = [", ".join(f"{each:.2f}" for each in pair) for pair in (off, on)]
                print(f"| {shape}, {number_format} | {num_streams} | {cells[0]} | {cells[1]} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
