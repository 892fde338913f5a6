"""API keys in files and in the environment, and the caller that a header identifies."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.common.errors import ConfigError, PermissionDenied, RateLimited, Unauthenticated
from services.gateway.access.access import Access, Caller
from services.gateway.access.api_keys import ApiKey, read_api_keys
from services.gateway.access.rate_limits import RateLimits, Usage
from services.gateway.http.authorize import _authorization
from tests.support.clients.generation_requests import make_request

KEY_A, KEY_B = "sk-aaaaaaaaaaaaaaaaaaaa", "sk-bbbbbbbbbbbbbbbbbbbb"


def write(file: Path, text: str) -> Path:
    """Replaces the file by a new one, as editors and Kubernetes do."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, file)
    return file


def entry(name: str, key: str, more: str = "") -> str:
    return f'[[keys]]\nname = "{name}"\nkey = "{key}"\n{more}\n'


def caller_of(access: Access, key: str) -> Caller:
    return access.identify(f"Bearer {key}")


def make_caller(**fields: object) -> Caller:
    key = ApiKey.model_validate({"name": "team", "key": KEY_A, **fields})
    return Caller(key, Usage(key.name, key.limits))


def test_keys_of_a_file_and_of_the_environment_are_combined(tmp_path: Path) -> None:
    digest = hashlib.sha256(KEY_B.encode()).hexdigest()
    text = entry("a", KEY_A, "max_concurrent_answers = 3\nrequests_per_minute = 60\npriority = 5")
    file = write(tmp_path / "keys.toml", text + f'[[keys]]\nname = "b"\nkey_sha256 = "{digest}"\n')
    access = Access(file, "c=sk-cccccccccccccccccccc, d=sk-dddddddddddddddddddd")
    assert [caller_of(access, key).name for key in (KEY_A, KEY_B)] == ["a", "b"]
    assert caller_of(access, "sk-dddddddddddddddddddd").name == "d"
    key = caller_of(access, KEY_A).key
    assert key is not None and key.limits == RateLimits(3, 60, None) and key.priority == 5


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "no API key"),
        ("", "not of the form `Bearer KEY`"),
        (f"Basic {KEY_A}", "not of the form `Bearer KEY`"),
        (KEY_A, "not of the form `Bearer KEY`"),
        (f"Bearer {KEY_A}x", "unknown"),
        (f"Bearer {KEY_A[:-1]}", "unknown"),
        ("Bearer ", "unknown"),
        ("Bearer \udcff", "unknown"),
    ],
)
def test_a_caller_without_a_valid_key_is_refused(tmp_path: Path, header: str | None, words: str) -> None:
    access = Access(write(tmp_path / "keys.toml", entry("a", KEY_A)), "")
    with pytest.raises(Unauthenticated, match=words) as refused:
        access.identify(header)
    assert KEY_A[:-1] not in str(refused.value)


@pytest.mark.parametrize("header", ["bearer {}", "Bearer  {} ", "BEARER {}"])
def test_the_authorization_scheme_is_not_case_sensitive(tmp_path: Path, header: str) -> None:
    access = Access(write(tmp_path / "keys.toml", entry("a", KEY_A)), "")
    assert access.identify(header.format(KEY_A)).name == "a"


def test_without_keys_everybody_is_anonymous() -> None:
    access = Access(None, "")
    assert access.identify(None).name == access.identify("Bearer whatever").name == ""
    request = make_request(priority=-100, cache_salt="mine")
    assert access.identify(None).adapt(request) is request


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys = []", "no keys"),
        ("", "keys: Field required"),
        ("[[keys]]", "keys.0.name"),
        ("nonsense", "not TOML"),
        (entry("a", "short"), "at least 16"),
        (entry("a", KEY_A, "max_concurrency = 3"), "max_concurrency"),
        (entry("a", KEY_A, "max_concurrent_answers = 0"), "max_concurrent_answers"),
        (entry("a", KEY_A, "requests_per_minute = inf"), "requests_per_minute"),
        (entry("a", KEY_A, "priority = 101"), "priority"),
        (entry("a", KEY_A, "priority = 1\nmin_priority = 2"), "min_priority is 2"),
        (entry("a b", KEY_A), "name"),
        (entry("a", KEY_A) + entry("a", KEY_B), "'a' and 'a' have the same name"),
        (entry("a", KEY_A) + entry("b", KEY_A), "'a' and 'b' have the same key"),
        (entry("a", KEY_A, f'key_sha256 = "{"0" * 64}"'), "one is enough"),
    ],
)
def test_the_error_of_a_wrong_file_names_the_file_and_shows_no_key(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigError, match=words) as refused:
        read_api_keys(file, "")
    assert str(file) in str(refused.value) or "same" in words
    assert KEY_A not in str(refused.value) and "short" not in str(refused.value)


@pytest.mark.parametrize("pairs", ["nokey", "a=short", "a b=" + KEY_A, f"a={KEY_A},a={KEY_B}"])
def test_the_error_of_a_wrong_environment_shows_no_key(pairs: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_api_keys(None, pairs)
    assert KEY_A not in str(refused.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/keys\.toml"):
        Access(Path("/nowhere/keys.toml"), "")


def test_a_changed_file_applies_at_once_and_keeps_open_requests(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.toml", entry("a", KEY_A))
    access = Access(file, "")
    caller_of(access, KEY_A).usage.open_request()
    write(file, entry("a", KEY_B, "max_concurrent_answers = 1"))
    access.reload_if_changed()
    with pytest.raises(Unauthenticated):
        caller_of(access, KEY_A)
    with pytest.raises(RateLimited, match="2 answers"):
        caller_of(access, KEY_B).usage.open_request()


def test_a_broken_or_missing_file_is_logged_and_the_old_keys_stay(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.toml", entry("a", KEY_A))
    access = Access(file, "")
    for break_it in (lambda: write(file, f"[[keys]\nkey = '{KEY_B}'"), file.unlink):
        break_it()
        with capture_logs() as logs:
            access.reload_if_changed()
            access.reload_if_changed()
        assert [each["log_level"] for each in logs] == ["error"], "once for each change"
        assert KEY_B not in str(logs)
        assert caller_of(access, KEY_A).name == "a"
    write(file, entry("a", KEY_B))
    access.reload_if_changed()
    assert caller_of(access, KEY_B).name == "a"


def test_salts_of_different_tenants_always_differ() -> None:
    def salt(name: str, sent: str, **fields: object) -> str:
        return make_caller(name=name, **fields).adapt(make_request(cache_salt=sent)).spec.cache_salt

    assert salt("a", "x") == salt("a", "x") != salt("a", "y")
    assert salt("a", "") != salt("b", "")
    assert salt("a", "b") != salt("ab", "") and salt("a", " b") != salt("a", "b")
    assert salt("a", "s", cache_salt="shared") == salt("b", "s", cache_salt="shared")
    assert salt("a", "", cache_salt="b") != salt("b", "")
    everything = {salt(name, sent) for name in ("a", "name:a", "a,name:b") for sent in ("", "a", "name:a ", "b")}
    assert len(everything) == 12


def test_a_request_may_only_lower_the_urgency_of_its_key() -> None:
    caller = make_caller(priority=5)
    assert caller.adapt(make_request()).spec.priority == 5
    assert caller.adapt(make_request(priority=9)).spec.priority == 9
    with pytest.raises(PermissionDenied, match="priority is -1, the lowest of the API key 'team' is 5") as refused:
        caller.adapt(make_request(priority=-1))
    assert refused.value.param == "priority"
    assert make_caller(priority=5, min_priority=-3).adapt(make_request(priority=-3)).spec.priority == -3
    assert make_caller(priority=-5).adapt(make_request()).spec.priority == -5
    assert make_caller(priority=-5).adapt(make_request(priority=0)).spec.priority == 0
    with pytest.raises(PermissionDenied, match="priority is 0, "):
        caller.adapt(make_request(priority=0))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], None),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], "Bearer a"),
        ([(b"x-api-key", b"k"), (b"x-api-key", b"l")], "Bearer k"),
        ([(b"x-api-key", b"k"), (b"authorization", b"Bearer a")], "Bearer a"),
        ([(b"authorization", b""), (b"x-api-key", b"k")], "Bearer k"),
        ([(b"authorization", b"Bearer \xe9")], "Bearer é"),
    ],
)
def test_the_key_of_a_request_is_in_the_first_of_its_headers(
    headers: list[tuple[bytes, bytes]], expected: str | None
) -> None:
    assert _authorization({"headers": headers}) == expected
