"""`services.launch` as systemd starts it with sockets: LISTEN_PID names the process itself."""

from __future__ import annotations

import os

os.environ["LISTEN_PID"] = str(os.getpid())

from services.launch.__main__ import main

main()
