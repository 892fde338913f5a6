"""The only file that imports TensorRT: its Python API from 8.6 to 11, and TensorRT-RTX, as one interface.

What differs: 8.6 picks precisions itself, within flags, and knows no bfloat16; 10 and later run what the
network says ("strongly typed"); 11 and RTX have dropped the older names. Guards ask for the attribute, not
for the version.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
import torch

from services.common.errors import ConfigError
from services.dense_worker.tensorrt.engine import Engine
from services.dense_worker.tensorrt.gpu import Gpu

log = structlog.get_logger()

MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")  # the first that is installed is used
INSTALL = (
    "TensorRT is not installed: `pip install tensorrt` (8.6 or later, data centre GPUs such as the H200), or "
    "`pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings` (TensorRT-RTX, RTX GPUs)"
)
# Starts the name of every ONNX node that computes in float32 though the model's dtype is narrower. TensorRT
# 8.6, which chooses precisions itself, must leave these alone.
FLOAT32_MARK = "float32/"
Sizes = tuple[int, int, int]  # the least, the one to tune for, the greatest


def load_tensorrt(import_module: Callable[[str], Any] = importlib.import_module) -> TensorRT:
    """The TensorRT that is installed. Raises ConfigError: what to install, or why it cannot be imported."""
    for name in MODULES:
        try:
            return TensorRT(import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise ConfigError(f"{name} is installed but lacks the module {error.name}") from error
        except (ImportError, OSError) as error:
            raise ConfigError(f"{name} is installed but cannot be imported: {error}") from error
    raise ConfigError(INSTALL)


def is_installed() -> bool:
    """Whether there is a module to import; it need not work."""
    return any(importlib.util.find_spec(name) for name in MODULES)


class TensorRT:
    """One imported TensorRT module."""

    def __init__(self, module: Any) -> None:
        self._trt = module
        self.is_rtx = module.__name__.startswith("tensorrt_rtx")
        self.version: str = module.__version__
        self.name = f"{'TensorRT-RTX' if self.is_rtx else 'TensorRT'} {self.version}"
        self._dtypes: dict[Any, torch.dtype] = {
            module.float32: torch.float32,
            module.float16: torch.float16,
            module.int32: torch.int32,
        }
        if hasattr(module, "bfloat16"):
            self._dtypes[module.bfloat16] = torch.bfloat16
        self._log = _make_log(module)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raises ConfigError for a dtype that this TensorRT cannot compute in."""
        if dtype not in self._dtypes.values():
            raise ConfigError(
                f"{self.name} has no {str(dtype)[6:]}: use float16 (model.dtype=float16, --dtype float16), "
                "or install TensorRT 10 or later"
            )

    def check_gpu(self, gpu: Gpu) -> None:
        """Raises ConfigError for a GPU that this TensorRT is known to refuse."""
        if not self.is_rtx:
            return
        supported = [
            member[2:] for member in self._trt.ComputeCapability.__members__ if member.startswith("SM")
        ]
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
        profiles: Sequence[Mapping[str, Sizes]],
        dtype: torch.dtype,
        timing_cache: bytes,
    ) -> tuple[bytes, bytes]:
        """A plan for the ONNX model `network`, and the timing cache grown by what was timed.

        profiles: for each, the sizes of dimension 0 of every input that is dynamic. `title` is for messages.
        Raises ConfigError where the network cannot be parsed or no plan be built.
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
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # what `--inspect` prints
        config.max_aux_streams = 0  # one stream: contexts share their memory in its order
        config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32
        if self.is_rtx:  # memory of its own would keep it out of CUDA graphs
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        if not self._is_strongly_typed:
            self._set_precisions(config, definition, dtype)
        for sizes in profiles:
            config.add_optimization_profile(_profile(builder, definition, sizes))
        cache = None
        if not self.is_rtx:  # which times nothing at build
            cache = config.create_timing_cache(timing_cache) or config.create_timing_cache(b"")
            config.set_timing_cache(cache, False)
        plan = builder.build_serialized_network(definition, config)
        if plan is None:
            raise ConfigError(f"{self.name} cannot build a plan for {title}: {self._log.take_errors()}")
        return bytes(plan), timing_cache if cache is None else bytes(config.get_timing_cache().serialize())

    def load(self, title: str, plan: bytes) -> Engine:
        """An engine on the current GPU. Raises ConfigError for a plan of another version or kind of GPU."""
        runtime = self._start(self._trt.Runtime)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ConfigError(f"{self.name} cannot load the plan of {title}: {self._log.take_errors()}")
        return Engine(self._trt, self._dtypes, self._log.take_errors, runtime, engine)

    @property
    def _is_strongly_typed(self) -> bool:
        return hasattr(self._trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")

    def _network_flags(self) -> int:
        flags = self._trt.NetworkDefinitionCreationFlag
        # The only kind of network from 10 on is what 8.6 calls explicit batch and has to be asked for.
        return 1 << int(flags.STRONGLY_TYPED if self._is_strongly_typed else flags.EXPLICIT_BATCH)

    def _set_precisions(self, config: Any, definition: Any, dtype: torch.dtype) -> None:
        """Lets 8.6 compute in float16 what the network says is float16, and nothing else."""
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
        """A Builder or Runtime, which need a working GPU unless this is RTX's Builder."""
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
    """A TensorRT logger that keeps errors for the message of an exception and hands on the rest."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self._errors.append(message)
            elif severity == trt.ILogger.WARNING:
                log.debug("tensorrt", message=message)

        def take_errors(self) -> str:
            errors, self._errors = "; ".join(self._errors), []
            return errors

    return Log()
