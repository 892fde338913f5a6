"""`await_arguments`: the command line of a service that was started before the launcher knew it.

The launcher imports modules and reads its own command line meanwhile, see `services/launch/early_services.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys

from services.common.process import die_with_parent, importing

EARLY_FLAG = "--early"  # before the number of a socket, the service's later lifeline, and the launcher's process id
MAX_PACKET_BYTES = 1 << 17  # the kernel allows somewhat more


def await_arguments(module: str) -> None:
    """Imports `module`, and gives this process the command line and the environment that the launcher says meanwhile.

    Does nothing in a process that has its command line. Ends one that the launcher does not need.
    """
    if sys.argv[1:2] != [EARLY_FLAG]:
        return
    descriptor, launcher_pid = map(int, sys.argv[2:])
    die_with_parent(launcher_pid)
    with importing():
        importlib.import_module(module)
    line = socket.socket(fileno=descriptor)
    packet = line.recv(MAX_PACKET_BYTES)
    line.detach()
    if not packet:
        os._exit(0)
    message = json.loads(packet)
    sys.argv[1:] = message["arguments"]
    for name, value in message["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
