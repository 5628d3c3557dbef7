"""HTTP for uvicorn with a limit on the size of a request's head."""

from __future__ import annotations

from typing import Any


def http_protocol(most_bytes: int) -> Any:
    """Value of uvicorn's `http` option: httptools, if installed, with at most this many bytes of a head (plus one read
    of the socket); else h11, which has its own limit."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class LimitedProtocol(HttpToolsProtocol):
        """Closes a connection whose head is too large."""

        head_bytes: int | None = None
        """Bytes received of the present head; None outside a head."""

        def data_received(self, data: bytes) -> None:
            if self.head_bytes is not None:
                self.head_bytes += len(data)
                if self.head_bytes > most_bytes:
                    self.send_400_response("The head of the request is too large.")
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.head_bytes = 0

        def on_headers_complete(self) -> None:
            self.head_bytes = None
            super().on_headers_complete()

    return LimitedProtocol
