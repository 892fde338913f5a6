"""`BackgroundResponses`: requests that go on when their client has its answer; it asks for the response later."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Hashable

from services.common.errors import AbortedByCaller, InvalidRequest
from services.gateway.access.access import Caller
from services.gateway.apis.responses.event_log import EventLog
from services.gateway.apis.responses.format import ResponsesFormat
from services.gateway.apis.responses.response_store import StoredResponse
from services.gateway.apis.responses.stored_record import owner_of
from services.gateway.apis.shared.generations import Generations
from services.gateway.core.request_service import RequestService
from services.gateway.http.field_names import client_field_names
from services.gateway.resources.memory_budget import BYTES_PER_BODY_BYTE, HeldMemory, hold_body
from services.pb import gateway_pb2

_Key = tuple[Hashable, str]  # owner and id of the response


class BackgroundResponses:
    """Those of one gateway, each in a task. They end with the gateway, in whose memory responses are stored.

    A response is stored when it has ended. Until then it is here, so that no other one takes its place in the store.
    """

    def __init__(self, service: RequestService) -> None:
        self._service = service
        self._tasks: dict[_Key, asyncio.Task[StoredResponse]] = {}
        self._started: dict[_Key, StoredResponse] = {}  # of those that are not refused any more

    async def start(
        self,
        message: gateway_pb2.GenerateRequest,
        form: ResponsesFormat,
        caller: Caller,
        of_connection: HeldMemory,
        *,
        is_stream: bool,
    ) -> StoredResponse:
        """Starts a request; what is found of it then. Raises a `TwostrokeError` if it is refused.

        `of_connection`: of the connection, which may end before the request. `is_stream`: keep its events.
        """
        key = owner_of(caller), form.response_id
        if key in self._tasks:
            raise InvalidRequest(
                f"the response {form.response_id} is running already", form.param_names["request_id"]
            )
        held = HeldMemory(of_connection.budget, of_connection.client)
        stored, started = form.running(), asyncio.Event()
        if is_stream:
            stored = dataclasses.replace(stored, events=EventLog(HeldMemory(held.budget, held.client)))
        task = self._tasks[key] = asyncio.create_task(self._run(key, message, form, caller, held, stored, started))
        task.add_done_callback(lambda ended: self._forget(key, ended))
        starting = asyncio.create_task(started.wait())
        try:
            await asyncio.wait({task, starting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()
        if not started.is_set():
            if task.cancelled():
                raise AbortedByCaller(f"the response {form.response_id} was cancelled")
            await task  # raises why it was refused
        return stored

    def find(self, owner: Hashable, response_id: str) -> StoredResponse | None:
        """A response that runs; None if there is none, or it has ended."""
        return self._started.get((owner, response_id))

    async def cancel(self, owner: Hashable, response_id: str) -> StoredResponse | None:
        """Ends a response that is running, and returns it as it is then. None: it has not run."""
        if (task := self._tasks.get((owner, response_id))) is None:
            return None
        if not task.cancelling():  # a second cancellation would keep it from saying how it has ended
            task.cancel()
        await asyncio.wait({task})
        return None if task.cancelled() or task.exception() is not None else task.result()

    async def close(self) -> None:
        """Ends all of them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self,
        key: _Key,
        message: gateway_pb2.GenerateRequest,
        form: ResponsesFormat,
        caller: Caller,
        held: HeldMemory,
        stored: StoredResponse,
        started: asyncio.Event,
    ) -> StoredResponse:
        """The response as it has ended."""
        hold_body(held)
        generations, log = Generations(self._service), stored.events
        try:
            # The response is here as JSON and as objects, which have what the message has not, such as metadata.
            num_bytes = BYTES_PER_BODY_BYTE * message.ByteSize() + stored.num_bytes + sum(map(len, stored.response))
            await held.reserve(num_bytes, "a request in the background", "input")
            with client_field_names(form.param_names):
                await generations.start([message], caller)
            await form.begin([each.request.spec.prompt_token_ids for each in generations.running])
            self._started[key] = stored
            if log is not None:
                await self._service.heavy_work.turn()  # the first and the last event have all that the request has
                log.add(form.opening())
            started.set()
            if log is None:
                answers = await generations.completions()
                await self._service.heavy_work.turn()  # hundreds may end in one step
                form.whole(answers)
            else:
                while (found := await generations.next_chunk()) is not None:
                    log.add(form.chunk(*found))
                await self._service.heavy_work.turn()
                log.add(form.closing())
        except asyncio.CancelledError:
            if not started.is_set():
                raise
            form.kept("cancelled")
        except Exception as error:
            if not started.is_set():
                raise
            failure = form.failure(error)
            if log is not None:
                log.add(failure)
            form.kept("failed")
        finally:
            if log is not None:
                log.end()
                if started.is_set():
                    form.keep_events(log)
            try:
                await generations.close()
            finally:  # also if it is cancelled again meanwhile
                held.release()
        return form.stored

    def _forget(self, key: _Key, ended: asyncio.Task[StoredResponse]) -> None:
        del self._tasks[key]
        self._started.pop(key, None)
        if not ended.cancelled():
            ended.exception()  # its client, who would be told of it, may have gone away
