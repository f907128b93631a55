"""Registrations that verify signatures: off the event loop, and without copies that stay."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from signers import KeyPair, key_pair, pack

from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import Conflict, ServingError, UntrustedArchive
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.registry import Registry
from torchere.serving.store.signing import TrustedKeys
from torchere.serving.telemetry.metrics import Metrics


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return key_pair(tmp_path)


@asynccontextmanager
async def registry_of(folder: Path, keys: KeyPair) -> AsyncIterator[Registry]:
    """A registry that requires signatures, over a store with the signed archive `m.mar`."""
    (folder / "store").mkdir()
    (folder / "temp").mkdir()
    keys.sign(pack(folder / "store" / "m.mar"))
    server = ServerSettings(
        model_store=folder / "store",
        temp_dir=folder / "temp",
        require_signed=True,
        trusted_signing_keys=(keys.public,),
    )
    registry = Registry(server, RegistryMetrics(Metrics("host")))
    yield registry
    await registry.close()


def copies(folder: Path) -> list[Path]:
    """The copies of archives, and the handlers of unpacked ones."""
    return [*(folder / "temp").rglob("*.mar"), *(folder / "temp").rglob("h.py")]


def verifying(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Call a function at the end of each verification."""
    verify = TrustedKeys.verify

    def verified(self: TrustedKeys, *arguments: object) -> str:
        signer = verify(self, *arguments)  # type: ignore[arg-type]
        then()
        return signer

    monkeypatch.setattr(TrustedKeys, "verify", verified)


def test_signatures_are_verified_by_the_threads_that_unpack(
    tmp_path: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    verifying(monkeypatch, lambda: threads.append(threading.current_thread().name))

    async def main() -> None:
        async with registry_of(tmp_path, keys) as registry:
            version = await registry.register(Wanted("m.mar", Asked()))
            assert version.origin.archive.signer.startswith("key sha256:")
            assert [path.name for path in copies(tmp_path)] == ["h.py"]

    asyncio.run(main())
    assert [name.partition("_")[0] for name in threads] == ["unpack"]


def test_a_registration_that_is_refused_leaves_no_copy(tmp_path: Path, keys: KeyPair) -> None:
    async def refused(registry: Registry, wanted: Wanted, kind: type[ServingError]) -> None:
        with pytest.raises(kind):
            await registry.register(wanted)

    async def main() -> None:
        async with registry_of(tmp_path, keys) as registry:
            pack(tmp_path / "store" / "unsigned.mar")
            await refused(registry, Wanted("unsigned.mar", Asked()), UntrustedArchive)
            await refused(registry, Wanted("m.mar", Asked(), name="no/name"), ServingError)
            assert copies(tmp_path) == []
            await registry.register(Wanted("m.mar", Asked()))
            await refused(registry, Wanted("m.mar", Asked()), Conflict)
            assert [path.name for path in copies(tmp_path)] == ["h.py"]

    asyncio.run(main())


def test_a_registration_that_is_given_up_while_it_is_verified_leaves_no_copy(
    tmp_path: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def waiting() -> None:
        begun.set()
        go_on.wait(30)

    verifying(monkeypatch, waiting)

    async def main() -> None:
        async with registry_of(tmp_path, keys) as registry:
            task = asyncio.create_task(registry.register(Wanted("m.mar", Asked())))
            await asyncio.to_thread(begun.wait)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.wait({task})
            assert task.cancelled()
            assert copies(tmp_path) == []

    asyncio.run(main())
