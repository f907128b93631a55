"""What an exit status comes to in words, and which losses blame what was running."""

import pytest

from torchere.serving.workers.loss import Loss, LossKind, loss_of_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (7, "exited with code 7"),
        (-11, "killed by signal 11 (SIGSEGV)"),
        (-99, "killed by signal 99"),
    ],
)
def test_an_exit_status_is_told_in_words(code: int, words: str) -> None:
    assert loss_of_exit(code).cause == words


def test_a_kill_for_memory_is_told_from_any_other() -> None:
    assert loss_of_exit(-9).kind is LossKind.SIGNAL
    killed = loss_of_exit(-9, killed_for_memory=True)
    assert killed.kind is LossKind.OUT_OF_MEMORY
    assert "out-of-memory" in killed.cause


@pytest.mark.parametrize(
    ("kind", "crashed"),
    [(kind, kind.value in ("exit", "protocol")) for kind in LossKind],
)
def test_only_a_worker_that_went_down_by_itself_crashed(kind: LossKind, crashed: bool) -> None:
    assert Loss(kind, "").crashed is crashed


@pytest.mark.parametrize(
    ("code", "crashed"),
    [
        *[(0, True), (7, True), (-11, True), (-6, True), (-7, True), (-8, True), (-4, True)],
        *[(-9, False), (-15, False), (-2, False), (-1, False), (-10, False)],
    ],
)
def test_a_fault_of_the_worker_is_evidence_and_a_signal_from_outside_is_none(
    code: int, crashed: bool
) -> None:
    loss = loss_of_exit(code)
    assert (loss.crashed, loss.came_from_outside) == (crashed, not crashed)


def test_a_kill_for_memory_may_be_a_neighbours_fault() -> None:
    killed = loss_of_exit(-9, killed_for_memory=True)
    assert (killed.crashed, killed.came_from_outside) == (False, True)
