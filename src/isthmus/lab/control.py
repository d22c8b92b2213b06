"""How a command reaches a lab that is running: a Unix socket in the lab's state directory.

One request a connection, one line of JSON each way::

    {"fault": {"kind": "link_down", "between": ["paris", "oslo"], "lasts_s": 2}}
    {"ask": "status"}

The answer is ``{"ok": ...}`` or ``{"error": ..., "hint": ...}``. Only the user who runs the lab,
and root, are heard.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from isthmus.errors import ConfigError, IsthmusError
from isthmus.lab.timeline import Fault, fault_of
from isthmus.spec.cluster import ClusterSpec

SOCKET_NAME: Final = "control"
_MAX_PATH_NBYTES: Final = 107
_MAX_LINE_NBYTES: Final = 1 << 20
_CLIENT_TIMEOUT_S: Final = 30.0
_REQUEST_TIMEOUT_S: Final = 5.0


class ControlServer:
    """Answers requests in a thread, until it is closed; the socket's file is removed then.

    Args:
        directory: The lab's state directory; the socket is made there.
        cluster: What faults may name.
        inject: Makes a fault; an IsthmusError that it raises becomes the answer.
        status: What there is to say about the lab, as something that JSON can hold.

    Raises:
        ConfigError: The path is longer than the kernel's 107 bytes for a socket.
    """

    def __init__(
        self,
        directory: Path,
        *,
        cluster: ClusterSpec,
        inject: Callable[[Fault], None],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.path = directory / SOCKET_NAME
        self._cluster = cluster
        self._inject = inject
        self._status = status
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            _bind(self._socket, self.path)
        except BaseException:
            self._socket.close()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="isthmus-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. Does nothing the second time."""
        if self._wake.fileno() < 0:
            return
        self._wake.close()
        self._thread.join()
        self._woken.close()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._socket, self._woken], (), ())
            if self._woken in ready:
                return
            connection, _ = self._socket.accept()
            with connection, suppress(OSError):  # a client that leaves is no matter of the lab
                connection.settimeout(_REQUEST_TIMEOUT_S)
                answer = self._answer(connection)
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        line = _read_line(connection)
        if _peer_uid(connection) not in (0, os.geteuid()):
            return {"error": "this lab belongs to another user", "hint": ""}
        try:
            match json.loads(line):
                case {"fault": table}:
                    self._inject(fault_of(table, self._cluster))
                    return {"ok": True}
                case {"ask": "status"}:
                    return {"ok": dict(self._status())}
                case request:
                    return {"error": f"the lab does not understand {request!r}", "hint": ""}
        except ValueError as problem:
            return {"error": f"the request is not JSON: {problem}", "hint": ""}
        except IsthmusError as problem:
            return {"error": problem.message, "hint": problem.hint}


def send_fault(directory: Path, fault: Fault) -> None:
    """Have a running lab make a fault now; returns when it has begun.

    Args:
        directory: The lab's state directory.
        fault: The fault; the time that it names is not looked at.

    Raises:
        ConfigError: No lab answers there.
        IsthmusError: The lab could not do it.
    """
    _request(directory, {"fault": fault.model_dump(mode="json", exclude_none=True)})


def ask_status(directory: Path) -> dict[str, Any]:
    """What a running lab says about itself.

    Raises:
        ConfigError: No lab answers there.
    """
    return _request(directory, {"ask": "status"})


def _request(directory: Path, request: dict[str, Any]) -> Any:
    path = directory / SOCKET_NAME
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_CLIENT_TIMEOUT_S)
        try:
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(_read_line(client))
        except (OSError, ValueError) as problem:
            raise ConfigError(
                f"no running lab answers at {path}: {problem}",
                hint="start one with: isthmus lab CLUSTER -- COMMAND",
            ) from None
    if "error" in answer:
        raise IsthmusError(answer["error"], hint=answer.get("hint", ""))
    return answer["ok"]


def _bind(server: socket.socket, path: Path) -> None:
    if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
        raise ConfigError(
            f"the lab's socket {path} has too long a path; the kernel takes {_MAX_PATH_NBYTES} B",
            hint="choose a state directory nearer to the root, such as one in /tmp",
        )
    path.unlink(missing_ok=True)  # left by a lab that was killed: the directory is this lab's own
    server.bind(str(path))
    path.chmod(0o600)
    server.listen()


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("iII", credentials)
    return uid


def _read_line(connection: socket.socket) -> bytes:
    """Everything up to the first newline."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _MAX_LINE_NBYTES:
        piece = connection.recv(65536)
        if not piece:
            break
        data += piece
    return data
