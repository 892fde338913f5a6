"""`CudaLaneRunner`: runs the steps of several lanes on a GPU, each lane on a stream of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from services.attn_worker.cache.block_storage import BlockCopies
from services.attn_worker.cache.step_metadata import StepMetadata
from services.attn_worker.runner.cuda_layer_runner import CudaLayerRunner
from services.attn_worker.runner.layer_runner import LayerRunner, RunningStep
from services.channel import Channel
from services.common.attention.learned import Learned


class CudaLaneRunner(LayerRunner):
    """Made of one for each lane, with graphs and workspaces of its own; all have one storage."""

    def __init__(self, runners: Sequence[CudaLayerRunner]) -> None:
        self._runners = runners
        self._runner_of: dict[Channel, CudaLayerRunner] = {}
        self._copies: list[BlockCopies] = []  # that the next step makes first

    def attach(self, channels: Iterable[Channel], learned: Learned) -> None:
        """Deals the runners to the channels; each captures its graphs."""
        self._copies.clear()
        self._runner_of = dict(zip(channels, self._runners, strict=True))
        for channel, runner in self._runner_of.items():
            runner.attach([channel], learned)

    def fence(self) -> None:
        raise AssertionError("`check_lanes` refuses a host tier")

    def copy_blocks(self, copies: BlockCopies) -> None:
        """The next step that is launched makes the copies, on the stream of its lane."""
        self._copies.append(copies)

    def launch(self, step: StepMetadata, channel: Channel, after: Collection[RunningStep] = ()) -> RunningStep:
        """Enqueues a step on the stream of its lane."""
        runner = self._runner_of[channel]
        runner.come_after(after)
        copies, self._copies = self._copies, []
        for each in copies:
            runner.copy_blocks(each)
        return runner.launch(step, channel)
