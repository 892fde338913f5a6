"""Vectors as bytes, one input behind the other, as vLLM's `encoding_format` bytes and bytes_only have them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from services.common.errors import InvalidRequest
from services.gateway.apis.shared.pooled_answer import PooledAnswer, usage_of
from services.gateway.apis.vectors.schema import EmbeddingRequest
from services.gateway.vectors.vectors import InputOptions, PooledInput, Vectors

MAX_METADATA_BYTES = 60_000  # of one header: many clients read at most 65,536
ROWS = 64  # of an input with a vector for each token that are packed at once


class BinaryAnswer(PooledAnswer):
    """The answer to `body`."""

    media_type = "application/octet-stream"

    def __init__(
        self,
        vectors: Vectors,
        body: EmbeddingRequest,
        options: InputOptions,
        values_of: Callable[[PooledInput], np.ndarray],
        shape: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """values_of, shape: as for `vector_pieces`. Raises `InvalidRequest` for a header that would be too long."""
        super().__init__(vectors, body.inputs, options, self._packed)
        assert body.pack is not None
        self._body, self._pack, self._values_of, self._shape = body.without_inputs(), body.pack, values_of, shape
        self._model = body.model or vectors.service.names.first
        # Before anything is computed; a vector for each token makes the header longer than one for each input.
        self._metadata([(1,)] * len(self._inputs), usage_of(()))

    def headers_of(self, pooled: Sequence[PooledInput]) -> dict[str, str]:
        """Where the vectors of each input are."""
        shapes = [self._values_of(each)[..., : self._body.dimensions].shape for each in pooled]
        return self._metadata(shapes, usage_of(pooled))

    def _packed(self, pooled: Sequence[PooledInput]) -> Iterator[bytes]:
        for values in map(self._values_of, pooled):
            if values.ndim == 1:
                yield self._pack(self._shape(values))
                continue
            for i in range(0, len(values), ROWS):
                yield self._pack(self._shape(values[i : i + ROWS]))

    def _metadata(self, shapes: Sequence[tuple[int, ...]], usage: dict[str, int]) -> dict[str, str]:
        body = self._body
        if body.encoding_format == "bytes_only":
            return {}
        number_bytes = len(self._pack(np.zeros(1, np.float32)))
        items, end = [], 0
        for index, shape in enumerate(shapes):
            start = end
            end += number_bytes * math.prod(shape)
            kind = {"embed_dtype": body.embed_dtype or "float32", "endianness": body.endianness or "native"}
            items.append({"index": index, **kind, "start": start, "end": end, "shape": shape})
        head = {"id": self._options.request_id, "created": int(time.time()), "model": self._model}
        metadata = json.dumps(head | {"data": items, "usage": usage})
        if len(metadata) > MAX_METADATA_BYTES:
            raise InvalidRequest(
                f"the header metadata would have {len(metadata)} bytes, at most {MAX_METADATA_BYTES} are sent: "
                "ask for fewer inputs, or for bytes_only",
                "encoding_format",
            )
        return {"metadata": metadata}
