# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks: every form of row, subsets, and how many of each."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from nemo_automodel.components.speculative.bench.workload import digest_prompts, load_prompts
from nemo_automodel.errors import DataError


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


def test_the_field_of_the_turns_and_the_split_are_the_ones_asked_for(tmp_path: Path) -> None:
    path = _rows(tmp_path, {"messages": _turns("user:a"), "conversations": _turns("user:b")})
    assert load_prompts(path, 1, column="conversations")[0].messages[0]["content"] == "b"
    rows = datasets.Dataset.from_list([{"messages": _turns("user:held out")}])
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "set")
    assert load_prompts(str(tmp_path / "set"), 1, split="test")[0].messages[0]["content"] == "held out"
    with pytest.raises(DataError, match="split"):
        load_prompts(str(tmp_path / "set"), 1)


def _subsets(prompts) -> list[str]:
    return [f"{prompt.subset}:{prompt.messages[0]['content']}" for prompt in prompts]


def test_questions_of_benchmarks_are_read_as_they_are(tmp_path: Path) -> None:
    path = _rows(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question": "q", "answer": "no"},
        {"prompt": "p", "task": "sum"},
        {"prompt": [*_turns("system:s", "user:u")], "category": "chat"},
    )
    first, second, third, fourth = load_prompts(path, 9)
    assert (first.subset, list(first.messages), first.followups) == ("writing", _turns("user:a"), ("b",))
    assert _subsets([second, third]) == [":q", "sum:p"] and second.followups == ()
    assert (fourth.subset, list(fourth.messages)) == ("chat", _turns("system:s", "user:u"))


def test_prompts_are_spread_over_the_subsets_of_a_file(tmp_path: Path) -> None:
    rows = [{"category": "ab"[i // 4], "prompt": str(i)} for i in range(8)] + [{"category": "c", "prompt": "8"}]
    assert _subsets(load_prompts(_rows(tmp_path, *rows), 5)) == ["a:0", "a:1", "b:4", "b:5", "c:8"]


def test_several_files_are_subsets_by_their_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "category": "x"}) + "\n")
    one, two = str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")
    assert _subsets(load_prompts((one, f"other={two}"), 2)) == ["one:one", "other:two"]
    odd = tmp_path / "k=v.jsonl"
    odd.write_text(json.dumps({"question": "odd"}) + "\n")
    assert _subsets(load_prompts(str(odd), 2)) == [":odd"]  # an equals sign in a path is no name


@pytest.mark.parametrize("row", [{"turns": "a"}, {"turns": ["a", 1]}, {"question": 3}])
def test_a_question_that_is_no_text_is_named(tmp_path: Path, row: dict) -> None:
    with pytest.raises(DataError, match="row 1"):
        load_prompts(_rows(tmp_path, row), 1)


def test_the_digest_follows_what_is_asked(tmp_path: Path) -> None:
    digests = {
        digest_prompts(load_prompts(_rows(tmp_path, row), 1))
        for row in ({"turns": ["a", "b"]}, {"turns": ["a"]}, {"turns": ["a"], "category": "c"}, {"question": "a"})
    }
    assert len(digests) == 3  # the second and the fourth ask the same
