"""A dense worker that loses one handoff: its 130th signal never reaches the attention worker."""

from __future__ import annotations

import itertools

from services.channel import Flag
from services.channel.shm import ShmChannel
from services.dense_worker.__main__ import main

LOST = 130

signal = ShmChannel.signal
numbers = itertools.count(1)


def lossy_signal(channel: ShmChannel, flag: Flag) -> None:
    if next(numbers) != LOST:
        signal(channel, flag)


if __name__ == "__main__":
    ShmChannel.signal = lossy_signal  # type: ignore[method-assign]
    main()
