"""`SourceFeature`: runs the encoder before the layers of a step that writes its output to the KV cache.

For each layer with cross attention its keys and values cross the seam like the rows of a step: the attention worker
stores them, and keeps them for all sequences of equal input. Some sequences report how they attend to it.
"""

from __future__ import annotations

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
from services.dense_worker.encoders.source.picture_tokens import SourceTokens
from services.dense_worker.encoders.source.source_encoder import SourceEncoder
from services.dense_worker.encoders.vision.picture import scale_pixels
from services.dense_worker.features.feature import Feature
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
    from services.common.vision.vision_config import PixelScale, VisionConfig
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
    input_index: int | None  # of the input whose output the step writes for them; None: an earlier step did


@dataclass(slots=True)
class SourceRows(StepPart):
    """A step that writes the outputs for these inputs, in the order of its plan, or has tokens that report."""

    encoder: SourceEncoder
    layers: dict[int, LayerHeads]  # with cross attention, by their numbers, in order
    inputs: SequenceOf[torch.Tensor | SourceTokens]
    pixels: PixelScale | None  # of pictures
    aligned: SequenceOf[AlignedTokens]
    _found: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # (seq_id, its answer, on the host)

    @property
    def reads_layers(self) -> bool:
        return bool(self.aligned)

    def before_layers(self, channel: Channel) -> None:
        """Runs the encoder, and hands over keys and values of its output layer by layer."""
        if not self.inputs:
            return
        operations, first = TorchOperations(), 0
        if self.pixels is None:
            inputs = [_to_device(each, channel.qkv) for each in self.inputs]
        else:
            like = channel.qkv.device, channel.qkv.dtype
            inputs = [scale_pixels(each, self.pixels, *like)[0] for each in self.inputs]
        lengths = [self.encoder.body.num_rows(each) for each in inputs]
        output = self.encoder.body.forward(operations, inputs)
        self._give_keys(operations, output.split(lengths))
        for pieces in source_pieces(lengths, len(channel.qkv)):
            num_rows = sum(piece.num_rows for piece in pieces)
            for rows in self.encoder.keys_and_values(operations, output[first : first + num_rows]):
                rows_of_layer(channel.qkv[:num_rows], rows.shape[1]).copy_(rows)
                channel.signal(qkv_flag(num_rows))
                channel.wait(Flag.ATTENTION_READY)
            first += num_rows

    def _give_keys(self, operations: TorchOperations, outputs: SequenceOf[torch.Tensor]) -> None:
        """Gives alignments the keys of their encoders' outputs."""
        for each in self.aligned:
            if each.input_index is not None:
                for layer, projection in zip(self.layers, self.encoder.cross_kv, strict=True):
                    if layer in each.alignment.layers:
                        rows = operations.linear(projection, outputs[each.input_index])
                        each.alignment.take_keys(layer, rows)

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
        pixels: PixelScale | None,
    ) -> None:
        """received: the pictures that gateways send; pixels: how an encoder of pictures reads them, None for others"""
        self._encoder = encoder
        self._config = model.encoder
        self._scale = model.attention.scale
        self._layers = {layer: model.attention.layer_heads[layer] for layer in model.cross_layers}
        self._received, self._pixels = received, pixels
        self._readers = Readers()

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> SequenceSource | None:
        """What the encoder reads. Raises `InvalidRequest` if the model cannot read it, or has no encoder."""
        if spec.source is None:
            if self._config is None:
                return None
            raise InvalidRequest("the model has an encoder, and the sequence has no input for it", "prompt")
        if self._config is None:
            raise InvalidRequest("the sequence has an input for an encoder, and the model has none", "prompt")
        message = source_pb2.Source.FromString(spec.features[NAME])
        num_rows = self._config.max_source_len
        if self._config.swin is not None:
            source = self._read_picture(message, self._config.swin, stream)
        elif self._config.vocab_size:
            source = _read_tokens(message, self._config)
            num_rows = len(source)
            if self._config.pictures is not None:
                source = self._read_pictures_among(source, message, self._config.pictures, stream)
        else:
            source = _read_sound(message, self._config)
        if num_rows != spec.source.num_rows:
            raise InvalidRequest(f"the encoder makes {num_rows} rows of it, not {spec.source.num_rows}", "prompt")
        return SequenceSource(source, num_rows, self._readers, self._read_alignment(spec))

    def prepare_step(self, step: StepView, rows: FeatureRows) -> SourceRows | None:
        """The inputs of the outputs that the step writes, and the tokens that report; mostly none."""
        if not step.extra_rows and not self._readers.num_aligned:
            return None
        places = {seq_id: index for index, (seq_id, _) in enumerate(step.extra_rows)}
        inputs, aligned = dict[int, torch.Tensor | SourceTokens](), []
        for index, feature in zip(rows.indexes.tolist(), rows.features, strict=True):
            place = places.get(int(step.entries.seq_ids[index]))
            if place is not None:
                inputs[place] = feature.source
            if feature.alignment is not None:
                aligned.append(AlignedTokens(feature.alignment, computed_tokens(step, index), place))
        if not inputs and not aligned:
            return None
        assert self._encoder is not None, "the model has an encoder"
        inputs_of_step = [inputs[place] for place in range(len(places))]
        return SourceRows(self._encoder, self._layers, inputs_of_step, self._pixels, aligned)

    def _read_picture(self, message: source_pb2.Source, config: SwinConfig, stream: int) -> torch.Tensor:
        shape = PictureShape(1, config.height, config.width, config.height, config.width, config.num_outputs)
        return self._received.one(message.picture.hex(), shape, stream).tiles

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


def _to_device(source: torch.Tensor | SourceTokens, like: torch.Tensor) -> torch.Tensor | SourceTokens:
    """An input on the device, tokens as they are and sound in the model's dtype; a tower uploads its pictures."""
    if isinstance(source, SourceTokens):
        return SourceTokens(_to_device(source.ids, like), source.pictures)
    if like.device.type != "cpu":
        source = source.pin_memory().to(like.device, non_blocking=True)
    return source.to(like.dtype) if source.is_floating_point() else source
