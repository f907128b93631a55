"""A coroutine as handle, with a client that belongs to its event loop."""

import asyncio


class AsyncHandler:
    def initialize(self, context):
        self.lock = None

    async def handle(self, data, context):
        if self.lock is None:
            self.lock = asyncio.Lock()
        async with self.lock:
            return await asyncio.gather(*(self.one(row) for row in data))

    async def one(self, row):
        await asyncio.sleep(0)
        return {"loop": asyncio.get_running_loop() is not None, "got": bytes(row["body"]).decode()}
