"""Downloads from a real server on this machine that behaves as badly as it is told to."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from torchere.serving.errors import DownloadFailed, ModelNotFound, ServingError
from torchere.serving.store.fetch import Download, Downloader, Interrupt

LOCAL = (r"http://127\.0\.0\.1:\d+/.*",)
BODY = b"archive" * 50_000


class Misbehaving(BaseHTTPRequestHandler):
    """What is asked for decides how it is answered; `hosts` are the Host headers that were seen."""

    protocol_version = "HTTP/1.1"
    hosts: list[str]
    released: threading.Event
    asked: threading.Event

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        self.close_connection = True
        kind, _, rest = self.path.lstrip("/").partition("/")
        getattr(self, f"answer_{kind}")(rest)

    def head(self, status: int = 200, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def answer_good(self, _: str) -> None:
        self.head(Content_Length=len(BODY))
        self.wfile.write(BODY)

    def answer_chunked(self, _: str) -> None:
        self.head(Transfer_Encoding="chunked")
        self.wfile.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    def answer_cutchunks(self, _: str) -> None:
        self.head(Transfer_Encoding="chunked")
        self.wfile.write(b"ff\r\nabc")

    def answer_short(self, _: str) -> None:
        self.head(Content_Length=10)
        self.wfile.write(b"abc")

    def answer_missing(self, _: str) -> None:
        self.head(404, Content_Length=0)

    def answer_to(self, target: str) -> None:
        self.head(302, Location=f"/{target}", Content_Length=0)

    def answer_elsewhere(self, _: str) -> None:
        self.head(302, Location="http://169.254.169.254/good/a.mar?signature=S", Content_Length=0)

    def answer_tofile(self, _: str) -> None:
        self.head(302, Location="file:///etc/passwd", Content_Length=0)

    def answer_loop(self, rest: str) -> None:
        self.head(302, Location=f"/loop/{rest}", Content_Length=0)

    def answer_drip(self, _: str) -> None:
        self.head(Content_Length=10)
        self.wfile.write(b"a")
        self.released.wait(30)

    def answer_notaurl(self, _: str) -> None:
        self.head(302, Location="http://[::1/a.mar", Content_Length=0)

    def answer_chatter(self, _: str) -> None:
        self.send_response_only(403, "no " * 10_000)
        self.end_headers()

    def answer_trickle(self, _: str) -> None:
        self.head()
        with suppress(ConnectionError):  # the client hangs up
            while not self.released.wait(0.01):
                self.wfile.write(b"a")

    def answer_silence(self, _: str) -> None:
        self.released.wait(30)

    def answer_endless(self, _: str) -> None:
        self.head()  # no length: the body ends where the connection does
        self.wfile.write(b"a")
        self.asked.set()
        self.released.wait(30)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Misbehaving.hosts = []
    Misbehaving.released, Misbehaving.asked = threading.Event(), threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        Misbehaving.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def at(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def downloader(patterns: tuple[str, ...] = LOCAL, **options: Any) -> Downloader:
    return Downloader(patterns, **{"max_bytes": 2**20, "timeout_s": 30.0, **options})


def test_an_archive_is_copied_under_its_own_name(at: str, tmp_path: Path) -> None:
    downloaded = downloader().download(f"{at}/good/a.mar?signature=x", tmp_path)
    target = tmp_path / "a.mar"
    assert downloaded == Download(target, is_new=True)
    assert target.read_bytes() == BODY
    assert target.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [target]


def test_a_body_in_chunks_is_put_together(at: str, tmp_path: Path) -> None:
    assert downloader().download(f"{at}/chunked/a.mar", tmp_path).path.read_bytes() == b"abcde"


def test_a_redirect_to_an_allowed_url_is_followed(at: str, tmp_path: Path) -> None:
    assert downloader().download(f"{at}/to/good/b.mar", tmp_path).path.read_bytes() == BODY


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing/a.mar", "the server answered 404 Not Found"),
        ("short/a.mar", "the connection ended after 3 of 10 bytes"),
        ("cutchunks/a.mar", "IncompleteRead"),
        ("elsewhere/a.mar", "it redirects to 'http://169.254.169.254/good/a.mar', which allowed_urls"),
        ("tofile/a.mar", "it redirects to 'file:///etc/passwd', which allowed_urls does not match"),
        ("loop/a.mar", "more than 5 redirects"),
        ("notaurl/a.mar", "it redirects to 'http://[::1/a.mar', which allowed_urls does not match"),
    ],
)
def test_a_failure_says_why_and_leaves_nothing(at: str, tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(DownloadFailed) as caught:
        downloader().download(f"{at}/{path}", tmp_path)
    assert caught.value.message == f"Failed to download archive from: {at}/{path}"
    assert reason in caught.value.detail
    assert list(tmp_path.iterdir()) == []


def test_what_another_server_says_is_shown_in_short(at: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed) as caught:
        downloader().download(f"{at}/chatter/a.mar", tmp_path)
    assert caught.value.detail.startswith("the server answered 403 no no no")
    assert len(caught.value.detail) < 300


@pytest.mark.parametrize("kind", ["drip", "silence", "endless", "trickle"])
def test_a_server_that_keeps_us_waiting_is_cut_off(at: str, tmp_path: Path, kind: str) -> None:
    with pytest.raises(DownloadFailed) as caught:
        downloader(timeout_s=0.2).download(f"{at}/{kind}/a.mar", tmp_path)
    assert "it took longer than download_timeout_s" in caught.value.detail
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_nobody_waits_for_is_ended_and_not_taken_for_whole(at: str, tmp_path: Path) -> None:
    interrupt = Interrupt()

    def stop_once_asked() -> None:
        if Misbehaving.asked.wait(30):
            interrupt.stop()

    stopper = threading.Thread(target=stop_once_asked)
    stopper.start()
    with pytest.raises(DownloadFailed) as caught:
        downloader().download(f"{at}/endless/a.mar", tmp_path, interrupt=interrupt)
    stopper.join()
    assert caught.value.detail == "it was given up before its end"
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_given_up_before_it_began_does_not_begin(at: str, tmp_path: Path) -> None:
    interrupt = Interrupt()
    interrupt.stop()
    asked: list[str] = []

    def address(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    with pytest.raises(DownloadFailed):
        downloader(resolver=address).download(f"{at}/good/a.mar", tmp_path, interrupt=interrupt)
    assert (Misbehaving.hosts, asked) == ([], [])


def test_a_redirect_never_leads_to_a_file(at: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed) as caught:
        downloader((*LOCAL, "file://.*")).download(f"{at}/tofile/a.mar", tmp_path)
    assert caught.value.detail == "it redirects from http to file"


def test_a_host_that_no_name_can_be_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed) as failed:
        downloader((".*",)).download(f"http://{'a' * 64}.example/m.mar", tmp_path)
    assert "too long" in failed.value.detail  # the label; Python 3.13 words it differently
    assert list(tmp_path.iterdir()) == []


def test_more_bytes_than_allowed_are_not_taken(at: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed) as caught:
        downloader(max_bytes=len(BODY) - 1).download(f"{at}/good/a.mar", tmp_path)
    assert "max_download_bytes" in caught.value.detail
    assert list(tmp_path.iterdir()) == []


def test_a_host_of_our_network_must_be_named_by_the_pattern(server: Any, tmp_path: Path) -> None:
    url = f"http://models.internal:{server.server_port}/good/a.mar"
    options = {"resolver": lambda host, port: ["127.0.0.1"]}
    with pytest.raises(DownloadFailed) as caught:
        downloader((r"http://[a-z.]+:\d+/.*",), **options).download(url, tmp_path)
    assert "models.internal is 127.0.0.1, an address of this machine or its network" in caught.value.detail
    assert server.RequestHandlerClass.hosts == []
    downloader((r"http://models\.internal:\d+/.*",), **options).download(url, tmp_path)
    assert server.RequestHandlerClass.hosts == [f"models.internal:{server.server_port}"]


@pytest.mark.parametrize("spelling", ["127.1", "0x7f.1", "2130706433", "localhost", "localhost.", "[::1]"])
def test_no_spelling_of_this_machine_gets_through_a_wide_pattern(
    server: Any, tmp_path: Path, spelling: str
) -> None:
    with pytest.raises(DownloadFailed):
        downloader(("http://.*",)).download(f"http://{spelling}:{server.server_port}/good/a.mar", tmp_path)
    assert server.RequestHandlerClass.hosts == []


def test_one_private_address_among_many_is_enough_to_refuse(tmp_path: Path) -> None:
    addresses = ["93.184.216.34", "10.0.0.1"]
    with pytest.raises(DownloadFailed) as caught:
        downloader(("http://.*",), resolver=lambda host, port: addresses).download("http://h/a.mar", tmp_path)
    assert "10.0.0.1" in caught.value.detail


def test_the_next_address_of_a_host_is_tried_if_one_refuses(server: Any, tmp_path: Path) -> None:
    def resolver(*_: object) -> list[str]:
        return ["127.0.0.2", "::1", "127.0.0.1"]

    one = downloader((r"http://models\.test:\d+/.*",), resolver=resolver)
    one.download(f"http://models.test:{server.server_port}/good/a.mar", tmp_path)
    assert (tmp_path / "a.mar").read_bytes() == BODY


def test_a_download_that_is_given_up_tries_no_further_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Interrupt()
    tried: list[str] = []

    def create_connection(address: tuple[str, int], _: float) -> None:
        tried.append(address[0])
        interrupt.stop()
        raise ConnectionRefusedError

    monkeypatch.setattr("torchere.serving.store.fetch.socket.create_connection", create_connection)
    one = downloader(
        (r"http://models\.test/.*",), resolver=lambda *_: ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    )
    with pytest.raises(DownloadFailed, match="Failed to download archive from"):
        one.download("http://models.test/a.mar", tmp_path, interrupt=interrupt)
    assert tried == ["127.0.0.2"]


def test_a_port_without_tls_is_no_https_server(server: Any, tmp_path: Path) -> None:
    url = f"https://127.0.0.1:{server.server_port}/good/a.mar"
    with pytest.raises(DownloadFailed) as caught:
        downloader((r"https://127\.0\.0\.1:.*",)).download(url, tmp_path)
    assert "SSL" in caught.value.detail


def test_a_file_that_is_there_is_not_overwritten(at: str, tmp_path: Path) -> None:
    (tmp_path / "a.mar").write_text("mine")
    with pytest.raises(ServingError) as caught:
        downloader().download(f"{at}/good/a.mar", tmp_path)
    assert caught.value.message == "Model file already exists a.mar"
    assert (tmp_path / "a.mar").read_text() == "mine"


def test_at_a_start_a_file_that_is_there_is_the_copy_of_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "a.mar").write_text("copy")
    found = downloader(("http://.*",)).download("http://models.internal/a.mar", tmp_path, by_operator=True)
    assert found == Download(tmp_path / "a.mar", is_new=False)
    with pytest.raises(ModelNotFound):  # a client's URL
        downloader(()).download("http://models.internal/a.mar", tmp_path)


def test_a_copy_of_an_earlier_start_is_taken_for_a_url_that_still_needs_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a.mar").write_text("here")
    url = "http://models.internal/a.mar"
    found = downloader(("http://models.internal/.*",)).download(url, tmp_path, reuses=True)
    assert found == Download(tmp_path / "a.mar", is_new=False)
    with pytest.raises(ModelNotFound):
        downloader(()).download(url, tmp_path, reuses=True)


@pytest.mark.parametrize("is_there", [False, True])
def test_of_two_urls_of_one_start_with_the_same_name_the_second_does_not_get_the_file_of_the_first(
    at: str, tmp_path: Path, is_there: bool
) -> None:
    first, second = f"{at}/good/a.mar?signature=1", f"{at}/to/good/a.mar?signature=2"
    if is_there:
        (tmp_path / "a.mar").write_text("of an earlier start")
    ours = downloader()
    ours.download(first, tmp_path, by_operator=True)
    with pytest.raises(ServingError) as caught:
        ours.download(second, tmp_path, by_operator=True)
    assert caught.value.message == "Model file already exists a.mar"
    assert f"a.mar is the file from {at}/good/a.mar;" in caught.value.detail
    again = ours.download(first.replace("=1", "=3"), tmp_path, by_operator=True)  # a new attempt
    assert again == Download(tmp_path / "a.mar", is_new=False)
    ours.origins.delete(tmp_path / "a.mar")
    assert ours.download(second, tmp_path, by_operator=True).is_new


def test_a_url_that_the_operator_names_needs_no_pattern(at: str, tmp_path: Path) -> None:
    url = f"{at}/good/a.mar?signature=a+b(c)"
    with pytest.raises(ModelNotFound):
        downloader(()).download(url, tmp_path)
    assert downloader(()).download(url, tmp_path, by_operator=True).path.read_bytes() == BODY


def test_a_redirect_of_the_operators_url_does_not_reach_other_private_hosts(at: str, tmp_path: Path) -> None:
    for path in ("elsewhere/a.mar", "tofile/a.mar"):
        with pytest.raises(DownloadFailed) as caught:
            downloader(()).download(f"{at}/{path}", tmp_path, by_operator=True)
        assert "signature" not in caught.value.full_text  # of the redirect
    assert (
        downloader(()).download(f"{at}/to/good/b.mar", tmp_path, by_operator=True).path.read_bytes() == BODY
    )


def test_of_two_servers_that_start_the_slower_one_takes_the_copy_of_the_other(
    at: str, tmp_path: Path
) -> None:
    def address(host: str, port: int) -> list[str]:
        (tmp_path / "a.mar").write_text("the other's")  # while ours is under way
        return ["127.0.0.1"]

    found = downloader(resolver=address).download(f"{at}/good/a.mar", tmp_path, by_operator=True)
    assert found == Download(tmp_path / "a.mar", is_new=False)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["the other's"]


def test_an_empty_file_is_no_copy_of_an_earlier_start(at: str, tmp_path: Path) -> None:
    (tmp_path / "a.mar").touch()
    found = downloader().download(f"{at}/good/a.mar", tmp_path, by_operator=True)
    assert found == Download(tmp_path / "a.mar", is_new=True)
    assert found.path.read_bytes() == BODY


def test_the_name_is_there_with_the_whole_file_or_not_at_all(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = os.open

    def watched(path: Any, flags: int, *more: Any, **named: Any) -> int:
        opened.append(str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", watched)
    downloader().download(f"{at}/good/a.mar", tmp_path)
    assert str(tmp_path / "a.mar") not in opened  # it was never there with nothing in it
    assert (tmp_path / "a.mar").read_bytes() == BODY


def test_a_store_without_hard_links_gets_its_file_all_the_same(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    downloader().download(f"{at}/good/a.mar", tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.mar", BODY)]


def test_a_name_that_no_file_can_have_is_not_fetched(at: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        downloader().download(f"{at}/good/{'a' * 300}.mar", tmp_path)


def test_a_store_that_cannot_be_written_is_said(at: str, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="Failed to save model: "):
        downloader().download(f"{at}/good/a.mar", tmp_path / "gone")


def test_a_file_url_is_copied_if_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.mar").write_bytes(BODY)
    url = f"file://{tmp_path}/elsewhere/a.mar"
    with pytest.raises(ModelNotFound):
        downloader().download(url, tmp_path)
    assert downloader((f"file://{tmp_path}/.*",)).download(url, tmp_path).path.read_bytes() == BODY


def test_a_file_url_of_no_regular_file_is_refused(tmp_path: Path) -> None:
    for place in ("/dev/null", "/dev"):
        with pytest.raises(DownloadFailed, match="Failed to download") as refusal:
            downloader(("file://.*",)).download(f"file://{place}", tmp_path)
        assert refusal.value.detail == f"{place} is not a regular file"
    with pytest.raises(DownloadFailed, match="Failed to download"):
        downloader(("file://.*",)).download("file:///nobody/a.mar", tmp_path)
    assert list(tmp_path.iterdir()) == []
