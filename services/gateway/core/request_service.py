"""`RequestService`: the functions that all APIs of the gateway call, independent of the wire format.

All APIs pass requests as `GenerateRequest` messages, which are checked in one module and become `Generation`s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType

from services.common.config import GatewaySection
from services.common.errors import AbortedByCaller, InvalidRequest, TwostrokeError
from services.common.json_files.processor_files import IMAGE_PROCESSOR, no_processor
from services.common.structured_output import StructuredOutput
from services.gateway.access.access import Access, Caller
from services.gateway.access.admission import Admission, Ticket
from services.gateway.adapters.adapters import Adapters
from services.gateway.core.generation import Generation
from services.gateway.features.feature import HeldBytes
from services.gateway.features.installed import features_of
from services.gateway.images.picture import Picture
from services.gateway.link.dense_pool import DensePool
from services.gateway.link.journal import Journal, is_of_batch
from services.gateway.link.journal_entry import FinishReason
from services.gateway.link.served_model import ServedModel
from services.gateway.link.stepwise import check_repeatable
from services.gateway.metrics.gateway_metrics import GatewayMetrics
from services.gateway.request.generation_request import GenerationRequest, Owner
from services.gateway.request.model_limits import LocalModel, ModelLimits, ModelNames
from services.gateway.request.read_request import (
    check_counts,
    check_num_logprobs,
    check_size,
    check_token_ids,
    read_request,
    read_text_or_chat,
)
from services.gateway.resources.heavy_work import HeavyWork
from services.gateway.resources.memory_budget import HeldMemory, MemoryBudget, settle_body
from services.gateway.text.answer_grammar import refusal
from services.gateway.text.grammar_trials import GrammarTrials
from services.gateway.text.held_forms import HeldForms
from services.gateway.text.read_chat import read_chat_in_turn
from services.grammar.grammar_error import GrammarError
from services.pb import gateway_pb2
from services.rpc.spans import Tracer

COPIES_OF_EMBEDDINGS = 2  # the message, and the table that is made of it
COPIES_OF_MESSAGES = 3  # of gRPC: the object, its bytes, and those that are being sent
BYTES_PER_TOKEN_ID = 40  # in a list of Python's
BYTES_PER_TOKEN_TEXT = 400  # of an answer that shows tokens as texts: as an id, as objects, and as JSON
BYTES_PER_CHARACTER = 8  # of a text that was asked for, and its JSON while it is sent
BYTES_PER_LOGPROB = 12  # in `LogprobRows`, with what its arrays keep free to grow


@dataclass(frozen=True, slots=True)
class Part:
    """What a request is of all that its client has asked for at once."""

    prompt_name: str = "prompt"  # in error messages
    num_other_logprobs: int = 0  # log-probabilities of the other prompts, which count towards the limit, too
    is_being_read: bool = False  # whether the caller is in a context of `reading` for all parts
    in_one_message: bool = False  # whether the answers are sent in one message of gRPC, which takes more memory

    @property
    def num_messages(self) -> int:
        """Copies of the answers as messages."""
        return COPIES_OF_MESSAGES if self.in_one_message else 0


WHOLE = Part()


def num_answers_of(message: gateway_pb2.GenerateRequest) -> int:
    """How many answers a request asks for, whose numbers have not been checked."""
    return max(1, message.n, message.best_of)


class RequestService:
    """Starts, finds and ends requests. Runs in the event loop."""

    def __init__(
        self,
        section: GatewaySection,
        model: LocalModel,
        adapters: Adapters,
        journal: Journal,
        dense: DensePool,
        metrics: GatewayMetrics,
        access: Access,
        admission: Admission,
        tracer: Tracer,
        grammar_trials: GrammarTrials,
        memory: MemoryBudget,
    ) -> None:
        self.section = section
        self.local_model = model
        self.adapters = adapters
        self.journal = journal
        self._dense = dense
        self.metrics = metrics
        self.access = access
        self._admission = admission
        self._tracer = tracer
        self._grammar_trials = grammar_trials
        self.memory = memory
        self.names = adapters.names
        self.tokenizer = model.tokenizer
        self.eos_token_ids = model.eos_token_ids
        self.generates = model.generates
        self.prompt_embeds = model.prompt_embeds
        self.sources = model.sources
        self.pictures = model.pictures
        self._held_forms = HeldForms(memory)
        self._being_read = BeingRead()
        self._last_limits: tuple[ServedModel, ModelLimits] | None = None  # of the last request

    @property
    def model(self) -> ServedModel:
        """The served model. Raises `PeerError` until a dense worker has answered once."""
        return self._dense.model

    @property
    def limits(self) -> ModelLimits:
        """The limits of requests. Raises `PeerError` until a dense worker has answered once."""
        return self._limits_with(self.names)

    def _limits_with(self, names: ModelNames) -> ModelLimits:
        model, section = self._dense.model, self.section
        if self._last_limits is not None:
            last_model, limits = self._last_limits
            if last_model is model and limits.names is names:
                return limits
        limits = ModelLimits(
            self.local_model,
            names,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            max_prompts=section.max_prompts,
            max_n=section.max_n,
            max_logprobs=section.max_logprobs,
            max_beam_width=model.max_beam_width,
            strict_max_tokens=section.strict_max_tokens,
            queue_timeout_s=section.queue_timeout_s,
        )
        self._last_limits = model, limits
        return limits

    @property
    def max_input_tokens(self) -> int:
        """The longest input of which a vector can be made. A decoder's has room for one token more."""
        return self._dense.model.max_model_len - self.generates

    @property
    def heavy_work(self) -> HeavyWork:
        """Where all that takes long is done."""
        return self.tokenizer.heavy_work

    @property
    def num_open_requests(self) -> int:
        """Requests that are not answered completely, those that wait included."""
        return self._admission.num_open

    def unready_reason(self) -> str | None:
        """Why no request can run now; None if requests can run."""
        if self._admission.is_draining:
            return "the gateway is about to stop"
        return self._dense.unready_reason()

    def names_for(self, caller: Caller) -> ModelNames:
        """The names of the model and of the adapters that a caller's requests may use."""
        return self.adapters.names_for(caller)

    async def start(
        self, message: gateway_pb2.GenerateRequest, caller: Caller, part: Part = WHOLE
    ) -> Generation:
        """Checks and submits a request. The caller must close the generation. Raises a `TwostrokeError`."""
        ticket = None
        span = self._tracer.start("request", message.traceparent)
        message.traceparent = span.traceparent  # so that the workers' spans are below this one
        try:
            num_answers = min(num_answers_of(message), self.section.max_answers)  # it is not checked yet
            ticket = self._admission.open(caller, num_answers)
            held = HeldMemory(self.memory, caller.client_id)
            ticket.at_close(held.release)
            async with nullcontext() if part.is_being_read else self.reading([message], caller):
                request = await self._read(message, caller, part, ticket, held)
            held.settle()
            settle_body()
            ticket.admit(request)
            if request.is_stepwise:
                check_repeatable(request)
            return Generation(request, self.tokenizer, self.journal, self._dense, self.metrics, ticket, span)
        except BaseException as error:
            if ticket is not None:
                ticket.close()
            if isinstance(error, TwostrokeError):
                self.metrics.on_rejected(error)
            span.end(str(error) or type(error).__name__)
            raise

    def room(
        self, messages: Sequence[gateway_pb2.GenerateRequest], caller: Caller
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Room in the queue for the answers to several prompts: see `Admission.room`."""
        return self._admission.room(caller, sum(map(num_answers_of, messages)))

    def reading(
        self, messages: Sequence[gateway_pb2.GenerateRequest], caller: Caller
    ) -> AbstractAsyncContextManager[Set[str]]:
        """A context in which requests are read, which may be aborted meanwhile: see `BeingRead.until_started`."""
        return self._being_read.until_started(caller.owner, [message.request_id for message in messages])

    async def _read(
        self, message: gateway_pb2.GenerateRequest, caller: Caller, part: Part, ticket: Ticket, held: HeldMemory
    ) -> GenerationRequest:
        """The request that a message asks for, with all that it needs reserved."""
        num_bytes = len(message.prompt_embeds.values) + len(message.prompt_embedding_table.values)
        if num_bytes and self.prompt_embeds is not None:
            advice = "send fewer or half precision"
            await held.reserve(COPIES_OF_EMBEDDINGS * num_bytes, "embeddings", "prompt_embeds", advice)
        limits = self._limits_with(self.names_for(caller))
        check_counts(message, self.pictures)
        async with self._reading_pictures(message, caller, held) as reading:
            read = await read_request(message, limits, part.prompt_name, reading, client=caller.client)
        request = caller.adapt(read)
        check_num_logprobs(part.num_other_logprobs + request.max_num_logprobs, self.section.max_request_logprobs)
        structure = request.spec.sampling.structured_output
        if structure is not None:
            compiled = await self._compile(structure, request)
            ticket.at_close(await self._held_forms.hold(compiled, caller.client_id))
            sampling = replace(request.spec.sampling, structured_output=compiled)
            request = replace(request, spec=replace(request.spec, sampling=sampling))
        if request.max_num_held_logprobs:
            num_bytes = (1 + part.num_messages) * BYTES_PER_LOGPROB * request.max_num_held_logprobs
            await held.reserve(num_bytes, "log-probabilities", "logprobs", "lower max_tokens, logprobs or n")
        await self._reserve(request, held, part.num_messages)
        return request

    def check_pictures(self, count: int) -> None:
        """Raises `InvalidRequest` for so many pictures in one request, if they are too many, or the model sees none."""
        if self.pictures is not None:
            self.pictures.check_count(count)
        elif count:
            raise InvalidRequest(
                "this model sees no pictures here: it has no tower that is supported, its directory has "
                f"{no_processor(IMAGE_PROCESSOR)}, or model.images is false",
                "messages",
            )

    def _reading_pictures(
        self,
        message: gateway_pb2.GenerateRequest | gateway_pb2.TokenizeRequest,
        caller: Caller,
        held: HeldMemory,
    ) -> AbstractAsyncContextManager[Awaitable[list[Picture]] | None]:
        """A context in which the pictures of a message are decoded; mostly there are none, and it gives None."""
        # Of messages that have passed `check_counts`; only their lists' lengths are looked at.
        num_pictures = len(message.pictures) + sum(len(each.pictures) for each in message.chat.messages)
        self.check_pictures(num_pictures)
        if self.pictures is None or not num_pictures:
            return nullcontext()
        has_gpu = self._dense.has_model and self._dense.model.has_gpu
        return self.pictures.reading(message, caller.client_id, held, worker_resizes=has_gpu)

    async def _reserve(self, request: GenerationRequest, held: HeldMemory, num_messages: int) -> None:
        """Reserves the memory of its features, which count together where they are of one kind."""
        needs = dict[str, list[tuple[str, HeldBytes]]]()  # by what it is: fields, and their bytes
        for feature in features_of(request.spec.features):
            size = request.size(self.model.vocab_size, self.model.hidden_size, num_messages)
            if (need := feature.held(size)) is not None:
                needs.setdefault(need.what, []).append((feature.field, need))
        for what, found in needs.items():
            field, last = found[-1]
            await held.reserve(sum(need.num_bytes for _, need in found), what, field, last.advice)

    async def _compile(self, structure: StructuredOutput, request: GenerationRequest) -> StructuredOutput:
        try:
            compiled = await self._grammar_trials.compile(structure, request.spec.client_id)
        except GrammarError as error:
            raise refusal(error, structure, request.parsing) from error
        return replace(compiled, field_name=structure.field_name)

    def abort(self, request_id: str | None, owner: Owner, *, with_batch: bool = False) -> bool:
        """Ends the answers of an owner's request, or with None of all, as they are; returns whether there were any.

        `with_batch`: those of a batch with this name too. A request that is still being read
        fails, and one of a batch ends when it has been read.
        """

        def is_meant(name: str) -> bool:
            return request_id in (None, name) or (with_batch and is_of_batch(name, request_id))

        is_being_read = self._being_read.abort(owner, is_meant)
        entries = [entry for entry in self.journal.of_owner(owner, is_meant) if not entry.is_ended]
        for entry in entries:
            self._dense.cancel(entry)
            entry.finish(FinishReason.ABORT)
        return is_being_read or bool(entries)

    async def forget_prefixes(self) -> None:
        """Requests that come later find no blocks of earlier ones. Raises `PeerError` unless all workers confirm it."""
        await self._dense.forget_prefixes()

    async def tokenize(
        self,
        messages: Sequence[gateway_pb2.TokenizeRequest],
        caller: Caller,
        answer: HeldMemory | None = None,
        bytes_per_token: int = BYTES_PER_TOKEN_ID,
    ) -> list[list[int]]:
        """Token ids of texts and chats. Needs no dense worker; if one has been connected, its limits apply.

        Each text counts as one of the caller's requests, as in `detokenize`; tokens do not count. `answer` holds what
        is made of the tokens of several texts, so many bytes of each; a single one is small.
        """
        self.count_requests(len(messages), caller)
        lists = []
        for message in messages:
            check_counts(message, self.pictures)
            if self._dense.has_model:
                check_size(message, self.limits)
            held = HeldMemory(self.memory, caller.client_id)
            try:
                async with self._reading_pictures(message, caller, held) as reading:
                    beside = len(message.pictures) if self.pictures is not None and self.pictures.have_tokens else 0
                    token_ids, _ = await read_text_or_chat(message, self.tokenizer, num_pictures=beside)
                    if reading is not None and self.pictures is not None:
                        token_ids, _ = self.pictures.expand(token_ids, await reading)
            finally:
                held.release()
            if answer is not None:
                await answer.reserve(bytes_per_token * len(token_ids), "tokens", "prompt", "send fewer texts at once")
            lists.append(token_ids)
            await asyncio.sleep(0)  # let other tasks run: each short text takes half a millisecond
        return lists

    async def render_chat(self, message: gateway_pb2.TokenizeRequest, caller: Caller) -> str:
        """The text of a chat as its template writes it. Counts as one of the caller's requests."""
        self.count_requests(1, caller)
        check_counts(message, self.pictures)
        if self._dense.has_model:
            check_size(message, self.limits)
        chat = await read_chat_in_turn(message.chat, self.tokenizer)
        return await self.tokenizer.render_chat(chat, message.chat.ByteSize())

    async def detokenize(
        self,
        lists: Sequence[Sequence[int]],
        skip_special_tokens: bool,
        caller: Caller,
        answer: HeldMemory,
        field: str = "token_ids",
    ) -> list[str]:
        """The texts of lists of at most max_model_len token ids; `field` names them in error messages.

        `answer` holds the memory of the texts: an id of two bytes in a body may stand for a hundred characters.
        """
        self.count_requests(len(lists), caller)
        limits = self.limits
        texts = []
        for token_ids in lists:
            if len(token_ids) > limits.max_model_len:
                raise InvalidRequest(
                    f"{field} has {len(token_ids)} tokens, max_model_len is {limits.max_model_len}", field
                )
            check_token_ids(field, token_ids, limits.vocab_size)
            text = await self.tokenizer.write_text(token_ids, skip_special_tokens)
            await answer.reserve(BYTES_PER_CHARACTER * len(text), "texts", field, "send fewer tokens at once")
            texts.append(text)
            await asyncio.sleep(0)
        answer.settle()
        return texts

    def count_requests(self, count: int, caller: Caller) -> None:
        """Counts requests towards the caller's limit. Raises `RateLimited`."""
        with self.metrics.noting_rejection():
            caller.usage.count_requests(count)

    def count_answers(self, count: int, caller: Caller) -> None:
        """Counts answers that are under way, until `caller.usage.close_answers`. Raises `RateLimited`."""
        with self.metrics.noting_rejection():
            caller.usage.add_answers(count)


class BeingRead:
    """Requests that wait to be read, for memory, pictures, the tokenizer or a grammar. They can be aborted.

    The journal does not know them yet. There is one object for a gateway process.
    """

    def __init__(self) -> None:
        self._readings: set[_Reading] = set()

    def until_started(self, owner: Owner, names: Iterable[str]) -> AbstractAsyncContextManager[Set[str]]:
        """A context in which the owner's requests with these names are read. Raises `AbortedByCaller` if all of them
        are aborted; gives the names of those that are.
        """
        return _Reading(self._readings, owner, frozenset(names))

    def abort(self, owner: Owner, is_meant: Callable[[str], bool]) -> bool:
        """Ends those of an owner with such a name; returns whether there are any, of which some may be ending."""
        found = False
        for reading in self._readings:
            if reading.owner == owner and (meant := set(filter(is_meant, reading.names))):
                found = True
                reading.abort(meant)
        return found


class _Reading(AbstractAsyncContextManager[Set[str]]):
    """Every request has one before anybody may wait for it, so it is no generator with a timeout of asyncio inside."""

    def __init__(self, readings: set[_Reading], owner: Owner, names: frozenset[str]) -> None:
        self.owner, self.names = owner, names
        self.aborted: set[str] = set()  # some of the names
        self._readings = readings  # those that have begun and not ended
        self._is_ending = False

    def abort(self, names: Set[str]) -> None:
        self.aborted |= names
        if len(self.aborted) == len(self.names) and not self._is_ending:
            self._is_ending = True
            self._task.cancel()

    async def __aenter__(self) -> Set[str]:
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        self._task, self._num_cancelled = task, task.cancelling()  # by others
        self._readings.add(self)
        return self.aborted

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._readings.remove(self)
        if not self._is_ending:
            return
        is_cancelled_by_others = self._task.uncancel() > self._num_cancelled
        if kind is None or (kind is asyncio.CancelledError and not is_cancelled_by_others):
            raise AbortedByCaller("the request was aborted before it ran") from error
