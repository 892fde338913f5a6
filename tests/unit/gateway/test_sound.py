"""Files of sound become samples or are refused, and outputs with timestamps become segments."""

from __future__ import annotations

import asyncio
import io
import signal
import struct
import subprocess
import sys
import tracemalloc

import av
import numpy as np
import pytest
import soundfile

from services.gateway.sound import attempts, decode, sound_file
from services.gateway.sound.attempts import TEMPERATURES, Output, best_output
from services.gateway.sound.decode import MIN_BYTES_PER_S, LongSound, ShortCheck, read_sound
from services.gateway.sound.sound_file import BLOCK_FRAMES, SoundError
from services.gateway.sound.speech_model import Segment, SpeechModel, split_window

RATE = 16_000
END, FIRST = 50, 60
MODEL = SpeechModel(51, END, 58, FIRST, None, 56, {"en": 52, "de": 53}, {"transcribe": 54, "translate": 55}, ())


def file_of(sound: np.ndarray, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=kind, subtype=subtype)
    return file.getvalue()


def recording(container_format: str, codec: str, sound: np.ndarray) -> bytes:
    """Two channels of 48 kHz, float32 [2, num_samples]."""
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=48_000, layout="stereo")
        frame = av.AudioFrame.from_ndarray(sound, format="fltp", layout="stereo")
        frame.sample_rate = 48_000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


def test_channels_are_averaged_and_rates_converted() -> None:
    time = np.arange(48_000) / 48_000
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    stereo = np.stack([tone, np.zeros_like(tone)], axis=1)
    found = read_sound(file_of(stereo, 48_000, subtype="FLOAT"), RATE, 2)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert found.dtype == np.float32 and len(found) == RATE
    assert np.abs(found - expected)[200:-200].max() < 1e-3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be decoded"),
        (bytes(1000), r"decoded \(Format not recognised\.\); formats: WAV, FLAC, OGG, MP3, M4A, MP4, WEBM"),
        (file_of(np.zeros(RATE * 3, np.float32)), r"the sound has 3 s, at most 2 are possible"),
        (file_of(np.full(10, np.nan, np.float32), subtype="FLOAT"), "not finite"),
        (file_of(np.zeros(0, np.float32)), "has no samples"),
        (file_of(np.zeros(9, np.float32), kind="AIFF"), "format AIFF, supported"),
        (file_of(np.zeros((9, 9), np.float32)), "9 channels, at most 8"),
        (file_of(np.zeros(9, np.float32), 500_000), "500000 samples per second, must be from 1000 to 384000"),
    ],
)
def test_what_cannot_be_used_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(SoundError, match=words):
        read_sound(data, RATE, 2)


@pytest.mark.parametrize(
    ("container", "codec"), [("ipod", "aac"), ("mov", "alac"), ("webm", "libopus")], ids=["m4a", "alac", "webm"]
)
def test_what_phones_and_browsers_record_is_read(container: str, codec: str) -> None:
    time = np.arange(2 * 48_000) / 48_000
    tone = 0.5 * np.sin(2 * np.pi * 440 * time).astype(np.float32)
    data = recording(container, codec, np.stack([tone, np.zeros_like(tone)]))
    found = read_sound(data, RATE, 3)
    assert len(found) == pytest.approx(2 * RATE, abs=0.03 * RATE)
    middle = found[RATE // 2 : RATE * 3 // 2]
    wave = np.exp(-2j * np.pi * 440 * np.arange(len(middle)) / RATE)
    assert 2 * abs(np.mean(middle * wave)) == pytest.approx(0.25, rel=0.05)  # half of the tone in one of two channels
    assert np.std(middle) == pytest.approx(0.25 / np.sqrt(2), rel=0.05), "there is another sound in it"
    for length in (20, 100, 200):
        with pytest.raises(SoundError, match="cannot be decoded"):
            read_sound(data[:length], RATE, 3)
    with pytest.raises(SoundError, match=r"at most 1 are|more than 1 s"):
        read_sound(data, RATE, 1)


def test_other_codecs_and_films_without_sound_are_refused() -> None:
    with pytest.raises(SoundError, match="codec pcm_s16le, supported: aac"):
        read_sound(recording("matroska", "pcm_s16le", np.zeros((2, 4800), np.float32)), RATE, 2)
    film = io.BytesIO()
    with av.open(film, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 16
        container.mux([*stream.encode(av.VideoFrame(16, 16, "yuv420p")), *stream.encode(None)])
    with pytest.raises(SoundError, match="codec none, supported"):
        read_sound(film.getvalue(), RATE, 2)


def test_a_codec_that_nobody_knows_is_refused() -> None:
    data = recording("webm", "libopus", np.zeros((2, 4800), np.float32))
    with pytest.raises(SoundError, match="codec unknown, supported: aac"):
        read_sound(data.replace(b"A_OPUS", b"A_OPUX"), RATE, 2)


@pytest.mark.parametrize("codec", ["aac", "alac"])
def test_a_file_without_a_time_scale_is_refused_and_not_cut_to_its_first_frame(codec: str) -> None:
    data = bytearray(recording("ipod", codec, np.zeros((2, 48_000), np.float32)))
    place = data.index(b"mdhd") + 16
    assert data[place : place + 4] == struct.pack(">I", 48_000)
    data[place : place + 4] = bytes(4)
    with pytest.raises(SoundError, match=r"0 or 1 units a second \(timescale in mdhd\)"):
        read_sound(bytes(data), RATE, 2)


def test_titles_in_any_encoding_are_no_obstacle() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="ipod") as container:
        container.metadata["title"] = "Uebung"
        stream = container.add_stream("aac", rate=48_000, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.zeros((2, 48_000), np.float32), format="fltp", layout="stereo")
        frame.sample_rate = 48_000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    data = file.getvalue()
    assert b"Uebung" in data
    assert len(read_sound(data.replace(b"Uebung", b"\xdcbung!"), RATE, 2)) > RATE / 2


@pytest.mark.parametrize("milliseconds", [-1000.0, -166_667.0, -1e6, float("nan"), 0.0])
def test_a_length_below_nothing_gives_no_other_time_than_none(milliseconds: float) -> None:
    """A negative time would be no timer at all, or end the process."""
    data = bytearray(recording("webm", "libopus", np.zeros((2, 48_000), np.float32)))
    place = data.index(b"\x44\x89\x88") + 3  # of the duration, a double
    data[place : place + 8] = struct.pack(">d", milliseconds)
    lengths: list[float] = []
    assert len(read_sound(bytes(data), RATE, 2, lengths.append)) == pytest.approx(RATE, abs=0.03 * RATE)
    assert lengths == [min(len(data) / MIN_BYTES_PER_S, 2)]


def test_no_more_time_than_for_the_longest_sound_where_the_header_names_none() -> None:
    lengths: list[float] = []
    read_sound(webm_without_length(1) + bytes(10_000), RATE, 2, lengths.append)
    assert lengths == [2]


def test_a_header_that_lies_about_the_length_is_no_way_around_the_limit() -> None:
    honest = file_of(np.zeros(RATE * 3, np.float32))
    lying = bytearray(honest)
    lying[40:44] = (100).to_bytes(4, "little")  # of the chunk with the samples
    assert len(read_sound(bytes(lying), RATE, 2)) == 50
    lying[40:44] = (2**32 - 1).to_bytes(4, "little")
    with pytest.raises(SoundError):
        read_sound(bytes(lying), RATE, 2)


def test_a_high_rate_takes_no_more_memory_than_the_rate_of_the_model() -> None:
    num_seconds, rate = 10, 384_000
    data = file_of(np.zeros(num_seconds * rate, np.int16), rate, "FLAC")
    tracemalloc.start()
    try:
        sound = read_sound(data, RATE, num_seconds)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(sound) == num_seconds * RATE
    of_a_block = 4 * BLOCK_FRAMES
    assert peak_bytes < 4 * len(sound) + 8 * of_a_block < 4 * num_seconds * rate


def test_blocks_join_without_a_seam() -> None:
    rate, num_samples = 48_000, 2 * BLOCK_FRAMES + 1000
    tone = np.sin(2 * np.pi * 440 * np.arange(num_samples) / rate).astype(np.float32)
    found = read_sound(file_of(tone, rate, subtype="FLOAT"), RATE, 20)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / RATE)
    assert len(found) == round(num_samples / 3)
    assert np.abs(found - expected)[200:-200].max() < 1e-3


def test_memory_beyond_that_of_the_longest_sound_is_refused() -> None:
    program = """
import numpy as np
from services.gateway.sound.decode import MAX_MEMORY_BYTES, MAX_MEMORY_BYTES_PER_S, limit_memory
limit_memory(100)
kept = np.empty(MAX_MEMORY_BYTES // 2, np.uint8)
try:
    np.empty(MAX_MEMORY_BYTES // 2 + 100 * MAX_MEMORY_BYTES_PER_S, np.uint8)
except MemoryError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "refused\n"


def test_the_limit_of_cpu_time_grows_with_the_length_that_the_header_names() -> None:
    lengths = list[float]()
    read_sound(file_of(np.zeros(RATE * 3 // 2, np.float32)), RATE, 2, lengths.append)
    assert lengths == [1.5]
    program = """
import signal
from services.gateway.sound import decode
decode.MAX_CPU_S, decode.MAX_CPU_S_PER_S = 0.01, 0.02
decode.limit_cpu(100.0)
assert 1.9 < signal.getitimer(signal.ITIMER_PROF)[0] <= 2.1
decode.limit_cpu(1.0)
while True:
    pass
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGPROF


def webm_without_length(num_seconds: int) -> bytes:
    """As browsers record: the header does not know the end."""
    data = bytearray(recording("webm", "libopus", np.zeros((2, 48_000 * num_seconds), np.float32)))
    place = data.index(b"\x44\x89\x88") + 3  # of the duration, a double
    data[place : place + 8] = bytes(8)
    return bytes(data)


def test_a_long_file_is_known_by_its_header_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_SHORT_S", 1.0)
    monkeypatch.setattr(decode, "MAX_SHORT_CPU_S", 1e9)
    short, long = (file_of(np.zeros(num_samples, np.float32)) for num_samples in (RATE, RATE + 1))
    assert len(read_sound(short, RATE, 9, None, ShortCheck())) == RATE
    monkeypatch.setattr(decode, "_resample", None)
    with pytest.raises(LongSound):
        read_sound(long, RATE, 9, None, ShortCheck())


@pytest.mark.parametrize(("max_s", "max_cpu_s"), [(6.0, 1e9), (1e9, -1.0)], ids=["length", "time"])
def test_a_long_file_of_unknown_length_is_given_up_at_its_first_block_too_many(
    monkeypatch: pytest.MonkeyPatch, max_s: float, max_cpu_s: float
) -> None:
    """Else a client could make the process that others wait for decode half an hour."""
    monkeypatch.setattr(decode, "MAX_SHORT_S", max_s)
    monkeypatch.setattr(decode, "MAX_SHORT_CPU_S", max_cpu_s)
    data, block_s = webm_without_length(20), BLOCK_FRAMES / 48_000
    check, asked = ShortCheck(), list[float]()

    def note(seconds: float) -> None:
        asked.append(seconds)
        check(seconds)

    with pytest.raises(LongSound):
        read_sound(data, RATE, 30, None, note)
    num_blocks = 2 if max_cpu_s > 0 else 1
    assert asked == pytest.approx([block_s * (i + 1) for i in range(num_blocks)], rel=0.01)
    assert len(read_sound(data, RATE, 30)) == pytest.approx(20 * RATE, abs=0.03 * RATE)


def test_parts_of_a_few_frames_make_more_blocks_of_the_same_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    data, blocks = webm_without_length(2), list[float]()
    whole = read_sound(data, RATE, 3, None, blocks.append)
    assert len(blocks) == 1
    monkeypatch.setattr(sound_file, "MAX_BLOCK_PARTS", 10)
    np.testing.assert_array_equal(read_sound(data, RATE, 3, None, blocks.append), whole)
    assert len(blocks) > 10


def seconds(value: float) -> int:
    """The token of a time."""
    return FIRST + round(value / 0.02)


def split(*token_ids: int, start: float = 10.0) -> tuple[list[Segment], int]:
    window = split_window(MODEL, token_ids, start, 2.0, 200)
    return window.segments, window.num_frames


def test_pairs_of_timestamps_end_segments_and_the_rest_is_computed_again() -> None:
    tokens = [seconds(0), 1, 2, seconds(0.4), seconds(0.6), 3, seconds(1.0), seconds(1.2), 4, 5, END]
    segments, num_frames = split(*tokens)
    assert [(each.start, each.end) for each in segments] == [(10.0, 10.4), pytest.approx((10.6, 11.0))]
    assert [MODEL.text_tokens(each.token_ids) for each in segments] == [[1, 2], [3]]
    assert num_frames == 100  # up to the end of the last pair's first timestamp


def test_a_single_timestamp_at_the_end_ends_the_window() -> None:
    segments, num_frames = split(seconds(0), 1, seconds(0.4), seconds(0.4), 2, seconds(1.5), END)
    assert [(each.start, each.end) for each in segments] == [(10.0, 10.4), pytest.approx((10.4, 11.5))]
    assert num_frames == 200


@pytest.mark.parametrize(
    ("tokens", "end"), [((FIRST, 1, 2, END), 12.0), ((FIRST, 1, FIRST + 25, END), 10.5), ((1, 2), 12.0)]
)
def test_without_pairs_there_is_one_segment(tokens: tuple[int, ...], end: float) -> None:
    [segment], num_frames = split(*tokens)
    assert (segment.start, segment.end) == (10.0, pytest.approx(end)) and num_frames == 200


def test_silence_has_no_segments_and_every_window_goes_on() -> None:
    assert split(FIRST, END) == ([], 200)
    segments, num_frames = split(FIRST, FIRST, 1, END)
    assert segments == [] and num_frames == 200


def tried(outputs: list[tuple[float, float]], no_speech_prob: float) -> tuple[Output, int, int]:
    """The best of outputs with these mean log-probabilities and ratios, how many were made, and how often silence was
    asked for."""
    num_asked = 0
    left = iter(outputs)
    made = []

    async def attempt(temperature: float) -> Output:
        made.append(Output([1], temperature, *next(left)))
        return made[-1]

    async def find_no_speech_prob() -> float:
        nonlocal num_asked
        num_asked += 1
        return no_speech_prob

    best = asyncio.run(best_output(attempt, find_no_speech_prob))
    assert [each.temperature for each in made] == list(TEMPERATURES[: len(made)])
    return best, len(made), num_asked


GOOD, REPETITIVE, UNLIKELY = (-0.4, 1.5), (-0.1, 2.5), (-1.1, 1.5)


@pytest.mark.parametrize(
    ("outputs", "no_speech_prob", "temperature", "num_asked"),
    [
        ([GOOD], 0.9, 0.0, 0),  # the model is sure of its text, whatever its mark of silence says
        ([REPETITIVE, GOOD], 0.9, 0.2, 0),
        ([UNLIKELY, REPETITIVE, UNLIKELY, GOOD], 0.5, 0.6, 1),
        ([UNLIKELY] * 6, 0.5, 1.0, 1),
    ],
)
def test_doubtful_outputs_are_tried_again_at_higher_temperatures(
    outputs: list[tuple[float, float]], no_speech_prob: float, temperature: float, num_asked: int
) -> None:
    best, num_made, asked = tried(outputs, no_speech_prob)
    assert (best.temperature, best.token_ids, num_made, asked) == (temperature, [1], len(outputs), num_asked)


def test_an_unlikely_text_of_silence_is_none() -> None:
    best, num_made, _ = tried([UNLIKELY, GOOD], 0.7)
    assert (best.token_ids, best.no_speech_prob, num_made) == ([], 0.7, 1)


def test_repetition_is_measured_as_the_published_code_does() -> None:
    text = "Thank you. " * 20
    assert attempts.compression_ratio(text) > attempts.MAX_COMPRESSION_RATIO > attempts.compression_ratio(text[:22])
    assert attempts.compression_ratio("") == 0
