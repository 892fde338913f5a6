"""POST /generate, and what the server says of itself, as SGLang has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.common.errors import PeerError
from services.gateway import __version__
from services.gateway.apis.sglang.conversion import generate_messages
from services.gateway.apis.sglang.format import GenerateFormat
from services.gateway.apis.sglang.schema import (
    AbortBody,
    GenerateBody,
    LoadDetails,
    ModelDetails,
    ServerDetails,
    WeightVersion,
)
from services.gateway.apis.sglang.sessions import Sessions, Turn
from services.gateway.apis.shared.answer import Answer
from services.gateway.apis.shared.prompts import check_prompts
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.request_service import BYTES_PER_TOKEN_ID, RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.link.gateway_peers import GatewayPeers
from services.gateway.link.worker_load import WorkerLoad
from services.gateway.request.mixed_prompt import without_texts_between


def generate_routes(service: RequestService, peers: GatewayPeers, worker_load: WorkerLoad) -> APIRouter:
    """The routes of one gateway but /generate. `peers`: its other processes, which may run what is to be aborted."""
    router = json_router(service, "Generation")

    @router.post("/abort_request", response_class=Response)
    async def abort_request(body: AbortBody, request: Request) -> Response:
        """Ends a request or batch of the caller, or all, in whichever process. One that is not there is no error."""
        service.count_requests(1, request.state.caller)
        owner, request_id = request.state.caller.owner, None if body.abort_all else body.rid
        service.abort(request_id, owner, with_batch=True)
        await peers.abort(owner, request_id, with_batch=True)
        return Response()

    @router.get("/model_info")
    @router.get("/get_model_info", include_in_schema=False)
    async def model_info() -> ModelDetails:
        """What SGLang's clients ask for first."""
        names = service.names
        return {
            "model_path": names.root,
            "tokenizer_path": names.root,
            "is_generation": service.generates,
            "has_image_understanding": service.pictures is not None,
            "has_audio_understanding": service.sources is not None and service.sources.reads_sound,
            "weight_version": service.model.weights_hash,
        }

    @router.get("/weight_version")
    @router.get("/get_weight_version", include_in_schema=False)
    async def weight_version() -> WeightVersion:
        """The hash of the weights."""
        return {"weight_version": service.model.weights_hash}

    @router.get("/get_load")
    async def get_load() -> list[LoadDetails]:
        """What the workers have to do, for routers that ask SGLang. Raises `PeerError` if one does not answer."""
        load = await worker_load.read()
        if load.requests is None or load.kv_cache is None:
            raise PeerError("a worker has not answered in time how busy it is")
        running, waiting = load.requests.num_running, load.requests.num_waiting
        cache = load.kv_cache
        num_tokens = (cache.num_blocks - cache.num_free_blocks) * cache.block_size
        counts = {"num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": num_tokens}
        return [{"dp_rank": 0, **counts}]

    @router.get("/server_info")
    @router.get("/get_server_info", include_in_schema=False)
    async def server_info() -> ServerDetails:
        """Version, limits and load, by SGLang's names."""
        model, cache = service.model, (await worker_load.read()).kv_cache
        return {
            "version": __version__,
            "model_path": service.names.root,
            "tokenizer_path": service.names.root,
            "served_model_name": service.names.first,
            "status": "ready" if service.unready_reason() is None else "starting",
            "context_length": model.max_model_len,
            "max_running_requests": model.max_num_seqs,
            "max_req_input_len": service.max_input_tokens,
            "max_total_num_tokens": None if cache is None else cache.num_blocks * cache.block_size,
            "page_size": None if cache is None else cache.block_size,
            "num_open_requests": service.num_open_requests,
            "internal_states": [{"num_open_requests": service.num_open_requests}],
        }

    return router


async def answer_generate(
    service: RequestService,
    sessions: Sessions,
    body: GenerateBody,
    request: Request,
    make_format: type[GenerateFormat] = GenerateFormat,
) -> Answer:
    """The answer to one or several prompts of /generate."""
    request_id: str = request.state.request_id if isinstance(body.rid, list) else body.rid or request.state.request_id
    turn = None
    if body.session_params is not None:
        body.session_params.log_unknown_fields(request)
        turn = sessions.turn(request.state.caller.owner, body.session_params, request_id)
        body = await _behind(turn, body, service, request)
    each_body = body.each
    for each in each_body[:1]:
        each.sampling_params.log_unknown_fields(request)
    limits = service.limits
    answer_format = make_format(service, body, request_id, turn)
    are_cut = all(each.sampling_params.truncate_prompt_tokens is not None for each in each_body)
    with client_field_names(answer_format.param_names):
        check_prompts(body.prompts, limits, are_cut=are_cut)
    messages = generate_messages(body, request_id, limits)
    return Answer(service, messages, answer_format, is_stream=bool(body.stream))


async def _behind(turn: Turn, body: GenerateBody, service: RequestService, request: Request) -> GenerateBody:
    """The body with what precedes it in its session. Special tokens stand at the beginning of a session alone."""
    if turn.before is None:
        return body
    num_bytes = 2 * BYTES_PER_TOKEN_ID * len(turn.before)
    await request.state.held.reserve(num_bytes, "a session's earlier tokens", "session_params", "begin another one")
    [prompt] = body.prompts
    if isinstance(prompt, str):
        limits = service.limits
        pieces = [*turn.before, prompt]
        token_ids = await without_texts_between(pieces, limits.model, limits.max_prompt_len, "text", None)
    else:
        is_marked = prompt[:1] == [service.tokenizer.hf_tokenizer.bos_token_id]
        token_ids = [*turn.before, *prompt[is_marked:]]
    return body.model_copy(update={"text": None, "input_ids": token_ids})
