"""`ImagesFeature`: sequences with pictures in their prompts, whose tokens have rows of a tower's output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.common.errors import InvalidRequest
from services.dense_worker.backends import InputEmbeds
from services.dense_worker.encoders.encoder import EncoderCounts
from services.dense_worker.encoders.encoder_runs import EncodedSequence, EncoderRuns
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.features.feature import Event, Feature
from services.dense_worker.features.images.received_pictures import ReceivedPictures
from services.dense_worker.features.sequence_feature import PlannedSequence, StepInPlanning
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.step.prompt_span import PromptSpan

if TYPE_CHECKING:
    from services.dense_worker.engine.sequence import Sequence
    from services.dense_worker.engine.waiting_queue import WaitingQueue
    from services.pb import dense_pb2
    from services.step import SequenceSpec


class SequenceImages(EncodedSequence[Picture]):
    """The pictures of a sequence, one for each of its spans."""

    def __init__(
        self,
        spans: tuple[PromptSpan, ...],
        pictures: tuple[Picture, ...],
        runs: EncoderRuns[Picture],
        *,
        are_whole: bool = False,
    ) -> None:
        """are_whole: a step computes all tokens of a picture, or none"""
        super().__init__(pictures, runs)
        self.spans = spans
        self._are_whole = are_whole

    def chunk(self, sequence: PlannedSequence, num_tokens: int, step: StepInPlanning) -> int:
        """Whole pictures, if their tokens see each other: it ends before one that does not fit, or takes all of it."""
        if not self._are_whole:
            return num_tokens
        return whole_chunk(self.spans, sequence.num_computed_tokens, num_tokens, step.num_tokens)

    def note_computed(self, num_tokens: int) -> None:
        """So many of its tokens are computed: behind the last picture the rows are not read again."""
        if self.pin is not None and num_tokens >= self.spans[-1].end:
            self.pin.release()
            self.pin = None


def whole_chunk(spans: Iterable[PromptSpan], position: int, num_tokens: int, most: int) -> int:
    """How many tokens from `position` on a step computes that cuts no span: of `num_tokens`, or up to `most`."""
    for span in spans:
        if span.start < position + num_tokens < span.end:
            if span.start > position:
                return span.start - position
            return span.end - position if span.end - position <= most else 0
    return num_tokens


@dataclass(frozen=True, slots=True)
class ImagesPart(StepPart):
    """A step some of whose rows are pictures."""

    input_embeds: InputEmbeds


class ImageRows:
    """The rows of a step that belong to pictures. Takes the entries of one sequence after the other."""

    def __init__(self, image_token_id: int, hidden_size: int) -> None:
        """hidden_size: of the model of text; wider outputs have further vectors for its first layers"""
        self._image_token_id = image_token_id
        self._hidden_size = hidden_size
        self._rows: list[torch.Tensor] = []
        self._vectors: list[torch.Tensor] = []

    def take(
        self,
        prompt_token_ids: torch.Tensor,
        spans: Iterable[tuple[PromptSpan, Callable[[], torch.Tensor]]],
        computed: range,
        first_row: int,
    ) -> None:
        """Those among the tokens `computed` of one sequence, which have rows from `first_row`.

        prompt_token_ids: int64 [num_prompt_tokens]; spans: each with what gives its output, [num_outputs, width]
        """
        for span, output in spans:
            start, end = max(span.start, computed.start), min(span.end, computed.stop)
            if start >= end:
                continue
            is_output = prompt_token_ids[span.start : span.end] == self._image_token_id
            inside = is_output[start - span.start : end - span.start]
            num_before, count = int(is_output[: start - span.start].sum()), int(inside.sum())
            if count:
                self._rows.append(inside.nonzero().flatten() + (first_row + start - computed.start))
                self._vectors.append(output()[num_before : num_before + count])

    def gather(self) -> InputEmbeds | None:
        """All rows with their vectors; None if there are none."""
        if not self._rows:
            return None
        rows, vectors = torch.cat(self._rows), torch.cat(self._vectors)
        if vectors.shape[1] == self._hidden_size:
            return InputEmbeds(rows, vectors)
        by_layer = vectors.unflatten(1, (-1, self._hidden_size)).transpose(0, 1)
        return InputEmbeds(rows, by_layer[0], by_layer[1:])


class ImagesFeature(Feature):
    """Without a tower it refuses pictures."""

    sequence_type = SequenceImages
    name = "images"
    message = "picture_part"

    def __init__(
        self,
        runs: EncoderRuns[Picture] | None,
        image_token_id: int = 0,
        hidden_size: int = 0,
        *,
        are_whole: bool = False,
        max_tokens: int | None = None,
        reason: str = "",
    ) -> None:
        """runs: of the tower; None: there is none, for this `reason`. hidden_size: of the model of text.

        are_whole: a step computes all tokens of a picture or none, and there is always room for `max_tokens` of one.
        """
        self.runs, self.gives_vectors = runs, runs is not None
        self._image_token_id, self._hidden_size = image_token_id, hidden_size
        self._are_whole, self._max_tokens = are_whole, max_tokens
        self._reason = reason
        self.received = ReceivedPictures()

    def start(self, post: Callable[[Event], None]) -> None:
        """The tower can run from now on."""
        if self.runs is not None:
            self.runs.start(post)

    def encoder_counts(self) -> EncoderCounts | None:
        """What the tower does."""
        return None if self.runs is None else self.runs.counts

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceImages:
        """The pictures that the spec names, which the stream has sent."""
        if self.runs is None:
            raise InvalidRequest(f"this dense worker takes no pictures: {self._reason}", "messages")
        pictures = self.received.find(spec, spec.features[self.name], stream)
        longest = max(each.shape.num_tokens for each in pictures)
        if self._are_whole and self._max_tokens is not None and longest > self._max_tokens:
            raise InvalidRequest(
                f"a picture has {longest} tokens, which one step must compute: it has room for {self._max_tokens}, "
                "scheduler.max_num_batched_tokens without max_num_seqs",
                "messages",
            )
        return SequenceImages(spec.spans, pictures, self.runs, are_whole=self._are_whole)

    def receive(self, message: dense_pb2.GatewayMessage, stream: int) -> None:
        """Keeps a part of a picture."""
        self.received.receive(message.picture_part, stream)

    def end_stream(self, stream: int) -> None:
        """Forgets what the stream has sent."""
        self.received.end_stream(stream)

    def provide(self, waiting: WaitingQueue, oldest_step_id: int | None) -> Iterable[Sequence]:
        """Runs the tower for pictures of parked sequences."""
        return () if self.runs is None else self.runs.run(waiting, oldest_step_id)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> ImagesPart | None:
        """Finds the rows that belong to pictures."""
        found, entries = ImageRows(self._image_token_id, self._hidden_size), step.entries
        for index, images in zip(rows.indexes.tolist(), rows.features, strict=True):
            position, num_tokens = entries.positions.item(index), entries.num_tokens.item(index)
            if images.pin is None:
                continue
            if position < images.spans[-1].end:
                pin = images.pin
                outputs = [
                    (span, pin.outputs[picture.hash].on_stream)
                    for span, picture in zip(images.spans, images.inputs, strict=True)
                ]
                end = images.spans[-1].end
                known = torch.tensor(step.known[index][:end], dtype=torch.int64)
                found.take(known, outputs, range(position, position + num_tokens), step.row_starts.item(index))
            images.note_computed(position + num_tokens)
        input_embeds = found.gather()
        return None if input_embeds is None else ImagesPart(input_embeds)
