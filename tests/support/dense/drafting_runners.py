"""The runners with which tests of drafts on the device run their steps: for a CPU, and for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import torch

from services.common.model_config import ModelConfig
from services.dense_worker.runner.cuda_model_runner import CudaModelRunner
from services.dense_worker.runner.model_runner import ModelRunner
from services.dense_worker.runner.step_hook import StepHook
from services.dense_worker.sampling.sampler import Sampler

MAX_NUM_SEQS, MAX_NUM_TOKENS = 12, 64


def cpu_runner(backend: Any, config: ModelConfig, sampler: Sampler, hook: StepHook) -> ModelRunner:
    return ModelRunner(backend, sampler, config.num_layers, MAX_NUM_SEQS, hook=hook)


def cuda_runner(backend: Any, config: ModelConfig, sampler: Sampler, hook: StepHook) -> CudaModelRunner:
    options: dict[str, Any] = {"captures_lazily": True, "hook": hook}
    return CudaModelRunner(backend, sampler, config, torch.float32, MAX_NUM_SEQS, MAX_NUM_TOKENS, **options)
