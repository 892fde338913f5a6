"""Kernels that are compiled together do not run, and are there afterwards. Triton's interpreter compiles none."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from services.attn_worker.runner.cuda_layer_runner import compiling_together  # noqa: E402


@triton.jit
def _fill(out, value, SIZE: tl.constexpr):  # noqa: ANN001, ANN202
    tl.store(out + tl.arange(0, SIZE), tl.full((SIZE,), 0, tl.int32) + value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_that_are_compiled_together_do_not_run_before_the_end() -> None:
    outs = {size: torch.zeros(size, dtype=torch.int32, device="cuda") for size in (16, 32, 64)}
    device = torch.device("cuda", torch.cuda.current_device())
    with compiling_together():
        for size, out in outs.items():
            _fill[(1,)](out, 7, SIZE=size)
        torch.cuda.synchronize()
        assert not any(out.any() for out in outs.values())
    compiled = dict(_fill.device_caches[device.index][0])
    assert len(compiled) == len(outs)
    assert all(kernel.module is not None for kernel in compiled.values()), "they are loaded, too"
    for size, out in outs.items():
        _fill[(1,)](out, 7, SIZE=size)
        assert (out == 7).all()
    assert dict(_fill.device_caches[device.index][0]) == compiled, "nothing is compiled again"
