"""The answers to transcriptions: JSON, text, and subtitles."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from services.gateway.sound.transcription import SpokenSegment, Transcription


def text_of(segments: Sequence[SpokenSegment]) -> str:
    """The whole text."""
    return "".join(each.text for each in segments).strip()


def json_object(transcription: Transcription, segments: Sequence[SpokenSegment]) -> dict[str, Any]:
    """The format `json`."""
    return {"text": text_of(segments), "usage": usage_object(transcription)}


def verbose_object(transcription: Transcription, segments: Sequence[SpokenSegment]) -> dict[str, Any]:
    """The format `verbose_json`, with segments, or words, or both."""
    answer: dict[str, Any] = {
        "task": transcription.options.task,
        "language": transcription.language,
        "duration": transcription.sound.seconds,
        "text": text_of(segments),
    }
    if transcription.options.has_words:
        words = [word for each in segments for word in each.words]
        answer["words"] = [{"word": each.text, "start": each.start, "end": each.end} for each in words]
    if transcription.options.has_segments:
        answer["segments"] = [_segment_object(index, each) for index, each in enumerate(segments)]
    return answer | {"usage": usage_object(transcription)}


class Chunks:
    """The events of a stream: OpenAI's, which have a `type`, with the fields of vLLM's chunks beside it."""

    def __init__(self, transcription: Transcription, *, has_usage: bool) -> None:
        """has_usage: each event has vLLM's counts of tokens so far"""
        self._transcription = transcription
        self._has_usage = has_usage
        options = transcription.options
        self._head = {
            "id": options.request_id,
            "object": "transcription.chunk" if options.task == "transcribe" else "translation.chunk",
            "created": int(time.time()),
            "model": options.model or transcription.service.names.first,
        }

    def delta(self, text: str) -> dict[str, Any]:
        """A segment's text."""
        usage = {"usage": self._tokens()} if self._has_usage else {}
        return {"type": "transcript.text.delta", "delta": text, **self._head, "choices": _choices(text, None), **usage}

    def done(self, text: str) -> dict[str, Any]:
        """The whole text."""
        usage = usage_object(self._transcription)
        return {
            "type": "transcript.text.done", "text": text, **self._head, "choices": _choices("", "stop"), "usage": usage
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        """vLLM's last chunk."""
        return {**self._head, "choices": [], "usage": self._tokens()}

    def _tokens(self) -> dict[str, int]:
        num_prompt, num_output = self._transcription.num_prompt_tokens, self._transcription.num_tokens
        return {
            "prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output
        }  # fmt: skip


def _choices(text: str, finish_reason: str | None) -> list[dict[str, Any]]:
    return [{"delta": {"content": text}, "finish_reason": finish_reason, "stop_reason": None}]


def usage_object(transcription: Transcription) -> dict[str, Any]:
    """What was used, in whole seconds of sound, as OpenAI counts it for such models."""
    return {"type": "duration", "seconds": math.ceil(transcription.sound.seconds)}


def srt(segments: Sequence[SpokenSegment]) -> str:
    """SubRip subtitles."""
    parts = [
        f"{index}\n{_time(each.segment.start, ',')} --> {_time(each.segment.end, ',')}\n{_line(each)}\n"
        for index, each in enumerate(segments, start=1)
    ]
    return "\n".join(parts)


def vtt(segments: Sequence[SpokenSegment]) -> str:
    """WebVTT subtitles."""
    parts = [
        f"{_time(each.segment.start, '.')} --> {_time(each.segment.end, '.')}\n{_escaped(_line(each))}\n"
        for each in segments
    ]
    return "\n".join(["WEBVTT\n", *parts])


def _line(spoken: SpokenSegment) -> str:
    """The text of a subtitle, in which an arrow would begin the next one."""
    return spoken.text.strip().replace("-->", "->")


def _escaped(text: str) -> str:
    """Text as WebVTT has it: what would begin a tag or an entity is written as one."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _time(seconds: float, separator: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds_part, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{seconds_part:02}{separator}{milliseconds:03}"


def _segment_object(index: int, spoken: SpokenSegment) -> dict[str, Any]:
    segment, output = spoken.segment, spoken.output
    return {
        "id": index,
        "seek": spoken.first_frame,
        "start": round(segment.start, 2),
        "end": round(segment.end, 2),
        "text": spoken.text,
        "tokens": segment.token_ids,
        "temperature": output.temperature,
        "avg_logprob": output.mean_logprob,
        "compression_ratio": output.compression_ratio,
        "no_speech_prob": output.no_speech_prob,
    }
