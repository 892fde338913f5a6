"""Mixtures of experts of true shapes with random weights: time per token of one stream, and tokens/s at saturation.

    python bench/gpu/moe.py --shape tiny --requests 4 --concurrency 2 --tokens 8  # on this CPU
    python bench/gpu/moe.py --shape qwen3-30b-a3b                                 # on a GPU
    python bench/gpu/moe.py --shape gpt-oss-like --set scheduler.max_num_seqs=512

One server runs both; the load goes to the dense worker (`bench/core.py`), without tokenizer and gateway.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from services.common.config import EMBEDDED_MODEL
from tests.support.cluster import running_cluster

_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _shape(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, experts: int, per_token: int, size: int
) -> dict[str, object]:
    """The config.json of a Qwen3-MoE of these sizes; `size` is the intermediate size of an expert."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "head_dim": head_dim}
    sizes |= {"num_key_value_heads": kv_heads, "num_experts": experts, "num_experts_per_tok": per_token}
    sizes |= {"moe_intermediate_size": size, "intermediate_size": 3 * hidden, "max_position_embeddings": 8192}
    return {**_QWEN3_MOE, **sizes, "vocab_size": 151936 if hidden > 64 else 512}


SHAPES = {
    "tiny": _shape(2, 64, 4, 2, 16, 8, 2, 32),
    "qwen3-30b-a3b": _shape(48, 2048, 32, 4, 128, 128, 8, 768),
    "gpt-oss-like": _shape(24, 2880, 64, 8, 64, 32, 4, 2880),  # the sizes of gpt-oss-20b; 16 bits, without its sinks
}


def write_model(directory: Path, shape: str) -> Path:
    """A directory with the shape's config.json and the tokenizer of the embedded model."""
    directory.mkdir()
    for file in EMBEDDED_MODEL.glob("token*"):
        shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
    return directory


def run_core(address: str, num_requests: int, concurrency: int, tokens: int) -> None:
    """Sends requests of `tokens` prompt and output tokens, so many at a time; prints what bench/core.py prints."""
    command = [sys.executable, str(Path(__file__).parents[1] / "core.py"), "--address", address]
    command += ["--max-concurrency", str(concurrency), "--warmup", str(min(concurrency, num_requests))]
    lengths = [f"--{side}-{part}" for side in ("input", "output") for part in ("mean", "stdev")]
    values = (tokens, 0, tokens, 0)
    options = [word for pair in zip(lengths, map(str, values), strict=True) for word in pair]
    print(f"\n{num_requests} requests, {concurrency} at a time, {tokens} prompt and {tokens} output tokens", flush=True)
    subprocess.run([*command, "token-norm-dist", "--num-requests", str(num_requests), *options], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, default=1000, help="prompt tokens and output tokens of a request")
    parser.add_argument("--requests", type=int, default=1024, help="requests at saturation")
    parser.add_argument("--concurrency", type=int, default=256, help="requests at a time at saturation")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a server's setting")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", args.shape)
        settings = (f"model.path={model}", "model.load_format=dummy", f"scheduler.max_num_seqs={args.concurrency}")
        print(f"shape {args.shape}: {json.dumps(SHAPES[args.shape])}")
        with running_cluster(Path(directory), *settings, *args.set) as cluster:
            for line in re.findall(r".*(?:linear kernels chosen|dense backend is).*", cluster.log_file.read_text()):
                print(line)
            address = f"unix:{directory}/dense.sock"
            run_core(address, min(4, args.requests), 1, args.tokens)
            run_core(address, args.requests, args.concurrency, args.tokens)


if __name__ == "__main__":
    main()
