"""nginx and HAProxy before the replicas, told which of them are endpoints. Neither tries a request twice."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from harness.errors import Failed
from harness.processes import free_ports

from rolling.replica import Replica

NGINX, HAPROXY = "nginx", "haproxy"
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")  # nginx's folders, in ours
_UP_S = 10.0


def missing() -> list[str]:
    """The proxies that are not installed."""
    return [name for name in (NGINX, HAPROXY) if _program(name) is None]


def _program(name: str) -> str | None:
    # Debian keeps daemons where only root's PATH leads.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Nginx:
    """REST, with connections to the replicas kept open; endpoints change by a reload, as an ingress does."""

    def __init__(self, folder: Path, replicas: Sequence[Replica]) -> None:
        folder.mkdir()
        (self.port,) = free_ports(1)
        self._file, self._replicas = folder / "nginx.conf", replicas
        self._command = [str(_program(NGINX)), "-p", str(folder), "-c", str(self._file), "-e", "error.log"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start with all replicas as endpoints."""
        self._write({replica.name for replica in self._replicas})
        self._process = subprocess.Popen([*self._command, "-g", "daemon off;"])
        _until_up(self.port, NGINX)

    def route_to(self, names: Collection[str]) -> None:
        """Send new requests to these replicas only."""
        self._write(names)
        subprocess.run([*self._command, "-s", "reload"], check=True, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        """End it."""
        _end(self._process)

    def _write(self, names: Collection[str]) -> None:
        servers = " ".join(
            f"server 127.0.0.1:{replica.rest_port};" for replica in self._replicas if replica.name in names
        )
        temporary = " ".join(f"{kind}_temp_path {kind};" for kind in _TEMPORARY)
        self._file.write_text(
            "worker_processes 1;\npid nginx.pid;\nevents { worker_connections 1024; }\nhttp {\n"
            f"access_log off;\n{temporary}\nupstream replicas {{ {servers} keepalive 16; }}\n"
            f"server {{ listen 127.0.0.1:{self.port} backlog=1024;\n"
            "location / { proxy_pass http://replicas; proxy_http_version 1.1;\n"
            'proxy_set_header Connection ""; proxy_next_upstream off; } } }\n'
        )


class Haproxy:
    """gRPC, over HTTP/2 on `port` and as mere bytes on `tcp_port`; endpoints change over its socket."""

    def __init__(self, folder: Path, replicas: Sequence[Replica]) -> None:
        folder.mkdir()
        self.port, self.tcp_port = free_ports(2)
        self._socket, self._replicas = folder / "admin", replicas
        self._file = folder / "haproxy.cfg"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start with all replicas as endpoints."""
        lines = [f"server {replica.name} 127.0.0.1:{replica.grpc_port}" for replica in self._replicas]
        http, tcp = ("\n".join(f"  {line} {more}" for line in lines) for more in ("proto h2", ""))
        self._file.write_text(
            f"global\n  stats socket {self._socket} mode 600 level admin\n  nbthread 1\n"
            "defaults\n  timeout connect 2s\n  timeout client 60s\n  timeout server 60s\n  retries 0\n"
            f"frontend streams\n  mode http\n  bind 127.0.0.1:{self.port} proto h2\n  default_backend http\n"
            f"backend http\n  mode http\n  balance roundrobin\n{http}\n"
            f"frontend bytes\n  mode tcp\n  bind 127.0.0.1:{self.tcp_port}\n  default_backend tcp\n"
            f"backend tcp\n  mode tcp\n  balance roundrobin\n{tcp}\n"
        )
        self._process = subprocess.Popen([str(_program(HAPROXY)), "-q", "-db", "-f", str(self._file)])
        _until_up(self.port, HAPROXY)

    def route_to(self, names: Collection[str]) -> None:
        """Send new requests (or connections) to these replicas only."""
        for replica in self._replicas:
            state = "ready" if replica.name in names else "drain"
            for backend in ("http", "tcp"):
                self._tell(f"set server {backend}/{replica.name} state {state}\n")

    def stop(self) -> None:
        """End it."""
        _end(self._process)

    def _tell(self, line: str) -> None:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self._socket))
            admin.sendall(line.encode())
            answer = admin.recv(1000).decode().strip()
        if answer:
            raise Failed(f"haproxy refuses {line!r}: {answer}")


def _until_up(port: int, name: str) -> None:
    give_up_s = time.monotonic() + _UP_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > give_up_s:
                raise Failed(f"{name} does not listen on port {port}") from None
            time.sleep(0.05)
        else:
            return


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.terminate()
        process.wait(20)
