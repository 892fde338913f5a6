"""Tokens per second on this CPU against `transformers` in one process, and the time from start to first token.

Both sides run the embedded model, or `--model DIRECTORY`, greedily in float32 on the same prompts; the ratios of one
run count, not the absolute figures. `python bench/cpu.py --json FILE` saves them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import Cluster, running_cluster

NUM_STREAMS = 16
PROMPT_TOKENS = 32


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 1024, (count, PROMPT_TOKENS), generator=generator).tolist()


def time_transformers(model: torch.nn.Module, batch: list[list[int]], max_tokens: int) -> float:
    """Seconds to generate for all prompts, one after another."""
    start = time.perf_counter()
    for prompt in batch:
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def time_cluster(cluster: Cluster, batch: list[list[int]], max_tokens: int) -> float:
    """Seconds to generate for all prompts at the same time, through the gateway."""

    def run(prompt: list[int]) -> None:
        answer = cluster.generate(prompt, max_tokens, ignore_eos=True)
        assert len(answer.token_ids) == max_tokens

    start = time.perf_counter()
    with ThreadPoolExecutor(len(batch)) as threads:
        list(threads.map(run, batch))
    return time.perf_counter() - start


def time_first_token(settings: list[str]) -> float:
    """Seconds from `python -m services.launch` to the first character of an answer."""
    command = [sys.executable, "-m", "services.launch", "--prompt", "San Francisco is a", "--max-tokens", "1"]
    for setting in settings:
        command += ["--set", setting]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    elapsed = time.perf_counter() - start
    process.communicate()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of each answer (256)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn; the median counts (3)")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="a directory (the embedded model)")
    parser.add_argument("--threads", type=int, default=1, help="of transformers for each operation of torch (1)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of our config")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG of every run; needs matplotlib")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)  # one is faster than two for the embedded model, for either side
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    settings = [f"model.path={arguments.model}", *arguments.set]
    batch = prompts(NUM_STREAMS)
    seconds: dict[str, list[float]] = {name: [] for name in ("hf_1", "hf_16", "twostroke_1", "twostroke_16")}
    with tempfile.TemporaryDirectory() as directory, running_cluster(Path(directory), *settings) as cluster:
        time_transformers(model, batch[:1], 16)
        time_cluster(cluster, batch, 16)
        for _ in range(arguments.repeats):
            seconds["hf_1"].append(time_transformers(model, batch[:1], arguments.max_tokens))
            seconds["twostroke_1"].append(time_cluster(cluster, batch[:1], arguments.max_tokens))
            seconds["hf_16"].append(time_transformers(model, batch, arguments.max_tokens))
            seconds["twostroke_16"].append(time_cluster(cluster, batch, arguments.max_tokens))
    max_tokens = arguments.max_tokens
    rates = {
        name: [max_tokens * (NUM_STREAMS if name.endswith("16") else 1) / run for run in runs]
        for name, runs in seconds.items()
    }
    figures = {f"{name}_tok_per_s": statistics.median(runs) for name, runs in rates.items()}
    figures["ratio_1"] = figures["twostroke_1_tok_per_s"] / figures["hf_1_tok_per_s"]
    figures["ratio_16"] = figures["twostroke_16_tok_per_s"] / figures["hf_16_tok_per_s"]
    figures["start_to_first_token_s"] = time_first_token(settings)

    print(f"{'':36}{'transformers':>14}{'Twostroke':>12}{'ratio':>8}")
    for count, label in ((1, "one stream, tok/s"), (16, "16 streams, tok/s")):
        row = (figures[f"hf_{count}_tok_per_s"], figures[f"twostroke_{count}_tok_per_s"], figures[f"ratio_{count}"])
        print(f"{label:36}{row[0]:14.0f}{row[1]:12.0f}{row[2]:8.2f}")
    print(f"{'start to first token, s':36}{'':14}{figures['start_to_first_token_s']:12.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    if arguments.plot:
        from bench.load.plots import save_comparison_plot  # it needs matplotlib

        groups = [
            ("One stream, tok/s", rates["hf_1"], rates["twostroke_1"]),
            (f"{NUM_STREAMS} streams, tok/s", rates["hf_16"], rates["twostroke_16"]),
        ]
        title = f"{arguments.model.name} on this CPU"
        save_comparison_plot(groups, ("transformers", "Twostroke"), title, arguments.plot)


if __name__ == "__main__":
    main()
