"""Memory that outlives a server: what it was at, for the supervisor that restarts it after a crash.

A crash in native code runs no line of ours, so whatever should be known afterwards has to be written before:
the model that an executor thread is about to run, by one store into shared memory; that the event loop turns;
and which models are served. The supervisor writes what the next server is to know of the crashes so far.

Standard library only: the supervisor is small. Not thread-safe but for cells, each of which has one thread,
and for the numbers of versions.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import IntEnum

_CELLS = 1024  # executor threads that can be told apart; more run unseen
_NAMES = 1024  # versions with executor threads; likewise
_NAME_BYTES = 520  # a model and a version of at most 255 each, in UTF-8 mostly far less
_CELL = struct.Struct("=QQ")  # the thread's identity; the number of what it runs, 0 for nothing
_HEADER_BYTES = 64  # of which byte 0 is the state, and 8 to 15 the beats
_CELLS_AT = _HEADER_BYTES
_NAMES_AT = _CELLS_AT + _CELLS * _CELL.size
_HISTORY_AT = _NAMES_AT + _NAMES * _NAME_BYTES
_HISTORY_BYTES = 1 << 20
_MODELS_AT = _HISTORY_AT + _HISTORY_BYTES
_MODELS_BYTES = 16 << 20  # pages that nobody writes to take no memory
SIZE_BYTES = _MODELS_AT + _MODELS_BYTES
_LENGTH = struct.Struct("=I")
MAX_CRASHES = 20  # that are remembered


class ServerState(IntEnum):
    """How far the server is, as it says itself."""

    STARTING = 0
    SERVING = 1
    ENDING = 2  # it was told to; however it ends now, it is meant to


@dataclass(frozen=True, slots=True)
class Crash:
    """One crash of the server."""

    time: str  # UTC, ISO 8601
    cause: str
    models: tuple[str, ...]  # "name:version" of those whose threads may be to blame; () when nobody knows


@dataclass(frozen=True, slots=True)
class History:
    """What a server is told of those before it."""

    crashes: tuple[Crash, ...] = ()
    isolated: dict[str, str] = field(default_factory=dict)  # "name:version" that needs processes, and why

    def as_json(self) -> bytes:
        """For the journal."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> History:
        """Read it back; b"" is an empty one."""
        if not text:
            return cls()
        read = json.loads(text)
        crashes = tuple(Crash(each["time"], each["cause"], tuple(each["models"])) for each in read["crashes"])
        return cls(crashes, read["isolated"])


class Cell:
    """Where one executor thread says what it is about to run. Use it in that thread only.

    `begin` and `end` are one store to memory each, so that every batch can afford them.
    """

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def begin(self, number: int) -> None:
        """The version of this number (`Journal.number_of`) is run from here on."""
        self._words[1] = number

    def end(self) -> None:
        """It has come back; nothing is run."""
        self._words[1] = 0


class Journal:
    """The shared memory behind an inherited file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, SIZE_BYTES)
        self._names: dict[str, int] = {}  # that are in use
        self._uses: Counter[str] = Counter()
        self._free_numbers = list(range(1, _NAMES + 1))[::-1]
        self._naming = threading.RLock()  # what is collected may give a name up while another is taken
        self._free = list(range(_CELLS))[::-1]
        self._used: dict[int, int] = {}  # id of a cell: its place

    @classmethod
    def create(cls) -> Journal:
        """New and empty memory, which a child process may inherit."""
        descriptor = anonymous_file("torchere-journal")
        os.ftruncate(descriptor, SIZE_BYTES)
        return cls(descriptor)

    def clear(self) -> None:
        """Forget the state, beats and threads of the server before; history and models stay."""
        self._map[:_HISTORY_AT] = bytes(_HISTORY_AT)

    @property
    def state(self) -> ServerState:
        """How far the server is."""
        return ServerState(self._map[0])

    @state.setter
    def state(self, state: ServerState) -> None:
        self._map[0] = state

    @property
    def beats(self) -> int:
        """How often the server's event loop said that it turns."""
        return int.from_bytes(self._map[8:16], "little")

    def beat(self) -> None:
        """The event loop turns."""
        self._map[8:16] = (self.beats + 1).to_bytes(8, "little")

    def number_of(self, name: str) -> int:
        """The number by which a cell names a version; 0, which names nothing, when there are too many.

        It is that of the version until `give_up` was called as often as this.
        """
        with self._naming:
            self._uses[name] += 1
            if name not in self._names and self._free_numbers:
                self._names[name] = number = self._free_numbers.pop()
                encoded = name.encode()[: _NAME_BYTES - _LENGTH.size]
                self._put(_NAMES_AT + (number - 1) * _NAME_BYTES, encoded)
            return self._names.get(name, 0)

    def give_up(self, name: str) -> None:
        """Somebody who asked for the number of a version needs it no more."""
        with self._naming:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                number = self._names.pop(name, 0)
                if number:
                    self._free_numbers.append(number)

    def open_cell(self, thread: int) -> Cell | None:
        """A cell for a thread, by its identity; None when there are too many."""
        if not self._free:
            return None
        place = self._free.pop()
        at = _CELLS_AT + place * _CELL.size
        _CELL.pack_into(self._map, at, thread, 0)
        cell = Cell(memoryview(self._map)[at : at + _CELL.size].cast("Q"))
        self._used[id(cell)] = place
        return cell

    def close_cell(self, cell: Cell) -> None:
        """The thread of a cell has ended."""
        place = self._used.pop(id(cell))
        _CELL.pack_into(self._map, _CELLS_AT + place * _CELL.size, 0, 0)
        self._free.append(place)

    def running(self) -> dict[int, str]:
        """What each thread that is at something runs, by the thread's identity."""
        found = {}
        for place in range(_CELLS):
            thread, number = _CELL.unpack_from(self._map, _CELLS_AT + place * _CELL.size)
            if 0 < number <= _NAMES:
                found[thread] = self._get(_NAMES_AT + (number - 1) * _NAME_BYTES).decode(errors="replace")
        return found

    @property
    def history(self) -> History:
        """What the supervisor knows of the servers before."""
        return History.from_json(self._get(_HISTORY_AT))

    @history.setter
    def history(self, history: History) -> None:
        kept = History(history.crashes[-MAX_CRASHES:], history.isolated)
        encoded = kept.as_json()
        self._put(_HISTORY_AT, encoded if len(encoded) <= _HISTORY_BYTES - _LENGTH.size else b"")

    @property
    def models(self) -> str:
        """The models that were served last, as `model_snapshot` of a properties file; "" before the first."""
        return self._get(_MODELS_AT).decode()

    @models.setter
    def models(self, text: str) -> None:
        encoded = text.encode()
        self._put(_MODELS_AT, encoded if len(encoded) <= _MODELS_BYTES - _LENGTH.size else b"")

    def _put(self, at: int, content: bytes) -> None:
        # The length comes last: a crash in between leaves nothing rather than a half.
        self._map[at : at + _LENGTH.size] = bytes(_LENGTH.size)
        start = at + _LENGTH.size
        self._map[start : start + len(content)] = content
        _LENGTH.pack_into(self._map, at, len(content))

    def _get(self, at: int) -> bytes:
        (length,) = _LENGTH.unpack_from(self._map, at)
        start = at + _LENGTH.size
        return bytes(self._map[start : start + length])


def anonymous_file(name: str) -> int:
    """An open file without a name, which child processes inherit."""
    try:
        descriptor = os.memfd_create(name)
    except (AttributeError, OSError):  # this system has none, or lets nobody make one
        descriptor, path = tempfile.mkstemp(prefix=name)
        os.unlink(path)
    os.set_inheritable(descriptor, True)
    return descriptor
