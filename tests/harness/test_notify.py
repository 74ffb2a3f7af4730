"""Who is told what, once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from harness.notify import CannotTell, after, messages, send
from harness.queue import ask
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
    ask(first.path.parent, [first.name, second.name], [first.name, second.name])
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
    ask(folder.path.parent, [folder.name], [folder.name])
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


def ends_of(folder) -> list[str]:
    return [text for text in messages(folder, goes_back=False) if "all has ended" in text]


def test_runs_that_were_not_asked_for_are_not_waited_for(make_run):
    first, second = make_run("molt-s0-1"), make_run("molt-s1-2")
    ask(first.path.parent, [first.name, second.name], [first.name])
    ended(first)
    assert ends_of(first) == ["experiment/tiny: all has ended, 0 of 1 runs done"]


def test_a_run_whose_need_was_lost_has_ended_too(make_run):
    """Slurm cancels it without a word in its folder."""
    first = make_run("warmup-1")
    second = make_run("molt-s1-2", needs=(first.name,))
    ask(first.path.parent, [first.name, second.name], [first.name, second.name])
    write_json(first.path.parent / "slurm.json", {first.name: "7_0", second.name: "8_0"})
    write_json(first.new_attempt() / "start.json", {"slurm_job_id": "7_0"})
    write_json(first.attempts[-1] / "end.json", LOST)
    assert ends_of(first) == ["experiment/tiny: all has ended, 0 of 2 runs done"]


@pytest.mark.parametrize("where", ["slurm", "here"])
def test_a_run_that_is_to_be_tried_again_has_not_ended(make_run, where):
    first, second = make_run("molt-s0-1"), make_run("molt-s1-2")
    ask(first.path.parent, [first.name, second.name], [first.name, second.name])
    for folder, job in ((first, "7_0"), (second, "8_0")):
        write_json(folder.new_attempt() / "start.json", {"slurm_job_id": job})
        write_json(folder.attempts[-1] / "end.json", LOST)
    if where == "slurm":
        write_json(first.path.parent / "slurm.json", {first.name: "9_0", second.name: "8_0"})
    else:
        ask(first.path.parent, [first.name, second.name], [first.name])
    assert ends_of(second) == []


def test_a_hook_that_answers_nonsense_is_a_hook_that_is_down():
    """http.client's errors are no OSError; a job that is done must not fail by them."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.sendall(b"what?\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(CannotTell, match="BadStatusLine"):
            send("x", f"http://127.0.0.1:{server.getsockname()[1]}/")
    with pytest.raises(CannotTell, match="InvalidURL|ValueError"):
        send("x", "http://[/")


def test_a_folder_that_is_gone_fails_no_job(make_run, monkeypatch, capsys):
    first, second = make_run("warmup-1"), make_run("molt-s1-2")
    ask(first.path.parent, [first.name, second.name], [first.name, second.name])
    monkeypatch.setenv("MOLT_NOTIFY", "http://127.0.0.1:9/")
    shutil.rmtree(second.path)
    write_json(first.path / "done.json", {"attempt": 1})
    ended(first)
    assert ends_of(first) == ["experiment/tiny: all has ended, 1 of 1 runs done"]
    monkeypatch.setattr("harness.notify.messages", lambda *_: os.stat("/nowhere"))
    after(first, goes_back=False)
    assert "no notice was sent" in capsys.readouterr().err
