"""Vectors as bytes, one input behind the other, as vLLM's `encoding_format` bytes and bytes_only have them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from services.common.errors import InvalidRequest
from services.gateway.apis.vectors.pooled_answer import PooledAnswer, usage_of
from services.gateway.apis.vectors.schema import EmbeddingRequest
from services.gateway.vectors.vectors import InputOptions, PooledInput, Vectors

MAX_METADATA_BYTES = 60_000  # of one header: many clients read at most 65,536
ROWS = 64  # of an input with a vector for each token that are packed at once


def binary_answer(
    vectors: Vectors,
    body: EmbeddingRequest,
    options: InputOptions,
    values_of: Callable[[PooledInput], np.ndarray],
    shape: Callable[[np.ndarray], np.ndarray],
) -> PooledAnswer:
    """The answer to `body`. values_of, shape: as for `vector_pieces`."""
    pack = body.pack
    assert pack is not None
    number_bytes = len(pack(np.zeros(1, np.float32)))

    def write(pooled: Sequence[PooledInput]) -> Iterator[bytes]:
        for values in map(values_of, pooled):
            if values.ndim == 1:
                yield pack(shape(values))
                continue
            for i in range(0, len(values), ROWS):
                yield pack(shape(values[i : i + ROWS]))

    def headers(shapes: Sequence[tuple[int, ...]], usage: dict[str, int]) -> dict[str, str]:
        if body.encoding_format == "bytes_only":
            return {}
        items, end = [], 0
        for index, shape in enumerate(shapes):
            start = end
            end += number_bytes * math.prod(shape)
            kind = {"embed_dtype": body.embed_dtype or "float32", "endianness": body.endianness or "native"}
            items.append({"index": index, **kind, "start": start, "end": end, "shape": shape})
        names = vectors.service.names
        head = {"id": options.request_id, "created": int(time.time()), "model": body.model or names.first}
        metadata = json.dumps(head | {"data": items, "usage": usage})
        if len(metadata) > MAX_METADATA_BYTES:
            raise InvalidRequest(
                f"the header metadata would have {len(metadata)} bytes, at most {MAX_METADATA_BYTES} are sent: "
                "ask for fewer inputs, or for bytes_only",
                "encoding_format",
            )
        return {"metadata": metadata}

    def headers_of(pooled: Sequence[PooledInput]) -> dict[str, str]:
        return headers([values_of(each)[..., : body.dimensions].shape for each in pooled], usage_of(pooled))

    # Before anything is computed; a vector for each token makes the header longer than one for each input.
    headers([(1,)] * len(body.inputs), usage_of(()))
    return PooledAnswer(
        vectors, body.inputs, options, write, headers=headers_of, media_type="application/octet-stream"
    )
