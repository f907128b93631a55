"""Requests that are suspect, convicted or acquitted, with a clock that the test moves; files of convicts."""

import asyncio
import base64
import json
import logging
import resource
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torchere.serving.batching.quarantine import (
    MAX_KNOWN,
    SUFFIX,
    SUSPECT_FOR_S,
    Conviction,
    Quarantine,
    QuarantineFiles,
    Verdict,
    digest_of,
    save,
)
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import QuarantineSettings
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorDied,
    HandlerFailed,
    InvalidRequest,
    NoRoom,
    Quarantined,
)
from torchere.serving.types import InferRequest, InferResponse, ModelKey, Parameter
from torchere.serving.workers.executor import BatchReport, Outcome

CRASH = ExecutorDied("killed by signal 11 (SIGSEGV)", crashed=True)
ANSWER = InferResponse(b"fine")
KEY = ModelKey("net", "1.0")


def asked(request_id: str, *parameters: Parameter, headers: Sequence[tuple[str, str]] = ()) -> Request:
    request = Request(request_id, 0.0)
    request.parameters, request.headers = parameters, headers
    return request


def request(content: str, request_id: str = "id", **headers: str) -> Request:
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return asked(request_id, Parameter("body", content.encode()), headers=named)


class Court:
    """A quarantine, its clock and its convictions."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.convictions: list[Conviction] = []
        self.quarantine = Quarantine(self.convictions.append, now=lambda: self.now_s)

    def run(
        self,
        *contents: str,
        outcome: Outcome = CRASH,
        began_s: float | None = None,
        alone: bool = True,
    ) -> list[Outcome]:
        """A run that began now (or at `began_s`) and ended with one outcome for all, a second later.

        `alone`: nothing else was in its process.
        """
        began_s = self.now_s if began_s is None else began_s
        self.now_s += 1.0
        report = BatchReport([outcome] * len(contents))
        requests = [request(content) for content in contents]
        if not self.quarantine.concerns(report):
            return list(report.outcomes)
        return list(self.quarantine.judge(requests, report, began_s, alone=alone).outcomes)

    def verdict(self, content: str) -> Verdict:
        return self.quarantine.verdict(request(content, "another id"))


def test_as_long_as_nothing_crashes_there_is_nothing_to_ask() -> None:
    court = Court()
    assert court.run("a", outcome=ANSWER) == [ANSWER]
    assert not court.quarantine.active
    assert not court.quarantine.concerns(BatchReport([ANSWER]))
    assert not court.quarantine.concerns(BatchReport([]))


def test_a_request_is_convicted_at_its_second_crash_and_not_before() -> None:
    court = Court()
    assert court.run("bad") == [CRASH]
    assert court.verdict("bad") is Verdict.SUSPECT
    (second,) = court.run("bad")
    assert isinstance(second, Quarantined)
    assert court.verdict("bad") is Verdict.CONVICTED
    (conviction,) = court.convictions
    assert conviction.causes == ("killed by signal 11 (SIGSEGV)",) * 2
    assert court.quarantine.convicted == 1


def test_requests_that_only_shared_the_batch_go_free() -> None:
    court = Court()
    court.run("bad", "good")
    assert court.verdict("good") is Verdict.SUSPECT
    court.run("good", outcome=ANSWER)
    assert court.verdict("good") is Verdict.CLEAN
    court.run("bad")
    assert court.verdict("bad") is Verdict.CONVICTED


def test_one_that_goes_free_takes_no_other_of_its_size_along() -> None:
    court = Court()
    court.run("one", "two")
    court.run("six", outcome=ANSWER)  # it was no suspect
    court.run("two", outcome=ANSWER)
    assert [court.verdict(content) for content in ("one", "two", "six")] == [
        Verdict.SUSPECT,
        Verdict.CLEAN,
        Verdict.CLEAN,
    ]


def test_a_convict_stays_one_and_is_told_of_once_whatever_comes_of_its_other_runs() -> None:
    court = Court()
    court.run("bad")
    court.run("bad")
    (again,) = court.run("bad")
    assert isinstance(again, Quarantined) and again.detail == CRASH.detail
    assert court.run("bad", outcome=ANSWER) == [ANSWER]
    assert court.verdict("bad") is Verdict.CONVICTED
    assert len(court.convictions) == 1


def test_a_second_crash_in_company_convicts_no_request() -> None:
    court = Court()
    court.run("bad", "good")
    assert court.run("bad", "good") == [CRASH, CRASH]
    assert court.verdict("good") is Verdict.SUSPECT


def test_a_second_crash_beside_other_runs_of_the_process_convicts_no_request() -> None:
    court = Court()
    court.run("bad", alone=False)
    assert court.run("bad", alone=False) == [CRASH]
    assert court.verdict("bad") is Verdict.SUSPECT
    (third,) = court.run("bad")
    assert isinstance(third, Quarantined)


def test_a_first_crash_beside_other_runs_makes_a_suspect_and_a_survivor_is_acquitted() -> None:
    court = Court()
    court.run("bad", alone=False)
    assert court.verdict("bad") is Verdict.SUSPECT
    court.run("bad", outcome=ANSWER, alone=False)
    assert court.verdict("bad") is Verdict.CLEAN


def test_runs_that_began_before_the_first_crash_are_no_second_trial() -> None:
    # All workers are killed at once while every client sends the same.
    court = Court()
    began_s = court.now_s
    court.run("same", began_s=began_s)
    assert court.run("same", began_s=began_s) == [CRASH]
    assert court.verdict("same") is Verdict.SUSPECT


def test_a_handler_that_fails_has_survived_the_request() -> None:
    court = Court()
    court.run("bad")
    court.run("bad", outcome=HandlerFailed())
    assert court.verdict("bad") is Verdict.CLEAN
    assert not court.quarantine.active


@pytest.mark.parametrize(
    "outcome",
    [
        Cancelled(),
        DeadlineExceeded("slow"),
        InvalidRequest("no tensor"),
        NoRoom("Out of resources"),
        ExecutorDied("the version was unloaded"),
    ],
)
def test_a_run_that_was_cut_short_says_nothing(outcome: Outcome) -> None:
    court = Court()
    court.run("bad")
    court.run("bad", outcome=outcome)
    assert court.verdict("bad") is Verdict.SUSPECT
    (second,) = court.run("bad")
    assert isinstance(second, Quarantined)


def test_a_crash_that_no_request_can_have_caused_makes_none_suspect() -> None:
    court = Court()
    court.run("bad", outcome=ExecutorDied("the version was unloaded"))
    assert court.verdict("bad") is Verdict.CLEAN


def test_an_empty_request_is_never_to_blame() -> None:
    court = Court()
    for _ in range(3):
        assert court.run("") == [CRASH]


def test_a_suspect_is_forgotten_when_it_does_not_come_again() -> None:
    court = Court()
    court.run("bad")
    court.now_s += SUSPECT_FOR_S - 1.0
    assert court.verdict("bad") is Verdict.SUSPECT
    court.now_s += 1.0
    assert court.verdict("bad") is Verdict.CLEAN
    assert not court.quarantine.active


def test_the_table_is_bounded_and_those_not_heard_of_for_longest_are_forgotten() -> None:
    court = Court()
    court.run(*(f"{number:05}" for number in range(MAX_KNOWN)))
    assert court.verdict("00000") is Verdict.SUSPECT  # asked about
    court.run("00001", "another")  # crashed again, in company
    court.run("and another")
    known = {f"{number:05}" for number in range(5) if court.verdict(f"{number:05}") is Verdict.SUSPECT}
    assert known == {"00000", "00001", "00004"}


def test_a_view_of_a_body_is_the_same_content_as_its_bytes() -> None:
    view: Any = memoryview(b"..abc..")[2:5]
    as_view = asked("1", Parameter("x", view))
    assert digest_of(as_view) == digest_of(asked("2", Parameter("x", b"abc")))


def test_a_report_keeps_what_it_says_of_its_batch() -> None:
    court = Court()
    court.run("bad")
    report = BatchReport([InferResponse(b"")], 3.0, (), (0.5, 1.0, 0.25), 2.0)
    assert court.quarantine.judge([request("good")], report, 0.0, alone=True) == report


def test_the_identity_is_the_content_and_not_who_sends_it() -> None:
    first = request("x", "1", content_type="text/plain", traceparent="a", Authorization="b")
    assert digest_of(first) == digest_of(request("x", "2", Content_Type="text/plain", date="now"))
    others = [
        request("y", content_type="text/plain"),
        request("x", content_type="application/json"),
        asked("1", Parameter("data", b"x"), headers=first.headers),
        asked("1", Parameter("body", b""), Parameter("body", b"x"), headers=first.headers),
    ]
    assert len({digest_of(each) for each in [first, *others]}) == 5


def test_a_form_in_parts_has_one_identity_under_any_boundary() -> None:
    def form(boundary: str, kind: str = "image/png") -> Request:
        headers = (("Content-Type", f"Multipart/form-data; boundary={boundary}"),)
        return asked("id", Parameter("data", b"x", kind), headers=headers)

    assert digest_of(form("one")) == digest_of(form("two"))
    assert digest_of(form("one")) != digest_of(form("one", "image/gif"))


KILLED = ExecutorDied("killed by signal 9 (SIGKILL)")
OUT_OF_MEMORY = ExecutorDied("killed by signal 9 (SIGKILL): out of memory", out_of_memory=True)


def test_kills_from_outside_are_no_evidence() -> None:
    court = Court()
    for _ in range(3):
        assert court.run("harmless", outcome=KILLED) == [KILLED]
    assert court.verdict("harmless") is Verdict.CLEAN


def test_a_kill_for_memory_has_the_request_run_alone_and_never_convicts_it() -> None:
    court = Court()
    for _ in range(3):
        assert court.run("large", outcome=OUT_OF_MEMORY) == [OUT_OF_MEMORY]
        assert court.verdict("large") is Verdict.SUSPECT
    assert court.run("large") == [CRASH]  # its first crash
    (second,) = court.run("large")
    assert isinstance(second, Quarantined)


def test_a_conviction_expires() -> None:
    court = Court()
    court.quarantine = Quarantine(now=lambda: court.now_s, expiry_s=3600.0)
    court.run("bad")
    (second,) = court.run("bad")
    assert "is not run again until its quarantine ends" in str(second)
    court.now_s += 3599.0
    assert court.verdict("bad") is Verdict.CONVICTED
    court.now_s += 1.0
    assert (court.quarantine.convicted, court.quarantine.active) == (0, False)
    assert court.verdict("bad") is Verdict.CLEAN


def test_convictions_are_lifted_one_by_one_or_all_at_once() -> None:
    court = Court()
    court.quarantine = Quarantine(now=lambda: court.now_s, expiry_s=3600.0)
    for name in ("a", "b", "c"):
        court.run(name)
        court.run(name)
    court.run("suspect")
    convicts = court.quarantine.convicts()
    assert [convict.size for convict in convicts] == [1, 1, 1]
    assert len(convicts[0].causes) == 2
    assert convicts[0].convicted_for_s + (convicts[0].expires_in_s or 0.0) == 3600.0
    assert court.quarantine.lift("unknown") == 0
    assert court.quarantine.lift(convicts[0].digest) == 1
    assert [court.verdict(name) for name in ("a", "b")] == [Verdict.CLEAN, Verdict.CONVICTED]
    assert court.quarantine.lift() == 2
    assert court.quarantine.convicted == 0
    assert court.verdict("suspect") is Verdict.SUSPECT


def convicted(content: bytes = b"\x00poison", digest: str = "d" * 32) -> Conviction:
    headers = (("Content-Type", "image/jpeg"), ("Authorization", "Bearer secret"), ("X-Api-Key", "secret"))
    request = InferRequest("id-1", (Parameter("body", content, "image/jpeg"),), headers)
    return Conviction(request, digest, ("exited with code 7", "killed by signal 11 (SIGSEGV)"))


def test_a_saved_request_can_be_replayed_and_holds_no_secret(tmp_path: Path) -> None:
    path = save(KEY, convicted(), QuarantineSettings(tmp_path / "q"))
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    saved = json.loads(path.read_text())
    assert base64.b64decode(saved["parameters"][0]["base64"]) == b"\x00poison"
    assert saved["headers"] == [["Content-Type", "image/jpeg"]]
    assert "secret" not in path.read_text()
    assert (saved["model"], saved["causes"]) == (
        "net",
        ["exited with code 7", "killed by signal 11 (SIGSEGV)"],
    )


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    settings = QuarantineSettings(tmp_path, max_files=3)
    written = [save(KEY, convicted(digest=f"{number:032}"), settings) for number in range(5)]
    assert sorted(tmp_path.iterdir()) == written[2:]


def test_what_was_saved_just_now_stays_beside_files_from_a_clock_that_was_ahead(tmp_path: Path) -> None:
    settings = QuarantineSettings(tmp_path, max_files=2)
    for year in (2098, 2099):
        (tmp_path / f"{year}0101T000000000000-net-{'d' * 12}{SUFFIX}").write_text("{}")
    path = save(KEY, convicted(), settings)
    assert path is not None
    assert [file.name[:4] for file in sorted(tmp_path.iterdir())] == [path.name[:4], "2099"]


def test_the_oldest_go_when_they_are_too_large(tmp_path: Path) -> None:
    settings = QuarantineSettings(tmp_path, max_bytes=3000)
    for number in range(5):
        save(KEY, convicted(b"x" * 500, f"{number:032}"), settings)
    left = list(tmp_path.iterdir())
    assert 0 < sum(file.stat().st_size for file in left) <= 3000
    assert len(left) == 2


def test_a_request_over_the_bound_is_not_saved(tmp_path: Path) -> None:
    assert save(KEY, convicted(b"x" * 500), QuarantineSettings(tmp_path, max_bytes=400)) is None
    assert list(tmp_path.iterdir()) == []


def test_what_fits_on_the_disk_in_part_only_is_not_left_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(KEY, convicted(b"x" * 500), QuarantineSettings(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_the_copy_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    async def main() -> None:
        files = QuarantineFiles(KEY, QuarantineSettings(tmp_path / "file" / "q"))
        files(convicted())
        await asyncio.gather(*files._writing)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "request id-1 is quarantined" in caplog.text
    assert "can't be saved" in caplog.text
