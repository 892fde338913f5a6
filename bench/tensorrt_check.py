"""TensorRT against torch on the GPU at hand: builds the plans, then checks and times them.

    python bench/tensorrt_check.py --dtype float16 --json results.json

Prints microseconds for each segment and number of tokens; then checks the errors of TensorRT and torch against a wider
computation in every profile (`tensorrt_precision.py` says what the limits are), the same for values whose squares
exceed float16, CUDA graphs of all captured sizes in random order, a step without waiting, and generations of the
embedded model. Weights are random in the shape of Llama-2-7B, or of `--model DIR`. The exit status is 1 if a check
fails; a check that could not run counts as failed and says why. The program has no built-in figures: it prints only
what it has measured.
"""

from __future__ import annotations

import argparse
import json
import random
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

from bench.tensorrt_precision import (
    WIDER,
    Comparison,
    error_of,
    in_dtype,
    print_comparisons,
    summing_backend,
    worst_by_name,
)
from services.common.batch_buckets import token_buckets
from services.common.config import EMBEDDED_MODEL, DenseSection
from services.common.errors import TwostrokeError
from services.common.model_config import ModelConfig, load_model_config
from services.dense_worker.backends import DenseBackend
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.backends.torch_on_device import torch_backend
from services.dense_worker.model.model_weights import ModelWeights
from services.dense_worker.model.weights import load_weights, random_weights
from services.dense_worker.tensorrt.api import TensorRT, load_tensorrt
from services.dense_worker.tensorrt.backend import TensorRTBackend
from services.dense_worker.tensorrt.engine_plan_builder import EnginePlanBuilder
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlanCache, EnginePlans
from services.dense_worker.tensorrt.engine_segments import TensorRTSegments
from services.dense_worker.tensorrt.export_check import OneSequenceAttention, greedy, load_hugging_face
from services.dense_worker.tensorrt.gpu import current_gpu, current_stream, synchronize
from services.dense_worker.tensorrt.measure import measure_segments, time_on_gpu
from services.dense_worker.tensorrt.onnx_segments import export_networks
from services.dense_worker.tensorrt.profiles import Limits, Profile, parse_profiles

LLAMA_2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
MAX_ROWS = 64
MAX_GRAPH_SEQS = 64  # scheduler.max_num_seqs, from which the captured sizes follow
NUM_GRAPH_ROUNDS = 2
TINY_PROFILES = "1-1,2-64"  # of the embedded model, enough for PROMPTS and what follows them
PROMPTS = ([1, 306, 27, 9, 400], [1, 77], [1, *range(3, 43)])
SLEEP_CYCLES = 2_000_000_000  # about a second


@dataclass(frozen=True, slots=True)
class Subject:
    """A model whose segments run with TensorRT and with torch."""

    api: TensorRT
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    weights: ModelWeights
    profiles: tuple[Profile, ...]
    plans: EnginePlans
    tensorrt: TensorRTSegments
    torch: TorchBackend

    @property
    def may_sum_in_float16(self) -> bool:
        """Whether this TensorRT may sum products in float16: before 10 no setting prevents it."""
        return self.dtype == torch.float16 and not self.api.is_strongly_typed

    def references(self) -> dict[str, DenseBackend]:
        """Backends by torch: `exact` in the wider dtype, `torch`, and `summed` if TensorRT may sum in float16."""
        exact = TorchBackend(in_dtype(self.weights, WIDER[self.dtype]))
        summed = {"summed": summing_backend(self.weights)} if self.may_sum_in_float16 else {}
        return {"exact": exact, "torch": self.torch} | summed

    def inputs(self, num_tokens: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Random inputs of all segments."""
        config, options = self.config, {"dtype": self.dtype, "device": self.device}
        return {
            "token_ids": torch.randint(config.vocab_size, (num_tokens,), device=self.device),
            "attn_out": torch.randn(num_tokens, config.attn_size, **options),
            "residual": torch.randn(num_tokens, config.hidden_size, **options) * scale,
            "rows": torch.randint(num_tokens, (min(num_tokens, MAX_ROWS),), device=self.device),
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
    segments = TensorRTSegments(api, found, weights, config, limits, current_stream)
    by_torch = TorchBackend(weights)
    return Subject(api, config, dtype, device, weights, profiles, found, segments, by_torch), lines


def run_segments(
    backend: DenseBackend, config: ModelConfig, inputs: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Runs each segment in a dtype on its inputs; returns the outputs by name."""
    token_ids, rows = inputs["token_ids"], inputs["rows"]
    attn_out, residual = (inputs[name].to(dtype) for name in ("attn_out", "residual"))
    shape, options = (len(token_ids), config.qkv_size), {"dtype": dtype, "device": rows.device}
    first_qkv, middle_qkv = torch.zeros(shape, **options), torch.zeros(shape, **options)
    outputs = {"first.residual": backend.first(token_ids, first_qkv), "first.qkv": first_qkv}
    outputs["middle.residual"] = backend.middle(0, attn_out, residual, middle_qkv)
    return outputs | {"middle.qkv": middle_qkv, "last.logits": backend.last(attn_out, residual, rows)}


def compare_outputs(
    subject: Subject,
    references: dict[str, DenseBackend],
    inputs: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    title: str = "",
) -> list[Comparison]:
    """The errors of TensorRT's outputs `found` for these inputs, and of torch's."""
    by_reference = {}
    for name, backend in references.items():
        dtype = WIDER[subject.dtype] if name == "exact" else subject.dtype
        by_reference[name] = run_segments(backend, subject.config, inputs, dtype)
    comparisons = []
    for name, exact in by_reference["exact"].items():
        errors = {reference: error_of(outputs[name], exact) for reference, outputs in by_reference.items()}
        tensorrt, size = error_of(found[name], exact), len(inputs["token_ids"])
        by_torch, summed = errors["torch"], errors.get("summed")
        comparisons.append(Comparison(title + name, size, tensorrt, by_torch, summed, subject.dtype))
    return comparisons


def verdict(comparisons: list[Comparison]) -> dict[str, Any]:
    """The worst comparisons, printed and as JSON. Raises AssertionError that names those beyond their limits."""
    print_comparisons(comparisons)
    bad = [f"{each.name} for {each.num_tokens} tokens" for each in comparisons if not each.is_good]
    assert not bad, f"errors beyond the limit: {', '.join(bad)}"
    return {each.name: each.as_json() for each in worst_by_name(comparisons)}


def check_agreement(subject: Subject, sizes: list[int], scale: float = 1.0) -> dict[str, Any]:
    """TensorRT's errors are at most MAX_RATIO times torch's. Raises AssertionError."""
    references, comparisons = subject.references(), []
    for size in sizes:
        inputs = subject.inputs(size, scale)
        found = run_segments(subject.tensorrt, subject.config, inputs, subject.dtype)
        comparisons += compare_outputs(subject, references, inputs, found)
    return verdict(comparisons)


def check_graphs(subject: Subject, sizes: list[int], seed: int = 0) -> dict[str, Any]:
    """Replays graphs of all sizes in random order, on new inputs, between uncaptured runs of other sizes.

    The outputs must equal those of uncaptured runs, or be within the limits: a kernel may sum in any order.
    """
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
    stream, config = torch.cuda.current_stream(), subject.config
    for size in reversed(sizes):
        inputs = subject.inputs(size)
        run_segments(subject.tensorrt, config, inputs, subject.dtype)  # a new size needs this once
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = run_segments(subject.tensorrt, config, inputs, subject.dtype)
        graphs[size] = graph, inputs, outputs
    references, comparisons, num_unequal = subject.references(), [], 0
    generator = random.Random(seed)
    for _ in range(NUM_GRAPH_ROUNDS):
        for size in generator.sample(sizes, len(sizes)):
            graph, inputs, outputs = graphs[size]
            for name, value in subject.inputs(size).items():
                inputs[name].copy_(value)
            uncaptured = run_segments(subject.tensorrt, config, inputs, subject.dtype)
            other = generator.choice(sizes)
            run_segments(subject.tensorrt, config, subject.inputs(other), subject.dtype)
            graph.replay()
            if not all(torch.equal(outputs[name], value) for name, value in uncaptured.items()):
                num_unequal += 1
                comparisons += compare_outputs(subject, references, inputs, outputs)
    return verdict(comparisons) | {"num_graphs": len(sizes), "num_replays_unequal_to_uncaptured": num_unequal}


def check_no_wait(subject: Subject, sizes: list[int]) -> dict[str, float]:
    """Checks that the host can enqueue a whole step while the GPU sleeps."""
    inputs = {size: subject.inputs(size) for size in sizes}
    for size in sizes:
        run_segments(subject.tensorrt, subject.config, inputs[size], subject.dtype)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start = time.perf_counter()
    run_segments(subject.tensorrt, subject.config, inputs[sizes[-1]], subject.dtype)
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
    detail = outcome.get("error") or ", ".join(f"{k} {v}" for k, v in outcome.items() if not isinstance(v, dict | bool))
    print(f"{'PASS' if outcome['passed'] else 'FAIL'}  {name}  {results[name]['seconds']} s  {detail}", flush=True)


def read_config(model: Path | None) -> ModelConfig:
    """The config of the model, or of Llama-2-7B, with three layers, since all layers are alike."""
    with tempfile.TemporaryDirectory() as directory:
        if model is None:
            AutoConfig.for_model("llama", num_hidden_layers=3, **LLAMA_2_7B).save_pretrained(directory)
        config = load_model_config(model or Path(directory))
    return replace(config, num_layers=min(3, config.num_layers), sliding_windows=config.sliding_windows[:3])


def run_checks(
    api: TensorRT,
    config: ModelConfig,
    dtype: torch.dtype,
    profiles: tuple[Profile, ...],
    plans: Path,
) -> dict[str, Any]:
    """Builds, checks and times. Raises ConfigError if there is nothing to check."""
    device = torch.device("cuda")
    subject, lines = make_subject(
        api, config, dtype, random_weights(config, dtype, device, 0), profiles, plans
    )
    tiny_config = load_model_config(EMBEDDED_MODEL)
    tiny_weights = load_weights(EMBEDDED_MODEL, tiny_config, dtype, device)
    tiny, tiny_lines = make_subject(api, tiny_config, dtype, tiny_weights, parse_profiles(TINY_PROFILES), plans)
    synchronize()
    print("\n".join((*lines, *tiny_lines)), flush=True)
    results: dict[str, Any] = {"build": lines + tiny_lines, "checks": {}}
    checks = results["checks"]
    edges = sorted({size for profile in profiles for size in (profile.low, profile.best, profile.high)})
    graph_sizes = token_buckets(MAX_GRAPH_SEQS, profiles[-1].high)
    limits = Limits(profiles[-1].high, MAX_ROWS)
    backends = {
        "tensorrt": subject.tensorrt,
        "torch": torch_backend(subject.weights, config, limits.num_tokens),
        "plain": subject.torch,
    }
    results["times_us"] = measure_segments(backends, config, dtype, device, limits, time_on_gpu)
    print_times(results["times_us"])
    model = load_hugging_face(EMBEDDED_MODEL, tiny_config, dtype).to(device)
    run_check("agreement with torch", lambda: check_agreement(subject, edges), checks)
    run_check("norms in float32", lambda: check_agreement(subject, [1, 20], scale=3000.0), checks)
    run_check("graphs of all sizes in random order", lambda: check_graphs(subject, graph_sizes), checks)
    run_check("enqueue while the GPU sleeps", lambda: check_no_wait(subject, [1, 64]), checks)
    run_check("generation of the embedded model", lambda: check_generation(tiny, model, 32), checks)
    return results


def print_times(times: dict[str, dict[int, dict[str, float]]]) -> None:
    """Prints times within a CUDA graph; `torch` is dense.backend=torch, `plain` its operators one by one."""
    print(f"{'segment':<8}{'size':>6}{'TensorRT µs':>14}{'torch µs':>12}{'plain torch µs':>17}{'TensorRT/torch':>17}")
    for segment, by_size in times.items():
        for size, us in by_size.items():
            ratio = f"{us['tensorrt'] / us['torch']:.2f}"
            print(f"{segment:<8}{size:>6}{us['tensorrt']:>14}{us['torch']:>12}{us['plain']:>17}{ratio:>17}", flush=True)


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
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    return int(not all(check["passed"] for check in results["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
