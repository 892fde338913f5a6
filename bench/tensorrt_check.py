"""TensorRT against torch on the GPU at hand: builds the plans, then checks and times them.

    python bench/tensorrt_check.py --dtype float16 --json results.json

Checks agreement in every profile, norms in float32, several CUDA graphs on one execution context, a step
without waiting, and whole generations of the embedded model; then prints microseconds for each segment and
number of tokens. Weights are random in the shape of Llama-2-7B, or of `--model DIR`. The exit status is 1 if
a check fails; a check that could not run counts as failed and says why. It has no built-in figures:
what has not been run has not been shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoConfig

from services.common.config import EMBEDDED_MODEL, DenseSection
from services.common.errors import TwostrokeError
from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.select import torch_backend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights, random_weights
from services.dense_worker.tensorrt.api import TensorRT, load_tensorrt
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.export_check import OneSequenceAttention, greedy, load_hugging_face
from services.dense_worker.tensorrt.gpu import current_gpu, current_stream, synchronize
from services.dense_worker.tensorrt.measure import measure_segments, time_on_gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import Limits, Profile, parse_profiles

LLAMA_2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # fraction of the greatest value
MAX_ROWS = 64
PROMPTS = ([1, 306, 27, 9, 400], [1, 77], [1, *range(3, 43)])
SLEEP_CYCLES = 2_000_000_000  # about a second


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose segments run with TensorRT and with torch."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    weights: ModelWeights
    tensorrt: TensorRTSegments
    torch: TorchBackend

    def inputs(self, num_tokens: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Random inputs of all segments."""
        config, options = self.config, {"dtype": self.dtype, "device": self.device}
        return {
            "token_ids": torch.randint(config.vocab_size, (num_tokens,), device=self.device),
            "attn_out": torch.randn(num_tokens, config.attn_size, **options),
            "residual": torch.randn(num_tokens, config.hidden_size, **options) * scale,
            "rows": torch.randint(num_tokens, (min(num_tokens, MAX_ROWS),), device=self.device),
            "qkv": torch.zeros(num_tokens, config.qkv_size, **options),
        }


def make_subject(
    api: TensorRT,
    config: ModelConfig,
    dtype: torch.dtype,
    weights: ModelWeights,
    profiles: tuple[Profile, ...],
    plans: Path,
) -> tuple[Subject, list[str]]:
    """Builds or finds the plans; also returns the builder's output."""
    device, lines = weights.device, []
    builder = EnginePlanBuilder(api, current_gpu(device), profiles, EnginePlanCache(plans))
    found = builder.find_or_build(export_networks(config, dtype), dtype, None, lines.append)
    limits = Limits(profiles[-1].high, MAX_ROWS)
    binaries = {name: cached.plan for name, cached in found.items()}
    segments = TensorRTSegments(api, binaries, profiles, weights, config, limits, current_stream)
    return Subject(config, dtype, device, weights, segments, TorchBackend(weights)), lines


def run_segments(backend: DenseBackend, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs each segment on its inputs; returns the outputs by name."""
    qkv = torch.zeros_like(inputs["qkv"])
    outputs = {"first.residual": backend.first(inputs["token_ids"], qkv), "first.qkv": qkv.clone()}
    outputs["middle.residual"] = backend.middle(0, inputs["attn_out"], inputs["residual"], qkv)
    return outputs | {
        "middle.qkv": qkv,
        "last.logits": backend.last(inputs["attn_out"], inputs["residual"], inputs["rows"]),
    }


def check_agreement(subject: Subject, sizes: list[int], scale: float = 1.0) -> dict[str, float]:
    """Greatest difference from torch, relative to the greatest value. Raises AssertionError."""
    worst: dict[str, float] = {}
    for size in sizes:
        inputs = subject.inputs(size, scale)
        found, expected = (run_segments(backend, inputs) for backend in (subject.tensorrt, subject.torch))
        for name, value in expected.items():
            error = ((found[name].float() - value.float()).abs().max() / value.float().abs().max()).item()
            worst[name] = max(worst.get(name, 0.0), error)
            assert error <= TOLERANCES[subject.dtype], f"{name} for {size} tokens differs by {error:.1e}"
    return worst


def check_graphs(subject: Subject, sizes: list[int]) -> dict[str, float]:
    """Replays graphs of several sizes, which share execution contexts, in turn on new inputs."""
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
    for size in sizes:
        inputs = subject.inputs(size)
        run_segments(subject.tensorrt, inputs)  # a new size needs this once
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = run_segments(subject.tensorrt, inputs)
        graphs[size] = graph, inputs, outputs
    worst = 0.0
    for size in (*sizes, *reversed(sizes)):
        graph, inputs, outputs = graphs[size]
        for name, value in subject.inputs(size).items():
            inputs[name].copy_(value)
        graph.replay()
        for name, value in run_segments(subject.torch, inputs).items():
            error = ((outputs[name].float() - value.float()).abs().max() / value.float().abs().max()).item()
            worst = max(worst, error)
            assert error <= TOLERANCES[subject.dtype], (
                f"{name} of the graph for {size} tokens differs by {error:.1e}"
            )
    return {"worst": worst}


def check_no_wait(subject: Subject, sizes: list[int]) -> dict[str, float]:
    """Checks that the host can enqueue a whole step while the GPU sleeps."""
    inputs = {size: subject.inputs(size) for size in sizes}
    for size in sizes:
        run_segments(subject.tensorrt, inputs[size])
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start = time.perf_counter()
    run_segments(subject.tensorrt, inputs[sizes[-1]])
    enqueued_ms = (time.perf_counter() - start) * 1000
    is_asleep = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert is_asleep, (
        f"enqueueing took {enqueued_ms:.1f} ms and ended after the GPU's work: something waits for it"
    )
    return {"enqueued_ms": enqueued_ms}


def check_generation(subject: Subject, model: Any, num_tokens: int) -> dict[str, Any]:
    """Compares greedy generations by TensorRT and torch, token for token, with the same attention."""
    config, backends = (
        subject.config,
        (TensorRTBackend(subject.tensorrt), subject.torch),
    )
    for prompt in PROMPTS:
        found, expected = (
            greedy(
                backend,
                OneSequenceAttention(model, config),
                config,
                subject.dtype,
                prompt,
                num_tokens,
                subject.device,
            )
            for backend in backends
        )
        assert found == expected, f"after {prompt}: {found} != {expected}"
    return {"prompts": len(PROMPTS), "tokens": num_tokens}


def run_check(name: str, check: Callable[[], dict[str, Any]], results: dict[str, Any]) -> None:
    """Runs a check and prints and stores its result. Errors of TensorRT, torch or CUDA count as failed checks."""
    start = time.perf_counter()
    try:
        outcome = {"passed": True} | check()
    except (AssertionError, TwostrokeError, RuntimeError) as error:
        outcome = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    results[name] = outcome | {"seconds": round(time.perf_counter() - start, 2)}
    print(f"{'PASS' if outcome['passed'] else 'FAIL'}  {name}  {results[name]}", flush=True)


def read_config(model: Path | None) -> ModelConfig:
    """The config of the model, or of Llama-2-7B, with three layers, since all layers are alike."""
    with tempfile.TemporaryDirectory() as directory:
        if model is None:
            AutoConfig.for_model("llama", num_hidden_layers=3, **LLAMA_2_7B).save_pretrained(directory)
        config = load_model_config(model or Path(directory))
    return replace(config, num_layers=min(3, config.num_layers), sliding_windows=config.sliding_windows[:3])


def run_checks(
    api: TensorRT, config: ModelConfig, dtype: torch.dtype, profiles: tuple[Profile, ...], plans: Path
) -> dict[str, Any]:
    """Builds, checks and times. Raises ConfigError if there is nothing to check."""
    device = torch.device("cuda")
    subject, lines = make_subject(
        api, config, dtype, random_weights(config, dtype, device, 0), profiles, plans
    )
    tiny_config = load_model_config(EMBEDDED_MODEL)
    tiny_weights = load_weights(EMBEDDED_MODEL, tiny_config, dtype, device)
    tiny, tiny_lines = make_subject(api, tiny_config, dtype, tiny_weights, profiles, plans)
    synchronize()
    print("\n".join((*lines, *tiny_lines)), flush=True)
    results: dict[str, Any] = {"build": lines + tiny_lines, "checks": {}}
    checks = results["checks"]
    edges = sorted({size for profile in profiles for size in (profile.low, profile.best, profile.high)})
    graph_sizes = [size for size in (1, 2, 8, 32, 64, 128, 256) if size <= profiles[-1].high]
    model = load_hugging_face(EMBEDDED_MODEL, tiny_config, dtype).to(device)
    run_check("agreement with torch", lambda: check_agreement(subject, edges), checks)
    run_check("norms in float32", lambda: check_agreement(subject, [1, 20], scale=3000.0), checks)
    run_check("graphs in turn on shared contexts", lambda: check_graphs(subject, graph_sizes), checks)
    run_check("enqueue while the GPU sleeps", lambda: check_no_wait(subject, [1, 64]), checks)
    run_check("generation of the embedded model", lambda: check_generation(tiny, model, 32), checks)
    limits = Limits(profiles[-1].high, MAX_ROWS)
    backends = {
        "tensorrt": subject.tensorrt,
        "torch": torch_backend(subject.weights, config, limits.num_tokens),
        "plain": subject.torch,
    }
    results["times_us"] = measure_segments(backends, config, dtype, device, limits, time_on_gpu)
    return results


def print_times(times: dict[str, dict[int, dict[str, float]]]) -> None:
    """Prints times within a CUDA graph; `torch` is dense.backend=torch, `plain` its operators one by one."""
    print(f"\n{'segment':<8}{'size':>6}{'TensorRT µs':>14}{'torch µs':>12}{'plain torch µs':>17}")
    for segment, by_size in times.items():
        for size, us in by_size.items():
            print(f"{segment:<8}{size:>6}{us['tensorrt']:>14}{us['torch']:>12}{us['plain']:>17}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="shapes of this model; default: Llama-2-7B")
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--profiles", default=DenseSection().profiles)
    parser.add_argument("--output-dir", type=Path, metavar="PLANS", help="default: a temporary directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to save the results")
    arguments = parser.parse_args()
    gpu = current_gpu(torch.device("cuda"))
    if gpu is None:
        sys.exit(
            f"bench/tensorrt_check.py: torch {torch.__version__} sees no CUDA device, nothing was checked"
        )
    plans = arguments.output_dir or Path(tempfile.mkdtemp(prefix="plans-"))
    torch.manual_seed(0)
    try:
        api, config = load_tensorrt(), read_config(arguments.model)
        profiles, dtype = parse_profiles(arguments.profiles), getattr(torch, arguments.dtype)
        results = {"tensorrt": api.name, "torch": torch.__version__, "gpu": gpu.name, "num_sms": gpu.num_sms}
        results |= {"dtype": arguments.dtype, "profiles": arguments.profiles}
        print(results, flush=True)
        with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
            results |= run_checks(api, config, dtype, profiles, plans)
    except TwostrokeError as error:
        sys.exit(f"bench/tensorrt_check.py: {error}")
    print_times(results["times_us"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    return int(not all(check["passed"] for check in results["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
