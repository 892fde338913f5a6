"""`PromptEmbedsReader`: vectors that clients send in prompts. Reads them in threads, so that no stream waits."""

from __future__ import annotations

import asyncio

from services.common.errors import InvalidRequest
from services.gateway.request.context_length import too_long
from services.gateway.resources.base64_text import decode_base64
from services.lora.prompt_embeds import PromptEmbeds, make_prompt_embeds
from services.pb import gateway_pb2

MAX_READING = 2  # at the same time; each takes a few times the memory of the body


class PromptEmbedsReader:
    """Used in the event loop."""

    def __init__(self, hidden_size: int) -> None:
        """hidden_size: the served model's"""
        # It imports torch, which takes a second and 160 MB: only gateways that read such prompts do, when they start.
        from services.gateway.request import torch_file

        self._torch_file = torch_file
        self._hidden_size = hidden_size
        self._reading = asyncio.Semaphore(MAX_READING)

    async def decode(self, text: str, name: str, max_model_len: int) -> gateway_pb2.PromptEmbeds:
        """The message of a tensor in base64 that `torch.save` has written, of shape [num_tokens, hidden].

        `name` is what the client calls it. Raises `InvalidRequest` if it is anything else.
        """
        async with self._reading:
            return await asyncio.to_thread(self._decode, text, name, max_model_len)

    async def read(self, message: gateway_pb2.PromptEmbeds, name: str, max_model_len: int) -> PromptEmbeds:
        """The table of the message in field `name`. Raises `InvalidRequest` if it does not fit, or is not finite."""
        self._check_shape((message.num_tokens, message.hidden_size), name, max_model_len)
        async with self._reading:
            return await asyncio.to_thread(
                make_prompt_embeds, message.values, message.num_tokens, message.hidden_size, message.dtype, name
            )

    def _decode(self, text: str, name: str, max_model_len: int) -> gateway_pb2.PromptEmbeds:
        tensor = self._torch_file.read_saved_tensor(decode_base64(text, name), name)
        if tensor.dim() == 3 and len(tensor) == 1:
            tensor = tensor[0]  # a batch of one prompt
        self._check_shape(tuple(tensor.shape), name, max_model_len)
        values = self._torch_file.bytes_of(tensor)
        num_tokens, hidden_size = tensor.shape
        dtype = str(tensor.dtype).removeprefix("torch.")
        return gateway_pb2.PromptEmbeds(values=values, num_tokens=num_tokens, hidden_size=hidden_size, dtype=dtype)

    def _check_shape(self, shape: tuple[int, ...], name: str, max_model_len: int) -> None:
        field = name.partition("[")[0]
        if len(shape) != 2 or not shape[0] or shape[1] != self._hidden_size:
            raise InvalidRequest(
                f"{name} has the shape {list(shape)}, must be [num_tokens, {self._hidden_size}] with at least 1 token",
                field,
            )
        if shape[0] >= max_model_len:
            what = f"at least {shape[0] + 1} were requested: {shape[0]} of {name} and 1 for the answer"
            raise too_long(max_model_len, what, field)

