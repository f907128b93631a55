"""Downloads that take their time, beside everything else."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchere.serving.errors import DownloadFailed, Unavailable
from torchere.serving.registry import fetching
from torchere.serving.registry.fetching import Fetching
from torchere.serving.store.fetch import Download, Interrupt


class SlowStore:
    """Downloads until `finish` or its interrupt comes, and then has a file in `folder`, or an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.finish = threading.Event()
        self.begun = threading.Semaphore(0)
        self.ended: list[str] = []

    def download(
        self, url: str, by_operator: bool, interrupt: Interrupt, *, signs: bool, reuses: bool
    ) -> Download:
        self.begun.release()
        while not self.finish.wait(0.005):
            if interrupt.asked:
                self.ended.append(url)
                raise DownloadFailed("Failed to download archive", "it was given up before its end")
        path = self.folder / url.rpartition("/")[2]
        path.touch()
        return Download(path, is_new=True)

    def delete(self, downloaded: Path) -> None:
        downloaded.unlink()


def fetched(folder: Path, case: Callable[[Fetching, SlowStore], object]) -> None:
    """Run a case; whatever it leaves under way is ended."""

    async def main() -> None:
        store = SlowStore(folder)
        fetches = Fetching(store)  # type: ignore[arg-type]
        try:
            await case(fetches, store)  # type: ignore[misc]
        finally:
            store.finish.set()
            fetches.close()

    asyncio.run(main())


async def begin(fetches: Fetching, count: int) -> list["asyncio.Task[Download | None]"]:
    tasks = [
        asyncio.create_task(fetches.fetch(f"http://host/{number}.mar", False)) for number in range(count)
    ]
    await asyncio.sleep(0)
    return tasks


def test_a_name_in_the_store_is_not_fetched(tmp_path: Path) -> None:
    async def case(fetches: Fetching, store: SlowStore) -> None:
        assert await fetches.fetch("m.mar", False) is None

    fetched(tmp_path, case)


def test_slow_downloads_leave_the_threads_that_all_share_alone(tmp_path: Path) -> None:
    async def case(fetches: Fetching, store: SlowStore) -> None:
        shared = min(32, (os.cpu_count() or 1) + 4)
        tasks = await begin(fetches, shared)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
        store.finish.set()
        assert [task.path.name for task in await asyncio.gather(*tasks) if task] == [
            f"{number}.mar" for number in range(shared)
        ]

    fetched(tmp_path, case)


def test_when_too_many_wait_one_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_WAITING", 1)

    async def case(fetches: Fetching, store: SlowStore) -> None:
        tasks = await begin(fetches, fetching.AT_ONCE + 1)
        with pytest.raises(Unavailable, match="Too many downloads wait already"):
            await fetches.fetch("http://host/more.mar", False)
        store.finish.set()
        await asyncio.gather(*tasks)

    fetched(tmp_path, case)


def test_a_download_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    async def case(fetches: Fetching, store: SlowStore) -> None:
        (task,) = await begin(fetches, 1)
        await asyncio.to_thread(store.begun.acquire)
        task.cancel()
        await asyncio.wait({task})
        until_s = time.monotonic() + 10
        while not store.ended and time.monotonic() < until_s:
            await asyncio.sleep(0.005)
        assert store.ended == ["http://host/0.mar"]

    fetched(tmp_path, case)


def test_at_the_end_of_the_server_downloads_end_and_none_begins(tmp_path: Path) -> None:
    async def case(fetches: Fetching, store: SlowStore) -> None:
        tasks = await begin(fetches, fetching.AT_ONCE + 1)
        for _ in range(fetching.AT_ONCE):
            await asyncio.to_thread(store.begun.acquire)
        fetches.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable] * (fetching.AT_ONCE + 1)
        assert sorted(store.ended) == [f"http://host/{number}.mar" for number in range(fetching.AT_ONCE)]

    fetched(tmp_path, case)


class DeafStore(SlowStore):
    """Its downloads end when they `finish` only, as one does that asks for an address."""

    def download(
        self, url: str, by_operator: bool, interrupt: Interrupt, *, signs: bool, reuses: bool
    ) -> Download:
        return super().download(url, by_operator, Interrupt(), signs=signs, reuses=reuses)


async def give_up(*tasks: "asyncio.Task[Download | None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=10)


def test_a_download_keeps_its_place_until_its_thread_is_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MAX_WAITING", 1)

    async def case() -> None:
        store = DeafStore(tmp_path)
        fetches = Fetching(store)  # type: ignore[arg-type]
        tasks = await begin(fetches, fetching.AT_ONCE)
        for _ in tasks:
            await asyncio.to_thread(store.begun.acquire)
        await give_up(*tasks)
        (waiting,) = await begin(fetches, 1)
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="Too many downloads wait already"):
            await fetches.fetch("http://host/more.mar", False)
        await give_up(waiting)  # who only waits goes at once
        last = asyncio.create_task(fetches.fetch("http://host/last.mar", False))
        await asyncio.sleep(0)
        assert not store.begun.acquire(blocking=False)
        store.finish.set()
        assert await asyncio.wait_for(last, 10) == Download(tmp_path / "last.mar", is_new=True)
        while [path.name for path in tmp_path.iterdir()] != ["last.mar"]:  # nobody wants the others
            await asyncio.sleep(0.01)
        fetches.close()

    asyncio.run(case())
