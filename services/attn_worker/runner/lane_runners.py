"""The runners of several lanes: `TurnLayerRunner` runs their steps by turns on the engine thread, as on a CPU;
`CudaLaneRunner` runs them on a GPU, each lane on a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from services.attn_worker.cache.block_storage import BlockCopies
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.layers import AttentionBackend
from services.attn_worker.runner.layer_runner import LayerRunner, RunningStep
from services.channel import Channel, Flag, qkv_flag
from services.channel.turns import Turn, TurnChannel, Turns
from services.common.attention.learned import Learned

if TYPE_CHECKING:
    from services.attn_worker.runner.cuda_layer_runner import CudaLayerRunner


class LaneRunner(LayerRunner):
    """Of all lanes. They have one storage, whose blocks the next step copies, in whatever lane it is."""

    def __init__(self) -> None:
        self._copies: list[BlockCopies] = []  # that the next step makes first

    def fence(self) -> None:
        raise AssertionError("`check_lanes` refuses a host tier")

    def copy_blocks(self, copies: BlockCopies) -> None:
        """The next step that is launched makes the copies, before its layers."""
        self._copies.append(copies)

    def _take_copies(self) -> list[BlockCopies]:
        copies, self._copies = self._copies, []
        return copies


class TurnLayerRunner(LaneRunner):
    """For backends that act at once. Each lane has a backend of its own."""

    def __init__(
        self, backends: Sequence[AttentionBackend], num_layers: int, on_step: Callable[[float, float], None]
    ) -> None:
        """`on_step` gets the duration of each step, and what part of it was spent waiting, in seconds."""
        super().__init__()
        self._backends = backends
        self._num_layers = num_layers
        self._on_step = on_step
        self._turns = Turns()
        self._backend_of: dict[TurnChannel, AttentionBackend] = {}

    def attach(self, channels: Iterable[TurnChannel], learned: Learned) -> None:
        """Deals the backends to the channels, and passes the values on."""
        for backend in self._backends:
            backend.use_learned(learned)
        self._turns = Turns()
        self._copies.clear()
        self._backend_of = dict(zip(channels, self._backends, strict=True))

    def launch(self, step: StepMetadata, channel: TurnChannel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Adds a step to those of its lane."""
        turn = Turn(channel, self._run(step, channel, self._take_copies()), after)
        self._turns.add(turn)
        return _TurnStep(self._turns, turn)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Runs one layer of a step, or waits a little. Returns whether any step is left."""
        if not self._turns.go_on() and self._turns.has_any:
            self._turns.pause()
        return self._turns.has_any

    def _run(self, step: StepMetadata, channel: TurnChannel, copies: Iterable[BlockCopies]) -> Iterator[Flag]:
        start_s, waited_s = time.perf_counter(), channel.waited_s
        backend, num_tokens = self._backend_of[channel], len(step.positions)
        for each in copies:
            backend.storage.copy_blocks(each)
        backend.begin_step(step)
        qkv, attn_out, qkv_ready = channel.qkv[:num_tokens], channel.attn_out[:num_tokens], qkv_flag(num_tokens)
        for layer in range(self._num_layers):
            yield qkv_ready
            channel.wait(qkv_ready)
            backend.forward(layer, qkv, attn_out)
            channel.signal(Flag.ATTENTION_READY)
        self._on_step(time.perf_counter() - start_s, channel.waited_s - waited_s)


class _TurnStep(RunningStep):
    """Its layers run by turns."""

    def __init__(self, turns: Turns, turn: Turn) -> None:
        self._turns = turns
        self._turn = turn

    def is_done(self) -> bool:
        return self._turn.is_done

    def drop(self) -> None:
        self._turns.remove(self._turn)


class CudaLaneRunner(LaneRunner):
    """Made of one for each lane, with graphs and workspaces of its own."""

    def __init__(self, runners: Sequence[CudaLayerRunner]) -> None:
        super().__init__()
        self._runners = runners
        self._runner_of: dict[Channel, CudaLayerRunner] = {}

    def attach(self, channels: Iterable[Channel], learned: Learned) -> None:
        """Deals the runners to the channels; each captures its graphs."""
        self._copies.clear()
        self._runner_of = dict(zip(channels, self._runners, strict=True))
        for channel, runner in self._runner_of.items():
            runner.attach([channel], learned)

    def launch(self, step: StepMetadata, channel: Channel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Enqueues a step on the stream of its lane, after the copies."""
        runner = self._runner_of[channel]
        runner.come_after(after)
        for each in self._take_copies():
            runner.copy_blocks(each)
        return runner.launch(step, channel)
