"""What stands still from one look to the next is given up, all of it at once, and nothing else."""

import asyncio

import pytest

from torchere.serving.io.watchdog import Stalls

EVERY_S = 0.02


class Watched:
    """A `Stalls` over `now`, which the test changes; each look counts."""

    def __init__(self, every_s=EVERY_S, **now):
        self.now = now
        self.looks = 0
        self.given_up = []
        self.stalls = Stalls(every_s, self.waiting, self.give_up)

    def waiting(self):
        self.looks += 1
        return dict(self.now)

    def give_up(self, stalled):
        self.given_up.append(stalled)
        for key in stalled:
            del self.now[key]

    async def until(self, looks):
        while self.looks < looks:
            await asyncio.sleep(EVERY_S / 4)


def run(main):
    return asyncio.run(asyncio.wait_for(main, 10))


def test_all_that_stands_still_is_given_up_and_what_moves_is_not():
    async def main():
        watched = Watched(a=1, b=1, c=1)
        watched.stalls.watch()
        watched.now["b"] = 2
        while not watched.given_up:
            await asyncio.sleep(0)
        watched.stalls.stop()
        return watched.given_up, watched.now

    assert run(main()) == ([{"a": 1, "c": 1}], {"b": 2})


def test_what_began_to_wait_in_between_has_until_the_look_behind_the_next():
    async def main():
        watched = Watched(a=1)
        watched.stalls.watch()
        watched.now["late"] = 1
        while len(watched.given_up) < 2:
            await asyncio.sleep(0)
        watched.stalls.stop()
        return watched.given_up

    assert run(main()) == [{"a": 1}, {"late": 1}]


def test_nobody_looks_any_more_once_giving_up_ended_the_connection():
    class Ending(Watched):
        def give_up(self, stalled):
            self.given_up.append(stalled)
            self.stalls.stop()

    async def main():
        watched = Ending(a=1)
        watched.stalls.watch()
        while not watched.given_up:
            await asyncio.sleep(0)
        return watched.stalls._timer

    assert run(main()) is None


def test_nobody_looks_while_nothing_waits():
    async def main():
        watched = Watched()
        watched.stalls.watch()
        watched.stalls.watch()  # once is enough
        await watched.until(2)
        idle = watched.stalls._timer
        watched.stalls.watch()
        again = watched.stalls._timer
        watched.stalls.stop()
        assert again is not None
        return idle, again.cancelled(), watched.looks

    assert run(main()) == (None, True, 3)


@pytest.mark.parametrize("is_watching", [True, False], ids=["now", "later"])
def test_in_a_hurry_the_looks_are_closer_and_compare_with_now(is_watching):
    async def main():
        watched = Watched(60, a=1, b=1)
        if is_watching:
            watched.stalls.watch()
        watched.now["b"] = 2
        watched.stalls.hurry(EVERY_S)
        watched.stalls.watch()
        while not watched.given_up:
            await asyncio.sleep(0)
        watched.stalls.stop()
        return watched.given_up

    assert run(main()) == [{"a": 1, "b": 2}]


def test_a_hurry_starts_no_looks_once_the_connection_is_lost():
    async def main():
        watched = Watched(a=1)
        watched.stalls.watch()
        watched.stalls.stop()
        watched.stalls.hurry(EVERY_S)
        await asyncio.sleep(3 * EVERY_S)
        return watched.given_up

    assert run(main()) == []
