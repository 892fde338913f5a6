"""The engine of an encoder on its own thread: who runs with whom, and what comes first."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.config import ModelSection
from services.common.encoders.encoder_config import read_encoder_config
from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import PoolingMethod, TokenHead, read_pooling
from services.common.sampling_params import SamplingParams
from services.dense_worker.encoders.text.encoder_engine import EncoderEngine
from services.dense_worker.encoders.text.load_encoder import load_encoder
from services.dense_worker.encoders.text.pooled_text import PooledText
from services.dense_worker.encoders.text.text_encoder import Affine, HeadLayer, TextEncoder
from services.dense_worker.engine.limits import SchedulerLimits
from services.dense_worker.engine.sequence import Sequence
from services.dense_worker.engine.step_report import StepReport
from services.pb import pooling_pb2
from tests.support.dense.sequences import new_sequence
from tests.support.encoders import SIZES, make_encoder

TIMEOUT_S = 30.0
LIMITS = SchedulerLimits(
    max_num_seqs=4, max_num_batched_tokens=20, max_model_len=90, max_num_waiting=50, policy="guaranteed_no_evict"
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextEncoder, torch.nn.Module]:
    path: Path = tmp_path_factory.mktemp("bert")
    model = make_encoder(path, "bert", SIZES | {"num_hidden_layers": 4})
    pooling = read_pooling(ModelSection(path=path))
    assert pooling is not None
    return load_encoder(path, read_encoder_config(path), pooling, torch.float32, torch.device("cpu")), model


class Run:
    """An engine whose thread starts when all inputs have been submitted."""

    def __init__(self, encoder: TextEncoder, limits: SchedulerLimits = LIMITS) -> None:
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.engine = EncoderEngine(encoder, PoolingMethod.CLS, limits, self.reports.put)

    def submit(
        self,
        seq_id: int,
        num_tokens: int,
        client: int = 0,
        num_crashes: int = 0,
        *,
        all_tokens: bool = False,
        token_head: int = 0,
    ) -> Sequence:
        prompt = [5 + (seq_id * 7 + i) % 80 for i in range(num_tokens)]
        sequence = new_sequence(seq_id, f"r{seq_id}", prompt, SamplingParams(), 1)
        sequence.spec = replace(sequence.spec, client=client)
        sequence.num_crashes = num_crashes
        request = pooling_pb2.PoolingRequest(all_tokens=all_tokens, token_head=token_head)
        sequence.features = (PooledText(request),)
        self.engine.submit(sequence)
        return sequence

    def until(self, num_ended: int) -> list[list[int]]:
        """Starts it, and returns the seq_ids of each step until so many inputs have ended."""
        self.engine.start()
        steps = list[list[int]]()
        self.vectors, self.rows = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        self.errors = dict[int, Exception]()
        while sum(map(len, steps)) < num_ended:
            report = self.reports.get(timeout=TIMEOUT_S)
            self.vectors |= {each.seq_id: torch.from_numpy(found.rows[0]) for each, found in report.reports}
            self.rows |= {each.seq_id: torch.from_numpy(found.rows) for each, found in report.reports}
            self.errors |= {each.sequence.seq_id: each.error for each in report.outputs.others if each.error}
            if ended := [each.sequence.seq_id for each in report.outputs.others]:
                steps.append(ended)
        return steps


@pytest.fixture
def run(bert: tuple[TextEncoder, torch.nn.Module]) -> Iterator[Run]:
    run = Run(bert[0])
    yield run
    run.engine.stop(TIMEOUT_S)
    assert not run.engine.failure.done() and run.engine.counts.num_waiting == run.engine.counts.num_running == 0


@torch.inference_mode()
def test_whole_inputs_fill_steps_and_get_their_own_vectors(
    run: Run, bert: tuple[TextEncoder, torch.nn.Module]
) -> None:
    sequences = [run.submit(seq_id, num_tokens) for seq_id, num_tokens in enumerate((8, 9, 5, 3, 4, 1, 2, 20))]
    assert run.until(8) == [[0, 1], [2, 3, 4, 5], [6], [7]], "at most 20 tokens, and four inputs"
    for each in sequences:
        wanted = bert[1](torch.tensor([each.spec.prompt_token_ids])).last_hidden_state[0, 0]
        torch.testing.assert_close(run.vectors[each.seq_id], wanted, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_inputs_with_one_vector_run_with_those_with_a_vector_for_each_token(
    run: Run, bert: tuple[TextEncoder, torch.nn.Module]
) -> None:
    has_each = (False, True, True, False)
    sequences = [run.submit(i, 5 - i, all_tokens=each) for i, each in enumerate(has_each)]
    assert run.until(4) == [[0, 1, 2, 3]]
    for sequence, is_each in zip(sequences, has_each, strict=True):
        states = bert[1](torch.tensor([sequence.spec.prompt_token_ids])).last_hidden_state[0]
        wanted = states if is_each else states[:1]
        torch.testing.assert_close(run.rows[sequence.seq_id], wanted, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_layers_for_tokens_run_beside_others_in_a_step(bert: tuple[TextEncoder, torch.nn.Module]) -> None:
    size = bert[0].config.hidden_size
    layers = {head: torch.nn.Linear(size, 1 if head is TokenHead.SPARSE else size) for head in TokenHead}
    activations = {TokenHead.SPARSE: "relu", TokenHead.COLBERT: None}
    heads = {head: HeadLayer(Affine(each.weight, each.bias), activations[head]) for head, each in layers.items()}
    run = Run(replace(bert[0], token_heads=heads))
    kinds = (pooling_pb2.TOKEN_HEAD_COLBERT, 0, pooling_pb2.TOKEN_HEAD_SPARSE)
    sequences = [run.submit(i, 4 + i, all_tokens=bool(kind), token_head=kind) for i, kind in enumerate(kinds)]
    assert run.until(3) == [[0, 1, 2]]
    run.engine.stop(TIMEOUT_S)
    states = [bert[1](torch.tensor([each.spec.prompt_token_ids])).last_hidden_state[0] for each in sequences]
    wanted = [layers[TokenHead.COLBERT](states[0]), states[1][:1], layers[TokenHead.SPARSE](states[2]).relu()]
    for sequence, each in zip(sequences, wanted, strict=True):
        torch.testing.assert_close(run.rows[sequence.seq_id], each, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_a_long_input_delays_nobody(run: Run, bert: tuple[TextEncoder, torch.nn.Module]) -> None:
    """It runs a layer between two steps; of two long ones the second waits, and others do not."""
    long = [run.submit(0, 90, client=1), run.submit(1, 60, client=2)]
    for seq_id in range(2, 6):
        run.submit(seq_id, 12, client=seq_id)
    steps = [seq_id for [seq_id] in run.until(6)]
    assert steps[3] == 0 and steps[5] == 1, "four layers, one after each step of the others"
    for each in long:
        wanted = bert[1](torch.tensor([each.spec.prompt_token_ids])).last_hidden_state[0, 0]
        torch.testing.assert_close(run.vectors[each.seq_id], wanted, rtol=0, atol=2e-5)


def test_clients_take_turns(run: Run) -> None:
    for seq_id in range(8):
        run.submit(seq_id, 9, client=1)
    run.submit(8, 9, client=2)
    assert 8 in run.until(9)[0]


def test_a_suspect_of_crashes_runs_alone(run: Run) -> None:
    for seq_id in range(3):
        run.submit(seq_id, 2, num_crashes=2 * (seq_id == 1))
    assert run.until(3) == [[0], [1], [2]]


def test_cancelled_inputs_are_not_reported(run: Run) -> None:
    for seq_id in range(4):
        run.submit(seq_id, 3)
    run.engine.cancel(1)
    run.engine.cancel(7)
    assert run.until(3) == [[0, 2, 3]]


def test_what_is_too_long_is_refused(run: Run) -> None:
    run.submit(0, 91)
    run.until(1)
    assert isinstance(run.errors[0], InvalidRequest) and "91 tokens, the model takes 90" in str(run.errors[0])


def test_a_full_queue_refuses_more(bert: tuple[TextEncoder, torch.nn.Module]) -> None:
    run = Run(bert[0], replace(LIMITS, max_num_waiting=2))
    for seq_id in range(3):
        run.submit(seq_id, 3)
    run.until(3)
    run.engine.stop(TIMEOUT_S)
    assert list(run.errors) == [2] and "the limit is 2" in str(run.errors[2])
