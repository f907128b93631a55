"""`model-config.yaml` is outside input: typed, bounded, and nothing but data."""

from pathlib import Path
from typing import Any

import pytest

from torchere.serving.config.model_settings import _Reader, parse_model_config
from torchere.serving.config.server_settings import ISOLATIONS, ParallelSettings
from torchere.serving.errors import InvalidArchive


def test_the_keys_of_torchserve_are_read() -> None:
    config = parse_model_config(
        "minWorkers: 1\nmaxWorkers: 2\nbatchSize: 4\nmaxBatchDelay: 200\nresponseTimeout: 30\n"
        "deviceType: CPU\ndeviceIds: [0, 1]\njobQueueSize: 9\nhandler: {mine: [1]}\n"
    )
    assert (config.min_workers, config.max_workers, config.batch_size) == (1, 2, 4)
    assert (config.max_batch_delay_ms, config.response_timeout_s, config.job_queue_size) == (200, 30, 9)
    assert (config.device_type, config.device_ids) == ("cpu", (0, 1))
    assert config.raw["handler"] == {"mine": [1]}


def test_every_key_that_the_server_reads_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    monkeypatch.setattr(_Reader, "note_spellings", lambda reader: read.update(reader._read))
    parse_model_config("")
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    reference = text[text.index("\n### Keys of model-config.yaml\n") : text.index("\n## GPUs\n")]
    assert "batchSize" in read
    assert sorted(key for key in read if f"`{key}`" not in reference) == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_each_isolation_is_known(isolation: str) -> None:
    config = parse_model_config(f"isolation: {isolation.upper()}")
    assert (config.isolation, config.ignored) == (isolation, {})


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_nothing_but_is_there(text: str) -> None:
    config = parse_model_config(text)
    assert config.present
    assert config.raw == {}


@pytest.mark.parametrize(
    "text", ['batchSize: "4"', "batchSize: true", "batchSize: 1.5", "deviceIds: [a]", "isolation: sandbox"]
)
def test_a_wrong_type_is_ignored_and_noted(text: str) -> None:
    config = parse_model_config(text)
    assert (config.batch_size, config.device_ids, config.isolation) == (None, (), None)
    key = text.partition(":")[0]
    assert config.ignored[key].endswith("; it is ignored")


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("responseTimeout: -1", "is -1, expected at least 1; it is ignored"),
        ("batchSize: 0", "is 0, expected at least 1; it counts as 1"),
        ("minWorkers: 4", "is 4, expected a maxWorkers that is at least as large; it is ignored"),
        ("minWorkers: 4\nmaxWorkers: 2", "is 4, expected a maxWorkers that is at least as large"),
        ("maxWorkers: 2", "is 2, expected a minWorkers, too; it is ignored"),
        ("maxNumSequence: 3", "is 3, expected sequenceBatching: true beside it; it is ignored"),
        ("sequenceBatching: true", "is true without a sequenceMaxIdleMSec above 0: no request is admitted"),
        ("sequenceBatching: true\nsequenceMaxIdleMSec: 0", "is true without a sequenceMaxIdleMSec above 0"),
        ("batchsize: 3", "is no key of the server; did you mean batchSize?"),
        ("response_timeout: 3", "is no key of the server; did you mean responseTimeout?"),
    ],
)
def test_a_number_that_does_not_count_is_noted(text: str, remark: str) -> None:
    ((key, noted),) = parse_model_config(text).ignored.items()
    assert text.startswith(key)
    assert noted.startswith(remark)


SEQUENCES = "sequenceBatching: true\nsequenceMaxIdleMSec: 5000\nmaxNumSequence: 3"
IN_ANY_ORDER = "sequenceBatching: true\ncontinuousBatching: true"
OWN = "batch_size: 3\nbatchSize: 2\nhandler: {batch_size: 3}\nthreshold: 0.5\n3: 4"


@pytest.mark.parametrize(
    "text",
    ["maxBatchDelay: 0\nresponseTimeout: 0", "minWorkers: 1\nmaxWorkers: 1", SEQUENCES, IN_ANY_ORDER, OWN],
)
def test_a_number_that_counts_or_stands_for_nothing_is_not_noted(text: str) -> None:
    assert parse_model_config(text).ignored == {}


def test_broken_yaml_is_told_by_line_without_the_parsers_drawing() -> None:
    with pytest.raises(InvalidArchive) as caught:
        parse_model_config("minWorkers: 1\na: [\n")
    assert caught.value.message == (
        "The model config is not valid YAML: expected the node content, but found '<stream end>' "
        "in line 3, column 1"
    )


def test_a_number_in_base_60_that_is_too_large_for_a_float_is_no_yaml() -> None:
    with pytest.raises(InvalidArchive, match="not valid YAML: int too large to convert to float"):
        parse_model_config(f"minWorkers: {':'.join(['1'] * 199)}:1.")


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("batchSize: 65537", 65_536),
        ("minWorkers: 1025", 1024),
        ("maxBatchDelay: 2147483648", 2**31 - 1),
        ("responseTimeout: " + "9" * 400, 2**31 - 1),
        ("startupTimeout: " + "9" * 400, 2**31 - 1),
        ("sequenceMaxIdleMSec: " + "9" * 400, 2**31 - 1),
    ],
)
def test_a_number_beyond_all_bounds_is_refused(text: str, bound: int) -> None:
    key = text.partition(":")[0]
    with pytest.raises(InvalidArchive, match=f"{key} in the model config is too large, .* {bound}"):
        parse_model_config(text)


def test_what_is_below_the_least_is_the_least_or_not_said() -> None:
    config = parse_model_config("minWorkers: 0\nbatchSize: -3\nmaxRetryTimeoutInSec: -4\nresponseTimeout: 0")
    assert (config.min_workers, config.batch_size, config.max_retry_timeout_s) == (1, 1, 0)
    assert config.response_timeout_s is None


def test_a_delay_of_zero_behaves_as_unset() -> None:
    assert parse_model_config("maxBatchDelay: 0").max_batch_delay_ms is None


def tripling(levels: int, first: str, form: str) -> str:
    """Each level has the one before it three times."""
    lines = [f"k0: &k0 {first}"]
    lines += [f"k{n}: &k{n} " + form.format(f"[*k{n - 1}, *k{n - 1}, *k{n - 1}]") for n in range(1, levels)]
    return "\n".join(lines)


def test_aliases_that_repeat_little_are_fine() -> None:
    config = parse_model_config("a: &a [x]\n" + "".join(f"k{n}: *a\n" for n in range(200)))
    assert config.raw["k199"] == ["x"]


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "!!int {=: '0x" + "f" * 5000 + "'}"])
def test_a_number_longer_than_any_is_refused_with_its_place(number: str) -> None:
    with pytest.raises(InvalidArchive, match="a number of 5002 characters in line 2, column 12"):
        parse_model_config("minWorkers: 1\nisolation: " + number)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "[1, 2]",
        "a: [",
        "x",
        "[" * 200,
        tripling(34, "[x]", "{}"),
        tripling(14, "{x: 1}", "{{<<: {}}}"),
        "a: &a " + "x" * 100_000 + "\nb: [" + "*a," * 2_000 + "]",
        "a: &a [*a]",
        "a: " + "x" * 2_000_000,
        "a: 1" + ":1" * 20_000 + ".5",
        "a: 2026-02-30",
        "a: !!bool maybe",
        "a: !!timestamp then",
        "a: !!int ''",
    ],
    ids=[
        *(
            "python tag",
            "a list",
            "broken",
            "a word",
            "deep",
            "alias bomb",
            "merge bomb",
            "text bomb",
            "of itself",
        ),
        *("huge", "beyond floats", "no day", "no truth", "no time", "no number"),
    ],
)
def test_what_is_not_a_sane_mapping_is_refused(text: str) -> None:
    with pytest.raises(InvalidArchive, match="model config"):
        parse_model_config(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parallelType: TP\nparallelLevel: 2", ParallelSettings("tp", 2)),
        ("parallelType: custom\nparallelLevel: 4", ParallelSettings("custom", 4)),
        ("parallelType: pp\nparallelLevel: 2\ntorchrun: {nproc-per-node: 4}", ParallelSettings("pp", 4)),
        (
            "parallelType: pptp\ntorchrun: {nproc-per-node: 3, OMP_NUMBER_THREADS: 2, rdzv-backend: c10d}",
            ParallelSettings("pptp", 3, threads=2),
        ),
        ("parallelType: tp\ntorchrun: {}", ParallelSettings("tp", 1)),
        ("parallelType: tp", None),
        ("parallelLevel: 2", None),
        ("torchrun: {nproc-per-node: 4}", None),
        ("parallelType: rowwise\nparallelLevel: 2", None),
        ("parallelType: tp\nparallelLevel: 2\ntorchrun: 4", None),
    ],
)
def test_a_worker_is_spread_if_a_type_and_a_level_are_given(text: str, expected: Any) -> None:
    assert parse_model_config(text).parallel == expected


@pytest.mark.parametrize(
    ("text", "key", "remark"),
    [
        ("parallelType: tp", "parallelType", "is 'tp', and parallelLevel is not set; it has no effect"),
        ("parallelLevel: 2", "parallelLevel", "is 2, and parallelType is not set; it has no effect"),
        (
            *("parallelType: tp\nparallelLevel: 4\ntorchrun: {OMP_NUMBER_THREADS: 2}", "parallelLevel"),
            "is 4, and torchrun without nproc-per-node means 1; it is ignored",
        ),
        (
            *("torchrun: {nproc-per-node: 2}", "torchrun"),
            "is {'nproc-per-node': 2}, and parallelType is not set; it has no effect",
        ),
        (
            *("parallelType: tp\nparallelLevel: -1", "parallelLevel"),
            "is -1, expected at least 1; it is ignored",
        ),
        (
            *("parallelType: tp\ntorchrun: {nproc-per-node: two}", "torchrun.nproc-per-node"),
            "is 'two', expected an integer; it is ignored",
        ),
        (
            *("parallel: {tensor: 2}\nparallelType: PP\nparallelLevel: 2", "parallelType"),
            "is 'pp', and the section parallel wins; it is ignored",
        ),
        (
            *("parallel: {tensor: 2}\nparallelType: tp\nparallelLevel: 4", "parallelLevel"),
            "is 4, and the section parallel wins; it is ignored",
        ),
        (
            *("parallel: {tensor: 2}\ntorchrun: {nproc-per-node: 4}", "torchrun.nproc-per-node"),
            "is 4, and the section parallel wins; it is ignored",
        ),
        (
            *("parallel: {tensor: 2}\nparallelType: rowwise", "parallelType"),
            "is 'rowwise', expected one of pp, tp, pptp, custom; it is ignored",
        ),
    ],
)
def test_a_type_or_a_level_without_effect_is_noted(text: str, key: str, remark: str) -> None:
    assert parse_model_config(text).ignored == {key: remark}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "parallelLevel: 0",
        "parallelLevel: 1",
        "parallelType: tp\nparallelLevel: 2",
        "parallelType: tp\nparallelLevel: 1\ntorchrun: {OMP_NUMBER_THREADS: 2}",
        "parallelType: tp\nparallelLevel: 2\ntorchrun: {nproc-per-node: 4}",
        "parallel: {tensor: 2}",
        "parallel: {tensor: 2}\ntorchrun: {nnodes: 2}",
        "parallel: {tensor: 2}\nparallelType: tp\nparallelLevel: 2",
        "parallel: {tensor: 4}\nparallelType: pptp\ntorchrun: {nproc-per-node: 2, nnodes: 2}",
        "parallel: {mine: 2}\nparallelType: pp\nparallelLevel: 2",  # another program's section
    ],
)
def test_a_type_and_a_level_that_have_their_effect_are_not_noted(text: str) -> None:
    assert parse_model_config(text).ignored == {}


def test_the_processes_of_custom_are_not_started_by_the_server() -> None:
    assert [ParallelSettings(kind, 4).ranks for kind in ("tp", "pp", "pptp", "custom")] == [4, 4, 4, 1]


def test_what_is_wrong_in_torchrun_is_noted_with_its_place() -> None:
    config = parse_model_config("parallelType: tp\ntorchrun: {nproc-per-node: 2, OMP_NUMBER_THREADS: many}")
    assert "expected an integer" in config.ignored["torchrun.OMP_NUMBER_THREADS"]
    assert config.parallel == ParallelSettings("tp", 2)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("nnodes: 2", {"least_machines": 2, "most_machines": 2}),
        ("nnodes: '1:3'", {"least_machines": 1, "most_machines": 3}),
        ("rdzv-backend: c10d, rdzv-endpoint: 'leader:29500', rdzv-id: job", {"port": 29500, "run_id": "job"}),
        ("rdzv-conf: 'join_timeout=600,last_call_timeout=7'", {"last_call_s": 7.0}),
        ("max-restarts: 3", {"max_restarts": 3}),
        ("max-restarts: 0", {"max_restarts": 0}),
    ],
)
def test_the_keys_of_torchrun_describe_a_group_over_machines(keys: str, expected: dict[str, Any]) -> None:
    config = parse_model_config(f"parallelType: tp\ntorchrun: {{nproc-per-node: 2, {keys}}}")
    assert config.parallel == ParallelSettings("tp", 2, **expected)
    assert not config.ignored


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("nnodes: 0", "nnodes"),
        ("nnodes: '3:1'", "nnodes"),
        ("nnodes: 'two'", "nnodes"),
        ("nnodes: [1]", "nnodes"),
        (f"nnodes: '1:{'9' * 5000}'", "nnodes"),
        (f"rdzv-endpoint: 'leader:{'9' * 5000}'", "rdzv-endpoint"),
        ("rdzv-endpoint: leader", "rdzv-endpoint"),
        ("rdzv-endpoint: 'leader:0'", "rdzv-endpoint"),
        ("rdzv-backend: etcd", "rdzv-backend"),
        ("max-restarts: many", "max-restarts"),
    ],
)
def test_a_wrong_key_of_a_group_over_machines_is_noted(keys: str, key: str) -> None:
    config = parse_model_config(f"parallelType: tp\ntorchrun: {{nproc-per-node: 2, {keys}}}")
    assert f"torchrun.{key}" in config.ignored
    assert config.parallel == ParallelSettings("tp", 2)


def test_more_machines_than_anybody_has_are_refused() -> None:
    with pytest.raises(InvalidArchive, match=r"torchrun.nnodes in the model config is too large"):
        parse_model_config("parallelType: tp\ntorchrun: {nnodes: '1:100000'}")


def test_the_ranks_of_our_own_section_are_spread_over_the_machines() -> None:
    spread = parse_model_config("parallel: {tensor: 4}\ntorchrun: {nnodes: 2}").parallel
    assert spread is not None
    assert (spread.kind, spread.ranks, spread.least_machines) == ("pptp", 2, 2)
    for nodes in ("3", "'1:2'"):
        with pytest.raises(InvalidArchive, match="parallel asks for 4 ranks"):
            parse_model_config(f"parallel: {{tensor: 4}}\ntorchrun: {{nnodes: {nodes}}}")
