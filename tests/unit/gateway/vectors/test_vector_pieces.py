"""An answer with vectors is written in small pieces, however many rows an input has."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from services.gateway.apis.vectors.routes import vector_pieces

SIZE = 33


@pytest.mark.parametrize("num_rows", [None, 1, 48, 49, 1000])
@pytest.mark.parametrize("is_encoded", [True, False])
def test_the_pieces_are_small_and_make_the_whole(num_rows: int | None, is_encoded: bool) -> None:
    values = np.random.default_rng(5).standard_normal((num_rows or 1, SIZE)).astype(np.float32)
    values = values[0] if num_rows is None else values
    pack = np.ndarray.tobytes if is_encoded else None
    pieces = list(vector_pieces("kind", "data", 3, values, lambda rows: 2 * rows, pack))
    found = json.loads(b"".join(pieces))
    data = found.pop("data")
    assert found == {"object": "kind", "index": 3}
    if is_encoded:
        assert base64.b64decode(data, validate=True) == (2 * values).tobytes()
    else:
        assert np.array_equal(np.array(data, np.float32), 2 * values)
    assert max(map(len, pieces)) < 48 * SIZE * 6
