"""`Triton`: runs inference requests, whichever protocol brought them. Everything runs in the event loop."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidRequest, TwostrokeError, UnknownModel
from services.common.shorten import quote, show
from services.gateway import __version__
from services.gateway.access.access import Caller
from services.gateway.apis.shared.generations import Generations
from services.gateway.apis.triton.answers import Answers, Column
from services.gateway.apis.triton.models import EMBEDDING, MODELS, POSTPROCESSING, PREPROCESSING, VERSION, ModelSpec
from services.gateway.apis.triton.pictures import pictures_of
from services.gateway.apis.triton.rows import InferLimits, Row
from services.gateway.apis.triton.tensors import Tensor
from services.gateway.apis.triton.texts import embed, postprocess, preprocess
from services.gateway.apis.triton.to_message import generate_message
from services.gateway.core.chunks import is_large
from services.gateway.core.request_service import RequestService
from services.gateway.features.installed import features_of
from services.gateway.features.returned_logits import num_logits
from services.gateway.http.field_names import client_field_names
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.request.generation_request import Owner
from services.gateway.resources.heavy_work import MAX_INLINE_BYTES
from services.gateway.resources.memory_budget import HeldMemory
from services.gateway.vectors.vectors import Vectors

SERVER_NAME = "twostroke"
EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "parameters", "statistics")
MAX_ID_CHARACTERS = 100  # of the client's name for a request; the gateway appends to it
MAX_TENSORS = 100  # inputs, or outputs, of one request
PARAM_NAMES = {"best_of": "beam_width", "n": "num_return_sequences"}  # fields of `GenerateRequest` here
SHARED_MEMORY = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
# Values that a request may give for settings of a TensorRT-LLM model, which apply to the whole server.
SERVED_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "gpt_model_type": ("inflight_batching", "inflight_fused_batching"),
    "batching_strategy": ("inflight_batching", "inflight_fused_batching"),
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """An inference request whose inputs have been checked."""

    model: ModelSpec
    rows: Sequence[Row]
    id: str = ""  # the client's name for it, for `stop`; several running requests may have the same name
    output_names: Sequence[str] | None = None  # None: all
    parameters: Mapping[str, Any] = field(default_factory=dict)
    traceparent: str = ""
    max_numbers: int | None = None  # in all logits of the answers, for responses in JSON; None: any number
    in_one_message: bool = False  # whether a response is a message of gRPC

    def check(self) -> None:
        """Raises `InvalidRequest` for a wrong id, an unknown output, or a setting of another server."""
        if len(self.id) > MAX_ID_CHARACTERS:
            raise InvalidRequest(f"id has {len(self.id)} characters, at most {MAX_ID_CHARACTERS} allowed", "id")
        known = {each.name for each in self.model.outputs}
        for name in self.output_names or ():
            if name not in known:
                raise InvalidRequest(f"model {self.model.name!r} has no output {quote(name)}", "outputs")
        for name, served in SERVED_SETTINGS.items():
            value = self.parameters.get(name)
            if value is not None and value not in served:
                raise InvalidRequest(
                    f"{name} is {show(value)}, this server has only {served[-1]}: it batches requests in flight",
                    name,
                )

    @property
    def is_stream(self) -> bool:
        """Whether each answer comes in pieces."""
        return any(row.get("stream") for row in self.rows)

    @property
    def is_stop(self) -> bool:
        """Whether it ends the running requests with its id and runs nothing."""
        return any(row.get("stop") for row in self.rows)


def check_output_parameters(parameters: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for a parameter of an output that would change it."""
    for name in ("classification", *SHARED_MEMORY):
        if parameters.get(name):
            raise InvalidRequest(f"the parameter {name!r} of an output is not supported", "outputs")


@dataclass(frozen=True, slots=True)
class InferResponse:
    """One of the responses to a request."""

    outputs: Sequence[Tensor]
    is_final: bool


@dataclass(slots=True, eq=False)
class _Running:
    """A request that runs."""

    request_ids: Sequence[str]  # in the gateway, one per row

    def stop(self, service: RequestService, owner: Owner) -> None:
        for request_id in self.request_ids:
            service.abort(request_id, owner)


def server_metadata() -> dict[str, Any]:
    """Name, version and extensions of the server."""
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


class Triton:
    """Runs requests, knows which of them run, and counts them."""

    def __init__(self, service: RequestService, peers: GatewayPeers, vectors: Vectors) -> None:
        """`peers`: the other gateways at the same port, which may run the requests of a stop."""
        self.service = service
        self.peers = peers
        self.vectors = vectors
        section, has_tables = service.section, service.prompt_embeds is not None
        self.limits = InferLimits(section.max_prompts, section.max_request_logprobs, has_tables)
        self.statistics = {name: Statistics() for name in MODELS}
        self._running: dict[tuple[Owner, str], list[_Running]] = {}  # by the client's id

    @contextlib.asynccontextmanager
    async def infer(self, request: InferRequest, caller: Caller) -> AsyncIterator[list[Tensor]]:
        """The outputs of a request with a single response, whose memory is counted as long as the context lasts.

        Raises `InvalidRequest` if it asks for a stream.
        """
        if request.is_stream:
            raise InvalidRequest(
                "stream is true: this call has one response, ModelStreamInfer and generate_stream have several",
                "stream",
            )
        request.check()
        async with contextlib.AsyncExitStack() as stack:
            held = HeldMemory(self.service.memory, caller.client_id)
            stack.callback(held.release)
            with self._counted(request):
                if request.model is PREPROCESSING:
                    outputs = await preprocess(self.service, request.rows, caller, held)
                elif request.model is POSTPROCESSING:
                    outputs = await postprocess(self.service, request.rows, caller, held)
                elif request.model is EMBEDDING:
                    outputs = await embed(self.vectors, request.rows, caller, held)
                else:
                    generations, answers = await stack.enter_async_context(self._generating(request, caller))
                    completions = await generations.completions()
                    pieces = [each for found, _ in completions for each in found]
                    if is_large(pieces, [prompt for _, prompt in completions]):
                        await self.service.heavy_work.turn()
                    outputs = await self._joined(answers, answers.columns(completions), held)
            yield _requested(request, outputs)

    async def _joined(self, answers: Answers, columns: Sequence[Column], held: HeldMemory) -> list[Tensor]:
        """The outputs of all answers, whose memory `held` holds."""
        num_bytes = sum(each.num_joined_bytes for each in columns)
        if num_bytes > MAX_INLINE_BYTES:
            advice = "ask for rows of like lengths, or for fewer at once"
            await held.reserve(num_bytes, "outputs of equal lengths", advice=advice)
            held.settle()
        outputs = []
        for column in columns:
            if column.num_joined_bytes > MAX_INLINE_BYTES:
                outputs.append(await self.service.heavy_work.in_thread(answers.joined, column, goes_on=True))
            else:
                outputs.append(answers.joined(column))
        return outputs

    async def stream(self, request: InferRequest, caller: Caller) -> AsyncIterator[InferResponse]:
        """The responses to a request: pieces of its answers if it asks for a stream, else each answer as a whole.

        Close the iterator (`contextlib.aclosing`) to end the request.
        """
        if request.model in (PREPROCESSING, POSTPROCESSING, EMBEDDING):
            async with self.infer(request, caller) as outputs:
                yield InferResponse(outputs, True)
            return
        request.check()
        with self._counted(request):
            async with self._generating(request, caller) as (generations, answers):
                responses = _pieces(generations, answers) if request.is_stream else _wholes(generations, answers)
                async for response in responses:
                    yield InferResponse(_requested(request, response.outputs), response.is_final)

    def index(self) -> list[dict[str, str]]:
        """All models with their versions and states."""
        reason = self.service.unready_reason()
        state = {"state": "READY", "reason": ""} if reason is None else {"state": "UNAVAILABLE", "reason": reason}
        return [{"name": name, "version": VERSION, **state} for name in MODELS]

    def stop(self, client_id: str, owner: Owner) -> None:
        """Ends the answers of an owner's requests with this id as they are, in this process."""
        for running in self._running.get((owner, client_id), ()):
            running.stop(self.service, owner)

    async def stop_at_peers(self, client_id: str, owner: Owner) -> None:
        """The same in the other processes. Raises `InvalidRequest` without an id."""
        if not client_id:
            raise InvalidRequest("stop needs the id of the request to stop", "id")
        await self.peers.stop(owner, client_id)

    @contextlib.asynccontextmanager
    async def _generating(
        self, request: InferRequest, caller: Caller
    ) -> AsyncIterator[tuple[Generations, Answers]]:
        """Starts the generations of all rows, and ends them with the context."""
        service, generations, messages = self.service, Generations(self.service), []
        with self._known(request, caller) as running:
            for name, row in zip(running.request_ids, request.rows, strict=True):
                pictures = await pictures_of(row, service)
                message = generate_message(row, name, lambda ids: service.tokenizer.decode(ids, False), pictures)
                message.traceparent = request.traceparent
                message.model = self._adapter_name(row, caller)
                messages.append(message)
            try:
                with client_field_names(PARAM_NAMES):
                    await generations.start(messages, caller, in_one_message=request.in_one_message)
                self._check_numbers(request, generations)
                pad_id = service.eos_token_ids[0] if service.eos_token_ids else 0
                answers = Answers(request.model, request.rows, service.tokenizer, pad_id, service.model.vocab_size)
                prompts = [each.request for each in generations.running]
                await answers.begin(prompts, is_stream=request.is_stream)
                yield generations, answers
            finally:
                await generations.close()

    def _adapter_name(self, row: Row, caller: Caller) -> str:
        """The name of the adapter that a row asks for; empty if it asks for none."""
        if "lora_task_id" not in row:
            return ""
        name = str(row["lora_task_id"])
        if name not in self.service.names_for(caller).adapters:
            raise UnknownModel(f"lora_task_id is {name}, but no adapter has this name", "lora_task_id")
        return name

    def _check_numbers(self, request: InferRequest, generations: Generations) -> None:
        vocab_size = self.service.model.vocab_size
        requests = [each.request for each in generations.running]
        count = sum(num_logits(features_of(each.spec.features), each.size(vocab_size, 0)) for each in requests)
        if request.max_numbers is not None and count > request.max_numbers:
            raise InvalidRequest(
                f"the answers may have {count} logits, at most {request.max_numbers} are sent as JSON "
                "(gateway.max_request_logprobs): ask for binary data by infer or gRPC",
                "return_generation_logits",
            )

    @contextlib.contextmanager
    def _known(self, request: InferRequest, caller: Caller) -> Iterator[_Running]:
        """Chooses names in the gateway for the rows of a request; as long as the context lasts, `stop` finds them."""
        name = f"{request.id or 'infer'}-{secrets.token_hex(8)}"
        names = [name] if len(request.rows) == 1 else [f"{name}-{index}" for index in range(len(request.rows))]
        running, key = _Running(names), (caller.owner, request.id)
        if not request.id:
            yield running
            return
        self._running.setdefault(key, []).append(running)
        try:
            yield running
        finally:
            self._running[key].remove(running)
            if not self._running[key]:
                del self._running[key]

    @contextlib.contextmanager
    def _counted(self, request: InferRequest) -> Iterator[None]:
        """Counts the request in the statistics of its model; cancelled ones count as neither kind."""
        start = time.monotonic_ns()
        statistics = self.statistics[request.model.name]
        try:
            yield
        except TwostrokeError:
            statistics.count_failure(time.monotonic_ns() - start)
            raise
        statistics.count_success(len(request.rows), time.monotonic_ns() - start)


async def _pieces(generations: Generations, answers: Answers) -> AsyncIterator[InferResponse]:
    while (found := await generations.next_chunk()) is not None:
        row_index, chunk = found
        outputs = answers.piece(row_index, chunk)
        is_final = all(each.is_finished for each in generations.running)
        if outputs or is_final:
            yield InferResponse(outputs, is_final)


async def _wholes(generations: Generations, answers: Answers) -> AsyncIterator[InferResponse]:
    rows = await generations.completions()
    found = [(index, each, prompt) for index, (completions, prompt) in enumerate(rows) for each in completions]
    for number, each in enumerate(found, start=1):
        yield InferResponse(answers.answer(*each), number == len(found))


def _requested(request: InferRequest, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs that the request names, in its order; all if it names none."""
    if not request.output_names:
        return list(outputs)
    by_name = {each.name: each for each in outputs}
    return [by_name[name] for name in request.output_names if name in by_name]


class Statistics:
    """Counts of one model's requests, and total durations, as Triton's statistics extension reports them.

    Since the start of this gateway process.
    """

    def __init__(self) -> None:
        self.inference_count = 0  # elements of batches
        self.success_count = 0  # requests
        self.success_ns = 0
        self.failure_count = 0
        self.failure_ns = 0
        self.last_inference_ms = 0  # when the last request ended, in milliseconds since 1970

    def count_success(self, batch_size: int, duration_ns: int) -> None:
        """Counts an answered request."""
        self.inference_count += batch_size
        self.success_count += 1
        self.success_ns += duration_ns
        self.last_inference_ms = time.time_ns() // 1_000_000

    def count_failure(self, duration_ns: int) -> None:
        """Counts a request that ended with an error."""
        self.failure_count += 1
        self.failure_ns += duration_ns

    def describe(self, model_name: str) -> dict[str, Any]:
        """The counts with the field names of `ModelStatistics`. Durations of single parts are not measured."""
        success = {"count": self.success_count, "ns": self.success_ns}
        return {
            "name": model_name,
            "version": VERSION,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inference_count,
            "execution_count": self.success_count,
            "inference_stats": {
                "success": success,
                "fail": {"count": self.failure_count, "ns": self.failure_ns},
                **{name: {"count": 0, "ns": 0} for name in ("queue", "compute_input", "compute_output")},
                "compute_infer": success,
            },
            "batch_stats": [],
        }
