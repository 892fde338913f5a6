"""A stand-in for the modules tensorrt (8.6, 10.0, 11.4) and tensorrt_rtx, recording every call.

Each version has the names that the published wheel of that version has, and lacks those it lacks, as far as
services/dense_worker/tensorrt/api.py could use them. A "plan" holds the ONNX model; an execution context
really runs it, by onnxruntime, from and to the addresses it was given, so a wrong address shows in the
numbers. What TensorRT would refuse is refused: False or None is returned and the logger told why. What ended
the process of the real 8.6.0 raises `ProcessCrash`.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import onnx

from tests.support.workers.fake_tensorrt_runtime import DTYPES, DataType, FakeRuntime, ILogger, ProcessCrash

Call = tuple[Any, ...]


def make_tensorrt(version: str, *, is_rtx: bool = False, has_gpu: bool = True, gpu: str = "GPU A") -> FakeTensorRT:
    """A module; `calls` holds what was called on it and on everything it made, in order."""
    return FakeTensorRT(version, is_rtx, has_gpu, gpu)


class FakeTensorRT:
    """Attributes as of the version's module. `fail` is the name of a call that is to fail."""

    def __init__(self, version: str, is_rtx: bool, has_gpu: bool, gpu: str) -> None:
        major = 11 if is_rtx else int(version.split(".")[0])
        self.__name__ = "tensorrt_rtx" if is_rtx else "tensorrt"
        self.__version__ = version
        self.calls: list[Call] = []
        self.fail: str | None = None
        self.num_contexts = 0
        self.runs: list[int] = []  # the number of the context of each execution
        self.is_capturing = False  # whether the stream is being captured; it runs nevertheless
        self.gpu = gpu
        self.major, self.has_gpu, self.is_rtx = major, has_gpu, is_rtx
        self.float32, self.float16, self.int32 = DataType.FLOAT, DataType.HALF, DataType.INT32
        self.ILogger = ILogger
        self.ProfilingVerbosity = SimpleNamespace(DETAILED="detailed")
        self.LayerInformationFormat = SimpleNamespace(JSON="json")
        self.LayerType = SimpleNamespace(CONSTANT="constant", OTHER="other")
        network_flags, builder_flags = {}, {"TF32": "TF32"}
        if major < 11:
            network_flags["EXPLICIT_BATCH"] = 0
            builder_flags |= {"FP16": "FP16", "OBEY_PRECISION_CONSTRAINTS": "OBEY_PRECISION_CONSTRAINTS"}
        if major < 10:
            self.PreviewFeature = SimpleNamespace(PROFILE_SHARING_0806="PROFILE_SHARING_0806")
        if major >= 10:
            self.bfloat16 = DataType.BF16
            self.int8, self.uint8, self.fp8 = DataType.INT8, DataType.UINT8, DataType.FP8
            network_flags["STRONGLY_TYPED"] = 0 if major >= 11 else 1
            self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")
        if is_rtx:
            builder_flags["REQUIRE_USER_ALLOCATION"] = "REQUIRE_USER_ALLOCATION"
            self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
            names = ("NONE", "CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
            self.ComputeCapability = SimpleNamespace(__members__=dict.fromkeys(names))
        self.NetworkDefinitionCreationFlag = SimpleNamespace(**network_flags)
        self.BuilderFlag = SimpleNamespace(**builder_flags)

    @property
    def timings_header(self) -> bytes:
        """How a timing cache of this version begins."""
        return f"timings of {self.__version__};".encode()

    def record(self, *call: Any) -> bool:
        """Notes a call; False if it is the one that is to fail."""
        self.calls.append(call)
        return call[0] != self.fail

    def named(self, *names: str) -> list[Call]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call[0] in names]

    def Builder(self, logger: ILogger) -> _Builder:
        if not (self.has_gpu or self.is_rtx):
            severity = ILogger.WARNING if self.major < 10 else ILogger.ERROR  # seen with 8.6.0
            logger.log(severity, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return _Builder(self, logger)

    def OnnxParser(self, network: _Network, logger: ILogger) -> _Parser:
        return _Parser(network)

    def Runtime(self, logger: ILogger) -> FakeRuntime:
        if not self.has_gpu:
            raise ProcessCrash("trt.Runtime() without a working driver")
        return FakeRuntime(self, logger)


class _Builder:
    def __init__(self, trt: FakeTensorRT, logger: ILogger) -> None:
        self._trt, self._logger = trt, logger

    def create_network(self, flags: int) -> _Network:
        self._trt.record("create_network", flags)
        return _Network(self._trt, flags)

    def create_builder_config(self) -> _BuilderConfig:
        return _BuilderConfig(self._trt)

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: _BuilderConfig) -> bytes | None:
        trt = self._trt
        if not trt.record("build_serialized_network"):
            self._logger.log(ILogger.ERROR, "no tactic found")
            return None
        is_half = any(tensor.dtype == DataType.HALF for tensor in network.inputs)
        if trt.major < 10 and is_half and "FP16" not in config.flags:
            self._logger.log(ILogger.ERROR, "network has FP16 tensors but the flag FP16 is not set")
            return None
        for name in (tensor.name for tensor in network.inputs if -1 in tensor.shape):
            if not all(name in profile.sizes for profile in config.profiles):
                self._logger.log(ILogger.ERROR, f"{name}: dynamic, but no profile gives its sizes")
                return None
        header = {
            "version": trt.__version__,
            "gpu": trt.gpu,
            "profiles": [profile.sizes for profile in config.profiles],
            "shares_profiles": trt.major >= 10 or "PROFILE_SHARING_0806" in config.flags,
        }
        return json.dumps(header).encode() + b"\0" + network.onnx_bytes


class _BuilderConfig:
    def __init__(self, trt: FakeTensorRT) -> None:
        self._trt = trt
        self.flags = {"TF32"}
        self.profiles: list[_Profile] = []
        self._cache: bytes | None = None

    def set_flag(self, flag: str) -> None:
        self._trt.record("set_flag", flag)
        self.flags.add(flag)

    def clear_flag(self, flag: str) -> None:
        self._trt.record("clear_flag", flag)
        self.flags.discard(flag)

    def set_preview_feature(self, feature: str, is_on: bool) -> None:
        assert is_on
        self.flags.add(feature)

    @property
    def builder_optimization_level(self) -> int:
        return 3

    @builder_optimization_level.setter
    def builder_optimization_level(self, level: int) -> None:
        self._trt.record("builder_optimization_level", level)

    def add_optimization_profile(self, profile: _Profile) -> int:
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, data: bytes) -> bytes | None:
        """None if the bytes are another version's."""
        self._trt.record("create_timing_cache", data)
        if data and not data.startswith(b"timings of "):
            raise ProcessCrash("a damaged timing cache")
        return None if data and not data.startswith(self._trt.timings_header) else data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        if not self._trt.record("set_timing_cache", cache):
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> SimpleNamespace | None:
        """None if none was set."""
        if self._cache is None:
            return None
        data = (self._cache or self._trt.timings_header) + b"timed;"
        return SimpleNamespace(serialize=lambda: data)


class _Profile:
    def __init__(self) -> None:
        self.sizes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, name: str, low: tuple[int, ...], best: tuple[int, ...], high: tuple[int, ...]) -> None:
        assert low <= best <= high
        self.sizes[name] = [low, best, high]


class _Network:
    """What 8.6 shows of a parsed model: one layer for each node, with its precision to be set."""

    def __init__(self, trt: FakeTensorRT, flags: int) -> None:
        self.trt, self.flags = trt, flags
        self.onnx_bytes = b""
        self.inputs: list[SimpleNamespace] = []
        self.layers: list[_Layer] = []

    num_inputs = property(lambda self: len(self.inputs))
    num_layers = property(lambda self: len(self.layers))

    def get_input(self, index: int) -> SimpleNamespace:
        return self.inputs[index]

    def get_layer(self, index: int) -> _Layer:
        return self.layers[index]


class _Layer:
    type = "other"
    num_outputs = 1

    def __init__(self, trt: FakeTensorRT, name: str) -> None:
        self._trt, self.name = trt, name

    @property
    def precision(self) -> DataType:
        raise AssertionError("only set")

    @precision.setter
    def precision(self, dtype: DataType) -> None:
        self._trt.record("precision", self.name, dtype)

    def set_output_type(self, index: int, dtype: DataType) -> None:
        self._trt.record("set_output_type", self.name, index, dtype)


class _Parser:
    def __init__(self, network: _Network) -> None:
        self._network = network
        self._errors: list[str] = []

    num_errors = property(lambda self: len(self._errors))

    def parse(self, data: bytes) -> bool:
        trt, network = self._network.trt, self._network
        if not trt.record("parse"):
            self._errors.append("unsupported operator")
            return False
        model = onnx.load_from_string(data)
        limit = 17 if trt.major < 10 else 24
        if model.opset_import[0].version > limit:
            self._errors.append(f"opset {model.opset_import[0].version} is newer than {limit}")
            return False
        network.onnx_bytes = data
        for value in model.graph.input:
            tensor_type = value.type.tensor_type
            shape = tuple(-1 if dim.dim_param else dim.dim_value for dim in tensor_type.shape.dim)
            network.inputs.append(SimpleNamespace(name=value.name, shape=shape, dtype=DTYPES[tensor_type.elem_type][0]))
        network.layers = [_Layer(trt, node.name) for node in model.graph.node]
        return True

    def get_error(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(desc=lambda: self._errors[index])
