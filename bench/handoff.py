"""The cost of handoffs: one signal and one wait in each direction between two processes, once per layer of a step.

`python bench/handoff.py` measures shared memory on the CPU; `--device cuda` measures CUDA IPC on a GPU, with the
handoffs captured in a CUDA graph on both sides. Without MPS (`--mps off`) the two processes take turns on the GPU; the
launcher warns of that case.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bench.gpu.device_rates import require_gpu
from bench.gpu.peer import WAIT_TIMEOUT_S, DeviceWait, ParentProcess, PeerProcess, closing, replay_steps
from bench.load.options import whole_number
from bench.load.stats import summarize
from services.channel import Channel, ChannelSpec, Flag
from services.channel.factory import create_channel, map_channel
from services.common.errors import TwostrokeError
from services.common.gpu import gpu_uuid
from services.launch.mps import MpsDaemon, has_mps

SPEC = ChannelSpec(max_tokens=16, qkv_size=64, attn_size=64, dtype=torch.float32)
NUM_LAYERS = 32  # handoffs each way in one step
EPOCH_BITS = 63


def ask(channel: Channel) -> None:
    """One step as the dense worker sees it."""
    for _ in range(NUM_LAYERS):
        channel.signal(Flag.QKV_READY)
        channel.wait(Flag.ATTENTION_READY)


def answer(channel: Channel) -> None:
    """One step as the attention worker sees it."""
    for _ in range(NUM_LAYERS):
        channel.wait(Flag.QKV_READY)
        channel.signal(Flag.ATTENTION_READY)


def gpu(name: str) -> torch.device:
    """Makes the device of this name current and returns it; `cuda` is the first GPU."""
    device = torch.device("cuda", torch.device(name).index or 0)
    torch.cuda.set_device(device)
    return device


def capture(channel: Channel, is_asking: bool) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (ask if is_asking else answer)(channel)
    return graph


def run_peer(device: str, kind: str, handle: str, epoch: int, num_steps: int) -> None:
    """The other process: maps the region and answers `num_steps` steps."""
    parent = ParentProcess()
    torch_device = torch.device("cpu") if device == "cpu" else gpu(device)
    with closing(map_channel(torch_device, kind, handle.encode(), SPEC, epoch, 1, WAIT_TIMEOUT_S)) as channel:
        graph = capture(channel, is_asking=False) if device != "cpu" else None
        print("ready", flush=True)
        if graph is not None:
            replay_steps(graph.replay, num_steps, DeviceWait(channel, parent))
            return
        for _ in range(num_steps):
            answer(channel)


def make_channel(device: str, peer_device: str, epoch: int, kind: str | None) -> Channel:
    """A channel of the kind that the attention worker would choose, unless one is named."""
    if device == "cpu":
        return create_channel(torch.device("cpu"), "", SPEC, epoch, 1, 0, WAIT_TIMEOUT_S)
    from services.channel.cuda_ipc import CudaIpcChannel, choose_kind  # needs cuda-bindings

    kind = kind or choose_kind(gpu(device), gpu_uuid(gpu(peer_device)))
    return CudaIpcChannel.create(gpu(device), kind, SPEC, epoch, 1, 0)


def measure(channel: Channel, epoch: int, device: str, peer_device: str, num_steps: int) -> list[float]:
    """Microseconds of one round trip, a value for each step."""
    command = [sys.executable, __file__, "--device", peer_device, "--peer", channel.handle.decode()]
    command += ["--channel", channel.kind]
    command += ["--epoch", str(epoch), "--steps", str(num_steps)]
    microseconds = []
    with PeerProcess(command) as peer:
        assert peer.read_line() == "ready"
        step = partial(ask, channel) if device == "cpu" else _replaying(channel, peer)
        for _ in range(num_steps):
            start = time.perf_counter()
            step()
            microseconds.append((time.perf_counter() - start) / NUM_LAYERS * 1e6)
    return microseconds[num_steps // 10 :]  # without the warm-up


def _replaying(channel: Channel, peer: PeerProcess) -> Callable[[], None]:
    """A function that runs one step on the GPU and waits for its end."""
    graph, end, wait = capture(channel, is_asking=True), torch.cuda.Event(), DeviceWait(channel, peer)

    def step() -> None:
        graph.replay()
        end.record()
        wait(end)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--peer-device", help="device of the other process, such as cuda:1 (the same)")
    parser.add_argument("--channel", help="cuda_ipc_spinning or cuda_ipc_queued (as the workers choose it)")
    parser.add_argument("--mps", choices=["on", "off"], default="on", help="whether to use MPS with cuda (on)")
    parser.add_argument("--steps", type=whole_number, default=200, help=f"steps of {NUM_LAYERS} round trips (200)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG of every step; needs matplotlib")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--epoch", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except TwostrokeError as error:
        raise SystemExit(f"handoff: {error}") from error


def _run(arguments: argparse.Namespace) -> None:
    if arguments.device != "cpu":
        require_gpu("cuda.bindings")
    if arguments.peer:
        run_peer(arguments.device, arguments.channel, arguments.peer, arguments.epoch, arguments.steps)
        return
    peer_device = arguments.peer_device or arguments.device
    shares_gpu = arguments.device != "cpu" and peer_device == arguments.device
    if shares_gpu and arguments.mps == "on" and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        run_under_mps()
        return
    epoch = secrets.randbits(EPOCH_BITS)
    with closing(make_channel(arguments.device, peer_device, epoch, arguments.channel)) as channel:
        kind = channel.kind
        values = measure(channel, epoch, arguments.device, peer_device, arguments.steps)
    summary = summarize(values)
    assert summary is not None, "there was at least one step"
    figures = {
        "device": arguments.device,
        "peer_device": peer_device,
        "channel": kind,
        "mps": arguments.mps if shares_gpu else None,
        "median_us": summary.median,
        "p99_us": summary.p99,
    }
    devices = arguments.device if shares_gpu or arguments.device == "cpu" else f"{arguments.device} and {peer_device}"
    print(f"round trip between two processes, {devices}, {kind}: "
          f"median {figures['median_us']:.1f} us, P99 {figures['p99_us']:.1f} us")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    if arguments.plot:
        from bench.load.plots import save_samples_plot  # it needs matplotlib

        title = f"the seam between two processes, {arguments.device}: mean of {NUM_LAYERS} round trips"
        save_samples_plot(values, "Round trip", "us", title, arguments.plot)


def run_under_mps() -> None:
    """Runs this program again as a client of a new MPS daemon. Ends this process too if that fails."""
    if not has_mps():
        raise SystemExit("this machine has no MPS: use --mps off")
    with tempfile.TemporaryDirectory() as directory:
        daemon = MpsDaemon(Path(directory) / "mps")
        daemon.start()
        try:
            status = subprocess.run([sys.executable, *sys.argv], env=daemon.environment, check=False).returncode
        finally:
            daemon.stop()
    if status:
        raise SystemExit(status)  # the program has printed the reason


if __name__ == "__main__":
    main()
