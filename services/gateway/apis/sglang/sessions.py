"""SGLang's sessions: their routes, and `Sessions`, their requests. A client sends what is new after an earlier one.

Each ended request of a session is kept as token ids, in the memory of one gateway process, by owner. Where a limit is
reached the least recently used sessions are dropped: an owner's own, then any. The attention worker knows nothing of
them: it finds the keys and values of what precedes in its prefix cache, as of any prompt.
"""

from __future__ import annotations

import threading
import uuid
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.common.errors import InvalidRequest
from services.common.shorten import quote
from services.gateway.apis.sglang.schema import CloseSessionBody, OpenSessionBody, SessionParams
from services.gateway.apis.shared.routes import json_router
from services.gateway.core.request_service import RequestService
from services.gateway.request.generation_request import Owner

LIMIT = "gateway.max_session_bytes"
OWNER_PARTS = 4  # an owner's sessions may take so small a part of the limit
SESSION_BYTES = REQUEST_BYTES = 512  # beside the token ids and names
BYTES_PER_CHARACTER = 8  # of names: what one takes at most, with its UTF-8, which Python keeps beside it


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request that has ended."""

    name: str
    parent: str | None  # the request that precedes it
    prompt: array[int]
    answer: array[int]

    @property
    def num_bytes(self) -> int:
        num_characters = len(self.name) + len(self.parent or "")
        num_tokens = len(self.prompt) + len(self.answer)
        return REQUEST_BYTES + BYTES_PER_CHARACTER * num_characters + self.prompt.itemsize * num_tokens


@dataclass(slots=True, eq=False)
class Session:
    """The ended requests of one session by name; each comes after its parent."""

    id: str
    requests: dict[str, SessionRequest] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        own = SESSION_BYTES + BYTES_PER_CHARACTER * len(self.id)
        return own + sum(each.num_bytes for each in self.requests.values())

    def followers(self, parent: str | None) -> set[str]:
        """The names of all requests that follow `parent`; None: of all."""
        names = set[str]()
        for name, each in self.requests.items():
            if each.parent == parent or each.parent in names:
                names.add(name)
        return names


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session that has not ended. One that fails leaves nothing."""

    sessions: Sessions
    owner: Owner
    session_id: str
    session: Session
    name: str
    parent: str | None
    before: Sequence[int] | None  # token ids that precede those of the request; None: it follows none

    def end(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keeps the request with all its token ids. May be called in any thread."""
        kept = SessionRequest(self.name, self.parent, array("i", prompt), array("i", answer))
        self.sessions.keep(self, kept)


class _Shelf(OrderedDict[str, Session]):
    """The sessions of one owner by id, least recently used first."""

    num_bytes = 0


class Sessions:
    """Those of one gateway. A lock guards everything, because answers may be encoded in threads."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all together; 0: there are none."""
        self._max_bytes, self._max_bytes_of_owner = max_bytes, max_bytes // OWNER_PARTS
        self._num_bytes = 0
        self._shelves: defaultdict[Owner, _Shelf] = defaultdict(_Shelf)
        self._by_use: OrderedDict[tuple[Owner, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, owner: Owner, session_id: str | None) -> str:
        """The id of a new session. Raises `InvalidRequest` if the owner has one with this id."""
        self._check_enabled("session_id")
        session_id = session_id or uuid.uuid4().hex
        with self._lock:
            if (owner, session_id) in self._by_use:
                raise InvalidRequest(f"the session {quote(session_id)} is open already", "session_id")
            self._by_use[owner, session_id] = None
            self._shelves[owner][session_id] = session = Session(session_id)
            self._grow(owner, session.num_bytes)
        return session_id

    def close(self, owner: Owner, session_id: str) -> None:
        """Forgets a session; its requests that run go on. Raises `InvalidRequest` if there is none."""
        self._check_enabled("session_id")
        with self._lock:
            self._find(owner, session_id, "session_id")
            self._drop(owner, session_id)

    def turn(self, owner: Owner, params: SessionParams, name: str) -> Turn:
        """Begins a request by this name; with `replace`, forgets those that follow the one it names.

        Raises `InvalidRequest` for a session or request that is not there.
        """
        self._check_enabled("session_params")
        with self._lock:
            session = self._find(owner, params.id, "session_params.id")
            forgotten = session.followers(params.rid) if params.replace else set()
            if name in session.requests and name not in forgotten:
                raise InvalidRequest(f"the session {quote(params.id)} has a request {quote(name)} already", "rid")
            parent = None if params.rid is None else session.requests.get(params.rid)
            if params.rid is not None and parent is None:
                raise InvalidRequest(
                    f"the session {quote(params.id)} has no request {quote(params.rid)} that has ended",
                    "session_params.rid",
                )
            for each in forgotten:
                self._grow(owner, -session.requests.pop(each).num_bytes)
            before = None
            if parent is not None:
                before = list(parent.prompt if params.drop_previous_output else parent.prompt + parent.answer)
                before = before[: params.offset or None]
            return Turn(self, owner, params.id, session, name, params.rid, before)

    def keep(self, turn: Turn, request: SessionRequest) -> None:
        """Adds an ended request, unless its session or its parent has gone meanwhile."""
        session = turn.session
        with self._lock:
            is_open = (turn.owner, turn.session_id) in self._by_use
            if not is_open or self._shelves[turn.owner][turn.session_id] is not session:
                return
            if (turn.parent is None or turn.parent in session.requests) and turn.name not in session.requests:
                session.requests[turn.name] = request
                self._grow(turn.owner, request.num_bytes)

    def _check_enabled(self, param: str) -> None:
        if not self._max_bytes:
            raise InvalidRequest(f"there are no sessions here: {LIMIT} is 0", param)

    def _find(self, owner: Owner, session_id: str, param: str) -> Session:
        """The session, which counts as used now."""
        if (owner, session_id) not in self._by_use:
            raise InvalidRequest(
                f"there is no session {quote(session_id)} of this client: it was not opened here, has been closed, or "
                f"was dropped because those of one client may take {self._max_bytes_of_owner} bytes and all "
                f"{self._max_bytes} ({LIMIT})",
                param,
            )
        shelf = self._shelves[owner]
        shelf.move_to_end(session_id)
        self._by_use.move_to_end((owner, session_id))
        return shelf[session_id]

    def _grow(self, owner: Owner, num_bytes: int) -> None:
        """Counts what an owner's sessions take more, or less, and makes room."""
        shelf = self._shelves[owner]
        shelf.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while shelf.num_bytes > self._max_bytes_of_owner:
            self._drop(owner, next(iter(shelf)))
        while self._num_bytes > self._max_bytes:
            self._drop(*next(iter(self._by_use)))

    def _drop(self, owner: Owner, session_id: str) -> None:
        shelf = self._shelves[owner]
        num_bytes = shelf.pop(session_id).num_bytes
        shelf.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        del self._by_use[owner, session_id]
        if not shelf:
            del self._shelves[owner]


def session_routes(service: RequestService, sessions: Sessions) -> APIRouter:
    """POST /open_session and /close_session, as SGLang has them; `/generate` takes `session_params`."""
    router = json_router(service, "Generation")

    @router.post("/open_session", responses={200: {"model": str}})
    async def open_session(body: OpenSessionBody, request: Request) -> Response:
        """Opens a session; the answer is its id."""
        service.count_requests(1, request.state.caller)
        return JSONResponse(sessions.open(request.state.caller.owner, body.session_id))

    @router.post("/close_session", response_class=Response)
    async def close_session(body: CloseSessionBody, request: Request) -> Response:
        """Forgets a session."""
        service.count_requests(1, request.state.caller)
        sessions.close(request.state.caller.owner, body.session_id)
        return Response()

    return router
