"""The answer to one request as an ASGI response: one JSON object, or a stream of server-sent events or of lines.

It does not use Starlette's streaming response, which costs a task group and several coroutines per chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.common.errors import TwostrokeError
from services.gateway.apis.shared.generations import Generations
from services.gateway.core.chunks import MAX_INLINE_VALUES, Chunk, Completion, Prompt, is_large
from services.gateway.core.request_service import RequestService
from services.gateway.http.connection import BodyWriter, while_connected
from services.gateway.http.errors import describe
from services.gateway.http.field_names import rename_fields
from services.gateway.http.headers import header_values
from services.gateway.http.json_pieces import json_line, json_pieces
from services.gateway.request.read_request import check_can_stream
from services.gateway.resources.heavy_work import HeavyWork
from services.gateway.resources.repeatable import check_one_prompt, current_run, note_failure, opening
from services.pb import gateway_pb2

DONE = b"data: [DONE]\n\n"  # the end of OpenAI's older streams
LINE_CONTENT_TYPE = "application/x-ndjson"
FORWARDED_AT_ONCE = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # the latter is for proxies
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), *FORWARDED_AT_ONCE]
LINE_HEADERS = [(b"content-type", LINE_CONTENT_TYPE.encode()), *FORWARDED_AT_ONCE]


class Format:
    """The objects of one kind of answer. A dialect overrides what is another in it.

    `prompt_index` is the index of a prompt in the request.
    """

    param_names: Mapping[str, str]  # names of fields of `GenerateRequest` here, where they differ
    is_lines: bool = False  # whether each object of a stream is a line of JSON, and not a server-sent event
    has_event_names: bool = False  # whether the `type` of a streamed object is also the name of its event
    end_of_stream: bytes = b""  # follows the last event of a complete stream
    repeats_prompt: bool = False  # whether `chunk` needs the prompt with the first chunk of every answer, not only of 0
    repeats_logprobs: bool = False  # whether `chunk` gives those of all tokens so far, and of the prompt that it got
    # What surrounds the JSON of the text in the event of a piece of the first answer that has nothing but its text; to
    # be called after `begin`. None: there are no such events.
    text_frame: Callable[[], tuple[bytes, bytes]] | None = None

    async def begin(self, prompts: Sequence[list[int]]) -> None:
        """Takes the token ids of each prompt; called before all other methods."""

    def opening(self) -> Sequence[Any]:
        """Objects to send before all others."""
        return ()

    def chunk(self, prompt_index: int, chunk: Chunk) -> Sequence[Any]:
        """Objects for a piece of an answer; none if the piece has nothing to show. Bytes are an event."""
        raise NotImplementedError

    def closing(self) -> Sequence[Any]:
        """Objects to send after all others."""
        return ()

    def whole(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Any:
        """The object with all answers, grouped by prompt."""
        raise NotImplementedError

    def failure(self, error: Exception) -> Sequence[Any]:
        """The last objects of a stream that fails: OpenAI's error object."""
        return [describe(error)[1]]


class Answer(Response):
    """Runs the request when the server calls it. Cancels the request if the client disconnects."""

    def __init__(
        self,
        service: RequestService,
        messages: Sequence[gateway_pb2.GenerateRequest],
        answer_format: Format,
        *,
        is_stream: bool,
    ) -> None:
        self._service = service  # nothing of `Response`, which prepares headers for a body that is there
        self._messages = messages
        self._format = answer_format
        self._is_stream = is_stream
        self._num_prompt_values = 0  # the most log-probabilities of a prompt so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises a `TwostrokeError` before the status line is sent; a later error is sent as an event."""
        work = self._stream(scope, send) if self._is_stream else self._whole(scope, receive, send)
        await while_connected(scope, receive, work)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        generations = Generations(self._service)
        try:
            await self._start(generations, scope)
            answers = await generations.completions()
            pieces = [each for completions, _ in answers for each in completions]
            has_large_body = scope["state"]["heavy_work"] is not None  # parts of which may be repeated
            if has_large_body or is_large(pieces, [prompt for _, prompt in answers]):
                await send_pieces(send, self._service.heavy_work.pieces(self._whole_pieces(answers)))
                return
        finally:
            await generations.close()  # when a large answer has been sent: its memory is counted until then
        body = json_line(self._format.whole(answers))
        await Response(body, media_type="application/json")(scope, receive, send)

    def _whole_pieces(self, answers: Sequence[tuple[Sequence[Completion], Prompt | None]]) -> Iterator[bytes]:
        yield from json_pieces(self._format.whole(answers))

    async def _stream(self, scope: Scope, send: Send) -> None:
        generations = Generations(self._service, repeats_prompt=self._format.repeats_prompt)
        try:
            await self._start(generations, scope)
            first = asyncio.ensure_future(generations.next_chunk())
            try:
                await self._turn_if_large(scope)
                body = self._events(self._format.opening())  # made while the first token is computed
                await asyncio.wait({first}, timeout=self._service.section.first_token_timeout_s)
                if first.done():
                    first.result()  # an error raised here gets a status line of its own
                headers = LINE_HEADERS if self._format.is_lines else STREAM_HEADERS
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                state = scope["state"]
                await self._send_events(scope, state["send_body"], state["body_writer"], body, first, generations)
            finally:
                first.cancel()
        finally:
            await generations.close()

    async def _send_large(self, send: Send, objects: Sequence[Any]) -> None:
        """Sends the events of large objects while they are made, in turns of `HeavyWork`."""
        async for piece in self._service.heavy_work.pieces(self._event_pieces(objects)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _event_pieces(self, objects: Sequence[Any]) -> Iterator[bytes]:
        is_lines = self._format.is_lines
        for each in objects:
            if not is_lines:
                yield _start(each, self._format.has_event_names)
            yield from json_pieces(each)
            yield b"\n" if is_lines else b"\n\n"

    def _events(self, objects: Sequence[Any]) -> bytes:
        if self._format.is_lines:
            return b"".join([json_line(each) + b"\n" for each in objects])
        return events(objects, has_names=self._format.has_event_names)

    def _is_large(self, chunk: Chunk) -> bool:
        if self._format.repeats_logprobs:
            if chunk.prompt is not None and chunk.prompt.logprobs is not None:
                self._num_prompt_values = max(self._num_prompt_values, chunk.prompt.logprobs.num_values)
            num_per_token = chunk.logprobs.num_values // len(chunk.logprobs) if chunk.logprobs else 0
            return self._num_prompt_values + num_per_token * chunk.num_output_tokens > MAX_INLINE_VALUES
        if not (chunk.logprobs or chunk.prompt):
            return False
        return is_large([chunk], [chunk.prompt])

    async def _start(self, generations: Generations, scope: Scope) -> None:
        given = header_values(scope["headers"], b"traceparent")
        traceparent = given[0].decode("latin-1") if given else ""
        for message in self._messages:
            message.traceparent = traceparent
        if self._is_stream:
            for message in self._messages:
                check_can_stream(message)
            check_one_prompt(len(self._messages))
        try:
            await generations.start(self._messages, scope["state"]["caller"])
        except TwostrokeError as error:
            rename_fields(error, self._format.param_names)
            raise
        await self._format.begin([generation.request.spec.prompt_token_ids for generation in generations.running])

    async def _turn_if_large(self, scope: Scope) -> None:
        """Waits for a turn before events that may repeat parts of a large body, as those of responses do."""
        if scope["state"]["heavy_work"] is not None:
            await self._service.heavy_work.turn()

    async def _send_events(
        self,
        scope: Scope,
        send: Send,
        writer: BodyWriter | None,
        body: bytes,
        first: asyncio.Future[tuple[int, Chunk] | None],
        generations: Generations,
    ) -> None:
        """Sends `body`, and each chunk as it arrives. `send` waits while the client does not read.

        Plain chunks go to `writer` in the call that brings their tokens, and this task waits until one cannot.
        """
        form = self._format
        # A list of likely tokens takes as long to write as several plain tokens. Written as soon as their tokens come,
        # those of many streams would keep other requests, and the next tokens of all, waiting.
        has_lists = any(each.logprobs > 0 or each.sampling.logprob_token_ids for each in self._messages)

        def write(chunks: list[Chunk]) -> None:
            """All in one piece."""
            assert writer is not None, "chunks are forwarded only to a writer"
            objects = form.chunk(0, chunks[0])
            for chunk in chunks[1:]:
                objects = [*objects, *form.chunk(0, chunk)]
            if piece := self._events(objects):
                writer.write(piece)

        write_text = None  # until the first event is written
        try:
            if body and (not first.done() or current_run() is not None):
                with opening():
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
            next_chunk = await first
            while next_chunk is not None:
                prompt_index, chunk = next_chunk
                if has_lists:
                    await self._service.heavy_work.turn()
                objects = form.chunk(prompt_index, chunk)
                is_large = self._is_large(chunk) and bool(objects)
                if not is_large:
                    body += self._events(objects)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    body = b""
                if is_large:
                    await self._send_large(send, objects)
                if writer is not None:
                    if write_text is None and form.text_frame is not None:
                        write_text = writer.text_writer(*form.text_frame())
                    await generations.forward(write, writer.can_write, write_text)
                next_chunk = await generations.next_chunk()
            end = form.end_of_stream
            if any(each.HasField("logprobs") for each in self._messages):  # the last objects may repeat all of them
                await self._send_large(send, form.closing())
            else:
                await self._turn_if_large(scope)
                end = self._events(form.closing()) + end
        except Exception as error:  # after any error the client must not take the stream for complete
            note_failure()
            end = self._events(form.failure(error))
        await send({"type": "http.response.body", "body": body + end, "more_body": False})


def events(objects: Sequence[Any], *, has_names: bool = False) -> bytes:
    """The objects as server-sent events (HTML standard, "Interpreting an event stream"). See `has_event_names`."""
    if len(objects) == 1 and type(objects[0]) is bytes:
        return objects[0]
    return b"".join([each if type(each) is bytes else _event(each, has_names) for each in objects])


async def send_pieces(
    send: Send,
    pieces: AsyncIterator[bytes],
    media_type: str = "application/json",
    further: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Sends a whole answer while it is made: the client reads it in chunks, and only the next one is in memory.

    An error before the first piece is raised before the status line is sent.
    """
    given = {"content-type": media_type, **further}
    headers = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    start: Message | None = {"type": "http.response.start", "status": 200, "headers": headers}
    async for piece in pieces:
        if start is not None:
            await send(start)
            start = None
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if start is not None:
        await send(start)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class PiecewiseAnswer(Response):
    """A large answer of JSON, made in turns of heavy work while it is sent."""

    def __init__(self, pieces: Iterator[bytes], heavy_work: HeavyWork) -> None:
        super().__init__()
        self._pieces, self._heavy_work = pieces, heavy_work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_pieces(send, self._heavy_work.pieces(self._pieces))


def _event(value: Any, has_name: bool) -> bytes:
    return _start(value, has_name) + json_line(value) + b"\n\n"


def _start(event: Any, has_name: bool) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " if has_name else b"data: "
