"""How the time of the event loop is shared among clients."""

import asyncio
import time

from torchere.serving.io.loop_time import LEAST_TURN_S, MOST_ITERATION_S, SHARED_TURN_S, LoopTurns


def test_less_is_parsed_in_each_iteration_while_iterations_are_too_long():
    async def main():
        loop = asyncio.get_running_loop()
        turns = LoopTurns()

        async def parse(iterations, work):
            done = loop.create_future()
            left = iter(range(iterations))

            def go_on():
                loop.call_soon(work)
                turns.spend(turns.turn_s)
                if next(left, None) is None:
                    done.set_result(None)
                else:
                    turns.put_off(go_on)

            turns.put_off(go_on)
            await done

        await parse(5, lambda: time.sleep(2 * MOST_ITERATION_S))
        slowed_s = turns.turn_s
        await parse(60, lambda: None)
        return slowed_s, turns.turn_s

    slowed_s, after_s = asyncio.run(main())
    assert LEAST_TURN_S <= slowed_s < SHARED_TURN_S / 4
    assert slowed_s < after_s <= SHARED_TURN_S
