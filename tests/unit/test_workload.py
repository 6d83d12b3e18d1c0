# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks, and that the answers come back in order."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from launching import launch

from nemo_automodel.components.datasets.rows import ChatRow
from nemo_automodel.components.speculative.bench.workload import load_prompts, run_workload
from nemo_automodel.errors import DataError, LaunchError


def _rows(tmp_path: Path, *rows: dict) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _turns(*pairs: str) -> list[dict]:
    return [{"role": role, "content": text} for role, text in (pair.split(":") for pair in pairs)]


def test_the_trailing_answer_is_cut_and_earlier_ones_stay(tmp_path: Path) -> None:
    path = _rows(tmp_path, {"messages": _turns("user:a", "assistant:b", "user:c", "assistant:d")})
    assert list(load_prompts(path, 9)[0].messages) == _turns("user:a", "assistant:b", "user:c")


def test_conversations_and_rows_without_an_answer_are_understood(tmp_path: Path) -> None:
    path = _rows(
        tmp_path,
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": _turns("system:s", "user:u")},
    )
    assert [list(chat.messages) for chat in load_prompts(path, 9)] == [_turns("user:a"), _turns("system:s", "user:u")]


def test_only_as_many_prompts_as_asked_for_are_read(tmp_path: Path) -> None:
    rows = [{"messages": _turns("assistant:only")}] + [
        {"messages": _turns(f"user:{i}", "assistant:x")} for i in range(5)
    ]
    path = _rows(tmp_path, *rows)
    with open(path, "a") as file:
        file.write("this line is never reached\n")
    assert [chat.messages[0]["content"] for chat in load_prompts(path, 3)] == ["0", "1", "2"]


@pytest.mark.parametrize("row", [{"text": "x"}, {"messages": [{"who": "me"}]}])
def test_a_row_that_is_no_conversation_names_the_key(tmp_path: Path, row: dict) -> None:
    with pytest.raises(DataError, match="serve.benchmark.prompts"):
        load_prompts(_rows(tmp_path, row), 1)


def test_rows_with_nothing_to_ask_and_absent_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to ask"):
        load_prompts(_rows(tmp_path, {"messages": _turns("assistant:x")}), 1)
    with pytest.raises(DataError, match="serve.benchmark.prompts"):
        load_prompts(str(tmp_path / "absent.jsonl"), 1)


def test_answers_keep_the_order_of_the_prompts(tmp_path: Path) -> None:
    chats = tuple(ChatRow(i, tuple(_turns(f"user:{i}"))) for i in range(12))
    with launch(tmp_path, "good") as (client, _):
        result = run_workload(client, chats, max_new_tokens=5, concurrency=4)
    assert [answer.text for answer in result.answers] == [f"echo {i}" for i in range(12)]
    assert result.output_tokens == 60
    assert result.tokens_per_s == pytest.approx(60 / result.seconds)


def test_a_server_that_fails_is_an_error_not_a_number(tmp_path: Path) -> None:
    with launch(tmp_path, "fails_on_chat") as (client, _):
        with pytest.raises(LaunchError, match="400 .*maximum context length"):
            run_workload(client, (ChatRow(1, tuple(_turns("user:a"))),) * 3, max_new_tokens=5, concurrency=2)


def test_the_field_of_the_turns_and_the_split_are_the_ones_asked_for(tmp_path: Path) -> None:
    path = _rows(tmp_path, {"messages": _turns("user:a"), "conversations": _turns("user:b")})
    assert load_prompts(path, 1, column="conversations")[0].messages[0]["content"] == "b"
    rows = datasets.Dataset.from_list([{"messages": _turns("user:held out")}])
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "set")
    assert load_prompts(str(tmp_path / "set"), 1, split="test")[0].messages[0]["content"] == "held out"
    with pytest.raises(DataError, match="split"):
        load_prompts(str(tmp_path / "set"), 1)


def test_tools_and_template_arguments_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft was trained on prompts that had them: without them another prompt is measured."""
    log, tool = tmp_path / "asked.jsonl", {"type": "function", "function": {"name": "f", "parameters": {}}}
    monkeypatch.setenv("FAKE_SERVER_LOG", str(log))
    path = _rows(tmp_path, {"messages": _turns("user:a"), "tools": [tool]}, {"messages": _turns("user:b")})
    with launch(tmp_path, "good") as (client, _):
        run_workload(
            client, load_prompts(path, 2), max_new_tokens=5, concurrency=1, template_kwargs={"enable_thinking": False}
        )
    first, second = [body for line in log.read_text().splitlines() if "messages" in (body := json.loads(line))]
    assert (first["tools"], first["tool_choice"]) == ([tool], "none")  # in the prompt, never answered with a call
    assert "tools" not in second and "tool_choice" not in second
    assert first["chat_template_kwargs"] == second["chat_template_kwargs"] == {"enable_thinking": False}
