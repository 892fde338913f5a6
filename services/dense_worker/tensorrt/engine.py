"""A TensorRT plan loaded on a GPU: its tensors, execution contexts and layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.common.errors import ConfigError


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

    def tensors(self) -> dict[str, TensorType]:
        """Types of all inputs and outputs, by name."""
        engine = self._engine
        return {
            name: TensorType(self._dtypes.get(engine.get_tensor_dtype(name)), tuple(engine.get_tensor_shape(name)))
            for name in map(engine.get_tensor_name, range(engine.num_io_tensors))
        }

    @property
    def context_bytes(self) -> int:
        """Device memory, in bytes, that a running context needs."""
        for name in ("get_device_memory_size_for_profile_v2", "get_device_memory_size_for_profile"):
            if hasattr(self._engine, name):
                return getattr(self._engine, name)(0)
        return self._engine.device_memory_size

    def create_context(self, memory: torch.Tensor, stream: int) -> Any:
        """An execution context, whose device memory is the caller's uint8 tensor `memory`.

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
        if context is None or not context.set_optimization_profile_async(0, stream):
            raise ConfigError(f"TensorRT has no context for {self._title}: {self.take_errors()}")
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
