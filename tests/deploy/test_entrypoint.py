"""The arguments of the image, as TorchServe's image takes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SERVE = [
    "--foreground",
    "--start",
    "--ts-config",
    "/home/model-server/config.properties",
]


@pytest.fixture
def enter(root: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the script with a `torchserve` that tells how it was called, an argument a line."""
    fake = tmp_path / "torchserve"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)

    def run(*arguments: str) -> list[str]:
        environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [root / "deploy/entrypoint.sh", *arguments],
            capture_output=True, text=True, env=environment, timeout=30, cwd=tmp_path, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("arguments", [(), ("serve",)])
def test_by_default_it_serves_the_bundled_configuration(
    enter: Callable[..., list[str]], arguments: tuple[str, ...]
) -> None:
    assert enter(*arguments) == SERVE


def test_options_behind_serve_are_added(enter: Callable[..., list[str]]) -> None:
    assert enter("serve", "--models", "all") == [*SERVE, "--models", "all"]


def test_a_torchserve_command_stays_in_the_foreground(enter: Callable[..., list[str]]) -> None:
    command = ("torchserve", "--start", "--model-store", "/m", "--models", "all")

    assert enter(*command) == ["--foreground", *command[1:]]


def test_a_command_in_one_word_is_taken_apart(enter: Callable[..., list[str]]) -> None:
    one = "torchserve --start --model-store /m --models *.mar"

    assert enter(one) == ["--foreground", "--start", "--model-store", "/m", "--models", "*.mar"]


def test_a_command_in_one_word_may_have_quotes_and_stays_in_the_foreground(
    enter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS", "a=a.mar $b=b.mar")
    one = "torchserve --start --models \"$MODELS\" 'c  d'"

    assert enter(one) == ["--foreground", "--start", "--models", "a=a.mar $b=b.mar", "c  d"]


def test_a_shell_command_in_one_word_is_run_by_the_shell(enter: Callable[..., list[str]]) -> None:
    assert enter("torchserve --start; echo then") == ["--start", "then"]


def test_a_command_of_several_lines_is_one_command(enter: Callable[..., list[str]]) -> None:
    told = ["--foreground", "--start", "--models", "a=b c.mar"]
    assert enter("torchserve --start\n  --models 'a=b c.mar'\n") == told
    assert enter("torchserve --start \\\n  --models 'a=b c.mar'") == told


@pytest.mark.parametrize("together", [True, False])
def test_variables_in_a_torchserve_command_are_filled_in(
    enter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    monkeypatch.setenv("MODEL_NAME", "network")
    words = ["torchserve", "--start", "--models", "$MODEL_NAME=${MODEL_NAME}.mar", "*.mar"]

    told = enter(*([" ".join(words)] if together else words))

    assert told == ["--foreground", "--start", "--models", "network=network.mar", "*.mar"]


def test_a_variable_may_hold_several_words_or_none(
    enter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS", "a=a.mar *=b.mar")
    monkeypatch.setenv("OPTIONS", "")
    words = ("torchserve", "--start", "$OPTIONS", "--models", "$MODELS")

    assert enter(*words) == ["--foreground", "--start", "--models", "a=a.mar", "*=b.mar"]
    assert enter("torchserve", '"$MODELS"', "'b  c'") == ["--foreground", "a=a.mar *=b.mar", "b  c"]


def test_a_variable_that_is_not_set_ends_the_container_with_its_name(root: Path) -> None:
    command = [str(root / "deploy/entrypoint.sh"), "torchserve", "--models", "$NO_SUCH_NAME.mar"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert done.returncode != 0
    assert "NO_SUCH_NAME" in done.stderr


def test_a_word_between_two_commands_leaves_them_to_the_shell(enter: Callable[..., list[str]]) -> None:
    assert sorted(enter("torchserve", "--start", "&", "echo", "then", ";", "wait")) == ["--start", "then"]
    assert enter("torchserve", "--start", "|", "tr", "s", "S") == ["--Start"]


@pytest.mark.parametrize("flag", ["--foreground", "--stop", "--version", "-v", "--help"])
def test_what_ends_by_itself_or_is_in_the_foreground_is_left_alone(
    enter: Callable[..., list[str]], flag: str
) -> None:
    assert enter("torchserve", flag) == [flag]


def test_anything_else_is_run_as_it_is(enter: Callable[..., list[str]]) -> None:
    assert enter("echo", "a  b", "serve") == ["a  b serve"]
    assert enter("sh", "-c", "name='$'; echo \"$name\" && echo then") == ["$", "then"]
    assert enter("python", "-c", "import os; print(os.name)\nprint((1, 2))") == ["posix", "(1, 2)"]
    assert enter("echo", "a; b", "(c d)") == ["a; b (c d)"]


def test_the_exit_status_is_that_of_the_command(root: Path) -> None:
    assert subprocess.run([root / "deploy/entrypoint.sh", "sh", "-c", "exit 7"], check=False).returncode == 7


SCRIPT = "echo then\ntorchserve --start {options}\n"
STOPPING = f"trap 'torchserve --stop' TERM\n{SCRIPT}sleep 60 & wait\n"


@pytest.mark.parametrize(
    ("line", "python_waits_s"),
    [
        ("torchserve --start {options} && echo then", 0),
        ("torchserve --start {options} && echo then", 5),  # a signal comes before the server's pid is known
        ("echo then; torchserve --start --foreground {options}; true", 0),
        ("echo then; exec torchserve --start --foreground {options}", 0),  # the shell is the server then
        ("echo then; torchserve --start --foreground {options} 2>&1 | cat", 0),
        ("bash ./starts", 0),
        ("starts", 0),
        ("/bin/sh -c 'exec ./starts'", 0),
        ("bash ./stops", 0),
        ("env sh -c 'torchserve --start {options} && echo then'", 0),
    ],
    ids=range(10),
)
def test_a_server_that_a_shell_has_started_is_stayed_with_and_ended(
    root: Path, tmp_path: Path, line: str, python_waits_s: int
) -> None:
    addresses = (f"{name}_address=http://127.0.0.1:0" for name in ("inference", "management", "metrics"))
    ports = (f"grpc_{name}_port=0" for name in ("inference", "management"))
    (tmp_path / "config.properties").write_text("\n".join([*addresses, *ports]))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nsleep {python_waits_s}\nexec {sys.executable} "$@"\n')
    options = "--ncs --model-store . --ts-config config.properties"
    for name, text in {"starts": SCRIPT, "stops": STOPPING}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text.format(options=options)}")
        (tmp_path / name).chmod(0o755)
    python.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    log, variables = tmp_path / "log", {**os.environ, "PATH": path, "TMPDIR": str(tmp_path)}
    line = line.format(options=options)
    with log.open("w") as file:
        entered = subprocess.Popen(
            [root / "deploy/entrypoint.sh", line], cwd=tmp_path, env=variables, stdout=file, stderr=file
        )
    try:
        limit_s = time.monotonic() + 60
        while not {"then", "Model server started."} <= set(log.read_text().splitlines()):
            assert entered.poll() is None and time.monotonic() < limit_s, log.read_text()
            time.sleep(0.05)
        entered.terminate()

        # A script that stops the server itself may end, with its own status, before the server is looked for.
        assert entered.wait(60) in ((0, 143) if line == "bash ./stops" else (0,))
        assert "stopped: 0 predictions accepted" in log.read_text()
        assert "ending at once" not in log.read_text()
    finally:
        subprocess.run(["torchserve", "--stop"], cwd=tmp_path, env=variables, check=False, timeout=60)


def test_a_script_that_names_the_server_keeps_its_input_and_its_exit_status(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "script").write_text("# as torchserve does\ncat\nexit 7\n")
    command = [str(root / "deploy/entrypoint.sh"), "sh", str(tmp_path / "script")]

    done = subprocess.run(command, check=False, input=b"given", capture_output=True, timeout=30)

    assert (done.returncode, done.stdout) == (7, b"given")


def test_a_line_for_the_shell_keeps_its_exit_status(enter: Callable[..., list[str]], root: Path) -> None:
    done = subprocess.run([root / "deploy/entrypoint.sh", "echo torchserve && exit 7"], check=False)

    assert done.returncode == 7
    assert enter("echo torchserve && echo --start") == ["torchserve", "--start"]


OLD = ["--foreground", "--start", "--model-store", "/m", "--models", "a=a.mar", "b.mar"]


@pytest.mark.parametrize(
    "words",
    [
        ["torchserve", "--start", "--model-store", "/m", "--models", "a=a.mar", "b.mar"],
        ["torchserve --start --model-store /m --models a=a.mar b.mar"],
        ["torchserve --start", "--model-store", "/m", "--models", "a=a.mar b.mar"],
        ["torchserve", "--start --model-store /m --models a=a.mar b.mar"],
        ["torchserve", "--start", "--model-store /m", "--models a=a.mar b.mar"],
        ["torchserve --start", "--model-store /m --models", "a=a.mar", "b.mar"],
        ["  torchserve   --start --model-store /m ", "--models 'a=a.mar'", '"b.mar"'],
        ["torchserve", "--start", "--model-store", "/m\n", "--models", "a=a.mar \\\n b.mar\n"],
        ["torchserve", "--start", "--model-store", "${STORE}", "--models $MODELS"],
        ["{bin}/torchserve", "--start", "--model-store", "/m", "--models", "a=a.mar", "b.mar"],
        ["{bin}/torchserve --start --model-store /m --models a=a.mar b.mar"],
    ],
    ids=range(11),
)
def test_a_torchserve_command_line_is_the_same_however_its_words_are_cut(
    enter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.setenv("STORE", "/m")
    monkeypatch.setenv("MODELS", "a=a.mar b.mar")
    assert enter(*[word.replace("{bin}", str(tmp_path)) for word in words]) == OLD


@pytest.mark.parametrize(
    "words",
    [
        ["STORE=/s torchserve --start --model-store $STORE"],
        ["export STORE=/s && torchserve --start --model-store $STORE"],
        ["export STORE=/s; torchserve --start", "--model-store $STORE"],
        ["cd / &&", "torchserve --start --model-store", "/s"],
        ["exec torchserve --start --model-store /s"],
        ["exec", "torchserve", "--start", "--model-store", "/s"],
        ["A=b", "torchserve", "--start", "--model-store", "/s"],
        ["sh", "-c", "torchserve --start --model-store /s"],
        ["/bin/sh", "-ec", "torchserve --start --model-store /s; true"],
        ["sh -c 'torchserve --start --model-store /s'"],
        ["torchserve --start --model-store /s && tail -n 0 /dev/null"],
        ["torchserve", "--start", "--model-store", "/s", "&&", "true"],
        ["torchserve", "--start --model-store /s > /dev/stdout"],
        ["echo x > /dev/null && torchserve --start --model-store /s"],
        ["echo", "x > /dev/null && torchserve --start --model-store /s"],
        ["echo x > /dev/null; echo", "--start; printf '%s\\n'", "--model-store /s; true"],
    ],
    ids=range(16),
)
def test_a_line_for_the_shell_starts_the_server_in_it(
    enter: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("STORE", "/s")
    assert enter(*words) == ["--start", "--model-store", "/s"]


def test_the_name_of_torchserves_entrypoint_starts_ours(enter: Callable[..., list[str]], root: Path) -> None:
    script = str(root / "deploy/entrypoint.sh")
    assert enter(script, "serve") == SERVE
    assert enter(f"{script} serve") == SERVE
    made = (root / "deploy/Dockerfile").read_text()
    assert "ln -s entrypoint.sh /usr/local/bin/dockerd-entrypoint.sh" in made
    assert "ln -s /opt/torchere /home/venv" in made  # the environment of TorchServe's image
