"""Cross-origin requests (CORS, in the Fetch standard): web pages of `gateway.cors_origins` may read answers.

Scripts send the API key in a header that they set themselves, so no origin may send cookies or other credentials.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.headers import REQUEST_ID_HEADER, header_values

ANY = "*"
EXPOSED_HEADERS = (REQUEST_ID_HEADER, "retry-after")  # in addition to those that every script may read


class CrossOrigin:
    """The outermost ASGI middleware, so that web pages can also read the refusals of all others.

    It answers preflights itself: they carry no API key.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins
        self._cors = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=(ANY,),
            allow_headers=(ANY,),  # clients send headers of their own, such as OpenAI's x-stainless-lang
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["send_body"] = send  # streams bypass middleware that only changes the start of an answer
        # `HostCheck` refuses other origins later; Starlette would answer their preflights with plain text.
        app = self._app if allowed_origin(scope["headers"], self._origins) is None else self._cors
        await app(scope, receive, send)


def allowed_origin(headers: Collection[tuple[bytes, bytes]], origins: Collection[str]) -> str | None:
    """The request's origin if it may read answers, else None."""
    given = header_values(headers, b"origin")
    origin = given[0].decode("latin-1") if given else None
    return origin if ANY in origins or origin in origins else None


def answer_headers(headers: Collection[tuple[bytes, bytes]], origins: Collection[str]) -> dict[str, str]:
    """The CORS headers of an error answer to an invalid request; `headers` are the request's headers read so far."""
    origin = ANY if ANY in origins else allowed_origin(headers, origins)
    if origin is None:
        return {}
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": ", ".join(EXPOSED_HEADERS),
        "vary": "origin",
    }
