"""Records which kernels the GPU runs and when, with torch's profiler. Needs a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType

from bench.gpu.step_timeline import Kernel


def record_kernels(run: Callable[[], object], num_steps: int) -> list[list[Kernel]]:
    """The kernels of each of the `num_steps` equal steps that `run` awaits, in order of their starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
    assert profiler.profiler is not None, "the profile has ended"
    kernels = sorted(
        (
            Kernel(event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3)
            for event in profiler.profiler.kineto_results.events()
            if event.device_type() == DeviceType.CUDA and event.duration_ns()
        ),
        key=lambda kernel: kernel.start_us,
    )
    num_kernels, rest = divmod(len(kernels), num_steps)
    assert not rest and num_kernels, f"{len(kernels)} kernels are not {num_steps} times the same step"
    return [kernels[step * num_kernels : (step + 1) * num_kernels] for step in range(num_steps)]
