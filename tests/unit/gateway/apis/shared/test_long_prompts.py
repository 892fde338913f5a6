"""A prompt of token ids that cannot fit is refused before its tokens are copied; one that just fits is not."""

from __future__ import annotations

import pytest

from services.common.errors import ContextLengthExceeded
from services.gateway.apis.shared.prompts import check_prompts
from tests.unit.gateway.request.test_request import LIMITS  # max_model_len is 64


def test_the_longest_prompt_that_an_encoder_reads_is_taken() -> None:
    check_prompts([[1], [7] * 64], LIMITS, are_cut=False)
    with pytest.raises(ContextLengthExceeded, match="context length is 64 tokens, but a prompt has 65") as error:
        check_prompts([[1], [7] * 65], LIMITS, are_cut=False)
    assert error.value.param == "prompt"
    check_prompts([[7] * 65], LIMITS, are_cut=True)
