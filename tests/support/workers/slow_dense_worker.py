"""A dense worker with slow layers, like those of a large model on a busy CPU."""

from __future__ import annotations

import time

from services.channel import Flag
from services.channel.shm import ShmChannel
from services.dense_worker.__main__ import main

LAYER_S = 1.0

signal = ShmChannel.signal


def late_signal(channel: ShmChannel, flag: Flag) -> None:
    time.sleep(LAYER_S)
    signal(channel, flag)


if __name__ == "__main__":
    ShmChannel.signal = late_signal  # type: ignore[method-assign]
    main()
