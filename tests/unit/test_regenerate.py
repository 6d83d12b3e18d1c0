# SPDX-License-Identifier: Apache-2.0
"""The regenerate command against a small HTTP server: turns, resuming, faults, what is said and kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeOpenAI

from nemo_automodel.components.datasets.regenerate import main
from nemo_automodel.components.datasets.regenerate_ask import MOST_WAIT_S, Backoff

WAIT_S = Backoff.wait_s  # the tests below do not wait
MODULE = "nemo_automodel.components.datasets.regenerate"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(number: int) -> list[dict[str, Any]]:
    return [{"messages": [user(f"q{i}"), assistant("old")]} for i in range(number)]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "wait_s", lambda self, attempt, retry_after: 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def place(tmp_path: Path):
    """(run the command on rows, output file)."""
    out = tmp_path / "answers.jsonl"

    def run(rows: list[Any], server: FakeOpenAI, *flags: str) -> int:
        data = write_rows(tmp_path / "data.jsonl", rows)
        return main(["--data", str(data), "--out", str(out), "--base-url", server.url, *flags])

    return run, out


def test_every_assistant_turn_is_the_targets_and_the_rest_is_kept(place) -> None:
    run, out = place
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    function = {"name": "f", "arguments": {"x": 1}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    system = {"role": "system", "content": "be brief"}
    rows = [
        {"messages": [system, user("one"), assistant("old"), user("two"), assistant("old"), assistant("again")]},
        {"messages": [user("call"), call, result, assistant("old")], "tools": tools},
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    with FakeOpenAI() as server:
        assert run(rows, server) == 0
    first, second, third = read_rows(out)
    assert first["messages"] == [system, user("one"), assistant("2:one"), user("two"), assistant("4:two")]
    assert second["messages"] == [user("call"), call, result, assistant("3:42")] and second["tools"] == tools
    assert third["messages"] == [user("alone"), assistant("1:alone")]
    asked = next(body for body in server.bodies if body["messages"][-1]["content"] == "two")
    assert [message["content"] for message in asked["messages"]] == ["be brief", "one", "2:one", "two"]
    with_tools = next(body for body in server.bodies if "tools" in body)
    assert with_tools["tools"] == tools and with_tools["tool_choice"] == "none"
    assert with_tools["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'  # text, says the API


def test_output_has_the_order_of_the_data_and_so_many_are_asked_at_once(place) -> None:
    run, out = place
    with FakeOpenAI(delay_s=0.005) as server:
        assert run(questions(40), server, "--concurrency", "4", "--limit", "30") == 0
    assert [row["messages"][0]["content"] for row in read_rows(out)] == [f"q{i}" for i in range(30)]
    assert [row["row"] for row in read_rows(out)] == list(range(1, 31))
    assert 1 < server.most_under_way <= 4


def test_killed_in_the_middle_nothing_is_asked_twice_lost_or_doubled(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "data.jsonl", questions(60)), tmp_path / "answers.jsonl"
    part = tmp_path / "answers.jsonl.part"
    with FakeOpenAI(delay_s=0.02) as server:
        argv = ["--data", str(data), "--out", str(out), "--base-url", server.url, "--concurrency", "3"]
        child = subprocess.Popen([sys.executable, "-m", MODULE, *argv], stderr=subprocess.DEVNULL)
        while len(server.bodies) < 15:
            assert child.poll() is None
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        child.wait()
        whole = part.read_bytes().rpartition(b"\n")[0].splitlines()
        finished = {json.loads(line)["messages"][0]["content"] for line in whole}
        assert not out.exists() and len(finished) < 60
        assert len(set(server.asked()) - finished) <= 2 * 3  # only what was under way, or just answered, is lost
        with part.open("ab") as file:  # what a kill in the middle of a write leaves
            file.write(b'{"row": 60, "source": "x", "mess')
        server.bodies.clear()
        assert main(argv) == 0
    assert not finished & set(server.asked()) and set(server.asked().values()) == {1}
    assert [row["messages"][1]["content"] for row in read_rows(out)] == [f"1:q{i}" for i in range(60)]
    assert not part.exists()


def test_run_again_asks_only_what_is_new(place) -> None:
    run, out = place
    with FakeOpenAI() as server:
        assert run(questions(3), server) == 0
        before = out.read_bytes()
        assert run(questions(3), server) == 0 and out.read_bytes() == before
        assert run(questions(5), server) == 0
    assert server.asked() == {f"q{i}": 1 for i in range(5)}
    assert len(read_rows(out)) == 5


def test_answers_never_land_beside_other_prompts_or_settings(place, capsys: pytest.CaptureFixture) -> None:
    run, out = place
    with FakeOpenAI() as server:
        assert run(questions(2), server) == 0
        assert run(questions(2)[::-1], server) == 1
        assert "row 1 is not the one that was answered" in capsys.readouterr().err
        assert run(questions(2), server, "--max-tokens", "7") == 1
        assert "max_tokens 512 -> 7" in capsys.readouterr().err
    assert len(server.bodies) == 2


def test_busy_and_failing_servers_are_asked_again(place) -> None:
    run, out = place
    faults = {"q0": [(429, {"Retry-After": "1"}), (503, {})], "q1": [(500, {})] * 3}
    with FakeOpenAI(faults) as server:
        assert run(questions(3), server) == 0
    assert server.asked() == {"q0": 3, "q1": 4, "q2": 1} and len(read_rows(out)) == 3


def test_a_refused_row_is_named_counted_and_asked_again_next_time(place, capsys: pytest.CaptureFixture) -> None:
    run, out = place
    with FakeOpenAI({"q1": [(400, {})]}) as server:
        assert run(questions(3), server, "--max-failed-share", "0") == 1
        said = capsys.readouterr().err
        assert "1 of 3 rows failed: row 2: 400" in said and "error:" in said.splitlines()[-1]
        assert [row["row"] for row in read_rows(out)] == [1, 3]
        assert json.loads(Path(f"{out}.json").read_text())["failed"][0]["row"] == 2
        assert run(questions(3), server, "--max-failed-share", "0") == 0
    assert [row["row"] for row in read_rows(out)] == [1, 2, 3] and server.asked()["q0"] == 1


def test_a_conversation_that_grows_too_long_keeps_its_first_turns(place) -> None:
    run, out = place
    rows = [{"messages": [user("a"), assistant("x"), user("b"), assistant("y")]}]
    with FakeOpenAI({"b": [(400, {})]}) as server:
        assert run(rows, server) == 0
    (row,) = read_rows(out)
    assert row["messages"] == [user("a"), assistant("1:a")] and row["ended"].startswith("400")


def test_rows_that_are_no_conversation_are_named(place, capsys: pytest.CaptureFixture) -> None:
    run, out = place
    with FakeOpenAI() as server:
        assert run([*questions(1), {"text": "x"}, {"messages": [assistant("hello")]}], server) == 1
    said = capsys.readouterr().err
    assert "row 2: no field 'messages'" in said and "row 3: no user turn" in said
    assert len(read_rows(out)) == 1


def test_cut_answers_are_marked_or_their_rows_dropped(place, tmp_path: Path) -> None:
    run, out = place
    rows = [{"messages": [user("a b c d")]}, {"messages": [user("a")]}]
    with FakeOpenAI() as server:
        assert run(rows, server, "--max-tokens", "3") == 0
        first, second = read_rows(out)
        assert first["cut"] == [1] and "cut" not in second
        for path in tmp_path.glob("*answers.jsonl*"):
            path.unlink()
        for _ in range(2):
            assert run(rows, server, "--max-tokens", "3", "--cut", "drop") == 0
    assert [row["row"] for row in read_rows(out)] == [2]
    assert server.asked()["a b c d"] == 2  # once for each setting: a dropped row is finished


def test_a_server_that_goes_away_ends_the_run_and_keeps_what_there_is(place, capsys: pytest.CaptureFixture) -> None:
    run, out = place
    with FakeOpenAI({f"q{i}": [(500, {})] * 99 for i in range(1, 60)}) as server:
        assert run(questions(60), server, "--concurrency", "1") == 1
        assert "20 rows in a row failed, the last one with: 500" in capsys.readouterr().err
    assert not out.exists() and len(read_rows(Path(f"{out}.part"))) == 1
    assert run(questions(60), server, "--model", "target") == 1  # nobody listens any more
    assert "no answer, 8 times" in capsys.readouterr().err


def test_a_wrong_key_ends_the_run_at_once_and_is_never_shown(
    place, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = place
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with FakeOpenAI({"q0": [(401, {})]}) as server:
        assert run(questions(2), server, "--concurrency", "1") == 1
    assert server.keys == {"Bearer sk-very-secret"} and server.asked()["q0"] == 1
    said = capsys.readouterr()
    kept = "".join(path.read_text() for path in out.parent.iterdir() if path.name.startswith("answers"))
    assert "export OPENAI_API_KEY" in said.err and "very-secret" not in said.err + said.out + kept


def test_progress_line(place, capsys: pytest.CaptureFixture) -> None:
    run, _ = place
    with FakeOpenAI() as server:
        assert run(questions(3), server) == 0
        assert run(questions(4), server) == 0
    said = capsys.readouterr().err
    assert "3/3 rows" in said and "tokens/s" in said and "4/4 rows" in said and "3 from before" in said


def test_two_runs_never_write_one_file(place, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    from filelock import FileLock

    run, out = place
    with FakeOpenAI() as server, FileLock(tmp_path / f".{out.name}.lock"):
        assert run(questions(1), server) == 1
    assert "another run writes this file" in capsys.readouterr().err and not server.bodies


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--base-url", "localhost:8000"], "is no URL"),
        (["--base-url", "http://me:pw@127.0.0.1/v1"], "the URL holds a password"),
        (["--base-url", "http://127.0.0.1:9/v1", "--target", "x"], "one of --base-url and --target"),
    ],
)
def test_unusable_flags_are_told_in_one_line(tmp_path: Path, flags: list[str], said: str, capsys) -> None:
    data = write_rows(tmp_path / "data.jsonl", questions(1))
    assert main(["--data", str(data), "--out", str(tmp_path / "o.jsonl"), *flags]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "pw@" not in error


def test_waits_grow_and_the_server_may_ask_for_its_own() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0)
    waits = [WAIT_S(backoff, attempt, None) for attempt in range(6)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, (1, 2, 4, 8, 8, 8), strict=True))
    assert WAIT_S(backoff, 0, "17") == 17.0 and WAIT_S(backoff, 0, "999999") == MOST_WAIT_S
