"""Turns a client's message into a request that can run. All limits are checked here, before anything starts."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace

from services.common.errors import InvalidRequest
from services.common.sampling_messages import decode_sampling
from services.common.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_TOKEN_SEQUENCES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKENS,
    MAX_PRIORITY,
    SamplingParams,
)
from services.common.shorten import quote
from services.gateway.features.installed import IMAGES, REPORTS, SOURCE, features_of, read_features
from services.gateway.images.picture import Picture, encode_pictures
from services.gateway.images.picture_reader import PictureReader
from services.gateway.request.beam_request import decode_beams, greedy_for_beams, read_widths
from services.gateway.request.context_length import check_prompt_length, num_kept_tokens, read_max_tokens, too_long
from services.gateway.request.generation_request import GenerationRequest, shows_prompt
from services.gateway.request.model_limits import LocalModel, ModelLimits
from services.gateway.request.prompt_vectors import PromptVectors, check_vectors, read_vectors
from services.gateway.request.source_reader import Source, SourceReader
from services.gateway.resources.repeatable import current_run, draw_bits
from services.gateway.text.answer_grammar import answer_ends, answer_grammar, read_parsing, read_reasoning_limit
from services.gateway.text.chat_template import Chat
from services.gateway.text.parsing import Parsing
from services.gateway.text.read_chat import read_chat_in_turn
from services.gateway.text.stop_patterns import automaton_of
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tools.tool import check_tools_size
from services.pb import gateway_pb2
from services.step.prompt_span import PromptSpan
from services.step.sequence_spec import SequenceSpec

MAX_REQUEST_ID_CHARACTERS = 128
MAX_STOP_STRINGS = 16
MAX_STRING_CHARACTERS = 256  # of a stop string, an expression that stops, or a bad word
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_MESSAGES = 4096  # of a chat
MAX_USER_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256
CHARACTERS_PER_EXCERPT = 60  # take as long as what each excerpt takes besides its characters, 30 µs


async def read_request(
    message: gateway_pb2.GenerateRequest,
    limits: ModelLimits,
    prompt_name: str = "prompt",
    reading: Awaitable[Sequence[Picture]] | None = None,
    *,
    client: int = 0,
) -> GenerationRequest:
    """Raises `InvalidRequest` for the first thing that is wrong; tokenizes only what is right otherwise.

    `prompt_name` is what the client calls the prompt, such as `prompt[1]` if it is one of several. `reading`: gives the
    pictures of the message when they are decoded, and what it raises is raised; None: there are none. `client`: the
    number of the address that it comes from.
    Raises `UnknownModel` for another model than the served one. The message has passed `check_counts`.
    """
    _check_fields(message, limits)
    has_beams = message.HasField("beam_search")
    n, best_of = read_widths(message, limits.max_beam_width) if has_beams else _read_counts(message, limits.max_n)
    features = read_features(message, limits.vocab_size)
    sampling = await _read_sampling(message, limits)
    if message.HasField("max_tokens"):
        _check_max_tokens(message, best_of, returns_prompt=message.echo or shows_prompt(features))
        _check_min_tokens(sampling.min_tokens, message.max_tokens)

    prompt = await _read_prompt(message, limits, prompt_name, reading)
    vectors = prompt.vectors
    features |= prompt.features
    max_tokens = read_max_tokens(
        message, prompt.num_tokens, sampling.min_tokens, limits.max_model_len, is_strict=limits.strict_max_tokens
    )
    _check_min_tokens(sampling.min_tokens, max_tokens)

    parsing, stop_token_ids = _read_answer(message, limits.model, prompt, sampling)
    sampling.check_choice(stop_token_ids)
    if prompt.chat is not None:
        limit = read_reasoning_limit(prompt.chat, parsing, limits.model.tokenizer)
        sampling = replace(sampling, reasoning_limit=limit)
    if parsing is not None:
        sampling = replace(sampling, structured_output=answer_grammar(parsing, sampling.structured_output))
    if has_beams:
        refused = [each.field for each in features_of(features) if not each.goes_with_beams]
        sampling = greedy_for_beams(message, sampling, refused)
    num_logprobs = message.logprobs if message.HasField("logprobs") else None
    beam_search = decode_beams(message, best_of, n) if has_beams and best_of > 1 else None
    # Choosing the best of several answers needs at least the tokens' own values.
    must_choose = beam_search is None and best_of > n
    adapter = limits.names.adapters.get(message.model)
    spec = SequenceSpec(
        request_id=message.request_id or f"gen-{secrets.token_hex(8)}",
        prompt_token_ids=[*vectors.front_ids, *prompt.token_ids] if vectors.are_in_front else prompt.token_ids,
        sampling=sampling,
        max_tokens=max(1, max_tokens),
        stop_token_ids=stop_token_ids,
        cache_salt=message.cache_salt,
        num_logprobs=0 if num_logprobs is None and must_choose else num_logprobs,
        priority=message.priority,
        traceparent=message.traceparent,
        adapter=None if adapter is None or adapter.table is not None else adapter,
        prompt_embeds=vectors.ref,
        beam_search=beam_search,
        source=prompt.source and prompt.source.ref,
        features=features,
        spans=prompt.spans,
        client=client,
    )
    return GenerationRequest(
        spec,
        wants_output=max_tokens > 0,
        stop=tuple(message.stop),
        stop_regex=tuple(message.stop_regex),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=not message.HasField("skip_special_tokens") or message.skip_special_tokens,
        n=n,
        best_of=best_of,
        num_logprobs=num_logprobs,
        prompt_text=prompt.text,
        echo=message.echo,
        priority=message.priority if message.HasField("priority") else None,
        user=message.user,
        queue_timeout_s=limits.queue_timeout_s,
        parsing=parsing,
        prompt_embeds=vectors.table,
        num_source_tokens=0 if prompt.source is None or message.HasField("sound") else prompt.source.ref.num_rows,
        pictures=prompt.pictures,
        is_stepwise=current_run() is not None,
    )


def _check_fields(message: gateway_pb2.GenerateRequest, limits: ModelLimits) -> None:
    """What can be told of one field alone, and nothing is made of."""
    limits.names.check(message.model)
    if not limits.model.generates and not message.return_pooled:
        raise InvalidRequest("this model generates nothing: its checkpoint has no language head", "model")
    check_name("request_id", message.request_id, MAX_REQUEST_ID_CHARACTERS)
    check_name("user", message.user, MAX_USER_CHARACTERS)
    _check_length("cache_salt", message.cache_salt, MAX_SALT_CHARACTERS)
    _check_logprobs(message, limits)
    _check_range("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_strings("stop", message.stop)
    _check_strings("stop_regex", message.stop_regex)
    if message.stop_regex:
        automaton_of(tuple(message.stop_regex))
    check_token_ids("stop_token_ids", message.stop_token_ids, limits.vocab_size)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What the model reads."""

    token_ids: list[int]  # with a source those that the decoder begins with
    vectors: PromptVectors
    text: str | None  # as it was given, if it was given as text and is kept whole
    chat: Chat | None
    pictures: Sequence[Picture]
    spans: tuple[PromptSpan, ...]  # one for each picture
    source: Source | None  # what an encoder reads
    features: Mapping[str, bytes]  # those of pictures and source

    @property
    def num_tokens(self) -> int:
        """With the vectors in front of them."""
        return len(self.vectors.front_ids) + len(self.token_ids)


async def _read_prompt(
    message: gateway_pb2.GenerateRequest,
    limits: ModelLimits,
    name: str,
    reading: Awaitable[Sequence[Picture]] | None,
) -> _Prompt:
    """Raises `InvalidRequest` if there is none, or it does not fit. The arguments are those of `read_request`."""
    model, adapter = limits.model, limits.names.adapters.get(message.model)
    vectors = await read_vectors(message, adapter, model.prompt_embeds, limits.vocab_size, limits.max_model_len)
    _check_source(message, model.sources)
    given, chat, source = await _read_input(message, limits, vectors.token_ids, reading)
    pictures: Sequence[Picture] = () if reading is None else await reading  # last: meanwhile the text was tokenized
    if model.sources is not None and source is None:
        given = _cut(given, message, model.sources.encoder.max_source_len)
        if model.pictures is not None:
            given, _ = model.pictures.expand(list(given), pictures)
        source = model.sources.read_tokens(given, pictures)
        given = await model.sources.read_decoder_prompt(message, model.tokenizer)
    spans: tuple[PromptSpan, ...] = ()
    if model.pictures is not None and source is None:
        given, spans = model.pictures.expand(list(given), pictures)
    if pictures and message.HasField("truncate_prompt_tokens"):
        raise InvalidRequest("truncate_prompt_tokens cannot be used with pictures", "truncate_prompt_tokens")
    if pictures and vectors.table is not None:
        raise InvalidRequest("pictures cannot be used with vectors in one prompt", "messages")
    if message.truncate_prompt_tokens > limits.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {message.truncate_prompt_tokens}, max_model_len is {limits.max_model_len}. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )
    num_kept, num_in_front = len(given), len(vectors.front_ids)
    if message.HasField("truncate_prompt_tokens") and source is None:
        num_kept = min(num_kept, num_kept_tokens(message, limits.max_model_len - num_in_front))
    if not num_kept:
        raise InvalidRequest("the prompt has no tokens, at least 1 is required", "prompt")
    check_prompt_length(num_in_front + num_kept, limits.max_model_len + (not model.generates))
    is_whole = num_kept == len(given)
    if not is_whole:
        given = given[:num_kept] if message.keep_first_tokens else given[-num_kept:]
    token_ids = list(given)
    num_rows = len(vectors.token_ids) - num_in_front  # that token ids of the prompt may stand for
    check_token_ids("prompt_token_ids", token_ids, limits.vocab_size, name, num_rows)
    features = {SOURCE.name: source.input} if source is not None else {}
    if pictures and source is None:
        features[IMAGES.name] = encode_pictures(pictures)
    is_whole_text = message.WhichOneof("input") == "prompt" and is_whole and source is None
    return _Prompt(
        token_ids,
        vectors,
        text=message.prompt if is_whole_text else None,
        chat=chat,
        pictures=pictures,
        spans=spans,
        source=source,
        features=features,
    )


def _read_answer(
    message: gateway_pb2.GenerateRequest, model: LocalModel, prompt: _Prompt, sampling: SamplingParams
) -> tuple[Parsing | None, tuple[int, ...]]:
    """What is to be found in the answers, and the tokens that end them."""
    parsing, ends = None, tuple[int, ...]()
    if prompt.chat is not None:
        parsing = read_parsing(prompt.chat, model.tokenizer, prompt.token_ids, sampling.structured_output)
        ends = answer_ends(parsing, model.tokenizer)
    elif message.HasField("suffix"):
        ends = model.tokenizer.fill_in_middle.end_token_ids
    eos_token_ids = () if message.ignore_eos else (*model.eos_token_ids, *ends)
    return parsing, tuple(sorted({*eos_token_ids, *message.stop_token_ids}))


async def _read_input(
    message: gateway_pb2.GenerateRequest,
    limits: ModelLimits,
    table_ids: range,
    reading: Awaitable[Sequence[Picture]] | None,
) -> tuple[Sequence[int], Chat | None, Source | None]:
    """The tokens that are given, the chat that they are of, and what an encoder reads if that is sound or a picture."""
    sources, tokenizer, kind = limits.model.sources, limits.model.tokenizer, message.WhichOneof("input")
    if sources is not None and message.HasField("sound"):
        source = sources.read_sound(message.sound)
        return await sources.read_decoder_prompt(message, tokenizer), None, source
    if sources is not None and sources.reads_pictures:
        check_size(message, limits)
        source = sources.read_picture(() if reading is None else await reading)
        return await sources.read_text_beside(message, tokenizer), None, source
    if message.HasField("suffix"):
        check_size(message, limits)
        return await _read_gap(message, limits), None, None
    if message.excerpts:
        raise InvalidRequest("excerpts belong to a prompt with a suffix", "excerpts")
    if kind == "prompt_token_ids":
        return message.prompt_token_ids.ids, None, None
    if kind == "prompt_embeds":
        return table_ids, None, None
    check_size(message, limits)
    token_ids, chat = await read_text_or_chat(message, tokenizer, table_ids, len(message.pictures))
    return token_ids, chat, None


async def read_text_or_chat(
    message: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest,
    tokenizer: Tokenizer,
    table_ids: range = range(0),
    num_pictures: int = 0,
) -> tuple[list[int], Chat | None]:
    """Token ids of a message's text or chat, and the chat. Raises `InvalidRequest` if it is missing or unusable.

    `table_ids` stand for the vectors of the chat; `num_pictures` are beside a prompt of text.
    """
    kind = message.WhichOneof("input")
    asked = message.add_special_tokens if message.HasField("add_special_tokens") else None
    if kind is None:
        names = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["input"].fields)
        raise InvalidRequest(f"nothing to read: exactly one of {names} is required", "prompt")
    if kind != "chat":
        text = getattr(message, kind)
        if kind == "prompt" and not text:
            raise InvalidRequest("prompt is empty", kind)
        if num_pictures:
            return await tokenizer.encode_prompt(text, num_pictures), None
        return await tokenizer.encode(text, asked is not False), None
    chat = await read_chat_in_turn(message.chat, tokenizer)
    check_vectors(chat, len(table_ids))
    num_bytes = message.chat.ByteSize()
    return await tokenizer.encode_chat(chat, asked, table_ids.start, num_bytes), chat


def _check_source(message: gateway_pb2.GenerateRequest, sources: SourceReader | None) -> None:
    """Raises `InvalidRequest` for what only models with an encoder have, or only those without one."""
    if sources is None:
        for field in ("decoder_prompt_token_ids", "decoder_prompt", "sound", "alignment"):
            if getattr(message, field).ByteSize() if field != "decoder_prompt" else message.decoder_prompt:
                raise InvalidRequest(f"{field} is given, and the model has no encoder", field)
        return
    for field in ("echo", "suffix", "prompt_embeds", "prompt_embedding_table"):
        if field in (each.name for each, _ in message.ListFields()):
            raise InvalidRequest(f"{field} cannot be used with a model whose encoder reads the prompt", field)


def _cut(given: Sequence[int], message: gateway_pb2.GenerateRequest, max_source_len: int) -> Sequence[int]:
    """What `truncate_prompt_tokens` leaves of an encoder's prompt. Raises `InvalidRequest` if there is none."""
    if not given:
        raise InvalidRequest("the prompt has no tokens, at least 1 is required", "prompt")
    if not message.HasField("truncate_prompt_tokens"):
        return given
    num_kept = min(len(given), message.truncate_prompt_tokens or max_source_len)
    return given[:num_kept] if message.keep_first_tokens else given[-num_kept:]


async def _read_gap(message: gateway_pb2.GenerateRequest, limits: ModelLimits) -> list[int]:
    """Token ids of a prompt and a suffix between which the answer stands. Raises `InvalidRequest`."""
    tokenizer = limits.model.tokenizer
    tokenizer.fill_in_middle.check()
    kind = message.WhichOneof("input")
    if kind not in ("prompt", "prompt_token_ids"):
        raise InvalidRequest(f"suffix belongs to a prompt of text or token ids, not to {kind or 'none'}", "suffix")
    if message.echo:
        raise InvalidRequest("echo cannot be used with suffix: the prompt is not what stands before the answer", "echo")
    if message.HasField("truncate_prompt_tokens"):
        raise InvalidRequest(
            "truncate_prompt_tokens cannot be used with suffix: it would cut the token off that the prompt begins with",
            "truncate_prompt_tokens",
        )
    prefix = message.prompt if kind == "prompt" else message.prompt_token_ids.ids
    adds_special_tokens = not message.HasField("add_special_tokens") or message.add_special_tokens
    excerpts = [(each.filename, each.text) for each in message.excerpts]

    def room(num_tokens: int) -> int:
        rest = limits.max_model_len - num_tokens
        return rest - max(1, message.max_tokens) if message.HasField("max_tokens") else rest // 2

    size = _num_characters(message) + len(message.prompt_token_ids.ids) + CHARACTERS_PER_EXCERPT * len(excerpts)
    encode = tokenizer.fill_in_middle.encode
    return await tokenizer.off_loop(
        size, encode, prefix, message.suffix, message.middle, adds_special_tokens, excerpts, room
    )


def check_can_stream(message: gateway_pb2.GenerateRequest) -> None:
    """Raises `InvalidRequest` for answers of which the best are chosen."""
    if message.best_of > max(1, message.n) and not message.HasField("beam_search"):
        raise InvalidRequest(
            f"best_of is {message.best_of} and n is {max(1, message.n)}: the best answers are known only at the end, "
            "so this cannot be streamed",
            "best_of",
        )


def check_counts(
    message: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest, pictures: PictureReader | None = None
) -> None:
    """Refuses a message with too many elements before they are checked: two megabytes may hold a million.

    `pictures`: what reads those that a model sees, whose text is limited, too.
    """
    counted: list[tuple[str, str, Sized, int]] = [("messages", "elements", message.chat.messages, MAX_MESSAGES)]
    if isinstance(message, gateway_pb2.GenerateRequest):
        sampling = message.sampling
        counted += [
            ("stop", "strings", message.stop, MAX_STOP_STRINGS),
            ("stop_regex", "strings", message.stop_regex, MAX_STOP_STRINGS),
            ("stop_token_ids", "ids", message.stop_token_ids, MAX_STOP_TOKENS),
            ("bad_words", "strings", message.bad_words, MAX_BAD_WORDS),
            ("bad_words", "words", sampling.bad_words, MAX_BAD_TOKEN_SEQUENCES),
            ("logit_bias", "tokens", sampling.logit_bias, MAX_LOGIT_BIASES),
            ("allowed_token_ids", "tokens", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS),
            ("logprob_token_ids", "tokens", sampling.logprob_token_ids, MAX_LOGPROB_TOKENS),
        ]
    for field, what, elements, most in counted:
        if len(elements) > most:
            raise InvalidRequest(f"{field} has {len(elements)} {what}, at most {most} allowed", field)
    if message.chat.tools:
        check_tools_size(message.chat.tools)
    if pictures is not None:
        pictures.check_text(_num_characters(message), _text_field(message))
        if isinstance(message, gateway_pb2.GenerateRequest):
            pictures.check_text(len(message.decoder_prompt), "decoder_prompt")


def check_size(message: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest, limits: ModelLimits) -> None:
    """Refuses a text that is too long for any tokens, before tokenizing it costs memory."""
    num_characters, per_token = _num_characters(message), limits.model.tokenizer.max_token_characters
    if num_characters > limits.max_prompt_len * per_token:
        raise too_long(
            limits.max_prompt_len,
            f"the text has {num_characters} characters, and a token at most {per_token}",
            _text_field(message),
        )


def _text_field(message: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest) -> str:
    return "messages" if message.WhichOneof("input") == "chat" else "prompt"


def _num_characters(message: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest) -> int:
    """Of the text that becomes the prompt's tokens."""
    if isinstance(message, gateway_pb2.GenerateRequest):
        count = len(message.prompt) + len(message.suffix) + len(message.middle)
        for excerpt in message.excerpts:
            count += len(excerpt.filename) + len(excerpt.text)
    else:
        count = len(message.text)
    for each in message.chat.messages:
        count += len(each.content) + len(each.reasoning)
        for call in each.tool_calls:
            count += len(call.arguments)
    return count


def _check_length(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidRequest(f"{field} has {len(text)} characters, at most {most} allowed", field)


def check_name(field: str, name: str, most: int) -> None:
    """Raises `InvalidRequest` for a name of more than `most` characters, or with some that cannot be printed."""
    _check_length(field, name, most)
    if not name.isprintable():  # it appears in the logs of three services
        raise InvalidRequest(f"{field} is {quote(name)}, must be printable characters", field)


def _check_range(field: str, value: int, least: int, most: int, key: str = "") -> None:
    """`key`: of the configuration, which has the upper limit."""
    if not least <= value <= most:
        raise InvalidRequest(f"{field} is {value}, must be from {least} to {most}{f' ({key})' if key else ''}", field)


def _check_logprobs(message: gateway_pb2.GenerateRequest, limits: ModelLimits) -> None:
    if message.logprobs > limits.max_logprobs:
        is_all = " (all of the vocabulary)" if message.logprobs == limits.vocab_size else ""
        raise InvalidRequest(
            f"logprobs is {message.logprobs}{is_all}, must be from 0 to {limits.max_logprobs} (gateway.max_logprobs)",
            "logprobs",
        )


def check_num_logprobs(num_logprobs: int, most: int) -> None:
    """Raises `InvalidRequest` if all answers to a client's request may have more than `most` log-probabilities."""
    if num_logprobs > most:
        raise InvalidRequest(
            f"all answers together may have {num_logprobs} log-probabilities, gateway.max_request_logprobs is {most}: "
            "ask for fewer by max_tokens, logprobs, prompt_logprobs, logprob_token_ids, n or best_of",
            "logprobs",
        )


def _read_counts(message: gateway_pb2.GenerateRequest, max_n: int) -> tuple[int, int]:
    """The values of `n` and `best_of`."""
    n = message.n if message.HasField("n") else 1
    best_of = message.best_of if message.HasField("best_of") else n
    _check_range("n", n, 1, max_n, "gateway.max_n")
    _check_range("best_of", best_of, n, max_n, "gateway.max_n")
    return n, best_of


async def _read_sampling(message: gateway_pb2.GenerateRequest, limits: ModelLimits) -> SamplingParams:
    sampling = decode_sampling(message.sampling, seed=draw_bits(64))
    if message.bad_words:
        _check_strings("bad_words", message.bad_words)
        words = await limits.model.tokenizer.word_token_ids(message.bad_words)
        sampling = replace(sampling, bad_words=(*sampling.bad_words, *words))
    sampling.validate()
    sampling.validate_token_ids(limits.vocab_size)
    if sampling.top_k is not None and sampling.top_k > limits.vocab_size:  # all tokens, as with vLLM and SGLang
        sampling = replace(sampling, top_k=None)
    return sampling


def _check_strings(field: str, strings: Sequence[str]) -> None:
    for i, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STRING_CHARACTERS:
            raise InvalidRequest(
                f"{field}[{i}] has {len(string)} characters, must have 1 to {MAX_STRING_CHARACTERS}", field
            )


def check_token_ids(
    field: str, token_ids: Sequence[int], vocab_size: int, what: str = "", num_rows: int = 0
) -> None:
    """Raises `InvalidRequest` for the first id outside `[0, vocab_size + num_rows)`.

    The message names `what`, else `field`. `num_rows`: vectors that ids beyond the vocabulary may stand for.
    """
    limit = vocab_size + num_rows
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limit):
        return
    i = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < limit)
    beyond = f"out of vocabulary and beyond the {num_rows} rows" if num_rows else "out of vocabulary"
    allowed = f"in [0, {limit})" if token_ids[i] >= 0 else f"greater than or equal to 0 and below {limit}"
    raise InvalidRequest(f"{what or field}[{i}] is {token_ids[i]}, {beyond}: must be {allowed}", field)


def _check_max_tokens(message: gateway_pb2.GenerateRequest, best_of: int, *, returns_prompt: bool) -> None:
    if message.max_tokens == 0 and returns_prompt:
        if best_of > 1:
            raise InvalidRequest(f"best_of or n is {best_of}, must be 1 where max_tokens is 0", "n")
    elif message.max_tokens < 1:
        showing = ["echo", *(each.field for each in REPORTS.values() if each.is_shown_with_prompt)]
        raise InvalidRequest(
            f"max_tokens is {message.max_tokens}, must be at least 1, or 0 with {', '.join(showing[:-1])} or "
            f"{showing[-1]}",
            "max_tokens",
        )


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}, max_tokens is {max_tokens}", "min_tokens")
