"""A TensorRT plan loaded on a GPU: its tensors, execution contexts and layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import ConfigError
from services.dense_worker.tensorrt.constant_weights import host_weights


@dataclass(frozen=True, slots=True)
class TensorType:
    """Type and shape of an input or output of an engine."""

    dtype: torch.dtype | None  # None: a type that no segment uses
    shape: tuple[int, ...]  # -1 is a dynamic dimension


class Engine:
    """A plan loaded on a GPU; it creates execution contexts."""

    def __init__(
        self,
        title: str,
        trt: Any,
        dtypes: Mapping[Any, torch.dtype],
        log: Any,
        runtime: Any,
        engine: Any,
    ) -> None:
        """`title` is for messages, `trt` the TensorRT module, `log` its logger, `dtypes` maps its types.

        Only `TensorRT.load` calls this.
        """
        # Returns TensorRT's error messages since the last call.
        self.take_errors: Callable[[], str] = log.take_errors
        self._title = title
        self._trt = trt
        self._dtypes = dtypes
        self._log = log
        self._runtime = runtime  # must outlive the engine
        self._engine = engine
        self.num_profiles: int = engine.num_optimization_profiles

    def tensors(self) -> dict[str, TensorType]:
        """Types of all inputs and outputs, by name."""
        engine = self._engine
        return {
            name: TensorType(self._dtypes.get(engine.get_tensor_dtype(name)), tuple(engine.get_tensor_shape(name)))
            for name in map(engine.get_tensor_name, range(engine.num_io_tensors))
        }

    def refit(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives constants of the plan new values, by name. They pass through host memory; waits for the device.

        Raises ConfigError if the plan has no such constant, or one of another size or type.
        """
        try:
            refitter = self._trt.Refitter(self._engine, self._log)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"a plan's constants cannot be set: {self.take_errors() or error}") from error
        known = set(refitter.get_all_weights())
        kept = []  # until TensorRT has copied it
        for name, tensor in weights.items():
            kept.append(tensor.cpu())
            if name not in known or not refitter.set_named_weights(name, host_weights(self._trt, kept[-1])):
                reason = self.take_errors() or f"it has {', '.join(sorted(known)) or 'none'}"
                raise ConfigError(f"the plan has no constant {name} {tuple(tensor.shape)} that can be set: {reason}")
        if not refitter.refit_cuda_engine():
            raise ConfigError(f"TensorRT cannot set the constants of a plan: {self.take_errors()}")

    def context_bytes(self, num_profiles: int) -> int:
        """Device memory, in bytes, that a running context of any of the first `num_profiles` profiles needs."""
        for name in ("get_device_memory_size_for_profile_v2", "get_device_memory_size_for_profile"):
            if hasattr(self._engine, name):
                return max(map(getattr(self._engine, name), range(num_profiles)))
        return self._engine.device_memory_size  # 8.6 has one number for all profiles

    def create_context(self, profile: int, memory: torch.Tensor, stream: int) -> Any:
        """An execution context fixed to one profile, whose device memory is the caller's uint8 tensor `memory`.

        It can be used after the work that this call enqueues on `stream`. The methods of contexts are the same in every
        version.
        """
        engine, trt = self._engine, self._trt
        if hasattr(engine, "create_runtime_config"):
            config = engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
                # RTX: compile for a shape when it is set, not during a later run, which may be captured.
                strategies = trt.DynamicShapesKernelSpecializationStrategy
                config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
            context = engine.create_execution_context(config)
        elif hasattr(trt, "ExecutionContextAllocationStrategy"):
            context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        else:
            context = engine.create_execution_context_without_device_memory()
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise ConfigError(f"TensorRT has no context for profile {profile} of {self._title}: {self.take_errors()}")
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(memory.data_ptr(), memory.numel())
        else:
            context.device_memory = memory.data_ptr()
        return context

    def layers(self) -> list[Any]:
        """TensorRT's description of the engine's layers: for each a dict of name, tactic and so on, or a name."""
        inspector = self._engine.create_engine_inspector()
        text = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        try:
            return json.loads(text)["Layers"]
        except (ValueError, LookupError, TypeError):
            return [text]
