"""Which URLs may be fetched; the cases are those that other servers fell for."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest

from torchere.serving.errors import DownloadFailed, ModelNotFound
from torchere.serving.store import url_rules as allowed_urls
from torchere.serving.store.url_rules import allow, is_public, names_host

TORCHSERVE_DEFAULT = ("file://.*|http(s)?://.*",)


def test_nothing_is_allowed_by_default_and_the_text_is_torchserves() -> None:
    url = "https://models.example.com/a.mar"
    with pytest.raises(ModelNotFound) as caught:
        allow(url, ())
    assert caught.value.message == f"Given URL {url} does not match any allowed URL(s)"
    assert caught.value.detail == "allowed_urls is empty"


def test_a_pattern_matches_the_whole_url_in_any_case() -> None:
    patterns = ("https://a/.*", r"https://models\.example\.com/.*\.mar")
    source = allow("HTTPS://Models.Example.com/x/a.mar", patterns)
    assert (source.scheme, source.host, source.port) == ("https", "models.example.com", 443)
    assert (source.target, source.file_name) == ("/x/a.mar", "a.mar")
    with pytest.raises(ModelNotFound) as caught:
        allow("https://models.example.com/a.mar?x", patterns)
    assert caught.value.detail == "no pattern of allowed_urls matches it"


def test_a_query_is_sent_and_is_not_part_of_the_name() -> None:
    source = allow("http://h:8000/a.mar?signature=x%2Fy", TORCHSERVE_DEFAULT)
    assert (source.port, source.target, source.file_name) == (8000, "/a.mar?signature=x%2Fy", "a.mar")


@pytest.mark.parametrize(("port", "expected"), [("", 80), (":", 80), (":8080", 8080)])
@pytest.mark.parametrize("host", ["::1", "2606:2800::1", "::ffff:1.2.3.4"])
def test_an_ipv6_address_stands_in_brackets(host: str, port: str, expected: int) -> None:
    source = allow(f"http://[{host}]{port}/a.mar", TORCHSERVE_DEFAULT)
    assert (source.host, source.port) == (host, expected)


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_url_is_a_path(host: str) -> None:
    source = allow(f"file://{host}/srv/my%20models/a.mar", TORCHSERVE_DEFAULT)
    assert (source.host, source.target, source.file_name) == ("", "/srv/my models/a.mar", "a.mar")


@pytest.mark.parametrize(
    "url",
    [
        "https://allowed.example@evil.example/a.mar",
        "https://allowed.example:x@evil.example/a.mar",
        "https://evil.example\\@allowed.example/a.mar",
        "https://evil.example#@allowed.example/a.mar",
        "https://evil%2eexample/a.mar",
        "https://evil.example/a b.mar",
        "https://evil.example/a b/a.mar",
        "https://evil.example/a.mar\n",
        "https://evil.example/a.mar#.mar",
        "https://evil.example/\u0430.mar",
        "https://evil.example/\u0430/a.mar",
        "https://evil.example/\x7f/a.mar",
        "https:///a.mar",
        "https://[::1/a.mar",
        "https://[2606:2800::1].allowed.example/a.mar",
        "https://allowed.example[2606:2800::1]/a.mar",
        "https://[93.184.216.34].allowed.example/a.mar",
        "https://[v1.evil]/a.mar",
        "https://evil.example:99999/a.mar",
        "https://evil.example:0/a.mar",
        "https://evil.example/" + "a" * 2048 + "/a.mar",
        "https://evil.example/" + "a" * 256,
        "https://evil.example/",
        "https://evil.example/.mar",
        "https://evil.example/a%2fb.mar",
        "file:///models/%00/a.mar",
        "file:///models/%2500/a.mar",
        "file://host/a.mar",
        "gopher://evil.example/a.mar",
        "ftp://evil.example/a.mar",
        "jar:file:///a.mar",
    ],
)
def test_a_url_that_could_deceive_a_pattern_is_refused_though_one_matches(url: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        allow(url, ("(?s).*",))
    assert caught.value.message.startswith("Given URL ")


def test_a_refused_url_is_named_without_its_query_which_may_hold_a_signature() -> None:
    for url in ("https://models.example.com/a.mar", "https://models.example.com/../a.mar"):
        with pytest.raises(ModelNotFound) as caught:
            allow(f"{url}?signature=secret", ())
        assert url in caught.value.message
        assert "secret" not in caught.value.full_text


@pytest.mark.parametrize("dots", ["..", "%2e%2e", ".%2E", "%252e%252e"])
def test_dots_are_refused_however_they_are_encoded(dots: str) -> None:
    with pytest.raises(ModelNotFound, match="Relative path is not allowed in url: "):
        allow(f"https://models.example.com/public/{dots}/private/a.mar", ("https://.*",))


def test_a_pattern_that_takes_for_ever_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_urls, "MATCH_TIMEOUT_S", 0.5)
    with pytest.raises(ModelNotFound):
        allow("http://h/" + "a" * 200 + ".mar", (r"http://h/(a+)+\d",))


def test_a_pattern_that_is_none_matches_nothing_and_may_stand_beside_no_other() -> None:
    with pytest.raises(ModelNotFound):
        allow("http://h/a.mar", ("http://.*", "["))


@pytest.mark.parametrize(("port", "expected"), [("", 80), (":8080", 8080)])
def test_one_of_the_patterns_that_match_has_to_spell_out_a_private_host(port: str, expected: int) -> None:
    patterns = ("http://.*", "http://10.0.0.1(:8080)?/.*")
    named, other = (allow(f"http://10.0.0.{last}{port}/a.mar", patterns) for last in (1, 2))
    assert (named.may_be_private, other.may_be_private) == (True, False)
    assert named.port == other.port == expected


def test_a_pattern_that_is_too_long_matches_nothing() -> None:
    with pytest.raises(ModelNotFound):
        allow("http://h/a.mar", ("http://h/a.mar|" + "x" * 1024,))


def test_a_signed_url_is_no_argument_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowed_urls, "MATCH_TIMEOUT_S", 2.0)
    url = "http://h/" + "a" * 40 + ".mar?signature=SECRET"
    seen = ""
    with ThreadPoolExecutor(1) as pool:
        matching = pool.submit(allow, url, ("(http://h/(a+)+b)",))
        while not matching.done() and "re.fullmatch" not in seen:
            for child in psutil.Process().children():
                with suppress(psutil.Error):
                    seen += " ".join(child.cmdline())
    with pytest.raises(ModelNotFound):
        matching.result()
    assert "re.fullmatch" in seen
    assert "SECRET" not in seen


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
        "fec0::1",
        "4000::1",
        *("192.0.0.192", "::ffff:192.0.0.192", "64:ff9b::c000:c0"),
        *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:1::1"),
    ],
)
def test_addresses_of_this_machine_and_its_network_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"])
def test_other_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("pattern", "host", "named"),
    [
        (r"http://127\.0\.0\.1(:\d+)?/.*", "127.0.0.1", True),
        ("http://localhost:.*", "localhost", True),
        (r"https?://(a|models\.internal)/.*", "models.internal", True),
        ("http://MODELS.internal./.*", "models.internal", False),
        ("http://.*models.internal/.*", "models.internal", False),
        ("http://x.models.internal/.*", "models.internal", False),
        ("http://models.internal.example/.*", "models.internal", False),
        ("https?://.*/models/.*", "models", False),
        ("https?://[^/]+/localhost/.*", "localhost", False),
        ("https://.*", "https", False),
        (r"https?:\/\/models\.internal\/.*", "models.internal", True),
        ("file://.*|http(s)?://.*", "localhost", False),
        ("http://[0-9.]+/.*", "10.0.0.1", False),
        ("http://.*", "", False),
    ],
)
def test_a_private_host_must_be_spelt_out(pattern: str, host: str, named: bool) -> None:
    assert names_host(pattern, host) is named


def test_a_url_that_is_none_fails_to_download_where_a_pattern_matches_it() -> None:
    with pytest.raises(DownloadFailed) as caught:
        allow("http://localhost:aaaa", ["http.*"])
    assert caught.value.message == "Failed to download archive from: http://localhost:aaaa"
    with pytest.raises(DownloadFailed) as caught:
        allow("http://localhost:aaaa/m.mar?signature=S", ["http.*"])
    assert "signature" not in caught.value.message  # a redirect may have led here
    with pytest.raises(ModelNotFound):
        allow("http://localhost:aaaa", ["https://a/.*"])
