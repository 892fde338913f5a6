"""A process that writes to standard error how it was started, and then ends in the way its argument names."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP]
    started = {
        "argv": sys.argv,
        "command_line": Path("/proc/self/cmdline").read_text().rstrip("\0"),
        "name": __name__,
        "cwd": os.getcwd(),
        "path": sys.path,
        "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},  # set by Python
        "files": sorted(os.listdir("/proc/self/fd")),
        "standard_input": os.readlink("/proc/self/fd/0"),
        "leads_session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "signals": [str(signal.getsignal(number)) for number in numbers],
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "cores": sorted(os.sched_getaffinity(0)),
        "max_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "namespaces": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "mnt")},
        "collects_garbage": gc.isenabled(),
    }
    print(json.dumps(started), file=sys.stderr, flush=True)
    match sys.argv[1]:
        case "returns":
            pass
        case "exits":
            sys.exit(3)
        case "exits with words":
            sys.exit("no such thing")
        case "raises":
            raise ValueError("wrong")
        case "waits":
            signal.pause()
