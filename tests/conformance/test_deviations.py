"""The table of deviations is complete, current and explained."""

import pytest
from conformity.deviations import DOCUMENT, deviations, documented_sections
from conformity.recordings import records, rest_names, rpc_names


@pytest.mark.parametrize("section", sorted(set(deviations().sections())))
def test_a_deviation_is_explained_in_the_documents(section: str) -> None:
    assert section in documented_sections(), f"{DOCUMENT.name} has no heading for it"


def test_no_heading_of_the_document_stands_twice() -> None:
    sections = documented_sections()

    assert sorted(set(sections)) == sorted(sections)


def test_every_deviation_names_a_recorded_case() -> None:
    table = deviations()

    assert table.rest.keys() <= set(rest_names())
    assert table.grpc.keys() <= set(rpc_names())


def test_every_deviation_differs_from_what_was_recorded() -> None:
    rest = {record["request"]["name"]: record for record in records("rest.json") if "request" in record}
    grpc = {record["name"]: record for record in records("grpc.json")}
    table = deviations()
    entries = [
        *((rest[name], deviation) for name, deviation in table.rest.items()),
        *((grpc[name], deviation) for name, deviation in table.grpc.items()),
    ]

    assert [
        deviation for record, deviation in entries if deviation.answer.items() <= record["response"].items()
    ] == []


@pytest.mark.parametrize(
    ("case", "lines", "section"),
    [
        ("open: inference: GET /ping/more", ["status 404, TorchServe 200"], "paths-are-matched-whole"),
        ("open: inference: GET /ping/more", ["status 500, TorchServe 200"], None),
        ("open: inference: GET /elsewhere", ["status 404, TorchServe 200"], None),
        (
            "open: headers: of a GET",
            ["body.headers.content-length is missing"],
            "headers-of-the-request-as-handlers-see-them",
        ),
        ("open: headers: of a GET", ["body.headers.content-length is missing", "body.a is missing"], None),
    ],
)
def test_a_section_explains_a_difference_line_by_line(
    case: str, lines: list[str], section: str | None
) -> None:
    assert deviations().section_for(case, lines) == section


def test_the_rest_of_an_answer_of_another_status_needs_no_explanation() -> None:
    lines = ["status 404, TorchServe 200", "body.status is missing"]

    assert deviations().section_for("open: inference: GET /ping/more", lines) == "paths-are-matched-whole"
