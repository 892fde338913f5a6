"""The adapter over TensorRT's versions: what it asks each of them for, and its words when they refuse."""

from __future__ import annotations

from functools import cache

import onnx
import pytest
import structlog.testing
import torch

from services.common.errors import ConfigError
from services.dense_worker.tensorrt.api import TensorRT, load_tensorrt
from services.dense_worker.tensorrt.gpu import Gpu
from services.dense_worker.tensorrt.onnx_segments import export_segment
from tests.support.model_configs import small_config
from tests.support.workers.fake_tensorrt import FakeTensorRT, make_tensorrt
from tests.support.workers.fake_tensorrt_runtime import DataType, ILogger

SIZES = {"attn_out": (17, 32, 64), "residual": (17, 32, 64)}


@cache
def middle(dtype: torch.dtype) -> bytes:
    return export_segment("middle", small_config("qwen3"), dtype).SerializeToString()


def build(trt: FakeTensorRT, dtype: torch.dtype, timing_cache: bytes = b"") -> tuple[bytes, bytes]:
    return TensorRT(trt).build("middle", middle(dtype), SIZES, dtype, timing_cache)


def test_8_6_may_use_float16_but_not_in_the_norms() -> None:
    trt = make_tensorrt("8.6.0")
    build(trt, torch.float16)
    assert trt.named("create_network") == [("create_network", 1 << 0)]  # explicit batch
    assert ("set_flag", "FP16") in trt.calls and ("set_flag", "OBEY_PRECISION_CONSTRAINTS") in trt.calls
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(middle(torch.float16))).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    in_float32 = {
        node.name
        for node in graph.node
        if node.op_type != "Cast" and types[node.output[0]] == onnx.TensorProto.FLOAT
    }
    assert len(in_float32) == 4 * 6  # four norms: square, mean, add, root, reciprocal, multiply
    assert set(trt.named("precision")) == {("precision", name, DataType.FLOAT) for name in in_float32}
    assert {call[1] for call in trt.named("set_output_type")} == in_float32


def test_builds_try_the_most_kernels_except_rtx_which_chooses_them_later() -> None:
    for version in ("8.6.0", "10.0.1", "11.4.0"):
        trt = make_tensorrt(version)
        build(trt, torch.float32)
        assert trt.named("builder_optimization_level") == [("builder_optimization_level", 5)]
    rtx = make_tensorrt("1.7.1", is_rtx=True)
    build(rtx, torch.float32)
    assert not rtx.named("builder_optimization_level")


def test_8_6_in_float32_uses_neither_float16_nor_tf32() -> None:
    trt = make_tensorrt("8.6.0")
    build(trt, torch.float32)
    assert not trt.named("set_flag") and not trt.named("precision")
    assert trt.named("clear_flag") == [("clear_flag", "TF32")]


@pytest.mark.parametrize(
    ("version", "is_rtx", "flags"), [("10.0.1", False, 1 << 1), ("11.4.0", False, 1), ("1.7.1", True, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_later_versions_take_the_types_from_the_network(
    version: str, is_rtx: bool, flags: int, dtype: torch.dtype
) -> None:
    trt = make_tensorrt(version, is_rtx=is_rtx)
    plan, _ = build(trt, dtype)
    assert trt.named("create_network") == [("create_network", flags)]  # strongly typed
    assert ("set_flag", "FP16") not in trt.calls and not trt.named("precision")
    assert b'"attn_out": [[17, 64], [32, 64], [64, 64]]' in plan


def test_timing_cache_goes_in_and_comes_back_grown() -> None:
    trt = make_tensorrt("8.6.0")
    _, timings = build(trt, torch.float16)
    _, more = build(trt, torch.float16, timings)
    assert trt.named("set_timing_cache") == [("set_timing_cache", b""), ("set_timing_cache", timings)]
    assert more.startswith(timings) and len(more) > len(timings)
    rtx = make_tensorrt("1.7.1", is_rtx=True)
    assert build(rtx, torch.float16)[1] == b"" and not rtx.named("set_timing_cache")


def test_timings_of_another_version_are_dropped_with_one_log_line() -> None:
    _, timings = build(make_tensorrt("8.6.0"), torch.float16)
    trt = make_tensorrt("8.6.1")
    with structlog.testing.capture_logs() as logs:
        _, own = build(trt, torch.float16, timings)
    assert [entry["event"] for entry in logs] == ["TensorRT refuses the timings of earlier builds"]
    assert trt.named("set_timing_cache") == [("set_timing_cache", b"")]
    assert own == build(make_tensorrt("8.6.1"), torch.float16)[1] != timings


def test_a_plan_is_built_although_tensorrt_takes_no_timing_cache_at_all() -> None:
    trt = make_tensorrt("8.6.0")
    _, timings = build(trt, torch.float16)
    trt.fail = "set_timing_cache"
    plan, none = build(trt, torch.float16, timings)
    assert plan and none == b""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("parse", r"TensorRT 10\.0\.1 cannot read the ONNX of middle: unsupported operator"),
        ("build_serialized_network", r"TensorRT 10\.0\.1 cannot build a plan for middle: no tactic found"),
    ],
)
def test_a_failed_build_says_what_tensorrt_said(call: str, message: str) -> None:
    trt = make_tensorrt("10.0.1")
    trt.fail = call
    with pytest.raises(ConfigError, match=message):
        build(trt, torch.float16)


@pytest.mark.parametrize("version", ["8.6.0", "10.0.1"])
def test_builder_without_a_gpu_is_an_error_in_words(version: str) -> None:
    """8.6.0 gives the reason as a warning."""
    with pytest.raises(ConfigError, match=r"finds no GPU that it can use: CUDA initialization failure"):
        build(make_tensorrt(version, has_gpu=False), torch.float16)


def test_warnings_of_an_earlier_call_are_not_given_as_a_reason() -> None:
    trt = make_tensorrt("8.6.0")
    api = TensorRT(trt)
    api._log.log(ILogger.WARNING, "unrelated")
    trt.has_gpu = False
    with pytest.raises(ConfigError, match=r"use: CUDA initialization failure with error: 35$"):
        api.build("middle", middle(torch.float16), SIZES, torch.float16, b"")


def test_no_runtime_is_made_without_a_working_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's Runtime would end the process here, as the real one did."""
    trt = make_tensorrt("8.6.0")
    plan, _ = build(trt, torch.float16)
    trt.has_gpu = False

    def fail() -> None:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(ConfigError, match=r"does not work in this process: CUDA driver version is .* version$"):
        load_tensorrt(lambda name: trt).load("middle", plan)


def test_rtx_builds_without_a_gpu() -> None:
    plan, _ = build(make_tensorrt("1.7.1", is_rtx=True, has_gpu=False), torch.float16)
    assert plan


def test_dtype_and_gpu_that_a_version_lacks() -> None:
    old, rtx = TensorRT(make_tensorrt("8.6.0")), TensorRT(make_tensorrt("1.7.1", is_rtx=True))
    with pytest.raises(ConfigError, match=r"TensorRT 8\.6\.0 has no bfloat16"):
        old.check_dtype(torch.bfloat16)
    old.check_dtype(torch.float16)
    rtx.check_dtype(torch.bfloat16)
    old.check_gpu(Gpu("NVIDIA H200", (9, 0), 132))
    rtx.check_gpu(Gpu("RTX 5090", (12, 0), 170))
    with pytest.raises(
        ConfigError, match=r"TensorRT-RTX 1\.7\.1 does not support NVIDIA H200, compute capability 9\.0"
    ):
        rtx.check_gpu(Gpu("NVIDIA H200", (9, 0), 132))


def test_the_first_module_that_is_installed_is_used() -> None:
    tried = []

    def only_rtx(name: str) -> FakeTensorRT:
        tried.append(name)
        if name != "tensorrt_rtx_bindings":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return make_tensorrt("1.7.1", is_rtx=True)

    assert load_tensorrt(only_rtx).is_rtx
    assert tried == ["tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"]


def test_no_module_installed_says_what_to_install() -> None:
    def no_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(ConfigError, match=r"pip install tensorrt`.*pip install tensorrt-rtx-cu13-libs"):
        load_tensorrt(no_module)


def test_module_that_cannot_be_imported_says_why() -> None:
    def broken(name: str) -> None:
        raise ImportError("libnvinfer.so.8: cannot open shared object file")

    with pytest.raises(ConfigError, match=r"tensorrt is installed but cannot be imported: libnvinfer\.so\.8"):
        load_tensorrt(broken)


def test_inspection_gives_the_layers() -> None:
    trt = make_tensorrt("10.0.1")
    plan, _ = build(trt, torch.float32)
    engine = TensorRT(trt).load("middle", plan)
    assert [layer["Name"] for layer in engine.layers()] == ["{ForeignNode[a...b]}"]
