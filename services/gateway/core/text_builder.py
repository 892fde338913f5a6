"""`TextBuilder`: from the tokens of one answer to its text. Runs in the task that answers the client."""

from __future__ import annotations

from services.gateway.request.generation_request import GenerationRequest
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings
from services.gateway.text.tokenizer import Tokenizer


class TextBuilder:
    """Turns the tokens of one answer into its text: whole characters, up to the first stop string."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(
            tokenizer.hf_tokenizer, request.text_token_ids, request.skip_special_tokens
        )
        self._stop_strings: StopStrings | None = None  # most requests have none, and do not pay for them
        if request.stop:
            self._stop_strings = StopStrings(request.stop, request.include_stop_str_in_output)

    def append(self, token_ids: list[int], is_last: bool) -> tuple[str, int, str | None]:
        """New text, how many of `token_ids` it took, and the stop string that ended it, if one did."""
        if self._stop_strings is None:
            text = self._detokenizer.append(token_ids)
            return text + self._detokenizer.flush() if is_last else text, len(token_ids), None
        pieces = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text, stop_string = self._stop_strings.feed(self._detokenizer.append([token_id]))
            pieces.append(text)
            if stop_string is not None:
                return "".join(pieces), num_tokens, stop_string
        stop_string = None
        if is_last:
            text, stop_string = self._stop_strings.feed(self._detokenizer.flush())
            pieces.append(text)
            if stop_string is None:
                pieces.append(self._stop_strings.flush())
        return "".join(pieces), len(token_ids), stop_string
