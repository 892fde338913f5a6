"""Vectors that clients send in place of tokens: as whole prompts of completions, or in the messages of chats."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.gateway.apis.openai.chat_schema import ChatRequest
from services.gateway.apis.openai.completion_schema import CompletionRequest
from services.gateway.apis.openai.conversion import refuse_embeds
from services.gateway.request.prompt_embeds_reader import PromptEmbedsReader
from services.gateway.text.chat_vectors import MAX_PLACES
from services.pb import gateway_pb2


async def read_prompt_embeds(
    body: CompletionRequest, reader: PromptEmbedsReader | None, max_model_len: int
) -> list[gateway_pb2.PromptEmbeds]:
    """The prompts of vectors. `reader`: None if clients may send none. Raises `InvalidRequest`."""
    texts = body.embeds
    if not texts:
        return []
    if reader is None:
        raise InvalidRequest("prompt_embeds is off here: gateway.enable_prompt_embeds is not set", "prompt_embeds")
    for field in ("echo", "prompt_logprobs"):
        if getattr(body, field) not in (None, False):
            raise InvalidRequest(f"{field} cannot be used with prompt_embeds, which are no tokens", field)
    is_list = isinstance(body.prompt_embeds, list)
    return [
        await reader.decode(text, f"prompt_embeds[{i}]" if is_list else "prompt_embeds", max_model_len)
        for i, text in enumerate(texts)
    ]


async def read_chat_embeds(
    body: ChatRequest, message: gateway_pb2.GenerateRequest, reader: PromptEmbedsReader | None, max_model_len: int
) -> None:
    """Adds the vectors in the messages of `body` to the table of its `message`.

    `reader`: None if clients may send none. Raises `InvalidRequest`.
    """
    if reader is None:
        refuse_embeds(body, "gateway.enable_prompt_embeds is not set")
        return
    parts = [(i, position, data) for i, each in enumerate(body.messages) for position, data in each.embeds]
    if len(parts) > MAX_PLACES:
        raise InvalidRequest(
            f"the messages have {len(parts)} parts of prompt_embeds, at most {MAX_PLACES} allowed", "messages"
        )
    tables = []
    for i, position, data in parts:
        table = await reader.decode(data, f"messages[{i}]", max_model_len)
        if tables and table.dtype != tables[0].dtype:
            raise InvalidRequest(
                f"messages[{i}] has prompt_embeds of {table.dtype}, those before it are of {tables[0].dtype}: all must "
                "have one dtype",
                f"messages[{i}]",
            )
        message.chat.messages[i].vectors.add(position=position, num_tokens=table.num_tokens)
        tables.append(table)
    if tables:
        whole = message.prompt_embedding_table
        whole.CopyFrom(tables[0])
        whole.values = b"".join(table.values for table in tables)
        whole.num_tokens = sum(table.num_tokens for table in tables)
