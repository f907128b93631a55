"""Plain numbers of what versions did."""

from torchere.serving.telemetry.statistics import StatisticsTable, VersionStatistics


def test_each_request_has_the_time_of_its_whole_batch() -> None:
    statistics = VersionStatistics()
    statistics.batch_finished([0.0, 1.0], [], executor_s=2.0, handler_s=1.5)
    assert (statistics.handler.count, statistics.handler.ns) == (2, 3_000_000_000)
    assert (statistics.success.count, statistics.success.ns) == (2, 5_000_000_000)
    assert statistics.batches[2].handler.count == 1
    assert statistics.executions == 1


def test_a_batch_of_what_goes_on_is_an_execution_without_requests() -> None:
    statistics = VersionStatistics()
    statistics.batch_finished([], [], executor_s=1.0, handler_s=1.0)
    assert (statistics.executions, statistics.success.count, statistics.batches) == (1, 0, {})


def test_failures_are_not_computing() -> None:
    statistics = VersionStatistics()
    statistics.batch_finished([], [0.0], executor_s=1.0, handler_s=3.0)
    assert (statistics.fail.count, statistics.handler.count, statistics.around.ns) == (1, 0, 0)


def test_a_version_that_is_gone_begins_anew() -> None:
    table = StatisticsTable()
    before = table.of("m", "1")
    assert table.of("m", "1") is before
    assert table.of("m", "2") is not before
    table.forget("m", "1")
    table.forget("m", "1")
    assert table.of("m", "1") is not before
