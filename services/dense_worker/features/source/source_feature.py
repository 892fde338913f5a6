"""`SourceFeature`: the encoder of a model whose decoder has cross attention. It runs between steps.

Before the layers of a sequence's first step its output crosses the seam, for each layer with cross attention as keys
and values: the attention worker stores them, and keeps them for all sequences of equal input. Some sequences report how
they attend to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.channel import Channel, Flag, qkv_flag, rows_of_layer
from services.common.encoders.source_pieces import source_pieces
from services.common.errors import InvalidRequest
from services.common.families.shape import LayerHeads
from services.common.vision.layout import PictureShape
from services.dense_worker.encoders.encoder import EncoderCounts
from services.dense_worker.encoders.encoder_runs import EncoderRuns
from services.dense_worker.encoders.source.picture_tokens import SourceTokens
from services.dense_worker.encoders.source.runnable_encoder import SourceInput, example_input
from services.dense_worker.encoders.source.source_encoder import SourceEncoder
from services.dense_worker.encoders.vision.picture import Picture
from services.dense_worker.features.feature import Event, Feature
from services.dense_worker.features.images.received_pictures import ReceivedPictures
from services.dense_worker.features.report import TokenReport
from services.dense_worker.features.source.alignment import Alignment
from services.dense_worker.features.source.sequence_source import Readers, SequenceSource
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.features.token_rows import TokenRows, computed_tokens, to_host
from services.dense_worker.model.torch_operations import TorchOperations
from services.pb import source_pb2

if TYPE_CHECKING:
    from services.common.families.shape import EncoderConfig, ModelConfig, SwinConfig
    from services.common.vision.vision_config import VisionConfig
    from services.dense_worker.engine.sequence import Sequence
    from services.dense_worker.engine.waiting_queue import WaitingQueue
    from services.pb import dense_pb2
    from services.step import SequenceSpec, StepResult

NAME = "source"
ALIGNMENT = "alignment"  # the name of what such sequences report
MAX_FILTER_WIDTH = 99


@dataclass(frozen=True, slots=True)
class AlignedTokens:
    """Tokens of the step that report how they attend."""

    alignment: Alignment
    tokens: TokenRows
    output: torch.Tensor | None  # of the encoder, in the first step


@dataclass(slots=True)
class SourceRows(StepPart):
    """A step that writes these outputs of the encoder, in the order of its plan, or has tokens that report."""

    encoder: SourceEncoder
    layers: dict[int, LayerHeads]  # with cross attention, by their numbers, in order
    outputs: SequenceOf[torch.Tensor]  # [num_rows, hidden] each
    aligned: SequenceOf[AlignedTokens]
    _found: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (seq_id, its answer, on the host)

    @property
    def reads_layers(self) -> bool:
        return bool(self.aligned)

    def before_layers(self, channel: Channel) -> None:
        """Hands over keys and values of the outputs, layer by layer."""
        operations, first = TorchOperations(), 0
        self._give_keys(operations)
        if not self.outputs:
            return
        output = torch.cat(list(self.outputs))
        for pieces in source_pieces(list(map(len, self.outputs)), len(channel.qkv)):
            num_rows = sum(piece.num_rows for piece in pieces)
            for rows in self.encoder.keys_and_values(operations, output[first : first + num_rows]):
                rows_of_layer(channel.qkv[:num_rows], rows.shape[1]).copy_(rows)
                channel.signal(qkv_flag(num_rows))
                channel.wait(Flag.ATTENTION_READY)
            first += num_rows

    def _give_keys(self, operations: TorchOperations) -> None:
        """Gives alignments the keys of their encoders' outputs."""
        for each in self.aligned:
            if each.output is not None:
                for layer, projection in zip(self.layers, self.encoder.cross_kv, strict=True):
                    if layer in each.alignment.layers:
                        each.alignment.take_keys(layer, operations.linear(projection, each.output))

    def take_layer(self, layer: int, rows: torch.Tensor) -> None:
        if layer not in self.layers:
            return
        queries = rows_of_layer(rows, self.layers[layer].q_size)
        for each in self.aligned:
            tokens = each.tokens
            of_tokens = queries[tokens.first_row : tokens.first_row + tokens.num_rows]
            found = each.alignment.take_queries(layer, of_tokens, tokens.start)
            if found is not None:
                self._found.append((tokens.seq_id, to_host(found)))

    def read(self, result: StepResult) -> None:
        for seq_id, values in self._found:
            result.reports.append(TokenReport(seq_id, ALIGNMENT, 0, values.numpy()))


class SourceFeature(Feature):
    """Of a model with an encoder; `encoder`: None in one without, whose sequences have no source."""

    sequence_type = SequenceSource
    name = NAME
    further_names = (ALIGNMENT,)

    def __init__(
        self,
        encoder: SourceEncoder | None,
        model: ModelConfig,
        received: ReceivedPictures,
        runs: EncoderRuns[SourceInput] | None,
    ) -> None:
        """received: the pictures that gateways send; runs: of the encoder; None: there is none"""
        self._encoder = encoder
        self._config = model.encoder
        self.sees_all = model.encoder is not None  # whose sequences all have a source
        self._scale = model.attention.scale
        self._layers = {layer: model.attention.layer_heads[layer] for layer in model.cross_layers}
        self._received, self._runs = received, runs
        self._readers = Readers()

    def start(self, post: Callable[[Event], None]) -> None:
        """The encoder can run from now on."""
        if self._runs is not None:
            self._runs.start(post)

    def encoder_counts(self) -> EncoderCounts | None:
        """What the encoder does."""
        return None if self._runs is None else self._runs.counts

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceSource:
        """What the encoder reads. Raises `InvalidRequest` if the model cannot read it, or has no encoder."""
        if self._config is None:
            raise InvalidRequest("the sequence has an input for an encoder, and the model has none", "prompt")
        if spec.source is None:
            raise InvalidRequest("the model has an encoder, and the sequence has no input for it", "prompt")
        assert self._runs is not None, "the model has an encoder"
        message = source_pb2.Source.FromString(spec.features[NAME])
        num_rows = self._config.max_source_len
        if message.example:
            example = example_input(self._config, 1)
            data, num_rows = example.data, example.num_rows
        elif self._config.swin is not None:
            data = self._read_picture(message, self._config.swin, stream)
        elif self._config.vocab_size:
            data = _read_tokens(message, self._config)
            num_rows = len(data)
            if self._config.pictures is not None:
                data = self._read_pictures_among(data, message, self._config.pictures, stream)
        else:
            data = _read_sound(message, self._config)
        if num_rows != spec.source.num_rows:
            raise InvalidRequest(f"the encoder makes {num_rows} rows of it, not {spec.source.num_rows}", "prompt")
        source, alignment = SourceInput(spec.source.hash, data, num_rows), self._read_alignment(spec)
        return SequenceSource(source, self._runs, self._readers, alignment, has_run=bool(submit.output_token_ids))

    def provide(self, waiting: WaitingQueue, oldest_step_id: int | None) -> Iterable[Sequence]:
        """Runs the encoder for inputs of parked sequences."""
        return () if self._runs is None else self._runs.run(waiting, oldest_step_id)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> SourceRows | None:
        """The outputs that the step writes, and the tokens that report; mostly none."""
        if not step.extra_rows and not self._readers.num_aligned:
            return None
        places = {seq_id: index for index, (seq_id, _) in enumerate(step.extra_rows)}
        outputs, aligned = dict[int, torch.Tensor](), []
        for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
            encoded, feature.output = feature.output, None
            output = None if encoded is None else encoded.on_stream()
            place = places.get(int(step.entries.seq_ids[index]))
            if place is not None:
                assert output is not None, "the step is planned with it"
                outputs[place] = output
            if feature.alignment is not None:
                aligned.append(AlignedTokens(feature.alignment, computed_tokens(step, index), output))
        if not outputs and not aligned:
            return None
        assert self._encoder is not None, "the model has an encoder"
        return SourceRows(self._encoder, self._layers, [outputs[place] for place in range(len(places))], aligned)

    def _read_picture(self, message: source_pb2.Source, config: SwinConfig, stream: int) -> Picture:
        shape = PictureShape(1, config.height, config.width, config.height, config.width, config.num_outputs)
        return self._received.one(message.picture.hex(), shape, stream)

    def _read_pictures_among(
        self, ids: torch.Tensor, message: source_pb2.Source, vision: VisionConfig, stream: int
    ) -> SourceTokens:
        shape, hashes = vision.layout.shape_of(1, 1, is_low=False), message.tokens.pictures
        count = int((ids == vision.image_token_id).sum())
        if count != shape.num_tokens * len(hashes):
            raise InvalidRequest(
                f"the prompt has {count} tokens of pictures, {len(hashes)} pictures have {shape.num_tokens} each",
                "prompt",
            )
        return SourceTokens(ids, tuple(self._received.one(each.hex(), shape, stream) for each in hashes))

    def _read_alignment(self, spec: SequenceSpec) -> Alignment | None:
        """What a sequence reports; None: nothing. Raises `InvalidRequest` for what cannot be."""
        if ALIGNMENT not in spec.features:
            return None
        request = source_pb2.Alignment.FromString(spec.features[ALIGNMENT])
        if not self._config.num_mel_bins:
            raise InvalidRequest("the model's encoder reads no sound to align tokens with", ALIGNMENT)
        limits = [
            ("first_token", request.first_token, 0, spec.num_prompt_tokens - 1),
            ("num_rows", request.num_rows, 1, self._config.max_source_len),
            ("filter_width", request.filter_width, 1, MAX_FILTER_WIDTH),
            ("heads", len(request.heads), 1, sum(heads.num_heads for heads in self._layers.values())),
        ]
        for head in request.heads:
            limits.append(("layer", head.layer, 0, len(self._layers) - 1))
            limits.append(("head", head.head, 0, next(iter(self._layers.values())).num_heads - 1))
        for name, value, least, most in limits:
            if not least <= value <= most:
                raise InvalidRequest(f"the alignment has {name} {value}, must be from {least} to {most}", ALIGNMENT)
        if request.filter_width % 2 == 0:
            raise InvalidRequest(f"the alignment has filter_width {request.filter_width}, must be odd", ALIGNMENT)
        return Alignment(request, spec.num_prompt_tokens, self._layers, self._scale)


def _read_tokens(message: source_pb2.Source, config: EncoderConfig) -> torch.Tensor:
    ids = np.array(message.tokens.ids, np.int64)
    if not 1 <= len(ids) <= config.max_source_len:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens, the encoder reads 1 to {config.max_source_len}", "prompt"
        )
    if ids.max() >= config.vocab_size:
        raise InvalidRequest(f"the prompt has token {ids.max()}, the encoder knows {config.vocab_size}", "prompt")
    return torch.from_numpy(ids)


def _read_sound(message: source_pb2.Source, config: EncoderConfig) -> torch.Tensor:
    shape = (config.num_mel_bins, 2 * config.max_source_len)
    if len(message.log_mel) != 4 * shape[0] * shape[1]:
        raise InvalidRequest(
            f"the sound has {len(message.log_mel)} bytes of features, the encoder reads {4 * shape[0] * shape[1]}",
            "file",
        )
    return torch.from_numpy(np.frombuffer(message.log_mel, "<f4").astype(np.float32).reshape(shape))
