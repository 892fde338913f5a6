"""`open_sound`: an uploaded file of sound, by libsndfile, or by FFmpeg's libraries (PyAV) for MP4 (M4A) and WebM."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Protocol, Self

import av
import numpy as np
import soundfile

FORMATS = ("WAV", "FLAC", "OGG", "MP3", "M4A", "MP4", "WEBM")
_PLAIN_FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")  # libsndfile's names
_CODECS = ("aac", "alac", "flac", "mp3", "mp3float", "opus", "vorbis")
BLOCK_FRAMES = 2**18  # decoded at a time
MAX_BLOCK_PARTS = 2**10  # of a container's block: some have parts of a few frames each
# What a file refers to is not opened.
_OPTIONS = {"enable_drefs": "0", "use_absolute_path": "0", "protocol_whitelist": "none"}


class SoundError(Exception):
    """A file cannot be used; the message says why."""


class SoundFile(Protocol):
    """An open file. Close it by `with`."""

    sample_rate: int
    num_channels: int
    seconds: float | None  # by its header; None: it does not say

    def blocks(self) -> Iterator[np.ndarray]:
        """The samples, float32 [num_frames, num_channels], block by block. Raises `SoundError`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def open_sound(data: bytes) -> SoundFile:
    """Raises `SoundError` for what is no file of `FORMATS`."""
    demuxer = _demuxer_of(data)
    return _PlainFile(data) if demuxer is None else _ContainerFile(data, demuxer)


def _demuxer_of(data: bytes) -> str | None:
    """FFmpeg's name for the container of a file, by its first bytes. None: neither MP4 nor WebM."""
    if data[4:8] == b"ftyp":
        return "mov"
    return "matroska" if data[:4] == b"\x1a\x45\xdf\xa3" else None


class _PlainFile:
    def __init__(self, data: bytes) -> None:
        try:
            self._file = soundfile.SoundFile(io.BytesIO(data))
        except soundfile.SoundFileError as error:
            raise _not_decoded(error) from error
        if self._file.format not in _PLAIN_FORMATS:
            self._file.close()
            raise SoundError(f"the file has the format {self._file.format}, supported: {', '.join(FORMATS)}")
        self.sample_rate = self._file.samplerate
        self.num_channels = self._file.channels
        self.seconds = self._file.frames / self.sample_rate

    def blocks(self) -> Iterator[np.ndarray]:
        try:
            while len(block := self._file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
                yield block
        except soundfile.SoundFileError as error:
            raise _not_decoded(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _not_decoded(error: Exception) -> SoundError:
    why = str(error)
    if isinstance(error, soundfile.LibsndfileError):
        why = error.error_string
    elif isinstance(error, av.FFmpegError):
        why = error.strerror
    return SoundError(f"the file cannot be decoded ({why}); formats: {', '.join(FORMATS)}")


class _ContainerFile:
    """The first stream of sound in a file with several."""

    def __init__(self, data: bytes, demuxer: str) -> None:
        try:
            # Titles and the like may be of any encoding.
            self._container = av.open(
                io.BytesIO(data), format=demuxer, options=dict(_OPTIONS), metadata_errors="replace"
            )
        except (av.FFmpegError, ValueError) as error:
            raise _not_decoded(error) from error
        streams = self._container.streams.audio
        codec = "none"
        if streams:
            context = streams[0].codec_context
            codec = "unknown" if context is None else context.codec.name
        if codec not in _CODECS:
            self._container.close()
            raise SoundError(f"the file has sound of the codec {codec}, supported: {', '.join(_CODECS)}")
        self._stream = streams[0]
        if demuxer == "mov" and self._stream.time_base == 1:  # which FFmpeg takes for 0, too
            self._container.close()
            raise SoundError(
                "the file counts the time of its sound in 0 or 1 units a second (timescale in mdhd), as no recorder "
                "does: nobody can tell how long it is"
            )
        self._stream.thread_count = 1
        self.sample_rate = self._stream.codec_context.sample_rate
        self.num_channels = self._stream.codec_context.channels
        self.seconds = self._seconds()

    def _seconds(self) -> float | None:
        seconds = None if self._container.duration is None else self._container.duration / av.time_base
        if self._stream.duration is not None and self._stream.time_base is not None:
            seconds = float(self._stream.duration * self._stream.time_base)
        return None if seconds is None or seconds < 0 else seconds  # less than nothing says as little

    def blocks(self) -> Iterator[np.ndarray]:
        to_floats = av.AudioResampler(format="fltp")
        parts, num_frames = list[np.ndarray](), 0
        try:
            for frame in self._container.decode(self._stream):
                for each in to_floats.resample(frame):
                    parts.append(each.to_ndarray())
                    num_frames += parts[-1].shape[1]
                if num_frames >= BLOCK_FRAMES or len(parts) >= MAX_BLOCK_PARTS:
                    yield np.concatenate(parts, axis=1).T
                    parts, num_frames = [], 0
        except (av.FFmpegError, ValueError) as error:  # a stream that changes its rate is a ValueError
            raise _not_decoded(error) from error
        if parts:
            yield np.concatenate(parts, axis=1).T

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._container.close()
