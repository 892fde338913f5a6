"""The two sides of `bench/seam.py`, in one process and in two. Needs triton, cuda-bindings and a CUDA device."""

from __future__ import annotations

import itertools
import json
import secrets
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.dense import MODELS
from bench.gpu.attention_steps import make_step
from bench.gpu.kernel_trace import record_kernels
from bench.gpu.peer import WAIT_TIMEOUT_S, DeviceWait, ParentProcess, PeerProcess, closing, replay_steps
from bench.gpu.step_timeline import Kernel, Span, make_timeline
from bench.handoff import EPOCH_BITS
from services.attn_worker.cache.spec import KVCacheSpec
from services.attn_worker.layers import BackendSetup
from services.attn_worker.layers.triton_attention import TritonAttention
from services.attn_worker.runner import layer_runner
from services.channel import Channel, ChannelSpec, Flag
from services.channel.cuda_ipc import CudaIpcChannel, choose_kind
from services.channel.factory import map_channel
from services.common.cuda_graphs import StepGraphs
from services.common.gpu import gpu_uuid
from services.common.model_config import ModelConfig
from services.dense_worker.backends.cuda_backend import CudaBackend
from services.dense_worker.model.weights import random_weights
from services.dense_worker.runner.model_runner import LayerRun

PROGRAM = Path(__file__).parents[1] / "seam.py"
BLOCK_SIZE = 16
NUM_WARM_UPS = 5
NUM_TRACED = 5  # steps under the profiler; the middle one is shown


@dataclass(frozen=True, slots=True)
class Task:
    """The parameters that both processes need."""

    model: str
    num_layers: int
    batches: list[int]
    context: int
    num_steps: int
    is_traced: bool
    attention_device: str
    kind: str | None  # of channel; None: as the workers choose it

    @property
    def config(self) -> ModelConfig:
        config = MODELS[self.model]
        return replace(config, num_layers=self.num_layers, sliding_windows=(None,) * self.num_layers)

    @property
    def spec(self) -> ChannelSpec:
        config = self.config
        return ChannelSpec(max(self.batches), config.qkv_size, config.attn_size, torch.bfloat16)


class OneProcess:
    """Replaces a `Channel`: where the dense worker would wait, attention runs in its stream."""

    def __init__(self, spec: ChannelSpec, attention: AttentionSide, batch: int) -> None:
        self.qkv = torch.zeros(spec.max_tokens, spec.qkv_size, dtype=spec.dtype, device="cuda")
        self.attn_out = torch.zeros(spec.max_tokens, spec.attn_size, dtype=spec.dtype, device="cuda")
        self._attend = lambda layer: attention.backend.forward(layer, self.qkv[:batch], self.attn_out[:batch])
        self._num_layers = attention.num_layers
        self._layer = 0
        self._attend(0)  # compiles it

    def begin_layers(self, num_rows: int) -> None:
        """Does nothing."""

    def signal(self, flag: Flag) -> None:
        """Does nothing: there is no other process."""

    def wait(self, flag: Flag) -> None:
        """Runs the next layer's attention."""
        self._attend(self._layer % self._num_layers)
        self._layer += 1

    def fetch_attn_out(self, num_tokens: int) -> torch.Tensor:
        """The rows themselves: they are in this process's memory."""
        return self.attn_out[:num_tokens]


class AttentionSide:
    """The attention worker's kernels over a cache of random keys and values."""

    def __init__(self, task: Task, device: torch.device) -> None:
        config = task.config
        self._context = task.context
        self.num_layers = config.num_layers
        blocks_per_seq = -(-task.context // BLOCK_SIZE)
        num_blocks = max(task.batches) * blocks_per_seq
        spec = KVCacheSpec.of_model(config, torch.bfloat16, num_blocks, BLOCK_SIZE)
        setup = BackendSetup(config, spec, torch.bfloat16, device, config.max_position_embeddings)
        self.backend = TritonAttention(setup)
        for cache in self.backend._caches:
            cache.normal_()  # zeros are faster than data
        order = np.random.default_rng(0).permutation(num_blocks)
        self._tables = order.reshape(-1, blocks_per_seq).astype(np.int32)
        self._stream = torch.cuda.Stream()

    def begin(self, batch: int) -> None:
        """Begins a decode step of all sequences."""
        self.backend.begin_step(make_step(self._tables[:batch], self._context, 1, BLOCK_SIZE), batch)

    def capture(self, channel: Channel, batch: int) -> Callable[[], None]:
        """Captures the step like the attention worker; returns a function that replays it."""
        layers = range(self.num_layers)

        def warm_up(batch: int) -> None:
            self.begin(batch)
            self.backend.forward(0, channel.qkv[:batch], torch.empty_like(channel.attn_out[:batch]))

        def run(batch: int) -> None:
            layer_runner.run_layers(self.backend, channel, layers, batch)

        return _replaying(self._stream, StepGraphs(self._stream, warm_up, run), batch)


class DenseSide:
    """The dense worker's segments on random weights."""

    def __init__(self, task: Task) -> None:
        self._config = task.config
        weights = random_weights(self._config, torch.bfloat16, torch.device("cuda"), seed=0)
        self._backend = CudaBackend(weights, self._config, max(task.batches))
        self._stream = torch.cuda.Stream()

    def capture(self, channel: Channel | OneProcess, batch: int) -> Callable[[], None]:
        """Captures the step like the dense worker, without the sampler; returns a function that replays it."""
        token_ids = torch.randint(self._config.vocab_size, (batch,), device="cuda")
        rows = torch.arange(batch, device="cuda")

        def warm_up(batch: int) -> None:
            qkv, attn_out = channel.qkv[:batch], channel.attn_out[:batch]
            attn_out.zero_()
            residual = self._backend.first(token_ids, qkv)
            if self._config.num_layers > 1:
                residual = self._backend.middle(0, channel.fetch_attn_out(batch), residual, qkv)
            self._backend.last(attn_out, residual, rows)

        def run(batch: int) -> None:
            layers = LayerRun(self._backend, channel, self._config.num_layers)
            layers.begin(token_ids)
            layers.finish(rows)

        return _replaying(self._stream, StepGraphs(self._stream, warm_up, run), batch)


def measure_one_process(task: Task, dense: DenseSide) -> dict[int, float]:
    """Milliseconds of a step, by batch."""
    attention = AttentionSide(task, torch.device("cuda", torch.cuda.current_device()))
    times = {}
    for batch in task.batches:
        attention.begin(batch)
        replay = dense.capture(OneProcess(task.spec, attention, batch), batch)
        times[batch] = time_steps(replay, task.num_steps, torch.cuda.Event.synchronize)
    return times


def measure_two_processes(task: Task, dense: DenseSide) -> tuple[dict[int, float], dict[int, list[Span]]]:
    """Milliseconds of a step, by batch, and its timeline if requested. This process is the dense worker."""
    epoch = secrets.randbits(EPOCH_BITS)
    device = torch.device("cuda", torch.cuda.current_device())
    command = [sys.executable, str(PROGRAM), "--peer", json.dumps(asdict(task)), "--epoch", str(epoch)]
    times, timelines = {}, {}
    with PeerProcess(command) as peer:
        kind, handle = peer.read_line().split()
        with closing(map_channel(device, kind, handle.encode(), task.spec, epoch, 1, WAIT_TIMEOUT_S)) as channel:
            wait = DeviceWait(channel, peer)
            for batch in task.batches:
                replay = dense.capture(channel, batch)
                times[batch] = time_steps(replay, task.num_steps, wait)
                if task.is_traced:
                    kernels = trace_step(replay, wait)
                    attention_kernels = [Kernel(**each) for each in json.loads(peer.read_line())]
                    timelines[batch] = make_timeline(kernels, attention_kernels)
    return times, timelines


def run_peer(task: Task, epoch: int) -> None:
    """The other process, the attention worker: replays each step as often as the dense worker."""
    parent = ParentProcess()
    device = torch.device(task.attention_device)
    torch.cuda.set_device(device)
    kind = task.kind or choose_kind(device, gpu_uuid(torch.device("cuda:0")))
    with closing(CudaIpcChannel.create(device, kind, task.spec, epoch, 1, 0)) as channel:
        wait = DeviceWait(channel, parent)
        attention = AttentionSide(task, device)
        print(channel.kind, channel.handle.decode(), flush=True)
        for batch in task.batches:
            replay = attention.capture(channel, batch)
            attention.begin(batch)
            time_steps(replay, task.num_steps, wait)
            if task.is_traced:
                print(json.dumps([asdict(kernel) for kernel in trace_step(replay, wait)]), flush=True)


def time_steps(replay: Callable[[], None], num_steps: int, wait: Callable[[torch.cuda.Event], None]) -> float:
    """Median milliseconds between the ends of two steps that follow each other at once."""
    ends = replay_steps(replay, NUM_WARM_UPS + num_steps, wait)[NUM_WARM_UPS - 1 :]
    return statistics.median(first.elapsed_time(second) for first, second in itertools.pairwise(ends))


def trace_step(replay: Callable[[], None], wait: Callable[[torch.cuda.Event], None]) -> list[Kernel]:
    """The kernels of one step."""
    return record_kernels(lambda: replay_steps(replay, NUM_TRACED, wait), NUM_TRACED)[NUM_TRACED // 2]


def _replaying(stream: torch.cuda.Stream, graphs: StepGraphs[int], batch: int) -> Callable[[], None]:
    with torch.inference_mode():
        graph = graphs.find(batch)
    torch.cuda.synchronize()
    return graph.replay
