"""`BackgroundResponses`: requests that go on when their client has its answer; it asks for the response later."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from services.common.errors import AbortedByCaller, InvalidRequest
from services.gateway.access.access import Caller
from services.gateway.apis.responses.answer_objects import ResponseObject
from services.gateway.apis.responses.format import ResponsesFormat
from services.gateway.apis.responses.stored_record import owner_of
from services.gateway.apis.shared.generations import Generations
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.http.headers import REQUEST_ID_HEADER
from services.gateway.resources.memory_budget import BYTES_PER_BODY_BYTE, HeldMemory, hold_body
from services.pb import gateway_pb2


class BackgroundResponses:
    """Those of one gateway, each in a task. They end with the gateway, in whose memory responses are stored."""

    def __init__(self, service: RequestService) -> None:
        self._service = service
        self._running: dict[tuple[Hashable, str], asyncio.Task[None]] = {}  # by owner and id of the response

    async def start(
        self, message: gateway_pb2.GenerateRequest, form: ResponsesFormat, caller: Caller, held: HeldMemory
    ) -> ResponseObject:
        """Starts a request; the response as it is then. Raises a `TwostrokeError` if it is refused.

        `held`: of the connection, which may end before the request.
        """
        key = owner_of(caller), form.response_id
        if key in self._running:
            raise InvalidRequest(f"the response {form.response_id} is running already", REQUEST_ID_HEADER)
        started = asyncio.Event()
        task = self._running[key] = asyncio.create_task(self._run(message, form, caller, held, started))
        task.add_done_callback(lambda _: self._running.pop(key))
        starting = asyncio.create_task(started.wait())
        await asyncio.wait({task, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not started.is_set():
            starting.cancel()
            if task.cancelled():
                raise AbortedByCaller(f"the response {form.response_id} was cancelled")
            await task  # raises why it was refused
        return form.response("queued")

    async def cancel(self, owner: Hashable, response_id: str) -> None:
        """Ends a response that is running, and returns when the store knows it."""
        if (task := self._running.get((owner, response_id))) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """Ends all of them."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self,
        message: gateway_pb2.GenerateRequest,
        form: ResponsesFormat,
        caller: Caller,
        of_connection: HeldMemory,
        started: asyncio.Event,
    ) -> None:
        held = HeldMemory(of_connection.budget, of_connection.client)
        hold_body(held)
        generations = Generations(self._service.heavy_work)
        try:
            num_bytes = BYTES_PER_BODY_BYTE * message.ByteSize()
            await held.reserve(num_bytes, "a request in the background", "input")
            with client_field_names(form.param_names):
                await generations.start(self._service, [message], caller)
            await form.begin([each.request.spec.prompt_token_ids for each in generations.running])
            form.kept("in_progress")
            started.set()
            form.whole(await generations.completions())
        except asyncio.CancelledError:
            form.kept("cancelled")
            raise
        except Exception as error:
            if not started.is_set():
                raise
            form.failure(error)
            form.kept("failed")
        finally:
            await generations.close()
            held.release()
