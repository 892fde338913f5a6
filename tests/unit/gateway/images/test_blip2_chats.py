"""What a chat with BLIP-2 becomes, whose files have no chat template."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from services.common.vision.blip2 import CHAT_TEMPLATE

PICTURE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize("tokens", [{"bos_token": "</s>", "eos_token": "</s>"}, {"eos_token": "</s>"}])
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("user", [PICTURE])], "<picture>|"),
        (
            [("user", [text("What? "), PICTURE, text(" Where?"), PICTURE])],
            "<picture><picture>|Question: What? Where? Answer:",
        ),
        (
            [("system", "Be brief."), ("user", "What?"), ("assistant", "A cat."), ("user", [PICTURE, text("Why?")])],
            "<picture>|Be brief. Question: What? Answer: A cat. Question: Why? Answer:",
        ),
    ],
)
def test_the_form_of_questions(tokens: dict[str, str], messages: list[tuple], expected: str) -> None:
    """OPT's texts have a first token, and those of T5 a last one."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"</s>": 0})), **tokens)
    chat = [{"role": role, "content": content} for role, content in messages]
    found = tokenizer.apply_chat_template(
        chat, chat_template=CHAT_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    begins = "bos_token" in tokens
    assert found == expected.replace("|", "</s>" if begins else "") + ("" if begins else "</s>")
