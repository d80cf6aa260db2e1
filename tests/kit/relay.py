"""Stands between a client and its server, and breaks their connections at a chosen moment."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

CHUNK = 65_536


class Relay:
    """Passes bytes on, over any number of connections.

    Attributes:
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._client: socket.socket | None = None
        self._server: socket.socket | None = None
        self._held: list[socket.socket] = []
        self._break_at: str | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def break_at(self, moment: str) -> None:
        """Break the newest connection once.

        Args:
            moment: `request`: in place of passing on what the client sends next. `answer`: in place of passing on what
                the server answers next. `client`: at once, and only towards the client; the server continues waiting.
        """
        if moment == "client":
            assert self._client is not None
            assert self._server is not None
            self._held.append(self._server)
            self._client.shutdown(socket.SHUT_RDWR)
        else:
            self._break_at = moment

    def close(self) -> None:
        """Break every connection, and take no new one."""
        for each in (self._listener, self._client, self._server, *self._held):
            if each is not None:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
                with suppress(OSError):
                    each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._client, self._server = client, server
                for source, sink, moment in ((client, server, "request"), (server, client, "answer")):
                    threading.Thread(target=self._pass_on, args=(source, sink, moment), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, moment: str) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if self._break_at == moment:
                    self._break_at = None
                    break
                sink.sendall(data)
        for end in (source, sink):
            if end not in self._held:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(port: int) -> Iterator[Relay]:
    """Relay to a port of 127.0.0.1."""
    with closing(Relay(port)) as between:
        yield between
