"""A server of a user's own that misbehaves as it is told: ``python unruly_server.py PORT MOOD [FOLDER]``.

It answers one request at a time, as the plainest servers do. What it did is noted in FOLDER, by empty files whose names
say it, so that its next life can be another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

LONG_S = 3600.0
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
ANSWER = {
    "model": "m-1",
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 1},
}
MODELS = {"object": "list", "data": [{"id": "m-1", "max_model_len": 512}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    mood = ""
    folder = Path()
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        if self.mood == "never ready" or (self.mood == "slow to load" and self.asked < 4):
            self.answer(503, {"error": {"message": "loading"}})
        elif self.path == "/health" and self.mood != "no health":
            self.answer(200, {})
        elif self.path == "/v1/models":
            self.answer(200, MODELS)
        else:
            self.answer(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = str(asked.get("messages", ""))
        if self.mood == "wants a key":
            self.answer(401, {"error": {"message": "a key is missing", "code": "invalid_api_key"}})
        elif asked["model"] != "m-1":
            self.answer(404, {"error": {"message": f"no model {asked['model']}", "code": "model_not_found"}})
        elif "hang" in text and first_time(self.folder / "hung"):
            time.sleep(LONG_S)
        elif (self.folder / "broken").exists() or "break" in text:
            (self.folder / "broken").touch()
            self.answer(500, {"error": {"message": "CUDA error: an illegal memory access was encountered"}})
        elif "bad row" in text:
            self.answer(500, {"error": {"message": "cannot parse this"}})
        elif "slowly" in text:
            time.sleep(1.5)
            self.answer(200, ANSWER)
        elif "die" in text:
            print("a row killed me", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self.answer(200, ANSWER)

    def answer(self, status: int, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def first_time(mark: Path) -> bool:
    """True once; the mark outlives this process."""
    if mark.exists():
        return False
    mark.touch()
    return True


def main(port: int, mood: str, folder: Path) -> int:
    if mood == "dies" or (mood == "starts once" and not first_time(folder / "started")):
        print("reading the weights\n\x1b[31mRuntimeError: out of memory\x1b[0m", flush=True)
        return 3
    if mood == "cannot bind at first" and first_time(folder / "taken"):
        print("[Errno 98] address already in use", flush=True)
        return 1
    (folder / "broken").unlink(missing_ok=True)
    if mood == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mood == "has children":
        children = [
            subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=alone) for alone in (False, True)
        ]
        (folder / "children").write_text(" ".join(str(child.pid) for child in children))
    Handler.mood, Handler.folder = mood, folder
    (folder / "environment").write_text(json.dumps(dict(os.environ)))
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
