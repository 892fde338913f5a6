"""The public gRPC API: protobuf in, protobuf out; everything between is `Generation`'s and `Tokenizer`'s."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from services.gateway import __version__
from services.gateway.dense_client import DenseClient
from services.gateway.generation import Finish, Generation
from services.gateway.journal import FinishReason, Journal
from services.gateway.request import ModelLimits, read_request, read_text_or_chat
from services.gateway.tokenizer import Tokenizer
from services.pb import gateway_pb2, gateway_pb2_grpc

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name
FINISH_REASONS = {
    FinishReason.STOP: gateway_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.FINISH_REASON_LENGTH,
}


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Answers clients. Errors leave as `TwostrokeError` and become statuses in `services.common.server`."""

    def __init__(
        self,
        model_name: str,
        eos_token_ids: tuple[int, ...],
        tokenizer: Tokenizer,
        journal: Journal,
        dense: DenseClient,
    ) -> None:
        self._model_name = model_name
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._journal = journal
        self._dense = dense

    async def GenerateStream(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.GenerateChunk]:
        """Sends a chunk whenever there are new tokens; while one is being sent, the next one grows."""
        generation = await self._start(request, context)
        finish = None
        while finish is None:
            chunk = await generation.next_chunk()
            finish = chunk.finish
            yield gateway_pb2.GenerateChunk(
                request_id=generation.request_id,
                text=chunk.text,
                token_ids=chunk.token_ids,
                finish=None if finish is None else _finish_message(finish),
            )

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.GenerateResponse:
        """The whole answer at once."""
        generation = await self._start(request, context)
        response = gateway_pb2.GenerateResponse(request_id=generation.request_id)
        pieces: list[str] = []
        finish = None
        while finish is None:
            chunk = await generation.next_chunk()
            finish = chunk.finish
            pieces.append(chunk.text)
            response.token_ids.extend(chunk.token_ids)
        response.text = "".join(pieces)
        response.finish.CopyFrom(_finish_message(finish))
        return response

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.TokenizeResponse:
        """Needs no dense worker."""
        token_ids = await read_text_or_chat(request, self._tokenizer)
        return gateway_pb2.TokenizeResponse(token_ids=token_ids, tokens=self._tokenizer.tokens(token_ids))

    async def ModelInfo(
        self, request: gateway_pb2.ModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.ModelInfoResponse:
        """As the dense worker last said."""
        model = self._dense.model
        return gateway_pb2.ModelInfoResponse(
            model=self._model_name,
            family=model.family,
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            num_layers=model.num_layers,
            eos_token_ids=self._eos_token_ids,
            weights_hash=model.weights_hash,
            version=__version__,
        )

    async def _start(
        self, message: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> Generation:
        model = self._dense.model
        limits = ModelLimits(model.vocab_size, model.max_model_len, self._eos_token_ids)
        request = await read_request(message, self._tokenizer, limits)
        generation = Generation(request, self._tokenizer, self._journal, self._dense)
        # Not left to the handler: one that is cancelled while it sends is only garbage collected.
        context.add_done_callback(lambda _: generation.close())
        return generation


def _finish_message(finish: Finish) -> gateway_pb2.Finish:
    return gateway_pb2.Finish(
        reason=FINISH_REASONS[finish.reason],
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        usage=gateway_pb2.Usage(
            num_prompt_tokens=finish.num_prompt_tokens,
            num_cached_tokens=finish.num_cached_tokens,
            num_output_tokens=finish.num_output_tokens,
        ),
        seed=finish.seed,
    )
