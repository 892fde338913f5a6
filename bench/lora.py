"""What LoRA adapters cost: TPOT of a batch with adapters against the same batch without any, on one server.

    python bench/lora.py --streams 8 --adapters 2 --rounds 2 --max-tokens 32       # on this CPU, the embedded model
    python bench/lora.py --shape llama-2-7b                                       # on a GPU, with random weights

First a server without slots runs the batch; then one with slots, where rounds without adapters alternate with rounds in
which each request names one of several random adapters in turn. All figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import numpy as np
from safetensors.numpy import save_file

from bench.gpu.models import SHAPES, write_model
from services.common.config import load_config
from services.common.model_config import load_model_config
from services.lora.shapes import adapted_shapes
from services.pb import gateway_pb2, gateway_pb2_grpc, sampling_pb2
from tests.support.cluster import running_cluster

PROMPT_TOKENS = 32
OFF, IDLE, ADAPTED = "no slots", "slots, no adapters", "adapters"
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


def write_adapter(path: Path, model: Path, rank: int, seed: int) -> None:
    """A random adapter of all linear layers, so small that answers stay texts."""
    generator, tensors = np.random.default_rng(seed), {}
    for name, (out_features, in_features) in adapted_shapes(load_model_config(model)).items():
        for half, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            values = generator.standard_normal(shape, dtype=np.float32) * 0.01
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.astype(np.float16)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(config))


async def time_round(address: str, names: list[str], max_tokens: int) -> float:
    """Median TPOT in milliseconds of one stream for each name of a model."""

    async def stream(gateway: gateway_pb2_grpc.GatewayStub, index: int, name: str) -> float:
        request = gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(ids=[3 + (index * 7 + i) % 200 for i in range(PROMPT_TOKENS)]),
            sampling=sampling_pb2.SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            ignore_eos=True,
            model=name,
        )
        async for chunk in gateway.GenerateStream(request):
            if chunk.HasField("finish"):
                return chunk.finish.timings.per_token_ms
        raise AssertionError("a stream had no end")

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        gateway = gateway_pb2_grpc.GatewayStub(channel)
        return statistics.median(await asyncio.gather(*(stream(gateway, i, name) for i, name in enumerate(names))))


def measure(directory: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """TPOT in milliseconds of each round, by kind."""
    settings = args.set
    if args.shape is not None:
        path = write_model(directory / "model", args.shape, "stored")
        settings = [f"model.path={path}", "model.load_format=dummy", *settings]
    model = load_config(None, settings).model.path
    names = [f"adapter{i}" for i in range(args.adapters)]
    for seed, name in enumerate(names):
        write_adapter(directory / "adapters" / name, model, args.rank, seed)
    modules = json.dumps([f"{name}={directory / 'adapters' / name}" for name in names])
    common = (*settings, f"scheduler.max_num_seqs={args.streams}")
    slots = (f"dense.max_loras={args.adapters}", f"dense.max_lora_rank={args.rank}", f"gateway.lora_modules={modules}")
    none = [""] * args.streams
    adapted = [names[i % len(names)] for i in range(args.streams)]
    times: dict[str, list[float]] = {OFF: [], IDLE: [], ADAPTED: []}
    # One server after the other: two would share the GPU's memory.
    servers = {"off": (common, {OFF: none}), "on": ((*common, *slots), {IDLE: none, ADAPTED: adapted})}
    for name, (own, batches) in servers.items():
        (directory / name).mkdir()
        with running_cluster(directory / name, *own) as cluster:
            for index in range(args.rounds + 1):
                for kind, models in batches.items():
                    tpot = asyncio.run(time_round(cluster.address, models, args.max_tokens))
                    if index:  # the first round warms up
                        times[kind].append(tpot)
                if not index:
                    time.sleep(args.pause)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, else model.path")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--pause", type=float, default=0, help="seconds after the first round, to capture graphs")
    settings = {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"}
    parser.add_argument("--set", **settings, help="a setting of both servers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        times = measure(Path(directory), args)
    print(f"{args.streams} streams, {args.adapters} adapters of rank {args.rank}, {args.rounds} rounds")
    print("| batch | TPOT, ms | range | to no slots |\n|---|---|---|---|")
    for kind, each in times.items():
        median = statistics.median(each)
        ratio = median / statistics.median(times[OFF])
        print(f"| {kind} | {median:.3f} | {min(each):.3f} to {max(each):.3f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
