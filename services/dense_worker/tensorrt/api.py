"""One interface to the Python APIs of TensorRT 8.6 to 11 and TensorRT-RTX. No other file imports TensorRT.

Differences: 8.6 picks precisions itself, within flags, and has no bfloat16; 10 and later run the precisions of the
network ("strongly typed"); 11 and RTX have dropped older names. The code checks for attributes, not for versions.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog
import torch

from services.common.errors import ConfigError
from services.dense_worker.tensorrt.engine import Engine
from services.dense_worker.tensorrt.gpu import Gpu, check_driver

log = structlog.get_logger()

# The highest: a build tries more. With 8.6.0 on an H200 a `middle` segment of Llama-2-7B then takes 118 µs instead of
# 154 at one token, and 134 instead of 159 at 16 (bench/results/tensorrt.md).
OPTIMIZATION_LEVEL = 5
MAX_WARNINGS = 8  # kept for the message of an exception

MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")  # the first installed one is used
INSTALL = (
    "TensorRT is not installed: `pip install tensorrt` (8.6 or later, data centre GPUs such as the H200), or "
    "`pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings` (TensorRT-RTX, RTX GPUs)"
)
# Prefix of the names of ONNX nodes that compute in float32 although the model's dtype is narrower. TensorRT 8.6
# chooses precisions itself and must not change these nodes.
FLOAT32_MARK = "float32/"
Sizes = tuple[int, int, int]  # the smallest, the one to tune for, the largest


def load_tensorrt(import_module: Callable[[str], Any] = importlib.import_module) -> TensorRT:
    """The installed TensorRT. Raises ConfigError that says what to install, or why the import fails."""
    for name in MODULES:
        try:
            return TensorRT(import_module(name), check_driver)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise ConfigError(f"{name} is installed but lacks the module {error.name}") from error
        except (ImportError, OSError) as error:
            raise ConfigError(f"{name} is installed but cannot be imported: {error}") from error
    raise ConfigError(INSTALL)


def is_installed() -> bool:
    """Whether a TensorRT module is installed; importing it may still fail."""
    return any(importlib.util.find_spec(name) for name in MODULES)


class TensorRT:
    """One imported TensorRT module."""

    def __init__(self, module: Any, check_driver: Callable[[], None] = lambda: None) -> None:
        """`check_driver` raises ConfigError where CUDA does not work; there, `module.Runtime` ends the process."""
        self._trt = module
        self._check_driver = check_driver
        self.is_rtx = module.__name__.startswith("tensorrt_rtx")
        self.version: str = module.__version__
        self.name = f"{'TensorRT-RTX' if self.is_rtx else 'TensorRT'} {self.version}"
        self._dtypes: dict[Any, torch.dtype] = {
            module.float32: torch.float32,
            module.float16: torch.float16,
            module.int32: torch.int32,
        }
        if self.is_strongly_typed:  # 8.6 has some of the names, but cannot build all segments with such inputs
            self._dtypes |= {
                module.bfloat16: torch.bfloat16,
                module.int8: torch.int8,
                module.uint8: torch.uint8,
                module.fp8: torch.float8_e4m3fn,
            }
        self._log = _make_log(module)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype that this TensorRT cannot compute in."""
        if dtype not in self._dtypes.values():
            raise ConfigError(
                f"{self.name} has no {str(dtype)[6:]}: use float16 (model.dtype=float16, --dtype float16), "
                "or install TensorRT 10 or later"
            )

    def check_codes(self, dtypes: Iterable[torch.dtype]) -> None:
        """Raises ConfigError for a type of the codes of quantized weights that this TensorRT cannot be given."""
        for dtype in dtypes:
            if dtype not in self._dtypes.values():
                raise ConfigError(
                    f"{self.name} is given no quantized weights ({str(dtype)[6:]}): "
                    "set dense.backend to torch, or install TensorRT 10 or later"
                )

    def check_gpu(self, gpu: Gpu) -> None:
        """Raises ConfigError for a GPU that this TensorRT is known to refuse."""
        if not self.is_rtx:
            return
        supported = [member[2:] for member in self._trt.ComputeCapability.__members__ if member.startswith("SM")]
        major, minor = gpu.capability
        if f"{major}{minor}" not in supported:
            names = ", ".join(f"{digits[:-1]}.{digits[-1]}" for digits in supported)
            raise ConfigError(
                f"{self.name} does not support {gpu.name}, compute capability {major}.{minor} "
                f"(supported: {names}): use TensorRT instead, `pip install tensorrt`"
            )

    def build(
        self,
        title: str,
        network: bytes,
        sizes: Mapping[str, Sizes],
        dtype: torch.dtype,
        timing_cache: bytes,
    ) -> tuple[bytes, bytes]:
        """A plan for the ONNX model `network`, and the timing cache with the new timings; empty if there is none.

        sizes: of dimension 0 of every dynamic input. `title` is for messages.
        `timing_cache` must be undamaged, see `files/timing_cache.py`.
        Raises ConfigError if the network cannot be parsed or no plan can be built.
        """
        self.check_dtype(dtype)
        trt = self._trt
        builder = self._start(trt.Builder)
        definition = builder.create_network(self._network_flags())
        parser = trt.OnnxParser(definition, self._log)
        if not parser.parse(network):
            errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
            raise ConfigError(f"{self.name} cannot read the ONNX of {title}: {errors}")
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for `--inspect`
        config.max_aux_streams = 0  # a single stream, because contexts share their memory in its order
        config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32
        if self.is_rtx:  # a context that allocates memory itself cannot be captured
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        else:  # RTX chooses kernels when it loads a plan
            config.builder_optimization_level = OPTIMIZATION_LEVEL
        if not self.is_strongly_typed:
            # The contexts of several graphs use one profile. From 10 on that is always allowed.
            config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
            self._set_precisions(config, definition, dtype)
        config.add_optimization_profile(_profile(builder, definition, sizes))
        if self.is_rtx:  # it times nothing during a build
            return self._build(title, builder, definition, config), b""
        cache = self._use_timings(config, timing_cache)  # the config refers to it
        plan = self._build(title, builder, definition, config)
        timings = None if cache is None else config.get_timing_cache()
        return plan, b"" if timings is None else bytes(timings.serialize())

    def load(self, title: str, plan: bytes) -> Engine:
        """An engine on the current GPU.

        Raises ConfigError if CUDA does not work, or if the plan is for another version or kind of GPU.
        """
        self._check_driver()
        runtime = self._start(self._trt.Runtime)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ConfigError(f"{self.name} cannot load the plan of {title}: {self._log.take_errors()}")
        return Engine(title, self._trt, self._dtypes, self._log, runtime, engine)

    def _build(self, title: str, builder: Any, definition: Any, config: Any) -> bytes:
        plan = builder.build_serialized_network(definition, config)
        if plan is None:
            raise ConfigError(f"{self.name} cannot build a plan for {title}: {self._log.take_errors()}")
        return bytes(plan)

    def _use_timings(self, config: Any, timing_cache: bytes) -> Any:
        """The timing cache that the build uses, an empty one if TensorRT refuses the given one; None without any."""
        for data in [timing_cache, b""] if timing_cache else [b""]:
            cache = config.create_timing_cache(data)
            if cache is not None and config.set_timing_cache(cache, False):
                return cache
            if data:
                log.warning("TensorRT refuses the timings of earlier builds", reason=self._log.take_errors())
        return None

    @property
    def is_strongly_typed(self) -> bool:
        """Whether operations run in the types of the network. If not, TensorRT may choose how products are summed."""
        return hasattr(self._trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    def _network_flags(self) -> int:
        flags = self._trt.NetworkDefinitionCreationFlag
        # From 10 on all networks have what 8.6 calls an explicit batch and requires as a flag.
        return 1 << int(flags.STRONGLY_TYPED if self.is_strongly_typed else flags.EXPLICIT_BATCH)

    def _set_precisions(self, config: Any, definition: Any, dtype: torch.dtype) -> None:
        """Makes 8.6 compute in float16 exactly where the network says so."""
        trt = self._trt
        if dtype != torch.float16:
            return
        config.set_flag(trt.BuilderFlag.FP16)
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        for layer in map(definition.get_layer, range(definition.num_layers)):
            if FLOAT32_MARK in layer.name and layer.type != trt.LayerType.CONSTANT:
                layer.precision = trt.float32
                for i in range(layer.num_outputs):
                    layer.set_output_type(i, trt.float32)

    def _start(self, kind: Callable[[Any], Any]) -> Any:
        """A Builder or Runtime. All of them need a working GPU, except RTX's Builder."""
        self._log.take_errors()  # those of an earlier call
        try:
            return kind(self._log)
        except (TypeError, RuntimeError) as error:
            reason = self._log.take_errors() or error
            raise ConfigError(f"{self.name} finds no GPU that it can use: {reason}") from error


def _profile(builder: Any, definition: Any, sizes: Mapping[str, Sizes]) -> Any:
    profile = builder.create_optimization_profile()
    for tensor in map(definition.get_input, range(definition.num_inputs)):
        if tensor.name in sizes:
            rest = tuple(tensor.shape)[1:]
            profile.set_shape(tensor.name, *((size, *rest) for size in sizes[tensor.name]))
    return profile


def _make_log(trt: Any) -> Any:
    """A TensorRT logger that keeps errors and the last warnings for the message of an exception."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []
            self._warnings: deque[str] = deque(maxlen=MAX_WARNINGS)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self._errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self._warnings.append(message)
                log.debug("tensorrt", message=message)

        def take_errors(self) -> str:
            """The messages since the last call: the errors, or else the warnings, since 8.6 warns of a failed CUDA."""
            messages = "; ".join(self._errors or self._warnings)
            self._errors.clear()
            self._warnings.clear()
            return messages

    return Log()


def require(package: str) -> None:
    """Raises ConfigError, with the command to install it, if `package` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: `pip install -r requirements-export.txt`")
