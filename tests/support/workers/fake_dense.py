"""A dense worker without a model. Tests script its tokens, kill it, and read the messages of the gateway."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import numpy as np

from services.common.dense_info import dense_info_metadata
from services.pb import dense_pb2, dense_pb2_grpc, prompt_logprobs_pb2, sampling_pb2

Script = Callable[[dense_pb2.Submit], Sequence[int]]


class FakeDense(dense_pb2_grpc.DenseWorkerServicer):
    """Gives every running sequence one token per step, in the order of `script(submit)`.

    A sequence ends at a stop token or at `max_tokens`; if the script ends earlier, the sequence gets no more tokens.
    The log-probability of a token is `fake_logprob` of its id; the next most likely tokens have the ids just below.
    A sequence that asks for a vector ends with its `fake_vector`.
    With `errors[request_id] = (status_code, message)` that request is refused. `start` may be called after `kill`.
    """

    def __init__(
        self, script: Script, *, step_s: float = 0.0, vocab_size: int = 32_000, max_model_len: int = 2048
    ) -> None:
        self.script = script
        self.step_s = step_s  # pause after each step
        self.info = dense_pb2.DenseInfo(
            family="llama",
            dtype="float32",
            vocab_size=vocab_size,
            num_layers=2,
            max_model_len=max_model_len,
            weights_hash="c0ffee",
            backend="fake",
            device="cpu",
            max_beam_width=16,
            max_num_seqs=4,
            hidden_size=8,
        )
        self.further_metadata: tuple[tuple[str, str], ...] = ()  # of streams
        self.errors: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.num_cached_tokens = 0  # reported for every sequence
        self.submits: list[dense_pb2.Submit] = []
        self.table_parts: list[dense_pb2.PromptEmbedsPart] = []
        self.cancelled_seq_ids: list[int] = []
        self._running: list[dict[int, _Sequence]] = []  # by seq_id, one dict per stream
        self.num_streams = 0
        self.num_ready_streams = 0  # those with a `Resumed` message, which may get new sequences
        self.flushes = list[int]()  # the generation of each message; 0: it is one
        self.confirms_flushes = True
        self._updates = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str) -> None:
        """Listens at `address`."""
        self._server = grpc.aio.server()
        dense_pb2_grpc.add_DenseWorkerServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)
        await self._server.start()

    async def kill(self) -> None:
        """Breaks every stream and stops listening. Only the records for tests remain."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def GetInfo(
        self, request: dense_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> dense_pb2.DenseInfo:
        return self.info

    async def Connect(
        self, requests: AsyncIterator[dense_pb2.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[dense_pb2.StepOutput]:
        await context.send_initial_metadata((*dense_info_metadata(self.info), *self.further_metadata))
        running: dict[int, _Sequence] = {}
        self._running.append(running)
        self.num_streams += 1
        step_id = 0
        is_ready = asyncio.Event()
        confirmed = deque[int]()
        reader = asyncio.create_task(self._read(requests, running, is_ready, confirmed))
        try:
            while not reader.done():
                if confirmed:
                    yield dense_pb2.StepOutput(prefix_generation=confirmed.popleft())
                    continue
                output = self._step(running)
                if output.ByteSize():
                    step_id += 1
                    output.step_id = step_id
                    yield output
                    await asyncio.sleep(self.step_s)
                else:
                    self._updates.clear()
                    await self._updates.wait()
        finally:
            self.num_streams -= 1
            self.num_ready_streams -= is_ready.is_set()
            self._running = [other for other in self._running if other is not running]
            reader.cancel()

    @property
    def running(self) -> dict[int, _Sequence]:
        """The running sequences of all streams, by seq_id."""
        return {seq_id: sequence for running in self._running for seq_id, sequence in running.items()}

    async def _read(
        self,
        requests: AsyncIterator[dense_pb2.GatewayMessage],
        running: dict[int, _Sequence],
        is_ready: asyncio.Event,
        confirmed: deque[int],
    ) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "submit":
                submit = message.submit
                self.submits.append(submit)
                running[submit.seq_id] = _Sequence(submit, self.script(submit))
            elif kind == "prompt_embeds_part":
                self.table_parts.append(message.prompt_embeds_part)
            elif kind == "cancel":
                self.cancelled_seq_ids.append(message.cancel.seq_id)
                running.pop(message.cancel.seq_id, None)
            elif kind == "resumed":
                is_ready.set()
                self.num_ready_streams += 1
            elif kind == "forget_prefixes":
                self.flushes.append(message.forget_prefixes.generation)
                if self.confirms_flushes:
                    confirmed.append(message.forget_prefixes.generation or self.flushes.count(0))
            self._updates.set()
        self._updates.set()

    def _step(self, running: dict[int, _Sequence]) -> dense_pb2.StepOutput:
        output = dense_pb2.StepOutput()
        for seq_id, sequence in list(running.items()):
            submit = sequence.submit
            if submit.spec.request_id in self.errors:
                code, message = self.errors[submit.spec.request_id]
                output.ended.add(
                    seq_id=seq_id,
                    reason=dense_pb2.SequenceEnd.ERROR,
                    status_code=code.value[0],
                    message=message,
                )
                del running[seq_id]
                continue
            if not sequence.is_started:
                sequence.is_started = True
                output.started.add(seq_id=seq_id, num_cached_tokens=self.num_cached_tokens)
                _report_prompt(submit, output)
            if "pooling" in submit.spec.features:
                vector = fake_vector(submit.spec.prompt_token_ids).astype("<f4").tobytes()
                output.reports.add(seq_id=seq_id, feature="pooling", num_tokens=1, values=vector)
                output.ended.add(seq_id=seq_id, reason=dense_pb2.SequenceEnd.LENGTH)
                del running[seq_id]
                continue
            if sequence.num_output_tokens == len(sequence.token_ids):
                continue
            token_id = sequence.token_ids[sequence.num_output_tokens]
            sequence.num_output_tokens += 1
            output.seq_ids.append(seq_id)
            output.token_ids.append(token_id)
            if submit.spec.HasField("num_logprobs"):
                output.logprobs.add(seq_id=seq_id, token=_logprobs(token_id, submit.spec.num_logprobs))
            reason = None
            if token_id in submit.spec.stop_token_ids:
                reason = dense_pb2.SequenceEnd.STOP
            elif sequence.num_output_tokens == submit.spec.max_tokens:
                reason = dense_pb2.SequenceEnd.LENGTH
            if reason is not None:
                output.ended.add(seq_id=seq_id, reason=reason)
                del running[seq_id]
        return output


def fake_logprob(token_id: int) -> float:
    """A value that is exact in 32 bits, differs for every token, and is higher for lower ids."""
    return -(token_id + 1) / 1024


def fake_vector(token_ids: Sequence[int]) -> np.ndarray:
    """float32 [8]: another one for each list of token ids, of any length."""
    return np.random.default_rng(list(token_ids)).standard_normal(8, np.float32)


def _logprobs(token_id: int, num_top: int) -> sampling_pb2.TokenLogprobs:
    top = [max(0, token_id - num_top + 1) + i for i in range(num_top)]
    return sampling_pb2.TokenLogprobs(
        logprob=fake_logprob(token_id), top_token_ids=top, top_logprobs=map(fake_logprob, top), rank=token_id + 1
    )


def _report_prompt(submit: dense_pb2.Submit, output: dense_pb2.StepOutput) -> None:
    name = "prompt_logprobs"
    if name not in submit.spec.features or len(submit.spec.prompt_token_ids) == 1:
        return
    num_top = prompt_logprobs_pb2.PromptLogprobsRequest.FromString(submit.spec.features[name]).num_likeliest
    own = np.array(submit.spec.prompt_token_ids[1:], np.uint32)[:, None]
    top = np.maximum(own.astype(np.int64) - num_top + 1, 0).astype(np.uint32) + np.arange(num_top, dtype=np.uint32)
    logprobs = [(-(ids + 1.0) / 1024).astype("<f4").view("<u4") for ids in (own, top)]  # `fake_logprob`
    rows = np.concatenate([logprobs[0], own + 1, top, logprobs[1]], axis=1).astype("<u4")
    output.reports.add(seq_id=submit.seq_id, feature=name, start=1, num_tokens=len(rows), values=rows.tobytes())


class _Sequence:
    def __init__(self, submit: dense_pb2.Submit, token_ids: Sequence[int]) -> None:
        self.submit = submit
        self.token_ids = token_ids
        self.num_output_tokens = len(submit.output_token_ids)
        self.is_started = False
