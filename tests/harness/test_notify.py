"""Who is told what, once."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from harness.notify import CannotTell, after, messages, send
from harness.run_folder import write_json

LOST = {"state": "FAILED", "reason": "FAILED: exit code 1: ValueError: no", "duration_s": 1.0}


def ended(folder, end=LOST):
    write_json(folder.new_attempt() / "end.json", end)


@pytest.fixture
def hook():
    """(URL, texts that arrived)."""
    arrived = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            arrived.append(json.loads(body)["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", arrived
    server.shutdown()


def test_a_lost_run_and_the_end_of_everything_are_told_once(make_run, hook, monkeypatch):
    url, arrived = hook
    monkeypatch.setenv("MOLT_NOTIFY", url)
    first, second = make_run("molt-s0-1"), make_run("molt-s1-2")
    write_json(first.path.parent / "queue.json", {"order": [first.name, second.name], "work": {}})
    ended(first)
    after(first, goes_back=False)
    assert [text.splitlines()[0] for text in arrived] == [
        "experiment/tiny: molt-s0-1 FAILED: exit code 1: ValueError: no"
    ]
    ended(second)
    write_json(second.path / "done.json", {"attempt": 1})
    after(second, goes_back=False)
    after(second, goes_back=False)
    assert arrived[1:] == ["experiment/tiny: all has ended, 1 of 2 runs done"]


def test_a_run_that_goes_back_into_the_queue_is_no_news(make_run):
    folder = make_run()
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    ended(folder, LOST | {"requeued": True})
    assert messages(folder, goes_back=True) == []


def test_a_hook_that_is_down_changes_nothing_but_the_log(make_run, monkeypatch, capsys):
    monkeypatch.setenv("MOLT_NOTIFY", "http://127.0.0.1:9/")
    folder = make_run()
    ended(folder)
    after(folder, goes_back=False)
    assert "no notice was sent: URLError" in capsys.readouterr().err


def test_an_address_of_no_known_kind_is_refused_by_name():
    with pytest.raises(CannotTell, match="MOLT_NOTIFY is neither"):
        send("x", "me@example.org")
