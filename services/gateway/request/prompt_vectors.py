"""Which vectors stand in a prompt: its embeddings, virtual tokens of its adapter, or rows of a table beside it."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import InvalidRequest
from services.gateway.request.context_length import check_prompt_length
from services.gateway.request.prompt_embeds_reader import PromptEmbedsReader
from services.gateway.text.chat_template import Chat
from services.lora.adapter import Adapter
from services.lora.prompt_embeds import PromptEmbeds
from services.pb import gateway_pb2
from services.step.sequence_spec import PromptEmbedsRef

EMBEDS, TABLE = "prompt_embeds", "prompt_embedding_table"  # fields of `GenerateRequest`


@dataclass(frozen=True, slots=True)
class PromptVectors:
    """The vectors of a prompt."""

    table: PromptEmbeds | None = None  # None: it has none
    token_ids: range = range(0)  # behind the vocabulary, which stand for them
    are_in_front: bool = False  # all before the prompt's tokens; else its token ids, if any, say where they stand

    @property
    def front_ids(self) -> range:
        """The ids of those that stand before its tokens."""
        return self.token_ids if self.are_in_front else range(0)

    @property
    def ref(self) -> PromptEmbedsRef | None:
        """How a `SequenceSpec` has them."""
        if self.table is None:
            return None
        table = self.table
        return PromptEmbedsRef(table.hash, table.num_rows, table.hidden_size, table.dtype, self.token_ids.start)


NO_VECTORS = PromptVectors()


async def read_vectors(
    message: gateway_pb2.GenerateRequest,
    adapter: Adapter | None,
    reader: PromptEmbedsReader | None,
    vocab_size: int,
    max_model_len: int,
) -> PromptVectors:
    """The vectors of a prompt. `reader` is None if clients may send none.

    Raises `InvalidRequest` if they are wrong, more than one kind, or if another field does not go with them.
    """
    given = [name for name in (EMBEDS, TABLE) if message.HasField(name)]
    virtual = None if adapter is None else adapter.table
    if virtual is not None:
        _check_virtual_tokens(message, virtual, given, max_model_len)
        return PromptVectors(virtual, virtual.token_ids(vocab_size), are_in_front=True)
    if not given:
        return NO_VECTORS
    name = given[0]
    if reader is None:
        raise InvalidRequest(f"{name} cannot be used here: gateway.enable_prompt_embeds is not set", name)
    if len(given) > 1:
        raise InvalidRequest(f"{TABLE} cannot be used with {EMBEDS}, which are a whole prompt", TABLE)
    if message.echo and name == EMBEDS:
        raise InvalidRequest(f"echo cannot be used with {EMBEDS}, which have no text", "echo")
    if message.HasField("prompt_logprobs"):
        raise InvalidRequest(f"prompt_logprobs cannot be used with {name}: they are no tokens", "prompt_logprobs")
    table = await reader.read(getattr(message, name), name, max_model_len)
    is_placed = any(each.vectors for each in message.chat.messages)
    are_in_front = name == TABLE and message.WhichOneof("input") in ("prompt", "chat") and not is_placed
    return PromptVectors(table, table.token_ids(vocab_size), are_in_front)


def check_vectors(chat: Chat, num_rows: int) -> None:
    """Raises `InvalidRequest` unless a chat with vectors has as many as the table has rows."""
    num_placed = sum(each.num_rows for each in chat.vectors)
    if chat.vectors and num_placed != num_rows:
        raise InvalidRequest(
            f"the messages have {num_placed} vectors, and the request's table {num_rows}: they must be the same",
            "messages",
        )


def _check_virtual_tokens(
    message: gateway_pb2.GenerateRequest, table: PromptEmbeds, given: list[str], max_model_len: int
) -> None:
    for name in given:
        raise InvalidRequest(f"{name} cannot be used with the adapter {message.model!r}", name)
    if message.HasField("prompt_logprobs"):
        raise InvalidRequest(
            f"prompt_logprobs cannot be used with the adapter {message.model!r}: its virtual tokens have none",
            "prompt_logprobs",
        )
    check_prompt_length(table.num_rows + 1, max_model_len)
