"""The public gRPC API: converts protobuf messages; `RequestService` and `Generation` do the rest."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import grpc

from services.common.errors import InvalidRequest
from services.common.token_logprobs import LogprobRows
from services.gateway import __version__
from services.gateway.access.reception import current_caller, held_by_answer, traceparent_of
from services.gateway.access.slow_reader import SlowReaders
from services.gateway.apis.twostroke.vector_calls import VectorCalls
from services.gateway.core.chunks import Chunk, Completion, Finish, Prompt, is_large
from services.gateway.core.generation import Generation
from services.gateway.core.request_service import BYTES_PER_TOKEN_TEXT, Part, RequestService
from services.gateway.features.installed import REPORTS
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.link.journal_entry import FinishReason
from services.gateway.request.read_request import check_can_stream
from services.gateway.resume.grpc_calls import STREAM, WHOLE, GrpcResumption, Way
from services.gateway.resume.recording import Recording
from services.gateway.resume.resumption import Resumption
from services.gateway.text.answer_parts import AnswerParts
from services.gateway.text.deltas import CallArguments, CallBegin, Delta, ReasoningDelta
from services.gateway.vectors.vectors import Vectors
from services.lora.adapter import encode_adapter
from services.pb import gateway_pb2, gateway_pb2_grpc

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name
VALUES_PER_TURN = 8192  # log-probabilities: a millisecond or two
VALUES_PER_ROW = 20  # what a token takes beside its likely ones
FINISH_REASONS = {
    FinishReason.STOP: gateway_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: gateway_pb2.FINISH_REASON_ABORT,
}


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Answers clients that `Reception` accepts.

    It raises errors as `TwostrokeError`, which become statuses in `services.rpc.server`.
    """

    def __init__(
        self, service: RequestService, peers: GatewayPeers, vectors: Vectors, resumption: Resumption | None
    ) -> None:
        """`peers`: the other gateways at the same port, which may run the request of an Abort.

        `resumption`: None if requests cannot be resumed.
        """
        self._service = service
        self._slow_readers = SlowReaders(service.section.slow_reader_timeout_s)
        self._peers = peers
        self._vector_calls = VectorCalls(vectors)
        self._resumption = GrpcResumption(resumption, service.memory, self._slow_readers)
        start_stream = partial(self._start_generation, in_one_message=False)
        self._stream_way = Way(STREAM, start_stream, self._record_stream, gateway_pb2.GenerateChunk)
        start_whole = partial(self._start_generation, in_one_message=True)
        self._whole_way = Way(WHOLE, start_whole, self._record_whole, gateway_pb2.GenerateResponse)

    async def GenerateStream(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends a chunk when there are new tokens. Tokens that arrive while a chunk is sent go into the next chunk."""
        check_can_stream(request)
        if request.resumable:
            _trace(request, context)
            async for message in self._resumption.answer(request, context, self._stream_way):
                await context.write(message)
            return
        generation = await self._start(request, context)
        with self._slow_readers.watching(context, generation.request_id) as call:
            while not generation.is_finished:
                chunk = await generation.next_chunk()
                message = await self._encode(generation.request_id, chunk)
                call.sending_since = time.monotonic()
                await context.write(message)
                call.sending_since = None

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.GenerateResponse:
        """Sends all answers in one response."""
        if request.resumable:
            _trace(request, context)
            return await anext(self._resumption.answer(request, context, self._whole_way))
        return await self._whole(await self._start(request, context, in_one_message=True))

    async def Resume(
        self, request: gateway_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.GenerateChunk]:
        """Sends the rest of a resumable stream."""
        async for message in self._resumption.rest(request, context, self._stream_way):
            yield message

    async def _whole(self, generation: Generation) -> gateway_pb2.GenerateResponse:
        completions, prompt = await generation.completions()
        response = gateway_pb2.GenerateResponse(request_id=generation.request_id)
        has_turns = is_large(completions, [prompt])
        for completion in completions:
            if has_turns:
                await self._service.heavy_work.turn()
            added = response.completions.add()
            _encode_completion(completion, added)
            await self._encode_logprobs(completion.logprobs, added.logprobs, has_turns=has_turns)
        if prompt is not None:
            response.prompt.MergeFrom(_encode_prompt(prompt))
            await self._encode_logprobs(prompt.logprobs, response.prompt.logprobs, has_turns=has_turns)
        return response

    async def Embed(
        self, request: gateway_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.EmbedResponse:
        """The vector of each input."""
        return await self._vector_calls.embed(request, context)

    async def Score(
        self, request: gateway_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.ScoreResponse:
        """The score of each pair of texts."""
        return await self._vector_calls.score(request, context)

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.TokenizeResponse:
        """Turns texts and chats into token ids; needs no dense worker."""
        caller = current_caller()
        held = held_by_answer(context, self._service.memory)
        [token_ids] = await self._service.tokenize([request], caller, held, BYTES_PER_TOKEN_TEXT)
        tokens = await self._service.tokenizer.write_tokens(token_ids)
        return gateway_pb2.TokenizeResponse(token_ids=token_ids, tokens=tokens)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        held, skips = held_by_answer(context, self._service.memory), request.skip_special_tokens
        [text] = await self._service.detokenize([request.token_ids], skips, current_caller(), held)
        return gateway_pb2.DetokenizeResponse(text=text)

    async def Abort(
        self, request: gateway_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.AbortResponse:
        """Ends a running request of the same owner, in any gateway process."""
        owner = current_caller().owner
        was_running = self._service.abort(request.request_id, owner)
        if await self._peers.abort(owner, request.request_id):
            was_running = True
        return gateway_pb2.AbortResponse(was_running=was_running)

    async def ModelInfo(
        self, request: gateway_pb2.ModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.ModelInfoResponse:
        """The served model, as last reported by the dense worker."""
        model = self._service.model
        return gateway_pb2.ModelInfoResponse(
            model=self._service.names.first,
            names=self._service.names.names,
            family=model.family,
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            num_layers=model.num_layers,
            eos_token_ids=self._service.eos_token_ids,
            weights_hash=model.weights_hash,
            version=__version__,
            adapters=map(encode_adapter, self._service.names_for(current_caller()).adapters.values()),
        )

    async def LoadAdapter(
        self, request: gateway_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.LoadAdapterResponse:
        """Loads an adapter in all gateway processes."""
        caller = current_caller()
        self._service.count_requests(1, caller)
        adapter = await self._service.adapters.load(caller, request.name, request.path, replaces=request.replaces)
        return gateway_pb2.LoadAdapterResponse(adapter=encode_adapter(adapter))

    async def UnloadAdapter(
        self, request: gateway_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.UnloadAdapterResponse:
        """Forgets an adapter in all gateway processes."""
        caller = current_caller()
        self._service.count_requests(1, caller)
        await self._service.adapters.unload(caller, request.name)
        return gateway_pb2.UnloadAdapterResponse()

    async def _record_stream(self, generation: Generation, recording: Recording) -> None:
        while not generation.is_finished:
            message = await self._encode(generation.request_id, await generation.next_chunk())
            message.digest = recording.record.run.digest
            await recording.add(message.SerializeToString())

    async def _record_whole(self, generation: Generation, recording: Recording) -> None:
        await recording.add((await self._whole(generation)).SerializeToString())

    async def _encode(self, request_id: str, chunk: Chunk) -> gateway_pb2.GenerateChunk:
        if not (chunk.logprobs or chunk.prompt or chunk.reports):
            return _encode_chunk(request_id, chunk)
        has_turns = is_large([chunk], [chunk.prompt])
        if has_turns:
            await self._service.heavy_work.turn()
        message = _encode_chunk(request_id, chunk)
        await self._encode_logprobs(chunk.logprobs, message.logprobs, has_turns=has_turns)
        if chunk.prompt is not None:
            await self._encode_logprobs(chunk.prompt.logprobs, message.prompt.logprobs, has_turns=has_turns)
        return message

    async def _encode_logprobs(self, rows: LogprobRows | None, target: Any, *, has_turns: bool) -> None:
        """Adds rows to a repeated field, some in each turn of `HeavyWork` if there are many values."""
        num_left = 0  # in this turn
        for row in () if rows is None else rows.encoded():
            if has_turns and num_left <= 0:
                await self._service.heavy_work.turn()
                num_left = VALUES_PER_TURN
            target.append(row)
            num_left -= VALUES_PER_ROW + len(row.top_token_ids)

    async def _start(
        self,
        message: gateway_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,
        *,
        in_one_message: bool = False,
    ) -> Generation:
        _trace(message, context)
        generation = await self._start_generation(message, in_one_message=in_one_message)
        # Closed here, because a handler that is cancelled while it sends is only garbage collected.
        context.add_done_callback(lambda _: generation.close())
        return generation

    async def _start_generation(
        self, message: gateway_pb2.GenerateRequest, *, in_one_message: bool
    ) -> Generation:
        given = {field.name for field, _ in message.ListFields()}
        for report in REPORTS.values():
            if not report.is_in_grpc and report.field in given:
                field = report.field
                raise InvalidRequest(f"{field} is for clients of HTTP: this API has no place for it", field)
        return await self._service.start(message, current_caller(), Part(in_one_message=in_one_message))


def _encode_chunk(request_id: str, chunk: Chunk) -> gateway_pb2.GenerateChunk:
    """The message without log-probabilities."""
    message = gateway_pb2.GenerateChunk(
        request_id=request_id,
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish=_encode_finish(chunk.finish) if chunk.finish else None,
        index=chunk.index,
        prompt=None if chunk.prompt is None else _encode_prompt(chunk.prompt),
        reasoning="".join([each.text for each in chunk.deltas if isinstance(each, ReasoningDelta)]),
        tool_calls=_encode_calls(chunk.deltas),
    )
    for name, part in chunk.reports.items():
        REPORTS[name].write([part], message)
    return message


def _encode_calls(deltas: Iterable[Delta]) -> list[gateway_pb2.ToolCallDelta]:
    pieces = []
    for delta in deltas:
        if isinstance(delta, CallBegin):
            pieces.append(gateway_pb2.ToolCallDelta(index=delta.index, id=delta.call_id, name=delta.name))
        elif isinstance(delta, CallArguments):
            pieces.append(gateway_pb2.ToolCallDelta(index=delta.index, arguments=delta.text))
    return pieces


def _encode_completion(completion: Completion, message: gateway_pb2.Completion) -> None:
    """Writes a completion, but not its log-probabilities, into a message."""
    assert completion.finish is not None
    parts = completion.parts or AnswerParts()
    message.MergeFrom(
        gateway_pb2.Completion(
            index=completion.index,
            text=completion.text,
            token_ids=completion.token_ids,
            finish=_encode_finish(completion.finish),
            reasoning=parts.reasoning(),
            tool_calls=[
                gateway_pb2.ToolCall(id=call.call_id, name=call.name, arguments=call.arguments) for call in parts.calls
            ],
        )
    )
    for name, parts in completion.reports.items():
        REPORTS[name].write(parts, message)


def _encode_prompt(prompt: Prompt) -> gateway_pb2.PromptEcho:
    """The message without log-probabilities."""
    message = gateway_pb2.PromptEcho(token_ids=prompt.token_ids)
    for name, part in prompt.reports.items():
        REPORTS[name].write([part], message)
    return message


def _encode_finish(finish: Finish) -> gateway_pb2.Finish:
    timings = finish.timings
    queue_s, first_token_s = timings.queue_s or 0.0, timings.first_token_s or 0.0
    has_calls = finish.num_calls > 0 and finish.reason is FinishReason.STOP
    return gateway_pb2.Finish(
        reason=gateway_pb2.FINISH_REASON_TOOL_CALLS if has_calls else FINISH_REASONS[finish.reason],
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        usage=gateway_pb2.Usage(
            num_prompt_tokens=finish.num_prompt_tokens,
            num_cached_tokens=finish.num_cached_tokens,
            num_output_tokens=finish.num_output_tokens,
            num_reasoning_tokens=finish.num_reasoning_tokens or 0,
        ),
        seed=finish.seed,
        beam_score=finish.beam_score,
        timings=gateway_pb2.Timings(
            queue_ms=1e3 * queue_s,
            prefill_ms=1e3 * max(0.0, first_token_s - queue_s),
            first_token_ms=1e3 * first_token_s,
            per_token_ms=1e3 * (timings.per_token_s or 0.0),
            total_ms=1e3 * timings.total_s,
        ),
    )


def _trace(message: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
    """Sets the caller's W3C trace context, unless the message has one."""
    message.traceparent = message.traceparent or traceparent_of(context)
