"""Where the time of a first token goes: one request at a time, from the client's bytes to the client's bytes.

    python bench/first_token/first_token.py --num-requests 200 --prompt-len 32

All processes note when they reach each row of docs/life-of-a-token.md; a row's time is that since the row before, its
median counts. Prompts come in turn with a first block of their own and with one that all have: before the first step of
these the dense worker asks the attention worker what is cached. The host's work is the same on a GPU; what the device
takes is in the row "all layers".
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
    (f"{DENSE}.servicer", "DenseServicer.deliver", "sequences updated, on the event loop"),
    (f"{GATEWAY}.link.dense_messages", "keep_output", "the gateway has the message"),
    (f"{GATEWAY}.core.generation", "Generation._chunk_of", "its task has the token"),
)
TO_CLIENT = "text, JSON, written, read"
WARM_UP = 10


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


def spans(asked: tuple[int, int], noted: list[tuple[int, str]]) -> list[float]:
    """Microseconds of each row. noted: points in time and what was called, in order."""
    (last_ns, end_ns), found, calls = asked, [], iter(noted)
    for module, function, _ in POINTS:
        at_ns = next(at_ns for at_ns, called in calls if at_ns >= last_ns and called == f"{module}:{function}")
        found.append((at_ns - last_ns) / 1000)
        last_ns = at_ns
    return [*found, (end_ns - last_ns) / 1000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-requests", type=int, default=200, help="requests of each kind; the median counts (200)")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens of each prompt (32)")
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
        with running_cluster(Path(directory), *options.set, env=os.environ | own) as cluster:
            path = Path(cluster.http_address.removeprefix("unix:"))
            for _ in range(options.num_requests + WARM_UP):
                prompt = [generator.randrange(3, 1000) for _ in common]
                asked["new"].append(ask(path, prompt))
                asked["known"].append(ask(path, common[: len(common) // 2] + prompt[len(common) // 2 :]))
        noted = sorted((int(at), called) for at, called in map(str.split, file.read_text().splitlines()))
    rows = {
        kind: [spans(each, [call for call in noted if each[0] <= call[0] <= each[1]]) for each in requests[WARM_UP:]]
        for kind, requests in asked.items()
    }
    print(f"{'microseconds, medians; first block':42}{'new':>8}{'known':>8}")
    for index, name in enumerate([*(name for *_, name in POINTS), TO_CLIENT]):
        print(f"{name:42}" + "".join(f"{statistics.median(row[index] for row in rows[kind]):8.0f}" for kind in rows))
    print(f"{'whole':42}" + "".join(f"{statistics.median(map(sum, rows[kind])):8.0f}" for kind in rows))


if __name__ == "__main__":
    main()
