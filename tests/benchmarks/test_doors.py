"""The script that measures the doors: each case is answered, and a failed one is not measured."""

import doors
import pytest
import uvloop


def test_each_case_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(doors, "READS", 40)
    monkeypatch.setattr(doors, "REQUESTS_A_ROUND", {"tensor of 600 KB": 2})
    uvloop.run(doors.main(1, ""))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(doors.CASES) + len(doors.METHODS) * len(doors.DEADLINES)
    assert all(float(line.split()[-2]) > 0 for line in lines)


def test_errors_are_not_measured(monkeypatch):
    monkeypatch.setattr(doors.FramedPlane, "admit", lambda *_: 1 / 0)

    async def main():
        doors.grpc_door("/inference.GRPCInferenceService/ModelInfer", doors.DEADLINES["no deadline"]).us()

    with pytest.raises(SystemExit, match="expected an answer"):
        uvloop.run(main())
