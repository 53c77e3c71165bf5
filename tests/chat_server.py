"""A local chat-completion server for tests: scripted replies, recorded requests."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from experiential.types import Message

CHAT: list[Message] = [{"role": "user", "content": "Which door?"}]


def completion(text: str = "north", **choice: Any) -> dict[str, Any]:
    """A reply in the form recorded from chat-completion servers."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                **choice,
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
    }


class Server:
    """Answers with scripted (status, body, headers, delay) replies, the last one repeated, and
    records requests.
    """

    def __init__(self) -> None:
        self.replies: list[tuple[int, Any, dict[str, str], float]] = [(200, completion(), {}, 0.0)]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.active = self.peak = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self.lock:
            self.requests.append({"path": handler.path, **body})
            self.headers.append(dict(handler.headers))
            status, reply, headers, delay = (
                self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
            )
            self.active += 1
            self.peak = max(self.peak, self.active)
        time.sleep(delay)
        with self.lock:
            self.active -= 1
        data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        try:
            handler.send_response(status)
            for key, value in {
                "content-type": "application/json",
                "content-length": str(len(data)),
                **headers,
            }.items():
                handler.send_header(key, value)
            handler.end_headers()
            handler.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
