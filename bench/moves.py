"""How long a stream stands still while its attention worker is drained: its blocks copied, or computed again.

    python bench/moves.py                                              # on CPUs, with the embedded model
    python bench/moves.py --shape llama-2-7b --set dense.device=cuda   # with random weights

A stream with a long prompt runs on a worker that is then drained. The figure is the longest time between two of its
tokens. Computing again is what a server without a prefix cache does.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.gpu.models import SHAPES, write_model
from bench.load.own_server import write_vocabulary
from tests.support.cluster import Cluster, ctl, request, running_cluster

VOCABULARY = 1000
OUTPUT_LEN = 500  # of a stream, which is cancelled before that
TOKENS_BEFORE = 20  # of a stream, before its worker is drained


def pause_s(cluster: Cluster, prompt_len: int, seed: int) -> float:
    """The longest time between two tokens of a stream, from the beginning of the drain until it goes on elsewhere."""
    added = ctl(cluster, "add-attention")
    assert added.returncode == 0, added.stderr
    name = added.stdout.split()[1].rstrip(",")
    used = {each.address: each.num_sequences for each in cluster.dense_status().attention_workers}
    assert not any(used.values()), used
    times_s, drained = list[float](), threading.Event()

    def drain() -> None:
        result = ctl(cluster, "drain-attention", name)
        assert result.returncode == 0, result.stderr
        drained.set()

    prompt = [1, *(3 + (seed * (each + 1)) % VOCABULARY for each in range(prompt_len - 1))]
    blocker = cluster.gateway.GenerateStream(request(prompt[::-1], OUTPUT_LEN, ignore_eos=True))
    next(iter(blocker))  # takes room from the first worker, so that the next stream goes to the other one
    stream = cluster.gateway.GenerateStream(request(prompt, OUTPUT_LEN, ignore_eos=True))
    thread = threading.Thread(target=drain)
    for chunk in stream:
        times_s += [time.monotonic()] * bool(chunk.token_ids)
        if len(times_s) == TOKENS_BEFORE:
            [*_, last] = cluster.dense_status().attention_workers
            assert last.num_sequences == 1, f"it is not where it should be: {cluster.dense_status().attention_workers}"
            blocker.cancel()
            thread.start()
        if drained.is_set():
            stream.cancel()
            break
    thread.join()
    cluster.wait_idle()
    return max(after - before for before, after in itertools.pairwise(times_s[TOKENS_BEFORE - 1 :]))


def measure(cluster: Cluster, lengths: Sequence[int], repeats: int) -> dict[int, float]:
    """The median pause by length, in ms."""
    pauses_s = {
        length: [pause_s(cluster, length, 7919 * (each + 1) + length) for each in range(repeats)] for length in lengths
    }
    return {length: 1000 * statistics.median(each) for length, each in pauses_s.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[64, 256, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, help="a model of this shape with random weights")
    parser.add_argument("--model", type=Path, help="another checkpoint")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster's config")
    arguments = parser.parse_args()
    rows = {}
    for name, prefix_cache in (("copied", "true"), ("computed again", "false")):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            settings = ["attention.elastic=true", f"attention.enable_prefix_cache={prefix_cache}", *arguments.set]
            if arguments.shape is not None:
                model = write_model(path / "model", arguments.shape, "stored")
                write_vocabulary(model)
                settings += [f"model.path={model}", "model.load_format=dummy"]
            if arguments.model is not None:
                settings.append(f"model.path={arguments.model}")
            with running_cluster(path, *settings) as cluster:
                rows[name] = measure(cluster, arguments.prompt_lens, arguments.repeats)
    print("| tokens of the prompt |", " | ".join(f"{each} ms" for each in rows), "|")
    print("|---|" + "---|" * len(rows))
    for length in arguments.prompt_lens:
        print(f"| {length} |", " | ".join(f"{row[length]:.0f}" for row in rows.values()), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
