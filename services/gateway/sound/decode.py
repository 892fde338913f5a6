"""A process that decodes sound for the gateway: `python -m services.gateway.sound.decode OPTIONS`.

Whatever a file does to time and memory, it does to this process alone: the limits below end it, and the gateway starts
another one. OPTIONS is JSON: the model's directory, and the most seconds of sound.

Standard input has one file after the other: its size, as 8 bytes, little-endian, a byte that says whether it may be
long, and its bytes. Each answer is a line of JSON, with an error, or `is_long` if it may not be, or the shape of the
log-mel features, and then the features: float32, one row for each mel bin.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soxr

from services.gateway.sound.sound_file import SoundError, SoundFile, open_sound

# CPU time for one file. Eight channels of 384 kHz take 0.023 s for each second, the usual files a tenth of that.
MAX_CPU_S = 5.0
MAX_CPU_S_PER_S = 0.03  # of its length
# A short file has no more of either. Usual files of this length take half of the time.
MAX_SHORT_S = 30.0
MAX_SHORT_CPU_S = 0.1  # to decode it; features of this length take 0.03 s more
# Address space beyond that of the imported libraries. Samples and features of a second take 0.6 MB while they are made.
MAX_MEMORY_BYTES = 2**30
MAX_MEMORY_BYTES_PER_S = 2**20
NICENESS = 5  # streams come first
MIN_BYTES_PER_S = 500  # of a file that does not say how long it is: half of what Opus needs for speech
SAMPLE_RATES = (1_000, 384_000)
MAX_CHANNELS = 8


def main() -> None:
    """Serves until standard input ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when this process ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads the answer if the gateway has died
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    options = json.loads(sys.argv[1])
    from transformers import WhisperFeatureExtractor  # takes seconds, which the first file waits

    extractor = WhisperFeatureExtractor.from_pretrained(options["path"])
    limit_memory(options["max_seconds"])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while size := requests.read(8):
        may_be_long = requests.read(1) != b"\0"
        data = requests.read(int.from_bytes(size, "little"))
        limit_cpu(0.0)
        check = None if may_be_long else ShortCheck()
        try:
            sound = read_sound(data, extractor.sampling_rate, options["max_seconds"], limit_cpu, check)
            found = extractor(
                sound,
                sampling_rate=extractor.sampling_rate,
                truncation=False,
                padding="max_length",
                return_tensors="np",
            )
            features = found["input_features"][0].astype("<f4", copy=False)
        except LongSound:
            _answer(answers, {"is_long": True})
            continue
        except (SoundError, MemoryError) as error:
            _answer(answers, {"error": str(error) or "it takes too much memory to decode"})
            continue
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = len(sound) / extractor.sampling_rate
        _answer(answers, {"shape": list(features.shape), "seconds": seconds}, np.ascontiguousarray(features))


def limit_memory(max_seconds: int) -> None:
    """Limits this process to what a file of so many seconds needs."""
    num_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = num_bytes + MAX_MEMORY_BYTES + max_seconds * MAX_MEMORY_BYTES_PER_S
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_cpu(seconds: float) -> None:
    """Ends this process by SIGPROF when it takes more time, from now on, than a file of so many seconds may."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S + MAX_CPU_S_PER_S * seconds)


class LongSound(Exception):
    """A file that may not be long is."""


class ShortCheck:
    """Call it with the seconds that a file has at least. Raises `LongSound` if it is no short one."""

    def __init__(self) -> None:
        self._end_cpu_s = time.process_time() + MAX_SHORT_CPU_S

    def __call__(self, seconds: float) -> None:
        if seconds > MAX_SHORT_S or time.process_time() > self._end_cpu_s:
            raise LongSound


def read_sound(
    data: bytes,
    sample_rate: int,
    max_seconds: float,
    on_length: Callable[[float], None] | None = None,
    on_seconds: Callable[[float], None] | None = None,
) -> np.ndarray:
    """The samples of a file, float32 [num_samples]: the mean of its channels, at this rate. Raises `SoundError`.

    on_length: called with the seconds that the header names, or the size allows, before anything is decoded
    on_seconds: called with those that the header names, and after each block with those that are decoded
    """
    with open_sound(data) as file:
        _check(file, max_seconds)
        if on_length is not None:
            on_length(min(len(data) / MIN_BYTES_PER_S, max_seconds) if file.seconds is None else file.seconds)
        if on_seconds is not None and file.seconds is not None:
            on_seconds(file.seconds)
        sound = _resample(file, sample_rate, max_seconds, on_seconds)
    if not len(sound):
        raise SoundError("the file has no samples")
    return sound


def _resample(
    file: SoundFile, sample_rate: int, max_seconds: float, on_seconds: Callable[[float], None] | None
) -> np.ndarray:
    """Reads the file block by block, so that no more than one block of its own rate is ever held."""
    stream = soxr.ResampleStream(file.sample_rate, sample_rate, 1, "float32")
    sound = np.empty(math.ceil(max_seconds * sample_rate), np.float32)  # takes memory only where it is written
    num_frames = end = 0
    for block in file.blocks():
        num_frames += len(block)
        if num_frames > max_seconds * file.sample_rate:  # whatever its header says
            raise SoundError(f"the sound has more than {max_seconds:g} s, the limit")
        if not np.isfinite(block).all():
            raise SoundError("the file has samples that are not finite")
        part = stream.resample_chunk(block.mean(axis=1, dtype=np.float32))[: len(sound) - end]
        sound[end : end + len(part)] = part
        end += len(part)
        if on_seconds is not None:
            on_seconds(num_frames / file.sample_rate)
    part = stream.resample_chunk(np.empty(0, np.float32), last=True)[: len(sound) - end]
    sound[end : end + len(part)] = part
    return sound[: end + len(part)]


def _check(file: SoundFile, max_seconds: float) -> None:
    """Raises `SoundError` for what the header says, before anything is decoded."""
    low, high = SAMPLE_RATES
    if not low <= file.sample_rate <= high:
        raise SoundError(f"the sound has {file.sample_rate} samples per second, must be from {low} to {high}")
    if file.num_channels > MAX_CHANNELS:
        raise SoundError(f"the sound has {file.num_channels} channels, at most {MAX_CHANNELS} are possible")
    if file.seconds is not None and file.seconds > max_seconds:
        raise SoundError(f"the sound has {file.seconds:g} s, at most {max_seconds:g} are possible")


def _answer(answers: BinaryIO, values: dict[str, object], features: np.ndarray | None = None) -> None:
    answers.write(json.dumps(values).encode() + b"\n")
    if features is not None:
        answers.write(features.data)
    answers.flush()


if __name__ == "__main__":
    main()
