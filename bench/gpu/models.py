"""Models of true shapes with random weights: time per token of one stream, and tokens/s of many requests at once.

    python bench/gpu/models.py --shape tiny --load 4x2:8/8                            # on this CPU
    python bench/gpu/models.py --shape llama-2-13b --format fp8 --load 1024x1024:128/128 --load 128x64:2048/128
    python bench/gpu/models.py --shape qwen3-30b-a3b --load 512x256:1000/1000
    python bench/gpu/models.py --shape deepseek-v2-lite --load 128x64:1000/500 --set model.max_model_len=8192

A load is written REQUESTSxCONCURRENCY:PROMPT/OUTPUT, in tokens; one stream is always measured. All loads go to one
server's dense worker (`bench/core.py`), without tokenizer and gateway.
"""

from __future__ import annotations

import argparse
import dataclasses
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

_LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
_QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 8192}
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
    "max_position_embeddings": 8192,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_act": "silu",
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "rope_theta": 150000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}
_DEEPSEEK_V2_LITE = {
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_GATED_DELTA = {
    "hidden_act": "silu",
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
_QWEN3_5 = {**_GATED_DELTA, "model_type": "qwen3_5_text"}
_QWEN3_5_MOE = {**_GATED_DELTA, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 512}
_QWEN3_NEXT = {
    **_GATED_DELTA,
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 512,
}
_GEMMA_3 = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, size: int, vocabulary: int) -> dict:
    """Fields of a config.json; `size` is the intermediate size of an MLP."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": size,
        "vocab_size": vocabulary,
    }


def _experts(number: int, per_token: int, size: int) -> dict:
    """Fields of a Qwen3-MoE's config.json; `size` is the intermediate size of an expert."""
    return {"num_experts": number, "num_experts_per_tok": per_token, "moe_intermediate_size": size}


def _gpt_oss(layers: int, experts: int) -> dict:
    """gpt-oss's config.json."""
    layer_types = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    own = {"num_local_experts": experts, "num_experts_per_tok": 4, "layer_types": layer_types}
    return {**_GPT_OSS, **_sizes(layers, 2880, 64, 8, 64, 2880, 201088), **own}


SHAPES = {
    "tiny": {**_QWEN3_MOE, **_sizes(2, 64, 4, 2, 16, 128, 512), **_experts(8, 2, 32)},
    "tiny-llama": {**_LLAMA, **_sizes(4, 256, 4, 2, 64, 704, 32000)},
    "llama-2-7b": {**_LLAMA, **_sizes(32, 4096, 32, 32, 128, 11008, 32000)},
    "llama-2-13b": {**_LLAMA, **_sizes(40, 5120, 40, 40, 128, 13824, 32000)},
    "llama-3.1-8b": {**_LLAMA, **_sizes(32, 4096, 32, 8, 128, 14336, 128256), "rope_theta": 500000.0},
    "llama-3.1-70b": {**_LLAMA, **_sizes(80, 8192, 64, 8, 128, 28672, 128256), "rope_theta": 500000.0},
    "qwen3-8b": {**_QWEN3, **_sizes(36, 4096, 32, 8, 128, 12288, 151936), "rope_theta": 1000000.0},
    "gemma-3-4b": {**_GEMMA_3, **_sizes(34, 2560, 8, 4, 256, 10240, 262208)},
    "qwen3-30b-a3b": {**_QWEN3_MOE, **_sizes(48, 2048, 32, 4, 128, 6144, 151936), **_experts(128, 8, 768)},
    "qwen3.5-9b": {**_QWEN3_5, **_sizes(32, 4096, 16, 4, 256, 12288, 248320)},
    "qwen3.5-35b-a3b": {**_QWEN3_5_MOE, **_sizes(40, 2048, 16, 2, 256, 5120, 248320), **_experts(256, 8, 512)},
    "qwen3-next-80b-a3b": {**_QWEN3_NEXT, **_sizes(48, 2048, 16, 2, 256, 5120, 151936), **_experts(512, 10, 512)},
    "deepseek-v2-lite": {**_DEEPSEEK_V2, **_sizes(27, 2048, 16, 16, 64, 10944, 102400), **_DEEPSEEK_V2_LITE},
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
_INT4 = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
}
FORMATS = {
    "stored": (),  # bfloat16, or as the shape's config.json says
    "fp8": ("dense.quantization=fp8",),
    "fp8-and-kv": ("dense.quantization=fp8", "attention.kv_cache_dtype=fp8"),
    "int4": (),
}
ONE_STREAM_TOKENS = 128
MAX_WARMUP = 16  # requests; kernels are compiled and graphs captured at start


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of one length."""

    num_requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int


def parse_load(text: str) -> Load:
    """REQUESTSxCONCURRENCY:PROMPT/OUTPUT."""
    found = re.fullmatch(r"(\d+)x(\d+):(\d+)/(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not REQUESTSxCONCURRENCY:PROMPT/OUTPUT")
    return Load(*map(int, found.groups()))


def write_model(directory: Path, shape: str, number_format: str) -> Path:
    """A directory with the shape's config.json and the tokenizer of the embedded model."""
    directory.mkdir()
    for file in EMBEDDED_MODEL.glob("token*"):
        shutil.copy(file, directory)
    quantization = {"quantization_config": _INT4} if number_format == "int4" else {}
    (directory / "config.json").write_text(json.dumps({"dtype": "bfloat16", **SHAPES[shape], **quantization}))
    return directory


def run_core(address: str, load: Load, figures: Path | None = None) -> None:
    """Sends the load; prints what bench/core.py prints, and writes it to a file of JSON."""
    command = [sys.executable, str(Path(__file__).parents[1] / "core.py"), "--address", address]
    command += ["--max-concurrency", str(load.concurrency), "--warmup", str(min(load.concurrency, MAX_WARMUP))]
    command += [] if figures is None else ["--json", str(figures)]
    command += ["token-norm-dist", "--num-requests", str(load.num_requests)]
    for side, tokens in (("input", load.input_tokens), ("output", load.output_tokens)):
        command += [f"--{side}-mean", str(tokens), f"--{side}-stdev", "0"]
    print(f"\n{load}", flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--format", choices=FORMATS, default="stored")
    parser.add_argument("--load", type=parse_load, action="append", default=[], metavar="RxC:P/O")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a server's setting")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", args.shape, args.format)
        num_seqs = max((load.concurrency for load in args.load), default=1)
        settings = [f"model.path={model}", "model.load_format=dummy", f"scheduler.max_num_seqs={num_seqs}"]
        settings += [*FORMATS[args.format], *args.set]
        print(f"shape {args.shape}, {args.format}: {json.dumps(SHAPES[args.shape])}")
        with running_cluster(Path(directory), *settings) as cluster:
            for line in re.findall(r".*(?:kernels chosen|dense backend is|KV cache).*", cluster.log_file.read_text()):
                print(line)
            tokens = min([ONE_STREAM_TOKENS, *(load.output_tokens for load in args.load)])
            for load in (Load(4, 1, tokens, tokens), *args.load):
                run_core(f"unix:{directory}/dense.sock", load)


if __name__ == "__main__":
    main()
