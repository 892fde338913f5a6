"""Plans of the embedded model with quantized weights, in float16, against the reference in float32."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.tensorrt_check import make_subject, run_segments
from services.common.config import EMBEDDED_MODEL
from services.common.model_config import load_model_config
from services.dense_worker.backends.torch_backend import TorchBackend
from services.dense_worker.model.weights import load_weights
from services.dense_worker.tensorrt.api import TensorRT
from services.dense_worker.tensorrt.engine_plan_cache import EnginePlans
from services.dense_worker.tensorrt.profiles import parse_profiles
from tests.support.quantized.checkpoints import FORMATS, quantize_model_dir

NUM_LAYERS = 2  # the fewest with a `middle` segment
PROFILES, SIZES = "1-64@16", (1, 16, 64)


@dataclass(frozen=True, slots=True)
class BuiltPlans:
    """What was built, and how well it computes."""

    plans: EnginePlans
    errors: dict[str, float]  # ‖found − reference‖ / ‖reference‖ by number of tokens and output


def build_and_compare(api: TensorRT, name: str, directory: Path, device: torch.device) -> BuiltPlans:
    """Builds a plan of each segment with weights in the format `name`, and runs it for several numbers of tokens.

    The inputs have a row of zeros, which has no greatest value to be scaled by, beside random ones.
    """
    path = directory / "model"
    shutil.copytree(EMBEDDED_MODEL, path)
    quantize_model_dir(path, FORMATS[name])
    config = load_model_config(path, NUM_LAYERS)
    weights, exact = (load_weights(path, config, dtype, device) for dtype in (torch.float16, torch.float32))
    subject, _ = make_subject(api, config, torch.float16, weights, parse_profiles(PROFILES), directory / "plans")
    reference, errors = TorchBackend(exact), {}
    for num_tokens in SIZES:
        inputs = subject.inputs(num_tokens)
        if num_tokens > 1:
            inputs["attn_out"][-1] = 0.0
        by_plans = run_segments(subject.tensorrt, config, inputs, torch.float16)
        by_reference = run_segments(reference, config, inputs, torch.float32)
        for output, expected in by_reference.items():
            error = (by_plans[output].float() - expected).norm() / expected.norm()
            errors[f"{num_tokens} {output}"] = error.item()
    return BuiltPlans(subject.plans, errors)
