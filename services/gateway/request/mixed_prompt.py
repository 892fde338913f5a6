"""Prompts of llama.cpp's clients: texts between token ids become tokens here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.gateway.request.context_length import too_long
from services.gateway.request.model_limits import LocalModel


def most_tokens(given: str | Sequence[str | int]) -> int:
    """How many tokens a prompt has at most, but for special ones: no text has more than bytes."""
    if isinstance(given, str):
        return 4 * len(given)
    texts = [each for each in given if isinstance(each, str)] if str in map(type, given) else ()
    return len(given) + 4 * sum(map(len, texts))


async def without_texts_between(
    given: str | Sequence[str | int], model: LocalModel, most: int, name: str, add_special_tokens: bool | None
) -> str | Sequence[int]:
    """The same prompt without texts between token ids. A text at the start gets special tokens, others do not.

    most: tokens that a prompt may have. name: of the prompt, in errors. `add_special_tokens`: what the client said;
    False: no text gets any. Raises `InvalidRequest`.
    """
    if isinstance(given, str) or str not in map(type, given):
        return given  # type: ignore[return-value]
    num_characters = sum(len(each) for each in given if isinstance(each, str))
    if model.pictures is not None:
        model.pictures.check_text(num_characters, name)
    tokenizer = model.tokenizer
    if num_characters > most * tokenizer.max_token_characters:
        limit = f"and a token at most {tokenizer.max_token_characters}"
        raise too_long(most, f"the texts have {num_characters} characters, {limit}", name)
    token_ids: list[int] = []
    for i, each in enumerate(given):
        if isinstance(each, str):
            token_ids += await tokenizer.encode(each, add_special_tokens=i == 0 and add_special_tokens is not False)
            await asyncio.sleep(0)  # let other tasks run
        else:
            token_ids.append(each)
    return token_ids
