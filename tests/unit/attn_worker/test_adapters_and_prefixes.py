"""Keys and values belong to an adapter and a prompt table: only sequences with the same ones share blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.attn_worker.attachment import Attachment
from services.attn_worker.cache.build_cache import build_cache
from services.attn_worker.engine import AttentionEngine
from services.attn_worker.metrics import AttentionMetrics
from services.attn_worker.runner.layer_runner import FinishedStep
from services.common.attention.learned import Learned
from services.common.kv_cache.scales import KVScales
from services.common.sampling_params import SamplingParams
from services.lora.adapter import Adapter
from services.step import NewSequence, PlanEntry, PromptEmbedsRef, SequenceSpec
from tests.support.attention.open_now import open_now
from tests.support.plans import plan_of

BLOCK_SIZE = 4
TOKENS = tuple(range(3, 3 + 2 * BLOCK_SIZE + 1))
A, B = Adapter("a", "aa" * 32, "/a"), Adapter("b", "bb" * 32, "/b")


class Worker:
    """An engine whose steps compute nothing."""

    def __init__(self) -> None:
        runner: Any = SimpleNamespace(
            attach=lambda channels, learned: None, launch=lambda metadata, channel, after: FinishedStep()
        )
        self.cache = build_cache(num_blocks=64, block_size=BLOCK_SIZE, max_model_len=64)
        self._engine = AttentionEngine(self.cache, runner, AttentionMetrics(CollectorRegistry(), lambda: None))
        channel: Any = SimpleNamespace(waited_s=None, close=lambda: None, abort=lambda: None)
        self._attachment = Attachment(1, {0: channel}, max_num_tokens=64)
        self._engine.attach(self._attachment, "00", Learned(KVScales.ones(1)))
        self._num_steps = 0

    def run(self, seq_id: int, adapter: Adapter | None, salt: str = "", table: str = "") -> int:
        """Computes and closes a sequence of `TOKENS`; returns how many of them were cached."""
        ref = PromptEmbedsRef(table, 1, 4, "float32", 100) if table else None
        asked = SequenceSpec("r", TOKENS, SamplingParams(), 1, cache_salt=salt, adapter=adapter, prompt_embeds=ref)
        new = NewSequence(seq_id, "r", TOKENS, len(TOKENS), prefix_key=asked.prefix_key)
        num_cached = open_now(self._engine, self._attachment, new).num_cached_tokens
        self._step(PlanEntry(seq_id, num_cached, len(TOKENS) - num_cached, 1))
        self._step(close=seq_id)
        self.cache.check_integrity()
        assert self.cache.num_free_blocks == self.cache.num_blocks
        return num_cached

    def _step(self, *entries: PlanEntry, close: int | None = None) -> None:
        self._num_steps += 1
        plan = plan_of(self._num_steps, *entries, close_seq_ids=() if close is None else (close,))
        self._engine.run_step(self._attachment, plan, 0.0, lambda _: None)


def test_only_sequences_of_one_adapter_share_blocks() -> None:
    worker = Worker()
    assert [worker.run(1, None), worker.run(2, A), worker.run(3, B)] == [0, 0, 0]
    assert [worker.run(4, None), worker.run(5, A), worker.run(6, B)] == [2 * BLOCK_SIZE] * 3


def test_the_hash_decides_and_not_the_name() -> None:
    worker = Worker()
    worker.run(1, A)
    assert worker.run(2, Adapter("other", A.hash, "/elsewhere")) == 2 * BLOCK_SIZE
    assert worker.run(3, Adapter(A.name, B.hash, A.path)) == 0


@pytest.mark.parametrize("salt", ["a", A.hash, "\xff" + A.hash, "\xff" + "\xaa" * 32])
def test_no_salt_stands_for_an_adapter(salt: str) -> None:
    worker = Worker()
    worker.run(1, A)
    assert worker.run(2, None, salt) == 0
    assert worker.run(3, A, salt) == 0, "a salt divides the sequences of an adapter, too"


def test_only_sequences_of_one_prompt_table_share_blocks() -> None:
    """Adapter, table and salt are told apart even where one has the bytes of another."""
    cases: list[tuple[Adapter | None, str, str]] = [
        (adapter, table, salt) for adapter in (None, A) for table in ("", A.hash, B.hash) for salt in ("", A.hash)
    ]
    cases += [(None, "\xfe" + A.hash, ""), (None, "\xff" + A.hash, "")]
    worker = Worker()
    for num_cached in (0, 2 * BLOCK_SIZE):
        for case, (adapter, table, salt) in enumerate(cases):
            is_hash = not table.startswith(("\xfe", "\xff"))
            found = worker.run(100 * num_cached + case, adapter, salt if is_hash else table, table if is_hash else "")
            assert found == num_cached, (adapter, table, salt)
