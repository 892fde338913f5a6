"""Turns texts and chats into token ids with the model's own tokenizer and chat template.

Short texts are tokenized in the gateway's event loop, longer ones in threads: a prompt of megabytes takes seconds, and
the Rust tokenizer releases the interpreter lock. Chats also go to threads, because a template is a program: short ones
to those of short texts, and all that is long to the thread of `HeavyWork`, so that nothing short waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerFast

from services.common.errors import ConfigError, InvalidRequest
from services.common.json_files.processor_files import read_processor_template
from services.common.pooling.pair_template import PairTemplate
from services.common.vision.vision_config import vision_family
from services.gateway.resources.heavy_work import HeavyWork
from services.gateway.text.chat_template import Chat, ChatTemplate
from services.gateway.text.chat_vectors import encode_around
from services.gateway.text.client_templates.client_templates import ClientTemplates
from services.gateway.text.control_tokens import ControlTokens, new_nonce
from services.gateway.text.detokenizer import token_bytes
from services.gateway.text.fill_in_middle import FillInMiddle
from services.gateway.text.harmony import MARKERS
from services.gateway.text.parsing import ChatFormats
from services.gateway.text.picture_text import PictureText
from services.grammar.hf_tokenizer import load_hf_tokenizer

MAX_INLINE_CHARACTERS = 1_000  # take about 0.5 ms; more would noticeably delay all running streams
CHARACTERS_PER_WORD = 16  # beside its own: a short text of many takes 10 us
MAX_SHORT_CHARACTERS = 2**15  # take about 15 ms
CHARACTERS_PER_MESSAGE = 256  # a template takes as long for a message as tokenizing so many characters takes
NUM_THREADS = 2

INFO_SETTINGS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "padding_side",
    "split_special_tokens",
    "truncation_side",
)
ADDED_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")

T = TypeVar("T")


class TokenSpan(NamedTuple):
    """A token of a text."""

    token_id: int
    text: str  # its part of the text, or the token's name
    start: int | None  # the part's first character; None: it is a special token around the text
    stop: int | None  # behind its last one


class InputLimit(NamedTuple):
    """How many tokens a text, or two that belong together, may have."""

    max_tokens: int  # with special ones
    is_cut: bool  # whether a longer one loses tokens until all are `max_tokens`
    max_last: int | None = None  # own tokens of the last text, if all can be `max_tokens` then
    keeps_last: bool = False  # whether a text loses tokens at its beginning, not at its end


class Tokenizer:
    """Owns the model's tokenizer and the threads it may use; `close` ends them."""

    def __init__(
        self,
        hf_tokenizer: PreTrainedTokenizerFast,
        chat_formats: ChatFormats | None = None,
        client_templates: ClientTemplates | None = None,
        *,
        may_want_parts: bool = False,
        completes_chats: bool = False,
    ) -> None:
        """client_templates: renders templates that clients send; None: they are refused.

        may_want_parts: the template may be one of a processor, which reads no content that is a text.
        completes_chats: as a processor, `encode_chat` adds special tokens unless the template begins with the first.
        """
        self.heavy_work = HeavyWork()  # the gateway's, for all that takes long
        self.chat_formats = chat_formats or ChatFormats.choose("auto", "auto", hf_tokenizer.chat_template)
        self.hf_tokenizer = hf_tokenizer  # decodes; shared with every Detokenizer, not changed after the start
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a limit saved with the tokenizer must not cut prompts silently
        self._backend.no_padding()
        self.max_token_characters = max(map(len, self._backend.get_vocab()))  # no token has a longer text
        missing = [name for name in MARKERS if self.chat_formats.is_harmony and self.token_id(name) is None]
        if missing:
            raise ConfigError(
                f"the chat template is Harmony, but the tokenizer lacks the token {missing[0]}: set "
                "gateway.tool_parser and gateway.reasoning_parser to none"
            )
        self._template = ChatTemplate(hf_tokenizer)
        self._template.may_want_parts = may_want_parts
        self.template_kwargs: Mapping[str, Any] = {}  # of chats that do not say them
        self._completes_chats = completes_chats
        self._control_tokens = ControlTokens(hf_tokenizer)
        self._client_templates = client_templates
        self.fill_in_middle = FillInMiddle(hf_tokenizer)
        self._picture_text: PictureText | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self._texts: dict[int, str] = {}  # of single tokens, those that have been asked for
        self._names: dict[int, str] = {}  # likewise

    def use_pictures(self, picture_text: PictureText) -> None:
        """The model sees pictures: chats may have some from now on, for which this stands."""
        self._picture_text = picture_text
        self._template.may_want_parts = True
        if self.hf_tokenizer.chat_template is None and picture_text.chat_template:
            self.hf_tokenizer.chat_template = picture_text.chat_template

    def use_template_kwargs(self, template_kwargs: Mapping[str, Any]) -> None:
        """Chats have these variables of the template from now on, unless they set them. Raises `InvalidRequest`."""
        self._template.check_names(template_kwargs)
        self.template_kwargs = template_kwargs

    def compile_template(self, source: str) -> None:
        """Compiles the chat template before the first chat, which is as fast as others then.

        A template that cannot be compiled is logged with its `source`, and refuses the chats.
        """
        self._template.compile(source)

    @property
    def picture_marker(self) -> str | None:
        """What stands for a picture in a text beside which there are some; None: the model sees none."""
        return None if self._picture_text is None else self._picture_text.marker

    async def encode_prompt(self, text: str, num_pictures: int) -> list[int]:
        """Token ids of a prompt of text beside which there are pictures: without a place for any, they are in front."""
        pictures = self._picture_text
        assert pictures is not None, "the model sees pictures"
        if pictures.marker in text:
            return await self.encode(pictures.written(text))
        in_front = pictures.written(pictures.marker * num_pictures)
        if pictures.precedes_text:
            return [*await self.encode(in_front, False), *await self.encode(text)]
        return await self.encode(in_front + text)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with the special tokens that the model expects around a prompt."""
        return await self.off_loop(len(text), self._encode, text, add_special_tokens)

    async def encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same where special tokens that are written out in the text are plain text, as in messages of chats."""
        return await self.off_loop(len(text), self._encode_plain, text, add_special_tokens)

    async def write_spans(
        self, text: str, write: Callable[[Iterator[TokenSpan]], T], add_special_tokens: bool
    ) -> T:
        """What `write` makes of the tokens of `encode`, and where in the text they are. It runs in a thread, too."""
        return await self.off_loop(len(text), lambda: write(self._spans(text, add_special_tokens)))

    async def encode_input(
        self, texts: Sequence[str], adds_special_tokens: bool, limit: InputLimit
    ) -> tuple[list[int], int]:
        """Token ids of a text, or of two that belong together, and how many of them are before the second one's part:
        0 if the model is not told.

        It is the longer text that loses tokens; special tokens remain.
        """
        return await self.off_loop(sum(map(len, texts)), self._encode_input, texts, adds_special_tokens, limit)

    async def encode_pair(self, template: PairTemplate, texts: Mapping[str, str], limit: InputLimit) -> list[int]:
        """Token ids of a template with a client's texts, in which special tokens are plain text.

        It is the document that loses tokens, always at its end.
        """
        size = sum(map(len, texts.values())) + sum(map(len, template.pieces))
        return await self.off_loop(size, self._encode_pair, template, texts, limit)

    async def encode_chat(
        self, chat: Chat, add_special_tokens: bool | None = None, first_table_id: int = 0, num_bytes: int = 0
    ) -> list[int]:
        """Token ids of a chat. None: with the special tokens that transformers adds to what the template writes, which
        are those of processors alone.

        `first_table_id` stands for the first of the chat's vectors, the ids after it for the others. `num_bytes`: size
        of its messages and tools. Special tokens written out in messages are plain text. Raises `InvalidRequest` if the
        template refuses or fails.
        """
        self._template.check(chat)
        size = _size(chat, num_bytes)
        if chat.template is None:
            return await self._in_thread(size, self._encode_chat, chat, add_special_tokens, first_table_id)
        nonce = new_nonce()
        marked = self._control_tokens.marked(self._template.variables(chat), nonce)
        try:
            text = await self._render_for_client(chat, marked)
        except InvalidRequest as error:
            raise InvalidRequest(self._control_tokens.unmarked(str(error), nonce), error.param) from error
        text = self._with_pictures(chat, text)
        return await self._in_thread(size, self._encode_rendered, chat, text, nonce, add_special_tokens, first_table_id)

    async def render_chat(self, chat: Chat, num_bytes: int = 0) -> str:
        """The text of a chat as its template writes it. Raises `InvalidRequest` if the template refuses or fails."""
        self._template.check(chat)
        if chat.template is not None:
            return await self._render_for_client(chat, self._template.variables(chat))
        return await self._in_thread(_size(chat, num_bytes), self._render_chat, chat)

    async def word_token_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token ids of words in the middle of a text: of each word as it is, and of the word after a space."""
        variants = [variant for word in words for variant in (word, f" {word.lstrip()}")]
        size = CHARACTERS_PER_WORD * len(variants) + sum(map(len, variants))
        lists = await self.off_loop(size, self._encode_all, variants)
        return list(dict.fromkeys(tuple(token_ids) for token_ids in lists if token_ids))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `token_ids`, each in [0, vocab_size)."""
        return self.hf_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def text_of(self, token_id: int) -> str:
        """The text of one token alone, special or not. It is decoded once: that takes 20 microseconds."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], False)
        return text

    def name_of(self, token_id: int) -> str:
        """The text that a token adds within a text; an incomplete character as OpenAI writes it: `bytes:\\xe2\\x80`.

        It is made once: lists of likely tokens have twenty for each token of an answer.
        """
        name = self._names.get(token_id)
        if name is None:
            data = token_bytes(self.hf_tokenizer, token_id)
            try:
                name = data.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{value:02x}" for value in data)
            self._names[token_id] = name
        return name

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the tokenizer writes it; empty for ids that it does not know."""
        return [token or "" for token in self.hf_tokenizer.convert_ids_to_tokens(list(token_ids))]

    def token_id(self, token: str) -> int | None:
        """The id of one token by its name; None if there is no such token."""
        return self._backend.token_to_id(token)

    async def write_text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """`decode`, off the event loop if there are many tokens."""
        return await self.off_loop(len(token_ids), self.decode, token_ids, skip_special_tokens)

    async def write_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Like `tokens`, but off the event loop if there are many tokens."""
        return await self.off_loop(len(token_ids), self.tokens, token_ids)

    def info(self) -> dict[str, Any]:
        """The settings of the tokenizer, as in tokenizer_config.json but without local paths."""
        hf = self.hf_tokenizer
        settings = {name: hf.init_kwargs[name] for name in INFO_SETTINGS if name in hf.init_kwargs}
        return {
            **settings,
            **hf.special_tokens_map,
            "model_max_length": hf.model_max_length,
            "tokenizer_class": type(hf).__name__,
            "chat_template": hf.chat_template,
            "added_tokens_decoder": {
                str(token_id): {name: getattr(token, name) for name in ADDED_TOKEN_FIELDS}
                for token_id, token in hf.added_tokens_decoder.items()
            },
        }

    async def off_loop(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a function whose time grows with `size`: at once if `size` is small, else in a thread."""
        if size <= MAX_INLINE_CHARACTERS:
            return function(*arguments)
        return await self._in_thread(size, function, *arguments)

    async def _in_thread(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        if size <= MAX_SHORT_CHARACTERS:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        return await self.heavy_work.in_thread(function, *arguments)

    def close(self) -> None:
        """Ends the threads; further long texts are refused."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.heavy_work.close()

    def _render_chat(self, chat: Chat) -> str:
        return self._template.render(chat, *self._template.variables(chat))

    async def _render_for_client(self, chat: Chat, variables: Sequence[Any]) -> str:
        if self._client_templates is None:
            raise InvalidRequest(
                "chat_template cannot be used here: gateway.trust_request_chat_template is not set", "chat_template"
            )
        return await self._client_templates.render(chat, *variables, self.hf_tokenizer.special_tokens_map)

    def _encode_rendered(
        self, chat: Chat, text: str, nonce: str, add_special_tokens: bool | None, first_table_id: int
    ) -> list[int]:
        if not chat.vectors:
            return self._control_tokens.encode(text, nonce, self._adds_special_tokens(text, add_special_tokens))
        if add_special_tokens:
            raise InvalidRequest("add_special_tokens cannot be used with prompt_embeds", "add_special_tokens")
        return encode_around(
            chat.vectors, text, first_table_id, lambda piece: self._control_tokens.encode(piece, nonce, False)
        )

    def _encode_chat(self, chat: Chat, add_special_tokens: bool | None, first_table_id: int) -> list[int]:
        given, nonce = self._template.variables(chat), new_nonce()
        marked = self._control_tokens.marked(given, nonce)
        try:
            text = self._template.render(chat, *marked)
        except InvalidRequest as error:
            raise InvalidRequest(self._control_tokens.unmarked(str(error), nonce), error.param) from error
        text = self._with_pictures(chat, text)
        if marked == given and not chat.vectors and not self._control_tokens.are_normalized:
            return self._encode(text, self._adds_special_tokens(text, add_special_tokens))
        return self._encode_rendered(chat, text, nonce, add_special_tokens, first_table_id)

    def _adds_special_tokens(self, text: str, asked: bool | None) -> bool:
        """Of a rendered text. `asked`: what the client said."""
        if asked is not None:
            return asked
        first = self.hf_tokenizer.bos_token
        return self._completes_chats and not (first and text.startswith(first))

    def _with_pictures(self, chat: Chat, text: str) -> str:
        """A rendered text with what is tokenized for pictures; the client's own texts have placeholders for such."""
        return text if self._picture_text is None or not chat.has_pictures else self._picture_text.written(text)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode_batch_fast` releases the interpreter lock, `encode` does not.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        nonce = new_nonce()
        return self._control_tokens.encode(self._control_tokens.marked(text, nonce), nonce, add_special_tokens)

    def _spans(self, text: str, add_special_tokens: bool) -> Iterator[TokenSpan]:
        """One by one: a list of very many objects keeps the interpreter lock for a tenth of a second."""
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        for index, (token_id, is_added) in enumerate(zip(encoding.ids, encoding.special_tokens_mask, strict=True)):
            if is_added:
                yield TokenSpan(token_id, self._backend.id_to_token(token_id), None, None)
            else:
                start, stop = encoding.token_to_chars(index)
                yield TokenSpan(token_id, text[start:stop], start, stop)

    def _encode_input(
        self, texts: Sequence[str], adds_special_tokens: bool, limit: InputLimit
    ) -> tuple[list[int], int]:
        pieces = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        num_special = self._backend.num_special_tokens_to_add(len(texts) > 1) if adds_special_tokens else 0
        room = max(0, limit.max_tokens - num_special)
        if limit.max_last is not None:
            num_before = sum(len(piece.ids) for piece in pieces[:-1])
            pieces[-1].truncate(min(limit.max_last, max(0, room - num_before)))
        if limit.is_cut and sum(len(piece.ids) for piece in pieces) > room:
            by_length = sorted(pieces, key=lambda piece: len(piece.ids))
            shorter = min(len(by_length[0].ids), room // 2) if len(pieces) > 1 else 0
            for piece, count in zip(reversed(by_length), (room - shorter, shorter), strict=False):
                piece.truncate(count, direction="left" if limit.keeps_last else "right")
        encoding = self._backend.post_process(*pieces, add_special_tokens=adds_special_tokens)
        if len(texts) == 1 or "token_type_ids" not in self.hf_tokenizer.model_input_names:
            return encoding.ids, 0
        return encoding.ids, next((i for i, each in enumerate(encoding.type_ids) if each), 0)

    def _encode_pair(self, template: PairTemplate, texts: Mapping[str, str], limit: InputLimit) -> list[int]:
        nonce, place = new_nonce(), template.document_piece

        def encode(piece: str) -> list[int]:
            return self._control_tokens.encode(piece, nonce, False)

        marked = self._control_tokens.marked(texts, nonce)
        parts = [encode(piece) for piece in template.fill(marked)]
        num_others = sum(map(len, parts)) - len(parts[place])
        is_cut = limit.is_cut or limit.max_last is not None
        most = max(0, limit.max_tokens - num_others) if is_cut else len(parts[place])
        if limit.max_last is not None:
            most = min(most, len(encode(template.fill({**marked, "document": ""})[place])) + limit.max_last)
        parts[place] = parts[place][:most]
        return [token_id for part in parts for token_id in part]

    def _encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text, add_special_tokens=False) for text in texts]


def _size(chat: Chat, num_bytes: int) -> int:
    return num_bytes + CHARACTERS_PER_MESSAGE * len(chat.messages)


def load_tokenizer(
    path: Path,
    is_optional: bool = False,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    client_templates: ClientTemplates | None = None,
    chat_template: Path | None = None,
) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, as `load_hf_tokenizer` reads it, with the configured parsers.

    The template of a processor comes before the tokenizer's if the model is of a family that sees pictures, whether or
    not they are off: chats with pictures and without then become the same text.
    `chat_template`: a file with a template in place of the model's. Raises `ConfigError` if it cannot be read.
    """
    hf_tokenizer, family = load_hf_tokenizer(path, is_optional), vision_family(path)
    may_want_parts = family is not None
    if (may_want_parts or hf_tokenizer.chat_template is None) and (template := read_processor_template(path)):
        hf_tokenizer.chat_template, may_want_parts = template, True
    if chat_template is not None:
        try:
            hf_tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"gateway.chat_template {str(chat_template)!r} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"gateway.chat_template {str(chat_template)!r} is not UTF-8: {error}") from error
    chat_formats = ChatFormats.choose(tool_parser, reasoning_parser, hf_tokenizer.chat_template)
    return Tokenizer(
        hf_tokenizer,
        chat_formats,
        client_templates,
        may_want_parts=may_want_parts,
        completes_chats=family is not None and not family.precedes_text,
    )
