"""Who may begin, who waits, and who is sent away."""

import asyncio

import pytest

from torchere.serving.errors import Unavailable
from torchere.serving.store.turns import Turns


class Crowd:
    """Callers of one `Turns`; each stays inside until `leave`."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.inside: list[int] = []
        self.leave = asyncio.Event()

    async def come(self, number: int) -> None:
        async with self.turns.take():
            self.inside.append(number)
            await self.leave.wait()


def test_so_many_are_at_it_and_the_others_wait_in_their_order() -> None:
    async def main() -> None:
        crowd = Crowd(Turns("things", at_once=2, waiting=2))
        tasks = [asyncio.ensure_future(crowd.come(number)) for number in range(4)]
        await asyncio.sleep(0)
        assert crowd.inside == [0, 1]
        crowd.leave.set()
        await asyncio.gather(*tasks)
        assert crowd.inside == [0, 1, 2, 3]

    asyncio.run(main())


def test_one_too_many_is_refused_until_somebody_goes() -> None:
    async def main() -> None:
        crowd = Crowd(Turns("things", at_once=1, waiting=1))
        tasks = [asyncio.ensure_future(crowd.come(number)) for number in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=r"^Too many things wait already: 2\. Try again later\.$"):
            await crowd.come(2)
        tasks[1].cancel()  # who waits may go, too
        await asyncio.wait({tasks[1]})
        third = asyncio.ensure_future(crowd.come(3))
        crowd.leave.set()
        await asyncio.gather(tasks[0], third)
        assert crowd.inside == [0, 3]

    asyncio.run(main())
