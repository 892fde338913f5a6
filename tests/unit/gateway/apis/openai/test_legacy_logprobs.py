"""`text_offset` in OpenAI's older format of log-probabilities, for tokenizers unlike the embedded one."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from services.gateway.apis.openai.logprobs import LegacyLogprobsBuilder
from services.gateway.text.tokenizer import Tokenizer

WORDS = ["<s>", "</s>", "<unk>", "▁San", "▁Francisco", "▁is", "plain"]
BOS, SAN, FRANCISCO, IS = 0, 3, 4, 5


def llama_2() -> PreTrainedTokenizerFast:
    """A tokenizer whose words include the space before them; the first word of a text loses it."""
    tokenizer = LlamaTokenizer(vocab={word: token_id for token_id, word in enumerate(WORDS)})
    tokenizer.add_tokens([AddedToken("<|eot|>", special=True)])  # `all_special_ids` does not contain it
    return tokenizer


EOT = llama_2().convert_tokens_to_ids("<|eot|>")


@pytest.mark.parametrize("token_ids", [[BOS, SAN, FRANCISCO, IS], [SAN, EOT, FRANCISCO, BOS, IS, EOT]])
def test_offsets_of_an_echo_are_positions_in_the_decoded_text(token_ids: list[int]) -> None:
    tokenizer = llama_2()
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert text == "San Francisco is"
    builder = LegacyLogprobsBuilder(Tokenizer(tokenizer), skip_special_tokens=True, is_echo=True)
    offsets = builder.append(token_ids, [None] * len(token_ids))["text_offset"]
    offset_of = dict(zip(token_ids, offsets, strict=True))
    assert [text[offset_of[token_id] :] for token_id in (SAN, FRANCISCO, IS)] == [text, " Francisco is", " is"]


def test_offsets_without_an_echo_count_the_space_before_the_first_word() -> None:
    builder = LegacyLogprobsBuilder(Tokenizer(llama_2()), skip_special_tokens=True, is_echo=False)
    assert builder.append([SAN, FRANCISCO], [None, None])["text_offset"] == [0, len(" San")]
