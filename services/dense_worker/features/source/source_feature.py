"""`SourceFeature`: runs the encoder before the layers of a step that writes its output to the KV cache.

For each layer with cross attention its keys and values cross the seam like the rows of a step: the attention worker
stores them, and keeps them for all sequences of equal input.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.channel import Channel, Flag, qkv_flag, rows_of_layer
from services.common.encoders.source_pieces import source_pieces
from services.common.errors import InvalidRequest
from services.common.vision.layout import PictureShape
from services.dense_worker.encoders.source.picture_tokens import SourceTokens
from services.dense_worker.encoders.source.source_encoder import SourceEncoder
from services.dense_worker.encoders.vision.picture import scale_pixels
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.images.received_pictures import ReceivedPictures
from services.dense_worker.features.source.sequence_source import Readers, SequenceSource
from services.dense_worker.features.step_part import FeatureRows, StepPart, StepView
from services.dense_worker.model.torch_operations import TorchOperations
from services.pb import source_pb2

if TYPE_CHECKING:
    from services.common.families.shape import EncoderConfig, SwinConfig
    from services.common.vision.vision_config import PixelScale, VisionConfig
    from services.pb import dense_pb2
    from services.step import SequenceSpec

NAME = "source"


@dataclass(frozen=True, slots=True)
class SourceRows(StepPart):
    """A step that writes the outputs for these inputs, in the order of its plan."""

    encoder: SourceEncoder
    inputs: SequenceOf[torch.Tensor | SourceTokens]
    pixels: PixelScale | None  # of pictures

    def before_layers(self, channel: Channel) -> None:
        """Runs the encoder, and hands over keys and values of its output layer by layer."""
        operations, first = TorchOperations(), 0
        if self.pixels is None:
            inputs = [_to_device(each, channel.qkv) for each in self.inputs]
        else:
            like = channel.qkv.device, channel.qkv.dtype
            inputs = [scale_pixels(each, self.pixels, *like)[0] for each in self.inputs]
        lengths = [self.encoder.body.num_rows(each) for each in inputs]
        output = self.encoder.body.forward(operations, inputs)
        for pieces in source_pieces(lengths, len(channel.qkv)):
            num_rows = sum(piece.num_rows for piece in pieces)
            for rows in self.encoder.keys_and_values(operations, output[first : first + num_rows]):
                rows_of_layer(channel.qkv[:num_rows], rows.shape[1]).copy_(rows)
                channel.signal(qkv_flag(num_rows))
                channel.wait(Flag.ATTENTION_READY)
            first += num_rows


class SourceFeature(Feature):
    """Of a model with an encoder; `encoder`: None in one without, whose sequences have no source."""

    sequence_type = SequenceSource
    name = NAME

    def __init__(
        self,
        encoder: SourceEncoder | None,
        config: EncoderConfig | None,
        received: ReceivedPictures,
        pixels: PixelScale | None,
    ) -> None:
        """received: the pictures that gateways send; pixels: how an encoder of pictures reads them, None for others"""
        self._encoder = encoder
        self._config = config
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
        return SequenceSource(source, num_rows, self._readers)

    def prepare_step(self, step: StepView, rows: FeatureRows) -> SourceRows | None:
        """The inputs of the outputs that the step writes; mostly none."""
        if not step.extra_rows:
            return None
        assert self._encoder is not None, "the model has an encoder"
        places = {int(step.entries.seq_ids[index]): place for place, index in enumerate(rows.indexes.tolist())}
        inputs = [rows.features[places[seq_id]].source for seq_id, _ in step.extra_rows]
        return SourceRows(self._encoder, inputs, self._pixels)

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
