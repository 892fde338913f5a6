"""A client for a terminal: streams the answer to one prompt, or holds a conversation.

`python -m services.gateway.chat_client --prompt "San Francisco is a" --max-tokens 7`

A terminal would execute control characters of the model, so there they are shown as `\\x1b`. A pipe or a file gets the
unchanged text.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import readline  # noqa: F401  line editing and history for input()
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from services.common.addresses import check_target
from services.common.cli import dashed
from services.common.config import API_KEY_VARIABLE, GatewaySection, api_key_of_environment
from services.common.terminal import safe_for
from services.pb import gateway_pb2, gateway_pb2_grpc, sampling_pb2
from services.rpc.client import found_nobody, nobody_answers
from services.rpc.tls_arguments import add_tls_arguments, open_sync_channel, read_credentials

INFO_TIMEOUT_S = 5.0
MAX_STOP_AFTER_MS = 1e9
BROKEN_PIPE_STATUS = 141  # as shells report SIGPIPE


def main(argv: Sequence[str] | None = None, program: str = "services.gateway.chat_client") -> int:
    """Returns the exit status: 0, 1 after an error (one line on stderr), 130 after Ctrl-C, 141 for a closed pipe.

    `program` is the name of the command in its usage.
    """
    parser = make_parser(program)
    arguments = parser.parse_args(dashed(sys.argv[1:] if argv is None else argv))
    try:
        check_target(arguments.address)
    except ValueError as error:
        parser.error(f"--address {arguments.address!r} {error}")
    if arguments.system is not None and arguments.prompt is not None and not arguments.chat:
        parser.error("--system belongs to a chat: add --chat, or leave --prompt out")
    try:
        request = _request(arguments)
    except ValueError as error:  # a number too large for its field
        parser.error(str(error))
    credentials = read_credentials(parser, arguments)
    channel = open_sync_channel(arguments.address, credentials, arguments.tls_server_name)
    with _freed_calls(), channel:
        api_key = arguments.api_key or api_key_of_environment()
        stub = gateway_pb2_grpc.GatewayStub(grpc.intercept_channel(channel, _ApiKey(api_key)) if api_key else channel)
        try:
            if arguments.prompt is None:
                converse(stub, request, arguments)
                return 0
            _, is_interrupted = print_answer(stub, request, arguments.stop_after_ms, streams=not arguments.no_stream)
            return 130 if is_interrupted else 0
        except grpc.RpcError as error:
            _print_error(arguments, error)
            return 1
        except KeyboardInterrupt:  # before a request was running
            return 130
        except BrokenPipeError:  # the reader of our output has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is still buffered
            return BROKEN_PIPE_STATUS


def print_answer(
    stub: gateway_pb2_grpc.GatewayStub,
    request: gateway_pb2.GenerateRequest,
    stop_after_ms: float | None,
    *,
    streams: bool = True,
) -> tuple[str, bool]:
    """Prints the answer as it arrives, or at its end, then a newline. Returns the text and whether Ctrl-C ended it.

    A request that runs longer than `stop_after_ms` is cancelled. Raises `grpc.RpcError`.
    """
    call = stub.GenerateStream(request)
    pieces: list[str] = []
    is_interrupted = False
    timer = None
    if stop_after_ms is not None:
        timer = threading.Timer(stop_after_ms / 1000, call.cancel)
        timer.start()
    try:
        for chunk in call:
            pieces.append(chunk.text)
            if streams:
                print(safe_for(sys.stdout, chunk.text), end="", flush=True)
    except KeyboardInterrupt:
        call.cancel()
        is_interrupted = True
    except grpc.RpcError as error:
        if timer is None or error.code() is not grpc.StatusCode.CANCELLED:
            if pieces:
                print("" if streams else safe_for(sys.stdout, "".join(pieces)))
            raise
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()  # its thread holds the call, which `_freed_calls` could not free
    text = "".join(pieces)
    print("" if streams else safe_for(sys.stdout, text), flush=True)
    return text, is_interrupted


def converse(
    stub: gateway_pb2_grpc.GatewayStub,
    request: gateway_pb2.GenerateRequest,
    arguments: argparse.Namespace,
) -> None:
    """Reads messages until Ctrl-D. `request` holds the options and the first messages of the conversation."""
    info = stub.ModelInfo(gateway_pb2.ModelInfoRequest(), timeout=INFO_TIMEOUT_S)
    model = safe_for(sys.stdout, info.model)
    print(f"{model}, {info.max_model_len} tokens. Ctrl-C stops an answer, Ctrl-D leaves, /reset forgets.")
    opening = list(request.chat.messages)
    while True:
        try:
            text = input("> ").strip().encode(errors="replace").decode()  # a terminal may send invalid UTF-8
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        messages = request.chat.messages
        if text == "/reset":
            del messages[len(opening) :]
            continue
        if not text:
            continue
        messages.add(role="user", content=text)
        try:
            answer, _ = print_answer(stub, request, arguments.stop_after_ms)
        except grpc.RpcError as error:
            _print_error(arguments, error)
            answer = ""
        if answer:
            messages.add(role="assistant", content=answer)
        else:
            del messages[-1]  # so that roles keep alternating


@contextlib.contextmanager
def _freed_calls() -> Iterator[None]:
    """Frees the calls of the block at its end.

    A failed call is its own exception, and so part of a cycle that only the garbage collector finds. Left to the end of
    the interpreter it can wait forever for its lock: gRPC's thread may have been ended while it held it.
    """
    try:
        yield
    finally:
        gc.collect()


class _ApiKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends an API key with every call."""

    def __init__(self, api_key: str) -> None:
        self._metadata = [("authorization", f"Bearer {api_key}")]

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return continuation(_CallDetails(details.method, details.timeout, self._metadata), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return continuation(_CallDetails(details.method, details.timeout, self._metadata), request)


class _CallDetails(grpc.ClientCallDetails):
    def __init__(self, method: str, timeout: float | None, metadata: Sequence[tuple[str, str]]) -> None:
        self.method, self.timeout, self.metadata = method, timeout, metadata
        self.credentials = self.wait_for_ready = self.compression = None


def _request(arguments: argparse.Namespace) -> gateway_pb2.GenerateRequest:
    request = gateway_pb2.GenerateRequest(
        sampling=sampling_pb2.SamplingParams(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        ),
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
    )
    if arguments.prompt is not None and not arguments.chat:
        request.prompt = arguments.prompt
        return request
    request.chat.SetInParent()
    if arguments.system is not None:
        request.chat.messages.add(role="system", content=arguments.system)
    if arguments.prompt is not None:
        request.chat.messages.add(role="user", content=arguments.prompt)
    return request


def _print_error(arguments: argparse.Namespace, error: grpc.RpcError) -> None:
    program, address = arguments.program, arguments.address
    if found_nobody(error):
        print(f"{program}: {nobody_answers(address, 'gRPC')}", file=sys.stderr)
        return
    details = " ".join(error.details().split())
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        details = _about_key(arguments)
    print(f"{program}: gateway at {address}: {error.code().name}: {safe_for(sys.stderr, details)}", file=sys.stderr)


def _about_key(arguments: argparse.Namespace) -> str:
    """What to do about a key that is missing or unknown. The gateway tells of headers, which users do not write."""
    if arguments.api_key:
        return "it does not know the key of --api-key"
    if api_key_of_environment():
        return f"it does not know the key in {API_KEY_VARIABLE}"
    return f"it wants an API key: set {API_KEY_VARIABLE}, or give --api-key KEY"


def make_parser(program: str) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Streams the answer to --prompt; without it, an interactive chat.",
    )
    parser.set_defaults(program=program)
    address = GatewaySection().address
    parser.add_argument("--address", default=address, help="address of the gateway (default: %(default)s)")
    add_tls_arguments(parser)
    parser.add_argument("--api-key", metavar="KEY", help=f"visible to other users; better set {API_KEY_VARIABLE}")
    parser.add_argument("--prompt", help="text to continue")
    parser.add_argument("--chat", action="store_true", help="send --prompt as a user's message")
    parser.add_argument("--system", help="system message of the chat")
    parser.add_argument("--max-tokens", type=int, help="tokens of an answer (default: the rest of the context)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, help="sample from the k most likely tokens")
    parser.add_argument("--top-p", type=float, help="sample from the tokens that make up this probability")
    parser.add_argument("--seed", type=int, help="makes sampling repeatable")
    parser.add_argument("--stop", action="append", default=[], help="end before this text; may be repeated")
    parser.add_argument("--no-stream", action="store_true", help="print the answer to --prompt when it is complete")
    parser.add_argument("--stop-after-ms", type=_milliseconds, help="end the answer early, after this time")
    return parser


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 < value < MAX_STOP_AFTER_MS:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MAX_STOP_AFTER_MS:.0f}")
    return value


if __name__ == "__main__":
    sys.exit(main())
