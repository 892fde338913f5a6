"""`EmbedsLoader`: makes vectors of what gateways send, in a thread. `ReceivedEmbeds` collects it on a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from services.common.errors import InvalidRequest, RequestAborted
from services.pb import dense_pb2
from services.step import PromptEmbedsRef

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ReceivedEmbeds:
    """The table that a stream has sent last."""

    hash: str = ""
    parts: tuple[bytes, ...] = ()

    def with_part(self, part: dense_pb2.PromptEmbedsPart) -> ReceivedEmbeds:
        """This table with its next part; or the beginning of the next table, if the part is of another one."""
        earlier = self.parts if part.hash == self.hash else ()
        return ReceivedEmbeds(part.hash, (*earlier, part.values))


class EmbedsLoader:
    """Keeps no table: those that sequences have are shared with other sequences. Used in the event loop."""

    def __init__(self, dtype: torch.dtype, hidden_size: int, is_supported: bool) -> None:
        """dtype, hidden_size: of the model; is_supported: whether the backend takes vectors"""
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._is_supported = is_supported
        self._loaded: WeakValueDictionary[str, LoadedEmbeds] = WeakValueDictionary()  # by hash
        self._lock = asyncio.Lock()  # answers to one prompt come together, and share the first one's table

    async def load(self, table: PromptEmbedsRef, received: ReceivedEmbeds) -> LoadedEmbeds:
        """The table of a sequence. Raises `InvalidRequest` if the model cannot take it."""
        if not self._is_supported:
            raise InvalidRequest(
                "the dense worker runs TensorRT, which takes no embeddings in prompts: set dense.backend to torch",
                "prompt_embeds",
            )
        if table.hidden_size != self._hidden_size:
            raise InvalidRequest(
                f"the prompt has rows of {table.hidden_size} numbers, the model's hidden size is"
                f" {self._hidden_size}",
                "prompt_embeds",
            )
        async with self._lock:
            found = self._loaded.get(table.hash)
            if found is None:
                if received.hash != table.hash:
                    raise RequestAborted(f"the prompt table {table.hash[:16]} has not been sent")
                rows = await asyncio.to_thread(self._read, table, received.parts)
                found = self._loaded[table.hash] = LoadedEmbeds(table.hash, table.first_token_id, rows)
            return found

    def _read(self, table: PromptEmbedsRef, parts: Sequence[bytes]) -> torch.Tensor:
        given = torch.frombuffer(bytearray().join(parts), dtype=DTYPES[table.dtype])
        rows = given.view(table.num_rows, self._hidden_size).to(self._dtype)
        if not bool(rows.isfinite().all()):
            raise InvalidRequest(
                f"the prompt has rows with values too large for the model's {str(self._dtype).removeprefix('torch.')},"
                f" the greatest is {given.abs().max().item():g}",
                "prompt_embeds",
            )
        return rows


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedEmbeds:
    """Token id `first_token_id + i` of a prompt stands for row i. Sequences with equal tables share one object."""

    hash: str  # of the rows as the client gave them, hexadecimal
    first_token_id: int  # the number of token ids of the vocabulary
    rows: torch.Tensor  # [num_rows, hidden] in the model's dtype, in the host's memory: steps copy what they need

    def without_rows(self, token_ids: Sequence[int]) -> list[int]:
        """Those of `token_ids` that are of the vocabulary."""
        return [token_id for token_id in token_ids if token_id < self.first_token_id]
