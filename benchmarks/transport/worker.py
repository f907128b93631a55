"""`python -m transport.worker SOCKET`: runs batches of up to 32 requests, with one message for each."""

from __future__ import annotations

import socket
import sys
from collections import deque

import torch

from transport.link import BATCH, ITEM, MAX_BATCH, SOCKET_BUFFER_BYTES

WIDTH = 64
MLP, IDENTITY = 0, 1  # models

Item = tuple[int, int, memoryview]  # request, model, body


def networks() -> dict[int, torch.jit.ScriptModule]:
    """Return the models, as TorchScript: three layers of 64, and one that gives back what it gets."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    mlp = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH)).eval()
    return {MLP: torch.jit.script(mlp), IDENTITY: torch.jit.script(torch.nn.Identity())}


def run(items: list[Item], nets: dict[int, torch.jit.ScriptModule]) -> list[bytes | memoryview]:
    """Run requests of one model; returns the message that answers them."""
    net = nets[items[0][1]]
    bodies = [torch.frombuffer(body, dtype=torch.float32) for _, _, body in items]
    with torch.inference_mode():
        if items[0][1] == MLP:
            rows = [body.view(-1, WIDTH) for body in bodies]
            found = net(torch.cat(rows) if len(rows) > 1 else rows[0])
            outputs = list(found.split([len(row) for row in rows]))
        else:
            outputs = [net(body) for body in bodies]
    parts: list[bytes | memoryview] = [b""]
    for (number, _, _), output in zip(items, outputs, strict=True):
        body = memoryview(output.numpy()).cast("B")
        parts += (ITEM.pack(number, 0, len(body)), body)
    parts[0] = BATCH.pack(sum(map(len, parts)), len(items))
    return parts


def receive(sock: socket.socket, received: bytearray, waiting: deque[Item]) -> None:
    """Read once, and take in the whole messages."""
    data = sock.recv(SOCKET_BUFFER_BYTES)
    if not data:
        raise SystemExit
    received += data
    while len(received) >= BATCH.size:
        size, items = BATCH.unpack_from(received)
        end = BATCH.size + size
        if len(received) < end:
            return
        view, at = memoryview(bytearray(received[BATCH.size : end])), 0
        del received[:end]
        for _ in range(items):
            number, model, length = ITEM.unpack_from(view, at)
            at += ITEM.size
            waiting.append((number, model, view[at : at + length]))
            at += length


def main(path: str) -> None:
    """Serve one front until it closes the socket."""
    torch.set_num_threads(1)
    nets = networks()
    with torch.inference_mode():
        for _ in range(3):
            nets[MLP](torch.zeros(4, WIDTH))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    sock, _ = listener.accept()
    received, waiting = bytearray(), deque[Item]()
    while True:
        while not waiting:
            receive(sock, received, waiting)
        batch = [waiting.popleft()]
        while waiting and len(batch) < MAX_BATCH and waiting[0][1] == batch[0][1]:
            batch.append(waiting.popleft())
        sock.sendall(b"".join(run(batch, nets)))


if __name__ == "__main__":
    main(sys.argv[1])
