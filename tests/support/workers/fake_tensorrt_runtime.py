"""The part of `fake_tensorrt.py` that loads and runs plans: runtime, engines, execution contexts."""

from __future__ import annotations

import ctypes
import enum
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto

if TYPE_CHECKING:
    from tests.support.workers.fake_tensorrt import FakeTensorRT


class ProcessCrash(BaseException):
    """The end of the process, which nothing can catch."""


class DataType(enum.Enum):
    FLOAT, HALF, INT32, BF16, INT8, UINT8, FP8 = range(7)


DTYPES = {
    TensorProto.FLOAT: (DataType.FLOAT, np.float32),
    TensorProto.FLOAT16: (DataType.HALF, np.float16),
    TensorProto.INT32: (DataType.INT32, np.int32),
    TensorProto.BFLOAT16: (DataType.BF16, np.uint16),
    TensorProto.INT8: (DataType.INT8, np.int8),
    TensorProto.UINT8: (DataType.UINT8, np.uint8),
    TensorProto.FLOAT8E4M3FN: (DataType.FP8, np.uint8),
}


class Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def log(self, severity: Severity, message: str) -> None:
        raise NotImplementedError


class FakeRuntime:
    def __init__(self, trt: FakeTensorRT, logger: ILogger) -> None:
        self._trt, self._logger = trt, logger

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        header, _, model = plan.partition(b"\0")
        try:
            built = json.loads(header)
        except ValueError:
            self._logger.log(ILogger.ERROR, "magic tag does not match")
            return None
        for name, own in (("version", self._trt.__version__), ("gpu", self._trt.gpu)):
            if built[name] != own:
                self._logger.log(ILogger.ERROR, f"the engine plan file is of another {name}: {built[name]}, not {own}")
                return None
        kind = {8: Engine8, 10: Engine10}.get(self._trt.major, Engine11)
        engine = kind(self._trt, self._logger, built, model)
        self._trt.record("deserialize_cuda_engine", engine.title, engine.high_sizes)
        return engine


class Engine:
    def __init__(self, trt: FakeTensorRT, logger: ILogger, built: dict[str, Any], model: bytes) -> None:
        self.trt, self.logger, self.profiles = trt, logger, built["profiles"]
        self.shares_profiles = built["shares_profiles"]
        self.contexts = WeakSet[_Context]()
        graph = onnx.load_from_string(model).graph
        self.title = graph.name.rpartition("_")[2]
        self.values = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
        self.input_names = [value.name for value in graph.input]
        self.output_names = [value.name for value in graph.output]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # its FP8 kernels are not all there
        is_bfloat16 = any(value.elem_type == TensorProto.BFLOAT16 for value in self.values.values())
        self.session = None if is_bfloat16 else onnxruntime.InferenceSession(model, options)
        self.num_io_tensors = len(self.values)
        # The greatest number of tokens, of `last` of rows, of each profile.
        self.high_sizes = [min(high[0] for _, _, high in profile.values()) for profile in self.profiles]

    def get_tensor_name(self, index: int) -> str:
        return list(self.values)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DTYPES[self.values[name].elem_type][0]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if dim.dim_param else dim.dim_value for dim in self.values[name].shape.dim)

    def create_engine_inspector(self) -> SimpleNamespace:
        layers = {"Layers": [{"Name": "{ForeignNode[a...b]}", "LayerType": "Myelin", "TacticName": "gemm_add"}]}
        return SimpleNamespace(get_engine_information=lambda kind: json.dumps(layers))

    def memory_size(self, profile: int) -> int:
        """More for larger sizes."""
        return 1000 * self.high_sizes[profile] + len(self.title)

    def make_context(self, kind: str) -> Any:
        if not self.trt.record(kind, self.title):
            self.logger.log(ILogger.ERROR, "out of memory")
            return None
        return (Context11 if self.trt.major >= 11 else Context8)(self)


class Engine8(Engine):
    @property
    def device_memory_size(self) -> int:
        return self.memory_size(len(self.profiles) - 1)

    def create_execution_context_without_device_memory(self) -> Any:
        return self.make_context("create_execution_context_without_device_memory")


class Engine10(Engine8):
    def get_device_memory_size_for_profile(self, profile: int) -> int:
        return self.memory_size(profile)

    def create_execution_context(self, strategy: str) -> Any:
        assert strategy == "user managed"
        return self.make_context("create_execution_context")


class Engine11(Engine):
    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return self.memory_size(profile)

    def create_runtime_config(self) -> _RuntimeConfig:
        return _RuntimeConfig()

    def create_execution_context(self, config: _RuntimeConfig) -> Any:
        assert config.strategy == "user managed"
        if self.trt.is_rtx:
            assert config.dynamic_shapes_kernel_specialization_strategy == "eager"
        return self.make_context("create_execution_context")


class _RuntimeConfig:
    strategy = dynamic_shapes_kernel_specialization_strategy = None

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class _Context:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._trt = engine, engine.trt
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = 0
        self._is_captured = False  # whether a graph depends on its state
        engine.contexts.add(self)
        self._number = self._trt.num_contexts
        self._trt.num_contexts += 1

    @property
    def _high_size(self) -> int:
        """Of the profile; calls record it, because all plans with one profile have the same index for it."""
        return self._engine.high_sizes[self._profile]

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert not self._trt.is_capturing, "a graph cannot hold what this does"
        others = [each for each in self._engine.contexts if each is not self and each._profile == profile]
        if others and not self._engine.shares_profiles:
            raise ProcessCrash(f"profile {profile} belongs to another context")  # seen with 8.6.0
        self._profile = profile
        return self._trt.record("set_optimization_profile_async", self._engine.title, self._high_size, stream)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        engine = self._engine
        assert not (self._is_captured or self._trt.is_capturing), "a captured graph depends on the present shapes"
        ok = self._trt.record("set_input_shape", engine.title, self._high_size, name, shape)
        low, _, high = engine.profiles[self._profile][name]
        if not all(least <= size <= greatest for least, size, greatest in zip(low, shape, high, strict=True)):
            engine.logger.log(ILogger.ERROR, f"{name}: {list(shape)} is outside of profile {self._profile}")
            return False
        self._shapes[name] = shape
        return ok

    def set_tensor_address(self, name: str, address: int) -> bool:
        ok = self._trt.record("set_tensor_address", self._engine.title, self._high_size, name, address)
        self._addresses[name] = address
        return ok and name in self._engine.values

    def execute_async_v3(self, stream: int) -> bool:
        engine = self._engine
        if not self._trt.record("execute_async_v3", engine.title, self._high_size, stream):
            engine.logger.log(ILogger.ERROR, "an illegal memory access was encountered")
            return False
        assert self._memory, "no device memory"
        self._is_captured |= self._trt.is_capturing
        self._trt.runs.append(self._number)
        inputs = {name: self._array(name, self._shape(name)) for name in engine.input_names}
        values = {name: _ort_value(array, engine.values.get(name)) for name, array in inputs.items()}
        outputs = engine.session.run_with_ort_values(engine.output_names, values)
        for name, value in zip(engine.output_names, outputs, strict=True):
            result = value.numpy()
            self._array(name, result.shape)[:] = result
        return True

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._shapes.get(name, self._engine.get_tensor_shape(name))
        assert -1 not in shape, f"{name} has no shape"
        return shape

    def _array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The memory at the address given for `name`; no copy."""
        dtype = np.dtype(DTYPES[self._engine.values[name].elem_type][1])
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = (ctypes.c_char * num_bytes).from_address(self._addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)


def _ort_value(array: np.ndarray, kind: Any) -> onnxruntime.OrtValue:
    """The array as an input of a session; numpy has no FP8."""
    if kind is not None and kind.elem_type == TensorProto.FLOAT8E4M3FN:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, TensorProto.FLOAT8E4M3FN)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


class Context8(_Context):
    @property
    def device_memory(self) -> int:
        return self._memory

    @device_memory.setter
    def device_memory(self, address: int) -> None:
        self._trt.record("device_memory", self._engine.title, self._high_size, address)
        self._memory = address


class Context11(_Context):
    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self._engine.memory_size(self._profile)
        self._trt.record("device_memory", self._engine.title, self._high_size, address)
        self._memory = address
