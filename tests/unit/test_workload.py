# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks, and that the answers come back in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import launch

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
    assert list(load_prompts(path, 9)[0]) == _turns("user:a", "assistant:b", "user:c")


def test_conversations_and_rows_without_an_answer_are_understood(tmp_path: Path) -> None:
    path = _rows(
        tmp_path,
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": _turns("system:s", "user:u")},
    )
    assert [list(p) for p in load_prompts(path, 9)] == [_turns("user:a"), _turns("system:s", "user:u")]


def test_only_as_many_prompts_as_asked_for_are_read(tmp_path: Path) -> None:
    rows = [{"messages": _turns("assistant:only")}] + [
        {"messages": _turns(f"user:{i}", "assistant:x")} for i in range(5)
    ]
    path = _rows(tmp_path, *rows)
    with open(path, "a") as file:
        file.write("this line is never reached\n")
    assert [p[0]["content"] for p in load_prompts(path, 3)] == ["0", "1", "2"]


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
    prompts = tuple(tuple(_turns(f"user:{i}")) for i in range(12))
    with launch(tmp_path, "good") as (client, _):
        result = run_workload(client, prompts, max_new_tokens=5, concurrency=4)
    assert [answer.text for answer in result.answers] == [f"echo {i}" for i in range(12)]
    assert result.output_tokens == 60
    assert result.tokens_per_s == pytest.approx(60 / result.seconds)


def test_a_server_that_fails_is_an_error_not_a_number(tmp_path: Path) -> None:
    with launch(tmp_path, "fails_on_chat") as (client, _):
        with pytest.raises(LaunchError, match="400 .*maximum context length"):
            run_workload(client, (tuple(_turns("user:a")),) * 3, max_new_tokens=5, concurrency=2)
