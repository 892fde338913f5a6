"""From the tokens of one answer to its text, or to its content, reasoning and calls. Runs in the task that answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.gateway.link.journal_entry import FinishReason
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.text.deltas import CallEnd, ContentDelta, Delta
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.parsing import Parsing
from services.gateway.text.stop_patterns import make_stops
from services.gateway.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextPiece:
    """What some tokens of an answer add to it."""

    text: str  # the content
    num_tokens: int  # tokens that were taken; fewer than given if the answer ended before the others
    stop_string: str | None = None  # the stop string that ended the answer
    is_cut: bool = False  # whether the answer ends here: at a stop string, or after the only call that it may have
    deltas: list[Delta] = field(default_factory=list)  # if content, reasoning and calls are told apart


def answer_text(request: GenerationRequest, tokenizer: Tokenizer) -> PlainText | ParsedText:
    """What makes the text of one answer to a request."""
    if request.parsing is None:
        return PlainText(request, tokenizer)
    return ParsedText(request, request.parsing, tokenizer)


class PlainText:
    """Whole characters, up to the first stop string."""

    num_reasoning_tokens = None
    num_calls = 0

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        # Alone it gives the text of tokens that are not the last ones, where there are no stop strings.
        self.detokenizer = Detokenizer(tokenizer.hf_tokenizer, request.text_token_ids, request.skip_special_tokens)
        # Most requests have none, and do not pay for them.
        self._stops = make_stops(request.stop, request.stop_regex, request.include_stop_str_in_output)
        self._num_early = request.spec.sampling.min_tokens  # tokens to come that no stop string ends

    def append(self, token_ids: Sequence[int], end: FinishReason | None) -> TextPiece:
        """Takes the next tokens. `end`: why they are the last ones."""
        if self._stops is None:
            text = self.detokenizer.append(token_ids)
            return TextPiece(text if end is None else text + self.detokenizer.flush(), len(token_ids))
        pieces = []
        for num_tokens, token_id in enumerate(token_ids, start=1):
            text, stop_string = self.detokenizer.append([token_id]), None
            if self._num_early:
                self._num_early -= 1
            else:
                text, stop_string = self._stops.feed(text)
            pieces.append(text)
            if stop_string is not None:
                return TextPiece("".join(pieces), num_tokens, stop_string, is_cut=True)
        stop_string = None
        if end is not None:
            text, stop_string = self._stops.feed(self.detokenizer.flush())
            pieces.append(text)
            if stop_string is None:
                pieces.append(self._stops.flush())
        return TextPiece("".join(pieces), len(token_ids), stop_string, is_cut=stop_string is not None)


class ParsedText:
    """The same with parsers. Stop strings end the content only: not reasoning, not a call.

    Works token by token, to count the tokens of the reasoning and to end the answer at the right one.
    """

    def __init__(self, request: GenerationRequest, parsing: Parsing, tokenizer: Tokenizer) -> None:
        self.detokenizer = Detokenizer(
            tokenizer.hf_tokenizer, request.text_token_ids, request.skip_special_tokens, parsing.markers
        )
        self._parser = parsing.make_parser()
        ids = ((tokenizer.token_id(name), name) for name in parsing.token_markers)
        self._markers = {token_id: name for token_id, name in ids if token_id is not None}
        self._is_parallel = parsing.tools.is_parallel
        self._is_demanded = parsing.tools.is_demanded
        self._stops = make_stops(request.stop, request.stop_regex, request.include_stop_str_in_output)
        self._num_early = request.spec.sampling.min_tokens  # tokens to come that no stop string ends
        self.num_calls = 0  # complete ones

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its markers included."""
        return self._parser.num_reasoning_tokens

    def append(self, token_ids: Sequence[int], end: FinishReason | None) -> TextPiece:
        """As in `PlainText`."""
        piece = TextPiece("", 0)
        self._take(token_ids, end, piece)
        piece.text = "".join([delta.text for delta in piece.deltas if isinstance(delta, ContentDelta)])
        return piece

    def _take(self, token_ids: Sequence[int], end: FinishReason | None, piece: TextPiece) -> None:
        for token_id in token_ids:
            text, marker = self.detokenizer.append([token_id]), self._markers.get(token_id)
            if marker is not None:
                text = text.removesuffix(marker)
            found = self._parser.feed_token(text, marker)
            piece.num_tokens += 1
            is_early = self._num_early > 0
            self._num_early -= is_early
            if self._show(found, piece, is_early):
                return
        if end is not None:
            is_limit = end is not FinishReason.STOP  # not the model has ended it
            found = self._parser.finish(self.detokenizer.flush(), is_limit)
            if is_limit and self._is_demanded:  # what was cut off before a call's name is no content
                found = [delta for delta in found if not isinstance(delta, ContentDelta)]
            if not self._show(found, piece, is_early=False) and self._stops is not None:
                _add_content(piece.deltas, self._stops.flush())

    def _show(self, found: list[Delta], piece: TextPiece, is_early: bool) -> bool:
        """Adds deltas to the piece. Returns whether they end the answer. `is_early`: no stop string does."""
        for delta in found:
            if isinstance(delta, ContentDelta) and self._stops is not None and not is_early:
                text, piece.stop_string = self._stops.feed(delta.text)
                _add_content(piece.deltas, text)
                if piece.stop_string is not None:
                    piece.is_cut = True
                    return True
                continue
            if self._stops is not None:  # a stop string does not go on behind a call
                _add_content(piece.deltas, self._stops.flush())
            piece.deltas.append(delta)
            if isinstance(delta, CallEnd) and delta.is_complete:
                self.num_calls += 1
                if not self._is_parallel:
                    piece.is_cut = True
                    return True
        return False


def _add_content(deltas: list[Delta], text: str) -> None:
    if text:
        deltas.append(ContentDelta(text))
