"""`TextPooling`: the one feature of a dense worker that serves an encoder. It makes vectors of every sequence."""

from __future__ import annotations

from collections.abc import Collection

from services.common.errors import InvalidRequest
from services.common.pooling.pooling_config import TokenHead
from services.dense_worker.features.feature import Feature
from services.dense_worker.features.sequence_feature import SequenceFeature
from services.pb import dense_pb2, pooling_pb2
from services.step import SequenceSpec

NAME = "pooling"  # of the feature by which gateways ask for vectors
TOKEN_HEADS = {pooling_pb2.TOKEN_HEAD_SPARSE: TokenHead.SPARSE, pooling_pb2.TOKEN_HEAD_COLBERT: TokenHead.COLBERT}


class PooledText(SequenceFeature):
    """What is asked for of an input."""

    name = NAME
    reports = True

    def __init__(self, request: pooling_pb2.PoolingRequest) -> None:
        self.second_segment, self.all_tokens = request.second_segment, request.all_tokens
        self.token_head = TOKEN_HEADS.get(request.token_head)  # None: the layers of the vector


class TextPooling(Feature):
    """Refuses whatever is no input for a vector."""

    name = NAME
    sees_all = True
    sequence_type = PooledText

    def __init__(self, token_heads: Collection[TokenHead]) -> None:
        """Those that the model has."""
        self._token_heads = token_heads

    def admit(self, spec: SequenceSpec, submit: dense_pb2.Submit, stream: int) -> PooledText:
        if NAME not in spec.features:
            raise InvalidRequest("this model is an encoder: it makes vectors and generates nothing")
        if spec.adapter is not None or spec.prompt_embeds is not None or spec.beam_search is not None:
            raise InvalidRequest("this model is an encoder: it has no adapters, prompt embeddings or beams")
        text = PooledText(pooling_pb2.PoolingRequest.FromString(spec.features[NAME]))
        if text.token_head is not None and text.token_head not in self._token_heads:
            raise InvalidRequest(f"this model has no {text.token_head.file_stem}.safetensors")
        return text
