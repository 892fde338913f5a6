"""Host time of a step, by batch: scheduler, plan, codec, KV cache, runner and report. Needs no GPU and no model.

    python bench/steps.py --batch 1 64 512 --clients 1 8
    python bench/steps.py --batch 64 --clients 1 --forms
    python bench/steps.py --calls

Every sequence decodes one token per step, and steps are planned one ahead. The backend does nothing, so the device's
work is not included. `--calls` counts calls instead of time: the same numbers on a busy machine. With `--forms` all
answers have one, of a vocabulary of 32,000. Then times are processor time: what other threads take to find the masks
is not included, and no part waits for these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from bench.load.own_server import SPECIAL_TOKEN_IDS, write_vocabulary
from bench.structured import ENDLESS
from services.attn_worker.cache.build_cache import build_cache
from services.common.config import EMBEDDED_MODEL
from services.common.sampling_params import SamplingParams
from services.common.structured_output import Constraint, StructuredOutput
from services.dense_worker.engine.attachment import AttachedCache, Attachment
from services.dense_worker.engine.engine import Engine
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.scheduler import Scheduler
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.session import ScheduledStep
from services.dense_worker.features.drafting.drafting import Drafting
from services.dense_worker.features.drafting.measured_drafting import ForcedDrafting
from services.dense_worker.features.drafting.step_costs import StepCosts
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.grammar.grammar_feature import GrammarFeature
from services.dense_worker.features.grammar.grammar_mask import GrammarMask
from services.dense_worker.features.grammar.grammars import Grammars
from services.dense_worker.features.grammar.sequence_grammar import SequenceGrammar
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.dense_worker.gateway_streams import GatewayStreams
from services.dense_worker.metrics import DenseMetrics
from services.dense_worker.runner.model_runner import ModelRunner, RunningStep
from services.dense_worker.runner.step_input import StepInput
from services.dense_worker.runner.step_tokens import PendingTokens
from services.dense_worker.sampling.editors import EDITORS
from services.dense_worker.sampling.sampler import Sampler
from services.grammar.matcher import GrammarMatcher
from services.grammar.vocabulary import Vocabulary, read_vocabulary
from services.pb import step_pb2
from services.step import SequenceSpec
from services.step.codec import decode_plan, encode_plan

ENGINE = ("schedule", "prepare", "masks", "read", "update")  # the dense worker's engine thread
LOOP = ("encode", "report")  # its event loop
ATTENTION = ("decode", "plan blocks", "commit")
PARTS = (*ENGINE, *LOOP, *ATTENTION)
BLOCK_SIZE, PROMPT_LEN, MAX_TOKENS, VOCAB_SIZE = 16, 128, 4096, 512
WARM_UP = 20
TOKEN = 7
FORM_VOCAB_SIZE = 32_000


class Steps:
    """An engine, a KV cache and one gateway's stream, joined by hand; `times` has µs by part."""

    clock = staticmethod(time.perf_counter)
    sampling = SamplingParams()
    stop_token_ids: tuple[int, ...] = (2,)

    def __init__(self, batch: int, num_clients: int, *, counts_calls: bool = False) -> None:
        """`counts_calls`: `times` has calls of functions instead, of Python and of C."""
        self.batch = batch
        self._measure = count_calls if counts_calls else self.measure_time
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self.cache = build_cache(batch * 300, BLOCK_SIZE, PROMPT_LEN + MAX_TOKENS)
        limits = SchedulerLimits(batch, batch + PROMPT_LEN, PROMPT_LEN + MAX_TOKENS, 64 * batch, "guaranteed_no_evict")
        self.sampler, drafting, features = self.make_parts(limits)
        self.runner = ModelRunner(None, self.sampler, 1, batch, features)  # type: ignore[arg-type]
        self.runner.attach(())
        metrics = DenseMetrics(CollectorRegistry())
        tracer: Any = SimpleNamespace(end=lambda *outcome: None)
        self.streams = GatewayStreams(tracer)
        self.outbox = queue.SimpleQueue[Any]()
        self.streams._streams[1] = self.outbox
        self.report: Any = None
        self.in_flight: Any = None  # the step that is planned and not ended, and its input
        attention: Any = None
        self.scheduler = Scheduler(limits, drafting, features)
        self.engine = Engine(self.scheduler, self.runner, attention, self.keep_report, 1.0, [metrics])
        attached = AttachedCache(0, self.cache.num_blocks, self.cache.num_free_blocks, {})
        self.session = self.scheduler.begin(Attachment(1, 1, {}, BLOCK_SIZE, (attached,), self.cache.max_model_len))
        for seq_id in range(1, batch + 1):
            prompt, client = list(range(PROMPT_LEN)), seq_id % num_clients
            spec = SequenceSpec(f"r{seq_id}", prompt, self.sampling, MAX_TOKENS, self.stop_token_ids, client=client)
            sequence = Sequence(seq_id, spec, stream=1, features=self.features_of(spec))
            self.streams.add(sequence)
            self.scheduler.add(sequence)
        for sequence in self.scheduler.next_to_open():
            self.scheduler.opened(self.cache.open_sequence(sequence.describe()))
            self.runner.open(sequence.describe_to_runner())

    def make_parts(self, limits: SchedulerLimits) -> tuple[Sampler, Drafting, tuple[Feature, ...]]:
        """The sampler, what decides about drafts, and the features."""
        return Sampler(limits.max_num_seqs, VOCAB_SIZE, "cpu"), Drafting(), ()

    def features_of(self, spec: SequenceSpec) -> tuple[SequenceFeature, ...]:
        """What a sequence has of features."""
        return ()

    def measure_time(self, function: Callable[..., Any], *arguments: object) -> tuple[Any, float]:
        """The function's result, and how many microseconds it took."""
        start = self.clock()
        result = function(*arguments)
        return result, 1e6 * (self.clock() - start)

    def keep_report(self, report: object) -> None:
        self.report = report

    def timed(self, part: str, function: Callable[..., Any], *arguments: object) -> Any:
        result, value = self._measure(function, *arguments)
        self.times[part].append(value)
        return result

    def run_step(self) -> bool:
        """Plans a step and ends the one before; returns whether every sequence has a token of that."""
        step = self.timed("schedule", self.schedule)
        step.launch_start_s, step.running, plan = time.monotonic(), RunningStep(), step.plan
        data = self.timed("encode", lambda: encode_plan(plan).SerializeToString())
        received = self.timed("decode", lambda: decode_plan(step_pb2.StepPlan.FromString(data)))
        self.timed("plan blocks", self.cache.plan_step, received)
        self.timed("commit", self.cache.commit_step)
        prepared = self.timed("prepare", lambda: self.runner.prepare(self.runner.bind(plan)))
        ended, self.in_flight = self.in_flight, (step, prepared)
        if ended is None:
            return False
        step, prepared = ended
        plan = step.plan
        tokens = self.sample(prepared)
        pending = PendingTokens(prepared.bound, self.runner._rows, tokens, {}, None, prepared.parts.values())
        result = self.timed("read", pending.read)
        self.timed("update", self.update, step, result)
        self.timed("report", self.send_report)
        return plan.num_tokens == len(plan.entries) == self.batch

    def schedule(self) -> Any:
        in_flight = self.session.in_flight
        assert not in_flight or not self.scheduler.waits_for(in_flight[-1]), "steps are planned ahead"
        return self.scheduler.schedule()

    def sample(self, prepared: StepInput) -> torch.Tensor:
        """The tokens of a step: int64 [num_sampled]."""
        self.timed("masks", self.edit, prepared)
        return torch.full((len(prepared.sampled_rows),), TOKEN)

    def edit(self, prepared: StepInput) -> None:
        """Edits logits that are not there."""
        self.runner._add_to_sampler()
        for editor, rows in self.sampler._find_edits(prepared.sampled_slots, prepared.output_lens):
            editor.apply(torch.empty(0), rows)

    def update(self, step: ScheduledStep, result: object) -> None:
        step.end_s = time.monotonic()
        report = self.engine._update(step, result)  # type: ignore[arg-type]
        self.engine._report(step, report)

    def send_report(self) -> None:
        self.streams.deliver(self.report)
        while not self.outbox.empty():
            self.outbox.get_nowait().SerializeToString()


class FormedSteps(Steps):
    """All answers have a form, and random tokens that it allows."""

    clock = staticmethod(time.thread_time)
    stop_token_ids = ()
    sampling = SamplingParams(structured_output=StructuredOutput(Constraint.JSON_SCHEMA, json.dumps(ENDLESS)))

    def make_parts(self, limits: SchedulerLimits) -> tuple[Sampler, Drafting, tuple[Feature, ...]]:
        vocabulary = make_vocabulary()
        self.grammars = Grammars(lambda: vocabulary, num_mask_threads=2)
        self.generator = np.random.default_rng(0)
        self.matchers: list[GrammarMatcher] = []
        self.allowed: np.ndarray | None = None  # uint32 [num_sampled, num_words]
        sampler = Sampler(limits.max_num_seqs, FORM_VOCAB_SIZE, "cpu", (*EDITORS, GrammarMask))
        [mask] = [each for each in sampler._editors if isinstance(each, GrammarMask)]
        mask._apply_masks, mask._stages = self.keep_masks, self  # type: ignore[assignment]
        self.memory = torch.empty(limits.max_num_seqs * (FORM_VOCAB_SIZE // 32 + 2), dtype=torch.int32)
        costs = StepCosts(limits.max_num_seqs, limits.max_num_batched_tokens)
        return sampler, ForcedDrafting(costs), (GrammarFeature(self.grammars),)

    def features_of(self, spec: SequenceSpec) -> tuple[SequenceFeature, ...]:
        matcher = asyncio.run(self.grammars.make(spec, ()))
        self.matchers.append(matcher)
        make: Any = None  # it is made
        return (SequenceGrammar("json_schema", make, matcher),)

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """As `HostStages`."""
        return self.memory[:size]

    def note_read(self) -> None:
        """As `HostStages`."""

    def keep_masks(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, floor: float) -> None:
        self.allowed = masks.numpy().view(np.uint8)

    def run_step(self) -> bool:
        while not all(each.has_found for each in self.matchers):
            time.sleep(1e-4)
        return super().run_step()

    def sample(self, prepared: StepInput) -> torch.Tensor:
        tokens = super().sample(prepared)
        for row in range(len(tokens)):
            allowed = np.flatnonzero(np.unpackbits(self.allowed[row], bitorder="little"))
            tokens[row] = int(self.generator.choice(allowed))
        return tokens


def make_vocabulary() -> Vocabulary:
    """The tokens of the embedded model, and random words."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        shutil.copy(EMBEDDED_MODEL / "tokenizer.json", model)
        config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"vocab_size": FORM_VOCAB_SIZE}))
        write_vocabulary(model)
        return read_vocabulary(model, FORM_VOCAB_SIZE, [SPECIAL_TOKEN_IDS["eos_token_id"]])


def count_calls(function: Callable[..., Any], *arguments: object) -> tuple[Any, float]:
    """The function's result, and how many functions were called, itself included."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    return result, num_calls - 1  # without the call that ends the count


def measure(
    batch: int, num_clients: int, num_steps: int, *, counts_calls: bool = False, has_forms: bool = False
) -> dict[str, float]:
    """What each part of a decode step of `batch` sequences takes: median microseconds, or the mean number of calls."""
    steps, num_decodes = (FormedSteps if has_forms else Steps)(batch, num_clients, counts_calls=counts_calls), 0
    while num_decodes < WARM_UP + num_steps:
        is_decode = steps.run_step()
        num_decodes += is_decode
        if not is_decode or num_decodes <= WARM_UP:
            for values in steps.times.values():
                values.clear()
    average = statistics.mean if counts_calls else statistics.median  # calls differ by whether a block is full
    return {part: average(values) for part, values in steps.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 512], help="sequences in a step")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="clients that they belong to")
    parser.add_argument("--num-steps", type=int, default=200, help="number of steps; the median counts")
    parser.add_argument("--calls", action="store_true", help="count calls of functions, not time")
    parser.add_argument("--forms", action="store_true", help="all answers have a form")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sums = {"engine": ENGINE, "loop": LOOP, "sum": PARTS}
    columns = (*PARTS, *sums)
    unit = "calls" if options.calls else "microseconds"
    print(f"{unit:>14}{'clients':>9}" + "".join(f"{name:>12}" for name in columns))
    for batch in options.batch:
        for num_clients in options.clients:
            kinds = {"counts_calls": options.calls, "has_forms": options.forms}
            found = measure(batch, num_clients, options.num_steps, **kinds)
            found |= {name: sum(found[part] for part in parts) for name, parts in sums.items()}
            print(f"{batch:>14}{num_clients:>9}" + "".join(f"{found[name]:>12.0f}" for name in columns))


if __name__ == "__main__":
    main()
