"""A server of HTTP in a thread of the test: what the stand-ins for rollout servers share."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    """Prints nothing."""

    def reply(self, status: int, answer) -> None:
        """Send JSON, or an empty body for None. The client may be gone."""
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    """It serves from now on, at `url`."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, handler: type[QuietHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_) -> None:
        pass
