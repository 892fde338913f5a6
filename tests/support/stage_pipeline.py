"""Stages of a pipeline in one process: each is a thread, or two with its attention worker, and gloo connects them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from services.common.config import Config
from services.common.rank import Rank
from services.dense_worker.build import resolve_dense_model
from services.dense_worker.engine.attachment import Attachment
from services.dense_worker.ranks.group import RankGroup
from services.dense_worker.ranks.join_group import RankStore, join_groups
from services.dense_worker.ranks.leading_backend import LeadingRanks
from services.dense_worker.ranks.rank_answers import RankAnswers
from services.dense_worker.ranks.shard_runner import ShardRunner
from services.dense_worker.ranks.shard_service import load_shard
from services.pb import shard_pb2
from services.step import PlanAccepted, SequenceOpened, StepPlan
from services.step.codec import decode_plan
from tests.support.lane_pair import TIMEOUT_S, AttentionSide, LanePair

CPU = torch.device("cpu")


class _Shard:
    """A stage that is not the first."""

    def __init__(self, config: Config, rank: Rank, side: AttentionSide) -> None:
        self.runner: ShardRunner = load_shard(config, resolve_dense_model(config, rank), print, None)[0]
        self.commands: queue.Queue[shard_pb2.ShardCommand | None] = queue.Queue()
        self._rank, self._side = rank, side

    def run(self, port: int) -> None:
        """Meets the other stages, and does what the first one says."""
        channels = self._side.channels
        groups = join_groups(CPU, RankStore.find(port), self._rank, len(channels), TIMEOUT_S)
        try:
            self.runner.attach(channels, groups)
            while (command := self.commands.get(timeout=TIMEOUT_S)) is not None:
                step, further = command.step, command.further_rows
                if command.HasField("step"):
                    self.runner.run_step(decode_plan(step.plan), step.num_rows, step.num_sampled)
                else:
                    self.runner.compute_rows(further.lane, list(further.rows))
        finally:
            for each in groups:
                each.abort()


class StagePipeline(LanePair):
    """A `LanePair` for each stage: plans go to all attention workers, and their answers are merged."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        count = config.dense.pipeline_parallel_size
        self.sides += [self.make_side(config, rank) for rank in range(1, count)]
        self.shards = [_Shard(config, Rank.of(config.dense, rank), self.sides[rank]) for rank in range(1, count)]
        self.num_opened_again = 0
        self._threads = ThreadPoolExecutor(count)
        self._answers = RankAnswers([each.engine.cache.num_free_blocks for each in self.sides])
        self._lock = threading.Lock()  # of the answers
        self._store, num_lanes = RankStore.create(), config.scheduler.num_lanes  # kept: others may need it longer
        own = Rank.of(config.dense, 0)
        met = self._threads.submit(join_groups, CPU, self._store, own, num_lanes, TIMEOUT_S)
        self._running: list[Future[None]] = [self._threads.submit(each.run, self._store.port) for each in self.shards]
        for each in self._running:
            each.add_done_callback(self._note_end)
        self.groups: list[RankGroup] = list(met.result(TIMEOUT_S))

    def _note_end(self, running: Future[None]) -> None:
        if (error := running.exception()) is not None:
            self.side.failures.append(error)

    def attach(self) -> None:
        ranks = LeadingRanks(self.groups, self.command, lambda slot, adapter: Future())
        self.engine.on_attached(replace(self.side.describe(), ranks=ranks))

    def command(self, command: shard_pb2.ShardCommand) -> None:
        """Gives all stages but the first a command."""
        for each in self.shards:
            each.commands.put(command)

    def publish(self, attachment: Attachment, plan: StepPlan) -> None:
        with self._lock:
            self._answers.note_plan(plan)
        for rank, side in enumerate(self.sides):
            for new in plan.new_sequences:
                side.open(new, self._merger(attachment, rank))
            if plan.is_step:
                side.run(plan, self._merger(attachment, rank))

    def _merger(self, attachment: Attachment, rank: int) -> Callable[[SequenceOpened | PlanAccepted], None]:
        def merge(answer: SequenceOpened | PlanAccepted) -> None:
            with self._lock:
                if isinstance(answer, PlanAccepted):
                    merged = self._answers.accepted(rank, answer)
                else:
                    merged = self._answers.opened(rank, answer)
                if isinstance(merged, SequenceOpened | PlanAccepted):
                    self.engine.on_answer(attachment, merged)
            for again in merged if isinstance(merged, list) else ():
                self.num_opened_again += 1
                self.sides[again.rank].open(again.new, self._merger(attachment, again.rank))

        return merge

    def close(self) -> None:
        super().close()
        for shard in self.shards:
            shard.commands.put(None)
        for group in self.groups:
            group.abort()
        for side in self.sides[1:]:
            side.close()
        self._threads.shutdown()


@contextlib.contextmanager
def stage_pipeline(config: Config) -> Iterator[StagePipeline]:
    """Stages that serve, and at the end a check that all blocks are counted."""
    pipeline = StagePipeline(config)
    pipeline.attach()
    try:
        yield pipeline
        for each in pipeline.sides:
            each.check()
    finally:
        pipeline.close()
