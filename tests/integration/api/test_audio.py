"""Transcriptions over HTTP with OpenAI's own client, compared with transformers on the same weights."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import numpy as np
import openai
import pytest
import torch
from openai.types.audio import TranscriptionVerbose
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from tests.support.clients.interrupted import over_a_kill
from tests.support.cluster import REQUEST_TIMEOUT_S, Cluster, ctl, running_cluster
from tests.support.speech import (
    END,
    FIRST_TIMESTAMP,
    NO_TIMESTAMPS,
    NUM_STEPS,
    PREVIOUS,
    RATE,
    START,
    WINDOW_S,
    make_speech_model,
    sound_file,
    sound_of,
)

pytestmark = pytest.mark.timeout(400)  # thousands of steps, and the machine may be slow

LONG_S = 2.6  # several windows
WHOLE_S = 32.0  # more than `MAX_SHORT_S` of the decoder
WORDS_S = 4.6  # with a window that ends within the sound
MAX_SECONDS = 90
MAX_BYTES = 6_000_000  # more than gateway.max_body_bytes
KEY, SLOW_KEY = "without-any-limit", "one-file-a-minute"
KEYS = f"""
[[keys]]
name = "free"
key = "{KEY}"
[[keys]]
name = "slow"
key = "{SLOW_KEY}"
max_concurrent_answers = 1
requests_per_minute = 1
tokens_per_minute = 1
"""
MAX_TEXT_BEFORE = 31  # as the decoder has 64 positions
FEW_TOKENS = 20  # enough for answers that differ
MAX_NEW_TOKENS = 29  # what the longest text before leaves of the decoder's 64 positions


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speech_model(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def cluster(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    limits = (f"gateway.max_audio_seconds={MAX_SECONDS}", f"gateway.max_audio_bytes={MAX_BYTES}")
    directory = tmp_path_factory.mktemp("cluster")
    (directory / "keys.toml").write_text(KEYS)
    settings = (f"model.path={path}", f"gateway.api_keys_file={directory}/keys.toml", *limits)
    with running_cluster(directory, *settings, is_warm=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx2.Client]:
    transport = httpx2.HTTPTransport(uds=cluster.http_address.removeprefix("unix:"))
    options = {"headers": {"authorization": f"Bearer {KEY}"}, "timeout": REQUEST_TIMEOUT_S}
    with httpx2.Client(transport=transport, base_url="http://localhost", **options) as http:
        yield http


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    transport = httpx2.HTTPTransport(uds=cluster.http_address.removeprefix("unix:"))
    with openai.OpenAI(
        api_key=KEY, base_url="http://localhost/v1", http_client=httpx2.Client(transport=transport), max_retries=0
    ) as client:
        yield client


def upload(sound: np.ndarray, kind: str = "WAV", **options: object) -> tuple[str, bytes]:
    return f"speech.{kind.lower()}", sound_file(sound, kind, **options)


def generate_truth(
    path: Path, sound: np.ndarray, attention: str | None = None, **options: object
) -> list[dict[str, torch.Tensor]]:
    """The segments by transformers' algorithm for long files."""
    model = WhisperForConditionalGeneration.from_pretrained(path, attn_implementation=attention).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    features = extractor(
        sound[:, 0],
        sampling_rate=RATE,
        truncation=False,
        padding="max_length",
        return_tensors="pt",
        return_attention_mask=True,
    )
    model.generation_config.max_length = None
    with torch.inference_mode():
        output = model.generate(
            features.input_features,
            attention_mask=features.attention_mask,
            return_timestamps=True,
            task="transcribe",
            language="en",
            do_sample=False,
            num_beams=1,
            return_segments=True,
            condition_on_prev_tokens=True,
            max_new_tokens=MAX_NEW_TOKENS,
            **options,
        )
    return output["segments"][0]


def true_segments(path: Path, sound: np.ndarray) -> list[tuple[float, float, list[int]]]:
    """Times and tokens of the segments with text."""
    segments = []
    for each in generate_truth(path, sound):
        tokens = each["tokens"].tolist()
        if tokens[-1] >= FIRST_TIMESTAMP and tokens[-2:-1] and tokens[-2] >= FIRST_TIMESTAMP:
            tokens.pop()  # the beginning of the next window, which it keeps to know that the last segment is complete
        assert any(token < END for token in tokens), "transformers keeps what has no text for the next windows"
        segments.append((float(each["start"]), float(each["end"]), tokens))
    return segments


def true_words(path: Path, sound: np.ndarray) -> list[tuple[str, float, float]]:
    """The words of all segments with their times."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    split = SimpleNamespace(decode=lambda ids, decode_with_timestamps: tokenizer.decode(ids), eos_token_id=END)
    found = []
    for each in generate_truth(path, sound, "eager", return_token_timestamps=True):
        times = each["token_timestamps"].tolist()
        places = [i for i, token in enumerate(each["tokens"].tolist()) if token < END]
        token_ids = [each["tokens"][i].item() for i in places]
        texts, _, indexes = _combine_tokens_into_words(split, token_ids, "english")
        for text, of_word in zip(texts, indexes, strict=True):
            found.append((text.strip(), times[places[of_word[0]] - 1], times[places[of_word[-1]]]))
    return [each for each in found if each[0]]


def true_no_speech(path: Path, sound: np.ndarray, answer: TranscriptionVerbose) -> list[float]:
    """Of each segment's window: the probability of the mark of silence after what begins the decoder's answer."""
    model = WhisperForConditionalGeneration.from_pretrained(path).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    features = extractor(
        sound[:, 0], sampling_rate=RATE, truncation=False, padding="max_length", return_tensors="pt"
    ).input_features
    probs, before, num_frames = [], list[int](), 2 * NUM_STEPS
    for seek, segments in itertools.groupby(answer.segments, lambda each: each.seek):
        window = features[:, :, seek : seek + num_frames]
        window = torch.nn.functional.pad(window, (0, num_frames - window.shape[2]))
        prompt = [PREVIOUS, *before[-MAX_TEXT_BEFORE:], START] if before else [START]
        with torch.inference_mode():
            logits = model(window, decoder_input_ids=torch.tensor([prompt])).logits[0, -1]
        prob = logits.softmax(-1)[NO_TIMESTAMPS - 1].item()
        for each in segments:
            probs.append(prob)
            before += each.tokens
    return probs


def check_segments(found: list, expected: list[tuple[float, float, list[int]]]) -> None:
    assert [each.tokens for each in found] == [tokens for _, _, tokens in expected]
    assert [(each.start, each.end) for each in found] == [pytest.approx(each[:2], abs=0.011) for each in expected]


@pytest.mark.parametrize("seconds", [WINDOW_S, WHOLE_S])
def test_segments_equal_those_of_transformers(path: Path, client: openai.OpenAI, seconds: float) -> None:
    sound = sound_of(seconds, seed=3)
    options = {"language": "en", "temperature": 0, "response_format": "verbose_json"}
    answer = client.audio.transcriptions.create(model=path.name, file=upload(sound, subtype="FLOAT"), **options)
    check_segments(answer.segments, true_segments(path, sound))
    assert answer.language == "en" and answer.duration == seconds and answer.task == "transcribe"


def check_words(answer: TranscriptionVerbose, expected: list[tuple[str, float, float]]) -> None:
    assert [each.word for each in answer.words] == [text for text, _, _ in expected]
    times = [(each.start, each.end) for each in answer.words]
    assert times == [pytest.approx(each[1:], abs=0.011) for each in expected]


def test_words_have_the_times_of_transformers(path: Path, client: openai.OpenAI) -> None:
    sound = sound_of(WORDS_S, seed=5)
    options = {"language": "en", "temperature": 0, "response_format": "verbose_json"}
    options["extra_body"] = {"max_completion_tokens": MAX_NEW_TOKENS}  # where a window's output is cut, times change
    file, model = upload(sound, subtype="FLOAT"), path.name
    words = client.audio.transcriptions.create(
        model=model, file=file, timestamp_granularities=["word"], **options
    )
    expected = true_words(path, sound)
    check_words(words, expected)
    assert words.segments is None and len({start for _, start, _ in expected}) > 10
    options |= {"model": model, "file": upload(sound[: WINDOW_S * RATE], subtype="FLOAT")}
    words = client.audio.transcriptions.create(timestamp_granularities=["word"], **options)
    both = client.audio.transcriptions.create(timestamp_granularities=["word", "segment"], **options)
    segments = client.audio.transcriptions.create(**options)
    assert both.words == words.words and both.segments == segments.segments and segments.words is None


def test_longer_sound_goes_on_where_the_last_segment_ended(path: Path, client: openai.OpenAI) -> None:
    options = {"language": "en", "temperature": 0, "response_format": "verbose_json"}
    sound = sound_of(LONG_S, seed=3)
    answer = client.audio.transcriptions.create(model=path.name, file=upload(sound, subtype="FLOAT"), **options)
    # In float32, after layers whose sums have another order: 1.1e-6 on some processors.
    expected = pytest.approx(true_no_speech(path, sound, answer), rel=1e-5)
    assert [each.no_speech_prob for each in answer.segments] == expected
    seeks = [each.seek for each in answer.segments]
    assert len(set(seeks)) > 2 and seeks == sorted(seeks)
    for before, after in zip(answer.segments, answer.segments[1:], strict=False):
        if after.seek != before.seek:
            assert after.start >= before.start
    assert answer.text == "".join(each.text for each in answer.segments).strip()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_formats_and_rates(path: Path, client: openai.OpenAI, kind: str) -> None:
    sound = sound_of(0.9, seed=4, rate=44_100, channels=2)
    answer = client.audio.transcriptions.create(model=path.name, file=upload(sound, kind, rate=44_100))
    assert answer.text and answer.usage.seconds == 1


def test_texts_and_subtitles(path: Path, client: openai.OpenAI) -> None:
    file = upload(sound_of(LONG_S, seed=3))
    options = {"model": path.name, "file": file, "language": "en", "temperature": 0}
    verbose = client.audio.transcriptions.create(**options, response_format="verbose_json")
    assert client.audio.transcriptions.create(**options, response_format="text") == verbose.text + "\n"
    srt = client.audio.transcriptions.create(**options, response_format="srt")
    first = verbose.segments[0]
    begin, end = (f"00:00:{each:06.3f}".replace(".", ",") for each in (first.start, first.end))
    assert srt.startswith(f"1\n{begin} --> {end}\n{first.text.strip()}\n\n2\n")
    vtt = client.audio.transcriptions.create(**options, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:") and vtt.count("-->") == len(verbose.segments)


def test_doubtful_windows_are_tried_again_at_higher_temperatures(path: Path, client: openai.OpenAI) -> None:
    options = {"model": path.name, "file": upload(sound_of(WINDOW_S, seed=3)), "response_format": "verbose_json"}
    cold = client.audio.transcriptions.create(**options, language="en", temperature=0)
    assert cold.segments[0].avg_logprob < -1, "this model's texts are all unlikely"
    answers = [
        client.audio.transcriptions.create(
            **options, language="en", extra_body={"seed": seed, "max_completion_tokens": FEW_TOKENS}
        )
        for seed in (1, 1, 2)
    ]
    assert {each.temperature for answer in answers for each in answer.segments} == {1.0}
    first, again, other = ([each.tokens for each in answer.segments] for answer in answers)
    assert first == again != other


def test_a_stream_has_the_same_text(path: Path, client: openai.OpenAI) -> None:
    options = {"model": path.name, "file": upload(sound_of(LONG_S, seed=3)), "language": "en", "temperature": 0}
    whole = client.audio.transcriptions.create(**options)
    events = list(client.audio.transcriptions.create(**options, stream=True))
    deltas, last = [each.delta for each in events[:-1]], events[-1]
    assert len(deltas) > 1 and "".join(deltas).strip() == last.text == whole.text
    assert last.type == "transcript.text.done"


def test_a_stream_has_the_chunks_of_vllm(path: Path, client: openai.OpenAI) -> None:
    options = {"model": path.name, "file": upload(sound_of(LONG_S, seed=3)), "language": "en", "temperature": 0}
    whole = client.audio.transcriptions.create(**options)
    asked = {"stream_include_usage": True, "stream_continuous_usage_stats": True}
    *chunks, last = list(client.audio.transcriptions.create(**options, stream=True, extra_body=asked))
    assert "".join(each.choices[0]["delta"]["content"] for each in chunks).strip() == whole.text
    assert [each.choices[0]["finish_reason"] for each in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {(each.object, each.model) for each in chunks} == {("transcription.chunk", path.name)}
    counts = [each.usage["completion_tokens"] for each in chunks[:-1]] + [last.usage["completion_tokens"]]
    assert last.choices == [] and counts == sorted(counts) and counts[0] < counts[-1]


def test_sampling_has_the_options_of_vllm(path: Path, client: openai.OpenAI) -> None:
    options = {"model": path.name, "file": upload(sound_of(WINDOW_S, seed=3)), "language": "en"}

    def ask(temperature: float, **fields: object) -> list[int]:
        answer = client.audio.transcriptions.create(
            **options, temperature=temperature, response_format="verbose_json", extra_body=fields
        )
        return [token for each in answer.segments for token in each.tokens]

    greedy = ask(0.0)
    assert ask(1.0, top_k=1, seed=5) == greedy
    sampled = ask(1.0, seed=5, presence_penalty=0.5, top_p=0.9, min_p=0.01, frequency_penalty=0.1)
    assert sampled != greedy
    assert sampled == ask(1.0, seed=5, presence_penalty=0.5, top_p=0.9, min_p=0.01, frequency_penalty=0.1)
    assert ask(0.0, repetition_penalty=1.9) != greedy
    assert len(ask(0.0, max_completion_tokens=3)) < len(greedy) and ask(0.0, max_completion_tokens=10**6) == greedy


def test_language_is_detected_and_translation_is_another_task(path: Path, client: openai.OpenAI) -> None:
    file = upload(sound_of(1.0, seed=6))
    options = {"model": path.name, "file": file, "temperature": 0, "response_format": "verbose_json"}
    detected = client.audio.transcriptions.create(**options)
    assert detected.language in ("en", "de")
    named = client.audio.transcriptions.create(**options, language=detected.language)
    assert [each.tokens for each in named.segments] == [each.tokens for each in detected.segments]
    translated = client.audio.translations.create(**options)
    assert translated.task == "translate" and translated.text != detected.text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "file"),
        (b"RIFF" + bytes(200), "cannot be decoded"),
        (b"\x00\x00\x00\x18ftypM4A " + bytes(100), "formats: WAV, FLAC, OGG, MP3, M4A, MP4, WEBM"),
        (sound_file(sound_of(0.5))[:30], "cannot be decoded"),
        (sound_file(np.zeros((MAX_SECONDS * 1000 * 40, 1), np.float32), "FLAC", rate=1000), "at most 90 are possible"),
        (sound_file(np.zeros((10, 9), np.float32)), "9 channels, at most 8"),
        (sound_file(np.zeros((10, 1), np.float32), rate=999), "999 samples per second"),
        (sound_file(sound_of(0.1), "AIFF"), "format AIFF, supported"),
    ],
    ids=["empty", "broken", "m4a", "truncated", "bomb", "channels", "rate", "aiff"],
)
def test_hostile_files_are_refused(path: Path, client: openai.OpenAI, data: bytes, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.audio.transcriptions.create(model=path.name, file=("a.wav", data))
    client.audio.transcriptions.create(model=path.name, file=upload(sound_of(0.2)), language="en")  # still there


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"language": "klingon"}, "language is 'klingon', the model knows: en, de"),
        ({"response_format": "diarized_json"}, "response_format is 'diarized_json', supported"),
        ({"temperature": 2.0}, "temperature is '2.0', must be a number from 0 to 1"),
        ({"timestamp_granularities": ["line"]}, "timestamp_granularities has 'line', supported: segment, word"),
        ({"timestamp_granularities": ["word"]}, "only the response_format verbose_json has words"),
        ({"stream": True, "response_format": "srt"}, "srt cannot be streamed"),
        ({"prompt": "a" * 5000}, "prompt has 5000 characters"),
        ({"extra_body": {"top_p": "x"}}, "top_p is 'x', must be a number"),
        ({"extra_body": {"top_p": 7}}, "top_p"),
        ({"extra_body": {"seed": 1.5}}, "seed is '1.5', must be a whole number"),
        ({"extra_body": {"max_completion_tokens": 0}}, "max_completion_tokens is '0'"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search is not supported"),
        ({"extra_body": {"to_language": "de"}}, "to_language is not supported"),
    ],
)
def test_wrong_fields_are_refused(path: Path, client: openai.OpenAI, fields: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.audio.transcriptions.create(**{"model": path.name, "file": upload(sound_of(0.2))} | fields)


def test_a_large_body_and_an_unknown_model_are_refused(path: Path, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.audio.transcriptions.create(model=path.name, file=("a.wav", bytes(MAX_BYTES + 1)))
    assert refused.value.status_code == 413
    with pytest.raises(openai.NotFoundError):
        client.audio.transcriptions.create(model="whisper-1", file=upload(sound_of(0.2)))
    with pytest.raises(openai.BadRequestError, match="reads sound, not text"):
        client.completions.create(model=path.name, prompt="w1 w2")


@pytest.mark.parametrize("media_type", ["application/x-www-form-urlencoded", "application/json", None])
def test_only_forms_with_files_and_json_are_read(http: httpx2.Client, media_type: str | None) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    answer = http.post("/v1/audio/transcriptions", content=b"&" * 1000, headers=headers)
    status, words = (400, "JSON") if media_type == "application/json" else (415, "must be multipart/form-data")
    assert answer.status_code == status and words in answer.json()["error"]["message"]
    answer = http.post("/v1/audio/transcriptions", content=b"&" * MAX_BYTES, headers=headers)
    assert answer.status_code == 413, "only an upload may have more than max_body_bytes"


def test_a_body_that_is_no_form_is_not_waited_for(cluster: Cluster) -> None:
    head = ["POST /v1/audio/translations HTTP/1.1", "host: localhost", "content-type: text/plain", "content-length: 9"]
    head.append(f"authorization: Bearer {KEY}")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(cluster.http_address.removeprefix("unix:"))
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 415")


@pytest.mark.parametrize(
    ("form", "words", "param"),
    [
        ({"files": [("file", ("a.wav", b"1")), ("file", ("b.wav", b"2"))]}, "number of files is 1", "file"),
        ({"files": [("file", ("a.wav", b""))]}, "the file is empty", "file"),
        ({"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=b"}}, "the form cannot", None),
        ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, "boundary", None),
    ],
    ids=["two", "empty", "broken", "boundary"],
)
def test_broken_forms_are_refused_as_other_requests(
    http: httpx2.Client, form: dict, words: str, param: str | None
) -> None:
    answer = http.post("/v1/audio/transcriptions", **form)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert words in error["message"] and "object at" not in error["message"]


def test_a_file_of_several_windows_is_one_request_and_all_its_tokens_count(
    path: Path, client: openai.OpenAI
) -> None:
    slow = client.with_options(api_key=SLOW_KEY)
    file = upload(sound_of(LONG_S, seed=3))
    answer = slow.audio.transcriptions.create(model=path.name, file=file, response_format="verbose_json")
    assert len({each.seek for each in answer.segments}) > 1
    num_tokens = sum(len(each.tokens) for each in answer.segments)
    with pytest.raises(openai.RateLimitError, match="has used up its 1 tokens a minute") as refused:
        slow.audio.transcriptions.create(model=path.name, file=file)
    assert int(refused.value.response.headers["retry-after"]) > 60 * (num_tokens - 2)


@pytest.mark.parametrize("role", ["dense_worker", "attn_worker"])
def test_words_are_the_same_over_the_death_of_a_worker(
    path: Path, cluster: Cluster, client: openai.OpenAI, role: str
) -> None:
    file = upload(sound_of(WORDS_S, seed=5))

    def words() -> list[tuple[str, float, float]]:
        answer = client.audio.transcriptions.create(
            model=path.name,
            file=file,
            language="en",
            temperature=0,
            response_format="verbose_json",
            timestamp_granularities=["word"],
        )
        return [(each.word, each.start, each.end) for each in answer.words]

    expected = words()
    pid = cluster.pid_of(role)
    found = over_a_kill(words, lambda: cluster.attention_status().num_sequences, 1, lambda: cluster.kill(role))
    assert found == expected and len(expected) > 10
    assert cluster.pid_of(role) != pid


def test_the_dense_worker_can_be_replaced(path: Path, cluster: Cluster, client: openai.OpenAI) -> None:
    file = upload(sound_of(LONG_S, seed=6))

    def text() -> str:
        return client.audio.transcriptions.create(model=path.name, file=file, language="en", temperature=0).text

    expected, pid = text(), cluster.pid_of("dense_worker")
    replaced = ctl(cluster, "replace-dense")
    assert replaced.returncode == 0, replaced.stderr
    assert cluster.pid_of("dense_worker") != pid and text() == expected
    cluster.wait_idle()


def test_openapi_knows_the_routes(http: httpx2.Client) -> None:
    paths = json.loads(http.get("/openapi.json").text)["paths"]
    assert {"/v1/audio/transcriptions", "/v1/audio/translations"} <= paths.keys()
