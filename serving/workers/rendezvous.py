"""Where the machines of a rank group meet: a model's `torchrun` keys under the settings of the server."""

from __future__ import annotations

from torchere.serving.config.server_settings import Address, ModelSettings, RendezvousSettings
from torchere.serving.errors import ServingError
from torchere.serving.store.package import StoredArchive
from torchere.serving.workers.executor import Rendezvous

LEAST_SECRET_BYTES = 16
_OF_START = 0.8  # share of the start-up time-out; the rest is for the load


def rendezvous_of(
    archive: StoredArchive, settings: ModelSettings, server: RendezvousSettings, *, at_startup: bool = False
) -> Rendezvous | None:
    """Return where the machines of a worker meet; None: it has one machine. Reads the secret.

    `at_startup`: the model is loaded at the start of the server: the other machines may be starting, too, and
    no client waits for the outcome.

    Raises:
        ServingError: other machines could not run the archive, or strangers could join.
    """
    parallel = settings.parallel
    if parallel is None or parallel.most_machines <= 1:
        return None
    if archive.environment is not None:
        raise ServingError(
            "The archive installs packages of its own, which no other machine of its group would have.",
            "Install them on each machine, and leave them out of the archive.",
        )
    return Rendezvous(
        host=server.host,
        port=parallel.port or server.port,
        least=parallel.least_machines,
        most=parallel.most_machines,
        join_s=_OF_START * settings.startup_timeout_s,
        last_call_s=parallel.last_call_s,
        run_id=parallel.run_id,
        secret=secret_of(server, needed=not Address(server.host).is_local),
        archive=archive.file_name,
        url=archive.url,
        fingerprint=archive.fingerprint,
        is_patient=at_startup,
    )


def secret_of(server: RendezvousSettings, *, needed: bool) -> bytes:
    """Return the secret of `rendezvous_secret_file`, without the white space around it; b"" without a file.

    Raises:
        ServingError: no file is set and one is needed; or it can't be read, or is too short.
    """
    if server.secret_file is None:
        if needed:
            raise ServingError(
                "Whoever reaches the rendezvous could join a model's ranks and read its requests.",
                "Set rendezvous_secret_file to a file with the same random text on each machine.",
            )
        return b""
    try:
        secret = server.secret_file.read_bytes().strip()
    except OSError as err:
        raise ServingError(f"rendezvous_secret_file {server.secret_file}: {err.strerror}.") from err
    if len(secret) < LEAST_SECRET_BYTES:
        raise ServingError(
            f"rendezvous_secret_file {server.secret_file} holds {len(secret)} bytes, "
            f"expected at least {LEAST_SECRET_BYTES}."
        )
    return secret
