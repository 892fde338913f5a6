"""Embeddings: tokens per second through the gateway beside `transformers`, and on a GPU as a part of its bf16 roof.

`python bench/embeddings.py` runs on the CPU, both sides in float32 on the same inputs: the ratios of one run count.
`python bench/embeddings.py --gpu` runs random weights in true shapes on a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx2
import torch
from transformers import AutoConfig, AutoModel

from services.common.config import EMBEDDED_MODEL
from services.pb import dense_pb2, sampling_pb2, sequence_pb2
from tests.support.cluster import Cluster, free_port, running_cluster
from tests.support.encoders import add_tokenizer

LENGTH = 512  # tokens of an input on a GPU
INPUTS_PER_REQUEST, NUM_CLIENTS = 64, 8
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-Embedding-0.6B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    },
    "BERT base": {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30_522, "dtype": "bfloat16"},
}
MINI_LM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}


def random_inputs(count: int, shortest: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def time_transformers(model: torch.nn.Module, inputs: Sequence[list[int]], batch_size: int) -> float:
    """Seconds for all inputs, sorted by length and padded in batches, as sentence-transformers does it."""
    start = time.perf_counter()
    by_length = sorted(inputs, key=len)
    with torch.inference_mode():
        for first in range(0, len(inputs), batch_size):
            batch = by_length[first : first + batch_size]
            width = len(batch[-1])
            token_ids = torch.tensor([each + [0] * (width - len(each)) for each in batch])
            mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in batch])
            states = model(token_ids, attention_mask=mask).last_hidden_state
            torch.nn.functional.normalize(states[torch.arange(len(batch)), mask.sum(1) - 1], dim=1)
    return time.perf_counter() - start


def time_gateway(cluster: Cluster, inputs: Sequence[list[int]], num_clients: int) -> float:
    """Seconds for all inputs, of which each request has some."""
    url = f"http://{cluster.http_address}/v1/embeddings"
    parts = [inputs[first : first + INPUTS_PER_REQUEST] for first in range(0, len(inputs), INPUTS_PER_REQUEST)]

    def post(part: Sequence[list[int]]) -> None:
        body = {"input": part, "encoding_format": "base64"}
        answer = httpx2.post(url, json=body, timeout=600)
        assert answer.status_code == 200 and len(answer.json()["data"]) == len(part), answer.text[:300]

    start = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as threads:
        list(threads.map(post, parts))
    return time.perf_counter() - start


def rate_of_dense_worker(cluster: Cluster, inputs: Sequence[list[int]]) -> float:
    """Inputs per second of the dense worker alone: between the first and the last tenth that end."""

    def messages() -> Iterator[dense_pb2.GatewayMessage]:
        for index, token_ids in enumerate(inputs):
            spec = sequence_pb2.SequenceSpec(
                request_id=f"r{index}",
                prompt_token_ids=token_ids,
                sampling=sampling_pb2.SamplingParams(temperature=0.0),
                max_tokens=1,
                features={"pooling": b""},
            )
            yield dense_pb2.GatewayMessage(submit=dense_pb2.Submit(seq_id=(77 << 32) + index + 1, spec=spec))
        while len(ends) < len(inputs):  # the stream ends with this iterator
            time.sleep(0.01)

    ends: list[float] = []
    for output in cluster.dense.Connect(messages(), timeout=600):
        assert not any(each.reason == dense_pb2.SequenceEnd.ERROR for each in output.ended), output
        ends += [time.perf_counter()] * len(output.ended)
        if len(ends) == len(inputs):
            break
    tenth = len(ends) // 10
    return (len(ends) - 2 * tenth) / (ends[-tenth - 1] - ends[tenth])


def flops_per_token(shape: dict[str, Any], length: int) -> float:
    """Of the matrices of all layers, and of attention over an input of `length` tokens: half as many if it is causal.
    """
    config = AutoConfig.for_model(**shape)
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    is_decoder = shape["model_type"] != "bert"
    kv_heads = config.num_key_value_heads if is_decoder else heads
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if is_decoder else 2) * hidden * config.intermediate_size
    scores = 2 * heads * head_dim * (length / 2 if is_decoder else length)
    return 2 * config.num_hidden_layers * (projections + mlp + scores)


def run_on_cpu(repeats: int) -> dict[str, float]:
    """The ratios for the embedded model, and for a random encoder of the shape of MiniLM."""
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "encoder"
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model("bert", **MINI_LM)).save_pretrained(path)
        add_tokenizer(path)
        models = (("tiny-llama", EMBEDDED_MODEL, 1024, 512), ("MiniLM", path, 90, 128))
        for name, model_path, vocab_size, count in models:
            model = AutoModel.from_pretrained(model_path, dtype=torch.float32).eval()
            run_dir = Path(directory) / name
            run_dir.mkdir()
            settings = [f"model.path={model_path}", "model.runner=pooling", "attention.enable_prefix_cache=false"]
            settings += [f"{section}.num_threads=1" for section in ("dense", "attention")]
            address = f"gateway.http_address=127.0.0.1:{free_port()}"
            with running_cluster(run_dir, *settings, address) as cluster:
                inputs = random_inputs(count, 16, 128, vocab_size, seed=1)
                time_transformers(model, inputs[:32], 32)
                time_gateway(cluster, inputs[:32], 1)
                runs = []
                for _ in range(repeats):
                    runs.append((time_transformers(model, inputs, 32), time_gateway(cluster, inputs, 2)))
            num_tokens = sum(map(len, inputs))
            for side, seconds in zip(("transformers", "twostroke"), zip(*runs, strict=True), strict=True):
                figures[f"{name} {side}, tok/s"] = num_tokens / statistics.median(seconds)
            figures[f"{name}, ratio"] = statistics.median(theirs / own for theirs, own in runs)
    return figures


def run_on_gpu(
    names: Sequence[str], num_inputs: int, num_batched_tokens: int, options: Sequence[str] = ()
) -> dict[str, float]:
    """The rates of the dense worker alone, and through the gateway; the roof is that of a large product."""
    from bench.gpu.device_rates import measure_matrix_rate, require_gpu

    require_gpu()
    figures = {"bf16 product of 8192 x 8192, TFLOP/s": measure_matrix_rate(torch.device("cuda"), torch.bfloat16)}
    torch.cuda.empty_cache()
    for name in names:
        shape = SHAPES[name]
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(shape))
            settings = [f"model.path={directory}", "model.load_format=dummy", "model.runner=pooling"]
            settings += [f"scheduler.max_num_batched_tokens={num_batched_tokens}", "scheduler.max_num_seqs=128"]
            settings += ["dense.captures_lazily=true", "attention.captures_lazily=true", "launch.gateway_processes=4"]
            settings += [f"gateway.{key}=127.0.0.1:{free_port()}" for key in ("address", "http_address")]
            with running_cluster(Path(directory), *settings, *options) as cluster:
                for seed in (1, 2):  # the first warms up
                    inputs = random_inputs(num_inputs, LENGTH, LENGTH, shape["vocab_size"], seed)
                    alone = rate_of_dense_worker(cluster, inputs)
                through = num_inputs / time_gateway(cluster, inputs[::-1], NUM_CLIENTS)
            flops = flops_per_token(shape, LENGTH)
            figures[f"{name}, dense worker alone, tok/s"] = alone * LENGTH
            figures[f"{name}, dense worker alone, TFLOP/s"] = alone * LENGTH * flops / 1e12
            figures[f"{name}, through the gateway, tok/s"] = through * LENGTH
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="true shapes on a CUDA device")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side on the CPU, in turn (3)")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="a shape on a GPU (all)")
    parser.add_argument("--num-inputs", type=int, default=4096, help="inputs of a run on a GPU (4096)")
    parser.add_argument("--num-batched-tokens", type=int, default=8192, help="tokens of a step on a GPU (8192)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting on a GPU")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if arguments.gpu:
        names = arguments.shape or list(SHAPES)
        figures = run_on_gpu(names, arguments.num_inputs, arguments.num_batched_tokens, arguments.set)
    else:
        figures = run_on_cpu(arguments.repeats)
    for name, value in figures.items():
        print(f"{name:52}{value:14,.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
