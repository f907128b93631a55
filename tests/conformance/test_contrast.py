"""What the differential comparison takes for a difference."""

from dataclasses import replace

from conformity.contrast import Answers, contrast
from conformity.rest import Answer
from conformity.rpc import RpcAnswer

OK = Answer(200, {"content-type": "application/json"}, True, {"a": 1}, ("\n  ", " ", "\n"))


def lines_between(theirs: Answer, ours: Answer) -> list[str]:
    return [line for one in contrast("p", Answers({"c": theirs}), Answers({"c": ours})) for line in one.lines]


def test_equal_answers_are_no_difference() -> None:
    assert lines_between(OK, OK) == []


def test_status_headers_body_and_layout_are_compared() -> None:
    assert lines_between(OK, replace(OK, status=404)) == ["status 404, TorchServe 200"]
    assert lines_between(OK, replace(OK, headers={})) == [
        "header content-type: None, TorchServe 'application/json'"
    ]
    assert lines_between(OK, replace(OK, has_request_id=False)) == ["x-request-id: False, TorchServe True"]
    assert lines_between(OK, replace(OK, body={})) == ["body.a is missing"]
    assert lines_between(OK, replace(OK, body={"a": 1, "b": 2})) == ["body.b TorchServe does not have"]
    assert lines_between(OK, replace(OK, layout=("\n",)))[0].startswith("layout: ")


def test_the_chunks_of_a_stream_are_compared() -> None:
    line = "chunks of (4,) bytes, TorchServe (1, 3)"
    assert lines_between(replace(OK, chunks=(1, 3)), replace(OK, chunks=(4,))) == [line]


def test_a_metric_family_is_compared_as_queries_see_it() -> None:
    theirs = replace(OK, body='# HELP a t\n# TYPE a gauge\na{Level="Host",} 1.0\n')
    ours = replace(OK, body='# HELP a t\n# TYPE a gauge\na{level="Host",} 1.0\n')
    assert lines_between(theirs, theirs) == []
    assert len(lines_between(theirs, ours)) == 1
    assert lines_between(theirs, replace(OK, body="# HELP b t\n")) == ["metric family a is missing"]


def test_members_of_ours_are_no_difference_and_change_the_layout() -> None:
    assert lines_between(OK, replace(OK, body={"a": 1, "torchere": {}}, layout=())) == []


def test_of_a_description_only_the_operations_count() -> None:
    def described(operation: str, summary: str) -> Answer:
        paths = {"/": {"get": {"operationId": operation, "summary": summary}}}
        return replace(OK, body={"openapi": "3.0.1", "info": {"title": "t"}, "paths": paths})

    assert lines_between(described("one", "theirs"), described("one", "ours")) == []
    assert len(lines_between(described("one", "x"), described("two", "x"))) == 1


def test_an_answer_that_is_none_differs_from_one_that_is() -> None:
    broken = Answers(broken={"c": "RemoteDisconnected"})

    assert [one.case for one in contrast("p", broken, Answers({"c": OK}))] == ["c"]
    assert list(contrast("p", broken, broken)) == []


def test_the_end_of_a_call_is_compared() -> None:
    theirs = Answers(grpc={"c": RpcAnswer("UNKNOWN", (), "")})
    ours = Answers(grpc={"c": RpcAnswer("ABORTED", (), "why")})

    (difference,) = contrast("p", theirs, ours)

    assert difference.lines == ["code ABORTED, TorchServe UNKNOWN", "details 'why', TorchServe ''"]
