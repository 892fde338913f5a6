"""`Transcription`: what a speech model writes of a file, window after window, as segments with times.

Each attempt at a window is a request of its own, whose decoder begins with the text before it. A window lasts as
long as the encoder reads and begins where the last complete segment before it ended (arXiv:2212.04356, section 3.8).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.common.errors import AbortedByCaller
from services.gateway.access.access import Caller
from services.gateway.core.chunks import Completion, Prompt
from services.gateway.core.request_service import Part, RequestService
from services.gateway.features.installed import ALIGNMENT
from services.gateway.features.token_rows import TokenRows
from services.gateway.link.journal_entry import FinishReason
from services.gateway.sound.attempts import MAX_TEMPERATURE_BEFORE, Output, best_output, compression_ratio
from services.gateway.sound.sound_reader import Sound
from services.gateway.sound.speech_model import (
    FRAMES_PER_STEP,
    SECONDS_PER_STEP,
    Segment,
    SpeechModel,
    Task,
    split_window,
)
from services.gateway.sound.word_times import LANGUAGES_WITHOUT_SPACES, Word, split_words, token_steps
from services.pb import gateway_pb2, sampling_pb2, source_pb2

_NEVER = -100.0  # the bias of tokens that are no speech


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """What a client asks for."""

    task: Task
    model: str
    language: str | None  # None: it is detected
    prompt: str
    temperature: float | None  # None: a window that is doubtful at 0 is tried again at higher ones
    has_words: bool  # whether the answer has words with their times
    has_segments: bool  # whether it has segments with all that is known of their windows
    request_id: str
    traceparent: str
    sampling: Mapping[str, float | int] = field(default_factory=dict)  # further fields of `SamplingParams`
    max_tokens: int | None = None  # of the output for each window; None: as many as there is room for


@dataclass(frozen=True, slots=True)
class SpokenSegment:
    """A segment, with what is known of the window it is from."""

    segment: Segment
    text: str
    first_frame: int  # of its window
    output: Output  # of its window
    words: Sequence[Word] = ()  # if they were asked for


@dataclass(slots=True)
class Transcription:
    """Call `segments` once."""

    service: RequestService
    model: SpeechModel
    sound: Sound
    options: TranscriptionOptions
    caller: Caller
    language: str = ""  # its code, when the first segment is there
    num_prompt_tokens: int = 0  # what the decoder began with, in all windows so far
    num_tokens: int = 0  # of all outputs so far
    _num_requests: int = field(default=0, init=False)

    async def segments(self) -> AsyncIterator[SpokenSegment]:
        """The segments in order, each as soon as it is complete. Raises a `TwostrokeError`."""
        sources = self.service.sources
        assert sources is not None, "a speech model has an encoder"
        num_frames = 2 * sources.encoder.max_source_len
        self.language = await self._find_language(num_frames)
        task_tokens = self.model.task_tokens(self.options.task, self.language if self.model.languages else None)
        most_before = self.service.limits.max_model_len // 2 - 1  # as the paper's code
        before = await self._prompt_tokens()
        last_frame = math.ceil(self.sound.seconds / SECONDS_PER_STEP) * FRAMES_PER_STEP
        first_frame = 0
        while first_frame < last_frame:
            window_s = min(num_frames, last_frame - first_frame) / FRAMES_PER_STEP * SECONDS_PER_STEP
            prompt = [self.model.start, *task_tokens]
            if self.model.previous is not None and before:
                prompt = [self.model.previous, *before[-most_before:], *prompt]
            output = await self._output(first_frame, num_frames, prompt)
            start_s = first_frame / FRAMES_PER_STEP * SECONDS_PER_STEP
            window = split_window(
                self.model, output.token_ids, start_s, window_s, min(num_frames, last_frame - first_frame)
            )
            words = await self._words(window.segments, output, first_frame, num_frames, prompt)
            for segment, of_segment in zip(window.segments, words, strict=True):
                before += segment.token_ids
                yield SpokenSegment(segment, self._text(segment.token_ids), first_frame, output, of_segment)
            if self.options.temperature is None and output.temperature > MAX_TEMPERATURE_BEFORE:
                before = []
            first_frame += window.num_frames

    async def _output(self, first_frame: int, num_frames: int, prompt: list[int]) -> Output:
        """The output for a window whose decoder begins with `prompt`."""

        async def attempt(temperature: float) -> Output:
            found = await self._generate(first_frame, num_frames, prompt, temperature)
            logprobs = found.logprobs.own
            mean = math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
            return Output(found.token_ids, temperature, mean, compression_ratio(self._text(found.token_ids)))

        async def no_speech() -> float:
            return await self._no_speech_prob(first_frame, num_frames, prompt)

        if self.options.temperature is None:
            output = await best_output(attempt, no_speech)
        else:
            output = await attempt(self.options.temperature)
        if self.options.has_segments and output.no_speech_prob is None:
            output = replace(output, no_speech_prob=await no_speech())
        return output

    async def _words(
        self, segments: Sequence[Segment], output: Output, first_frame: int, num_frames: int, prompt: list[int]
    ) -> list[list[Word]]:
        """The words of each segment of a window; none if they were not asked for.

        The decoder computes the output once more, as a prompt, and reports where it attends to the sound. The last
        token is mostly the end; if it is cut off there, nothing tells when it was said, as in transformers.
        """
        if not self.options.has_words or not segments:
            return [[] for _ in segments]
        message = self._message(first_frame, num_frames, [*prompt, *output.token_ids[:-1]], max_tokens=0)
        message.ClearField("logprobs")
        num_sound_frames = math.ceil(round(self.sound.seconds * FRAMES_PER_STEP / SECONDS_PER_STEP, 6))
        num_steps = min(num_frames, num_sound_frames - first_frame) // FRAMES_PER_STEP
        message.alignment.CopyFrom(
            source_pb2.Alignment(
                first_token=len(prompt),
                num_rows=max(1, num_steps),
                heads=[source_pb2.AlignmentHead(layer=layer, head=head) for layer, head in self.model.alignment_heads],
                filter_width=self.model.filter_width,
            )
        )
        _, answered = await self._run_whole(message)
        found = answered and answered.reports.get(ALIGNMENT.name)
        assert isinstance(found, TokenRows), "it has been asked for"
        weights = found.array()
        start_s = first_frame / FRAMES_PER_STEP * SECONDS_PER_STEP
        return await self.service.heavy_work.in_thread(self._find_words, segments, weights, start_s)

    def _find_words(self, segments: Sequence[Segment], weights: np.ndarray, start_s: float) -> list[list[Word]]:
        # A token's time is where the decoder attends when it has written the token, so the next one begins there.
        times = [start_s, *(start_s + SECONDS_PER_STEP * token_steps(weights)).tolist()]
        times.append(times[-1])  # of the last token
        found = []
        for segment in segments:
            places = [i for i, token_id in enumerate(segment.token_ids) if token_id < self.model.end]
            words = split_words(
                self._decode,
                [segment.token_ids[i] for i in places],
                has_spaces=self.language not in LANGUAGES_WITHOUT_SPACES,
            )
            found.append([])
            for text, first, last in words:
                start = times[segment.first_token + places[first]]
                end = times[segment.first_token + places[last] + 1]
                found[-1].append(Word(text, round(start, 2), round(end, 2)))
        return found

    async def _no_speech_prob(self, first_frame: int, num_frames: int, prompt: list[int]) -> float:
        """How likely the model's mark of silence is right after the token that begins its answer."""
        message = self._message(first_frame, num_frames, prompt[: prompt.index(self.model.start) + 1], max_tokens=1)
        message.sampling.temperature = 0.0
        message.sampling.logprob_token_ids.append(self.model.no_speech)
        completion = await self._run(message)
        return math.exp(dict(completion.logprobs[0].top)[self.model.no_speech])

    def _text(self, token_ids: list[int]) -> str:
        return self._decode(self.model.text_tokens(token_ids))

    def _decode(self, token_ids: list[int]) -> str:
        return self.service.tokenizer.decode(token_ids, skip_special_tokens=True)

    async def _prompt_tokens(self) -> list[int]:
        prompt = self.options.prompt.strip()
        return await self.service.tokenizer.encode(f" {prompt}", False) if prompt else []

    async def _find_language(self, num_frames: int) -> str:
        """The code of the language: the given one, or the most likely first token of the first window."""
        if not self.model.languages:
            return "en"
        if self.options.language is not None:
            return self.model.language_code(self.options.language)
        message = self._message(0, num_frames, [self.model.start], max_tokens=1)
        message.sampling.temperature = 0.0
        message.sampling.allowed_token_ids.extend(self.model.languages.values())
        [token_id] = (await self._run(message)).token_ids
        return next(code for code, each in self.model.languages.items() if each == token_id)

    async def _generate(
        self, first_frame: int, num_frames: int, prompt: list[int], temperature: float
    ) -> Completion:
        """The answer for a window, with the log-probability of each token."""
        model = self.model
        max_tokens = min(self.service.limits.max_model_len // 2, self.service.limits.max_model_len - len(prompt))
        if self.options.max_tokens is not None:
            max_tokens = min(max_tokens, self.options.max_tokens)
        message = self._message(first_frame, num_frames, prompt, max_tokens)
        message.sampling.temperature = temperature
        for name, value in self.options.sampling.items():
            setattr(message.sampling, name, value % 2**64 if name == "seed" else value)
        message.sampling.logit_bias.update({token_id: _NEVER for token_id in model.suppressed if token_id >= 0})
        rules = sampling_pb2.TimestampRules(first_token_id=model.first_timestamp, end_token_id=model.end)
        if model.max_initial_timestamp is not None:
            rules.last_initial_token_id = model.first_timestamp + model.max_initial_timestamp
        message.sampling.timestamps.CopyFrom(rules)
        return await self._run(message)

    def _message(
        self, first_frame: int, num_frames: int, prompt: list[int], max_tokens: int
    ) -> gateway_pb2.GenerateRequest:
        self._num_requests += 1
        return gateway_pb2.GenerateRequest(
            request_id=f"{self.options.request_id}-{self._num_requests}",
            traceparent=self.options.traceparent,
            model=self.options.model,
            max_tokens=max_tokens,
            logprobs=0,
            sound=source_pb2.Source(log_mel=self.sound.window(first_frame, num_frames)),
            decoder_prompt_token_ids=gateway_pb2.TokenIds(ids=prompt),
        )

    async def _run(self, message: gateway_pb2.GenerateRequest) -> Completion:
        return (await self._run_whole(message))[0]

    async def _run_whole(self, message: gateway_pb2.GenerateRequest) -> tuple[Completion, Prompt | None]:
        generation = await self.service.start(message, self.caller, Part("file"))
        try:
            [completion], prompt = await generation.completions()
        finally:
            generation.close()
        self.num_prompt_tokens += len(message.decoder_prompt_token_ids.ids)
        self.num_tokens += len(completion.token_ids)
        assert completion.finish is not None, "it is whole"
        if completion.finish.reason is FinishReason.ABORT:  # what there is of it would pass for a whole output
            raise AbortedByCaller(f"the file's request {message.request_id} was aborted")
        return completion, prompt
