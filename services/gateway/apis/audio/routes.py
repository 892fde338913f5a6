"""POST /v1/audio/transcriptions and /v1/audio/translations: uploads in OpenAI's forms, or in llama.cpp's JSON."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from services.common.errors import InvalidRequest, TwostrokeError
from services.common.shorten import quote
from services.gateway.access.access import Caller
from services.gateway.apis.audio import formats
from services.gateway.apis.shared.answer import DONE, STREAM_HEADERS, events
from services.gateway.core.request_service import RequestService
from services.gateway.http.connection import while_connected
from services.gateway.http.envelope import FORM_BYTES, FORM_TYPE, media_type_of
from services.gateway.http.errors import ERROR_RESPONSES, describe
from services.gateway.http.json_route import parse_json
from services.gateway.resources.base64_text import decode_base64
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.sound.sound_reader import Sound, SoundReader
from services.gateway.sound.speech_model import SpeechModel, Task
from services.gateway.sound.transcription import SpokenSegment, Transcription, TranscriptionOptions

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
JSON_TYPE = "application/json"
MAX_PROMPT_CHARACTERS = 4096
MAX_FIELDS = 32
# Fields that would change the answer, with the values that have no effect.
_UNSUPPORTED = {
    "chunking_strategy": (),
    "known_speaker_names[]": (),
    "include[]": (),
    "use_beam_search": ("false",),
    "n": ("1",),
    "to_language": ("en", "english"),
}
# vLLM's options of sampling.
_NUMBERS = ("top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_INTEGERS = ("top_k", "seed")
_STREAM_FLAGS = ("stream", "stream_include_usage", "stream_continuous_usage_stats")


@dataclass(frozen=True, slots=True)
class Streaming:
    """Whether the answer is a stream, and what vLLM's clients ask of one."""

    is_on: bool
    includes_usage: bool  # in an event of its own at the end
    repeats_usage: bool  # in each event


@dataclass(frozen=True, slots=True)
class Speech:
    """What a gateway has for a speech model."""

    model: SpeechModel
    reader: SoundReader


def audio_routes(service: RequestService, speech: Speech | None) -> APIRouter:
    """The routes of one gateway; `speech`: None if its model reads no sound."""
    router = APIRouter(tags=["Audio"], responses=ERROR_RESPONSES)

    async def answer(request: Request, task: Task) -> Response:
        if speech is None:
            path = request.scope["path"]
            raise InvalidRequest(f"{service.names.first} reads text, not sound: it has no {path}", "model")
        media_type = media_type_of(request.scope)
        if media_type not in (FORM_TYPE, JSON_TYPE):  # others are slow to parse, and have no files
            raise HTTPException(415, f"content-type is {quote(media_type)}, must be {FORM_TYPE} or {JSON_TYPE}")
        try:
            if media_type == JSON_TYPE:
                form = await _form_of_json(request, service)
                data, options, response_format, streaming = await _read_form(form, request, task, service)
            else:
                async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=FORM_BYTES) as form:
                    data, options, response_format, streaming = await _read_form(form, request, task, service)
        except HTTPException as error:
            if error.status_code != 400:
                raise
            param = "file" if "files" in error.detail else None
            raise InvalidRequest(f"the form cannot be read: {error.detail}", param) from error
        service.names_for(request.state.caller).check(options.model)
        if options.language is not None and speech.model.languages:
            speech.model.language_code(options.language)
        speech.model.task_tokens(task, options.language or next(iter(speech.model.languages), None))
        caller = request.state.caller
        service.count_requests(1, caller)
        held: HeldMemory = request.state.held
        # Of the form only the file is left, and nothing is made of it here.
        held.give_back(max(0, held.num_bytes - len(data)))
        sound = await _read(speech.reader, data, request, held)
        del data
        if sound is None:
            return Response()  # to nobody
        transcription = Transcription(service, speech.model, sound, options, caller.for_parts())
        return _TranscriptionAnswer(transcription, caller, response_format, streaming)

    @router.post("/v1/audio/transcriptions", response_class=Response)
    async def transcribe(request: Request) -> Response:
        """Writes down what is said in a file."""
        return await answer(request, "transcribe")

    @router.post("/v1/audio/translations", response_class=Response)
    async def translate(request: Request) -> Response:
        """Writes in English what is said in a file."""
        return await answer(request, "translate")

    return router


async def _read(reader: SoundReader, data: bytes, request: Request, held: HeldMemory) -> Sound | None:
    """The sound of a file; None if the client disconnects while it waits."""
    sound: Sound | None = None

    async def read() -> None:
        nonlocal sound
        sound = await reader.read(data, request.state.caller.client_id, held)

    await while_connected(request.scope, request.receive, read())
    return sound


class _TranscriptionAnswer(Response):
    """Runs the transcription when the server calls it. Cancels it if the client disconnects.

    It counts as one answer of its caller, however many windows it has.
    """

    def __init__(
        self, transcription: Transcription, caller: Caller, response_format: str, streaming: Streaming
    ) -> None:
        super().__init__()
        self._transcription = transcription
        self._caller = caller
        self._format = response_format
        self._streaming = streaming

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises a `TwostrokeError` before the status line is sent; a later error is sent as an event."""
        self._transcription.service.count_answers(1, self._caller)
        work = self._stream(send) if self._streaming.is_on else self._whole(scope, receive, send)
        try:
            await while_connected(scope, receive, work)
        finally:
            self._caller.usage.close_answers(1)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        segments = [each async for each in self._transcription.segments()]
        await self._response(segments)(scope, receive, send)

    def _response(self, segments: list[SpokenSegment]) -> Response:
        match self._format:
            case "text":
                return PlainTextResponse(formats.text_of(segments) + "\n")
            case "srt":
                return PlainTextResponse(formats.srt(segments))
            case "vtt":
                return PlainTextResponse(formats.vtt(segments), media_type="text/vtt")
            case "verbose_json":
                return JSONResponse(formats.verbose_object(self._transcription, segments))
            case _:
                return JSONResponse(formats.json_object(self._transcription, segments))

    async def _stream(self, send: Send) -> None:
        """OpenAI's events: a delta for each segment, then the whole text. Each has vLLM's fields, too."""
        segments = aiter(self._transcription.segments())
        first = await anext(segments, None)  # an error raised here gets a status line of its own
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async for event in self._events(first, segments):
            body = events([event]) if isinstance(event, dict) else event
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(
        self, first: SpokenSegment | None, segments: AsyncIterator[SpokenSegment]
    ) -> AsyncIterator[dict[str, Any] | bytes]:
        spoken, found = first, list[SpokenSegment]()
        chunks = formats.Chunks(self._transcription, has_usage=self._streaming.repeats_usage)
        try:
            while spoken is not None:
                found.append(spoken)
                text = spoken.text.lstrip() if len(found) == 1 else spoken.text
                yield chunks.delta(text)
                spoken = await anext(segments, None)
        except TwostrokeError as error:
            yield {"type": "error", **describe(error)[1]}
            return
        yield chunks.done(formats.text_of(found))
        if self._streaming.includes_usage:
            yield chunks.usage()
        yield DONE


async def _form_of_json(request: Request, service: RequestService) -> FormData:
    """A form with the fields of an object, of which `file` is base64: llama.cpp's clients send it so."""
    try:
        body = await parse_json(await request.body(), service.section.max_body_values, service.heavy_work)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body is no object of JSON")
    if len(body) > MAX_FIELDS:
        raise InvalidRequest(f"there are {len(body)} fields, at most {MAX_FIELDS} allowed")
    fields = list[tuple[str, str | UploadFile]]()
    for name, value in body.items():
        if name == "file":
            if not isinstance(value, str):
                raise InvalidRequest("file must be the base64 of a file of sound", "file")
            data = await asyncio.to_thread(decode_base64, value, "file")
            fields.append((name, UploadFile(io.BytesIO(data), size=len(data))))
            continue
        for each in value if isinstance(value, list) else () if value is None else (value,):
            if not isinstance(each, str | int | float):
                raise InvalidRequest(f"{name} must be a text, a number, true, false or a list of these", name)
            fields.append((name, str(each).lower() if isinstance(each, bool) else str(each)))
    return FormData(fields)


async def _read_form(
    form: FormData, request: Request, task: Task, service: RequestService
) -> tuple[bytes, TranscriptionOptions, str, Streaming]:
    """The file, the options, the format of the answer, and how it is streamed. Raises `InvalidRequest`."""
    file = _file(form, service.section.max_audio_bytes)
    for name, neutral in _UNSUPPORTED.items():
        if (given := form.get(name)) not in (None, "") and str(given).lower() not in neutral:
            raise InvalidRequest(f"{name} is not supported", name.removesuffix("[]"))
    name = "timestamp_granularities"
    granularities = {str(each) for each in (*form.getlist(f"{name}[]"), *form.getlist(name))}
    if unsupported := granularities - {"segment", "word"}:
        raise InvalidRequest(f"{name} has {quote(min(unsupported))}, supported: segment, word", name)
    response_format = _text(form, "response_format") or "json"
    if response_format not in FORMATS:
        raise InvalidRequest(
            f"response_format is {quote(response_format)}, supported: {', '.join(FORMATS)}", "response_format"
        )
    has_words = "word" in granularities
    if has_words and response_format != "verbose_json":
        raise InvalidRequest(f"{name} has 'word', and only the response_format verbose_json has words", name)
    has_segments = response_format == "verbose_json" and ("segment" in granularities or not has_words)
    streaming = Streaming(*(_flag(form, name) for name in _STREAM_FLAGS))
    if streaming.is_on and response_format not in ("json", "text"):
        raise InvalidRequest(f"response_format {response_format} cannot be streamed, json and text can", "stream")
    prompt = _text(form, "prompt")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequest(
            f"prompt has {len(prompt)} characters, at most {MAX_PROMPT_CHARACTERS} are possible", "prompt"
        )
    sampling: dict[str, float | int] = {
        name: _number(form, name, -math.inf, math.inf) for name in _NUMBERS if _text(form, name)
    }
    sampling |= {name: _integer(form, name, -(2**63), 2**63 - 1) for name in _INTEGERS if _text(form, name)}
    name = "max_completion_tokens"
    options = TranscriptionOptions(
        task=task,
        model=_text(form, "model"),
        language=_text(form, "language") or None,
        prompt=prompt,
        temperature=_number(form, "temperature", 0.0, 1.0) if _text(form, "temperature") else None,
        has_words=has_words,
        has_segments=has_segments,
        request_id=request.state.request_id,
        traceparent=request.headers.get("traceparent", ""),
        sampling=sampling,
        max_tokens=_integer(form, name, 1, 2**63 - 1) if _text(form, name) else None,
    )
    return await file.read(), options, response_format, streaming


def _file(form: FormData, max_bytes: int) -> UploadFile:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("file is missing: a file of sound is required", "file")
    if file.size is not None and file.size > max_bytes:
        raise HTTPException(413, f"the file has {file.size} bytes, gateway.max_audio_bytes is {max_bytes}")
    if not file.size:
        raise InvalidRequest("the file is empty", "file")
    return file


def _text(form: FormData, name: str) -> str:
    value = form.get(name)
    if isinstance(value, UploadFile):
        raise InvalidRequest(f"{name} is a file, must be text", name)
    return value or ""


def _flag(form: FormData, name: str) -> bool:
    text = _text(form, name).lower()
    if text not in ("", "true", "false"):
        raise InvalidRequest(f"{name} is {quote(text)}, must be true or false", name)
    return text == "true"


def _number(form: FormData, name: str, low: float, high: float) -> float:
    text = _text(form, name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {quote(text)}, must be a number from {low:g} to {high:g}", name)
    return value


def _integer(form: FormData, name: str, low: int, high: int) -> int:
    text = _text(form, name)
    try:
        value = int(text)
    except ValueError:
        value = high + 1
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {quote(text)}, must be a whole number from {low} to {high}", name)
    return value
