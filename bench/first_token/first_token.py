"""Where the time of a first token goes: one request at a time, from the client's bytes to the client's bytes.

    python bench/first_token/first_token.py --num-requests 200 --prompt-len 32

All processes note when they reach each row of docs/life-of-a-token.md; a row's time is that since the row before, its
median counts. Prompts come in turn with a first block of their own and with one that all have: before the first step of
these the dense worker asks the attention worker what is cached. The host's work is the same on a GPU; what the device
takes is in the row "all layers". `--calls` shows how many calls of functions, of Python and of C, the process of a
row has made since its last row, which do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.cluster import running_cluster

GATEWAY, DENSE, ATTENTION = "services.gateway", "services.dense_worker", "services.attn_worker"
POINTS = (  # module, function, what has been done when it is called
    (f"{GATEWAY}.http.protocol", "BoundedProtocol.data_received", "the gateway wakes"),
    (f"{GATEWAY}.apis.shared.answer", "Answer.__call__", "body parsed, checked, converted"),
    (f"{GATEWAY}.core.generation", "Generation.__init__", "prompt read, request admitted"),
    (f"{GATEWAY}.link.dense_messages", "encode_submit", "in the journal"),
    (f"{DENSE}.gateway_messages", "decode_sequence", "the dense worker has the message"),
    (f"{DENSE}.engine.scheduler", "Scheduler.add", "its engine thread has it"),
    (f"{DENSE}.engine.engine", "Engine._publish", "admitted, opened and planned"),
    ("services.step.codec", "decode_plan", "the attention worker has the plan"),
    (f"{ATTENTION}.engine", "AttentionEngine.run_step", "its engine thread has it"),
    (f"{ATTENTION}.engine", "AttentionEngine._launch", "blocks planned"),
    (f"{DENSE}.runner.model_runner", "ModelRunner.finish", "all layers"),
    (f"{DENSE}.engine.engine", "Engine._update", "logits and sampling"),
    (f"{DENSE}.gateway_streams", "GatewayStreams.deliver", "sequences updated, on the event loop"),
    (f"{GATEWAY}.link.dense_messages", "keep_output", "the gateway has the message"),
    (f"{GATEWAY}.core.generation", "Generation._chunk_of", "its task has the token"),
)
TO_CLIENT = "text, JSON, written, read"
WARM_UP = 10


class Noted(NamedTuple):
    """A call that a process has written down."""

    at_ns: int  # on the monotonic clock
    called: str
    pid: int
    num_calls: int  # that the process had made


def ask(path: Path, token_ids: list[int]) -> tuple[int, int]:
    """When a streamed completion was asked for and when its first token was here, on the monotonic clock in ns."""
    body = json.dumps({"prompt": token_ids, "max_tokens": 2, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        start_ns, answer = time.monotonic_ns(), b""
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        while b"data: " not in answer and (piece := connection.recv(2**16)):
            answer += piece
        end_ns = time.monotonic_ns()
        assert b"200 OK" in answer, answer
        while connection.recv(2**16):  # until the answer has ended
            pass
    return start_ns, end_ns


def rows_of(asked: tuple[int, int], noted: list[Noted], *, calls: bool) -> list[float]:
    """Microseconds of each row, or calls: none in the first row of a process. noted: in order."""
    (last_ns, end_ns), found, left = asked, [], iter(noted)
    num_calls = dict[int, int]()  # by process
    for module, function, _ in POINTS:
        each = next(each for each in left if each.at_ns >= last_ns and each.called == f"{module}:{function}")
        num_before = num_calls.setdefault(each.pid, each.num_calls)
        found.append(each.num_calls - num_before if calls else (each.at_ns - last_ns) / 1000)
        last_ns, num_calls[each.pid] = each.at_ns, each.num_calls
    return found if calls else [*found, (end_ns - last_ns) / 1000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=200, help="requests of each kind; the median counts (200)")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens of each prompt (32)")
    parser.add_argument("--calls", action="store_true", help="count calls in place of microseconds")
    settings = {"action": "append", "default": [], "metavar": "SECTION.KEY=VALUE"}
    parser.add_argument("--set", **settings, help="a setting of the server")
    options = parser.parse_args()
    generator, common = random.Random(0), [5] * options.prompt_len
    asked = defaultdict[str, list[tuple[int, int]]](list)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "noted"
        points = "\n".join(f"{module} {function}" for module, function, _ in POINTS)
        places = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": places, "FIRST_TOKEN_POINTS": points, "FIRST_TOKEN_FILE": str(file)}
        own |= {"FIRST_TOKEN_CALLS": "1"} if options.calls else {}
        with running_cluster(Path(directory), *options.set, env=os.environ | own) as cluster:
            path = Path(cluster.http_address.removeprefix("unix:"))
            for _ in range(options.num_requests + WARM_UP):
                prompt = [generator.randrange(3, 1000) for _ in common]
                asked["new"].append(ask(path, prompt))
                asked["known"].append(ask(path, common[: len(common) // 2] + prompt[len(common) // 2 :]))
        lines = map(str.split, file.read_text().splitlines())
        noted = sorted(Noted(int(at), called, int(pid), int(num)) for at, called, pid, num in lines)
    rows = {
        kind: [
            rows_of(each, [call for call in noted if each[0] <= call.at_ns <= each[1]], calls=options.calls)
            for each in requests[WARM_UP:]
        ]
        for kind, requests in asked.items()
    }
    what = "calls" if options.calls else "microseconds"
    print(f"{what + ', medians; first block':42}{'new':>8}{'known':>8}")
    names = [name for *_, name in POINTS] + ([] if options.calls else [TO_CLIENT])
    for index, name in enumerate(names):
        print(f"{name:42}" + "".join(f"{statistics.median(row[index] for row in rows[kind]):8.0f}" for kind in rows))
    print(f"{'whole':42}" + "".join(f"{statistics.median(map(sum, rows[kind])):8.0f}" for kind in rows))


if __name__ == "__main__":
    main()
