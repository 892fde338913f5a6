"""Prompt tables that arrive in parts: sequences with equal ones share them, and nothing else keeps them."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
import torch

from services.common.errors import InvalidRequest, RequestAborted
from services.dense_worker.features.prompt_embeds.embeds_loader import EmbedsLoader, LoadedEmbeds, ReceivedEmbeds
from services.pb import dense_pb2
from services.step import PromptEmbedsRef

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def received(hash_: str = "aa", values: bytes = ROWS.tobytes(), size: int = 10) -> ReceivedEmbeds:
    table = ReceivedEmbeds().with_part(dense_pb2.PromptEmbedsPart(hash="00", values=b"of an earlier table"))
    for start in range(0, len(values), size):
        table = table.with_part(dense_pb2.PromptEmbedsPart(hash=hash_, values=values[start : start + size]))
    return table


def message(hash_: str = "aa", num_rows: int = 3, hidden_size: int = 4) -> PromptEmbedsRef:
    return PromptEmbedsRef(hash_, num_rows, hidden_size, dtype="float32", first_token_id=100)


def load(table: PromptEmbedsRef, parts: ReceivedEmbeds, dtype: torch.dtype = torch.float32) -> LoadedEmbeds:
    return asyncio.run(EmbedsLoader(dtype, 4, is_supported=True).load(table, parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_become_rows_in_the_models_dtype(dtype: torch.dtype) -> None:
    found = load(message(), received(), dtype)
    assert found.rows.dtype == dtype and torch.equal(found.rows.float(), torch.from_numpy(ROWS))
    assert found.without_rows([100, 5, 101, 99]) == [5, 99]


def test_equal_tables_are_shared_while_a_sequence_has_them() -> None:
    async def body() -> None:
        loader = EmbedsLoader(torch.float32, 4, is_supported=True)
        first, second = await asyncio.gather(*(loader.load(message(), received()) for _ in range(2)))
        assert first is second
        other = await loader.load(message("bb"), received("bb"))
        assert await loader.load(message(), received("bb")) is first, "its own sequences have it"
        assert other is not first
        del first, second
        gc.collect()
        with pytest.raises(RequestAborted, match="table aa has not been sent"):
            await loader.load(message(), received("bb"))

    asyncio.run(body())


def test_what_the_model_cannot_take_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="rows of 6 numbers, the model's hidden size is 4"):
        load(message(num_rows=2, hidden_size=6), received())
    with pytest.raises(InvalidRequest, match="too large for the model's float16, the greatest is 210000"):
        load(message(), received(values=(ROWS * 1e4 + 1e5).astype(np.float32).tobytes()), torch.float16)
    with pytest.raises(InvalidRequest, match=r"runs TensorRT.*set dense.backend to torch"):
        asyncio.run(EmbedsLoader(torch.float32, 4, is_supported=False).load(message(), received()))
