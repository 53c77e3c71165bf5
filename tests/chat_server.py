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


def tool_call(
    arguments: Any, name: str = "search_and_ask", id: str | None = "c1"
) -> dict[str, Any]:
    """A call of a tool in the form recorded from chat-completion servers."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = None, finish: str = "tool_calls") -> Any:
    """A reply that calls tools."""
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return completion(message=message, finish_reason=finish)


class Server:
    """Answers with scripted (status, body, headers, delay) replies, the last one repeated, and
    records requests. It lists ``models``.
    """

    models: tuple[str, ...] = ("m",)

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

            def do_GET(self) -> None:
                data = json.dumps({"data": [{"id": name} for name in outer.models]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

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
            status, reply, headers, delay = self.reply_to(body)
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

    def reply_to(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str], float]:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
