# SPDX-License-Identifier: Apache-2.0
"""Every source gives the same rows, and a bad row is named."""

from __future__ import annotations

import gzip
import json

import pytest
from datasets import Dataset, DatasetDict

from nemo_automodel.components.datasets.rows import load_rows
from nemo_automodel.errors import DataError
from nemo_automodel.files import is_path_like

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path, **settings):
    return [[dict(m) for m in row.messages] for row in load_rows(str(path), where="data.train", **settings)]


def test_both_spellings_give_the_same_messages(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": MESSAGES}, {"conversations": SHAREGPT}])
    assert read(path) == [MESSAGES, MESSAGES]


def test_rows_of_different_styles_in_one_file(tmp_path):
    rows = [
        {"messages": MESSAGES},
        {"conversations": [{"from": "Human", "value": "Hi"}, {"from": "GPT", "value": "Hello"}]},
        {"messages": [{"role": "human", "content": "Hi"}, {"role": "model", "content": "Hello"}]},
        {"messages": json.dumps(MESSAGES)},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:], "messages": None},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"question": "Hi", "answer": "Hello"},
    ]
    assert read(write_jsonl(tmp_path / "a.jsonl", rows)) == [MESSAGES] * len(rows)


def test_a_system_prompt_in_its_own_field_and_the_input_of_an_instruction(tmp_path):
    rows = [
        {"system": "Be kind.", "conversations": SHAREGPT},
        {"system": "ignored: the turns have one", "messages": [{"role": "system", "content": "Be kind."}, *MESSAGES]},
        {"instruction": "Translate", "input": "salut", "output": "hi", "system_prompt": "Be kind."},
    ]
    first, second, third = read(write_jsonl(tmp_path / "a.jsonl", rows))
    assert first == second == [{"role": "system", "content": "Be kind."}, *MESSAGES]
    assert third[1] == {"role": "user", "content": "Translate\n\nsalut"}


def test_tool_calls_in_all_spellings_become_one(tmp_path):
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    as_text = {"type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    asked, told = {"role": "user", "content": "time?"}, {"role": "tool", "content": "12:00"}
    sharegpt = [
        {"from": "human", "value": "time?"},
        {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": "UTC"}}'},
        {"from": "observation", "value": "12:00"},
    ]
    rows = [
        {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [as_text]}, told]},
        {"messages": [asked, {"role": "assistant", "tool_calls": json.dumps([call["function"]])}, told]},
        {"conversations": sharegpt, "tools": '[{"name": "clock"}]'},
        {
            "messages": [
                asked,
                {"role": "assistant", "function_call": as_text["function"]},
                {**told, "role": "function"},
            ]
        },
    ]
    wanted = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, told]
    assert read(write_jsonl(tmp_path / "a.jsonl", rows)) == [wanted] * 4
    broken = [{"conversations": [{"from": "function_call", "value": "clock()"}]}]
    with pytest.raises(DataError, match="turn 0 is a string but not JSON"):
        read(write_jsonl(tmp_path / "b.jsonl", broken))


def test_a_folder_of_shards_in_the_order_of_their_names(tmp_path):
    import datasets

    named = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(6)]
    (tmp_path / "deep").mkdir()
    write_jsonl(tmp_path / "a-1.jsonl", named[:2])
    (tmp_path / "a-2.jsonl.gz").write_bytes(gzip.compress(json.dumps(named[2]).encode() + b"\n"))
    (tmp_path / "b.json").write_text(json.dumps([named[3]]))
    datasets.Dataset.from_list(named[4:]).to_parquet(str(tmp_path / "deep" / "c.parquet"))
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / ".hidden.jsonl").write_text("{")
    assert [row[0]["content"] for row in read(tmp_path)] == list("012345")
    write_jsonl(tmp_path / "a-1.jsonl", [named[0], {"text": "x"}])
    with pytest.raises(DataError, match=r"row 2 \(a-1.jsonl:2\): no field"):
        read(tmp_path)


def test_files_named_after_splits_are_read_by_split(tmp_path):
    for name, text in (("train-00000-of-00001", "t"), ("test-00000-of-00001", "e"), ("validation", "v")):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"messages": [{"role": "user", "content": text}]}])
    assert [row[0]["content"] for row in read(tmp_path)] == ["t"]
    assert [row[0]["content"] for row in read(tmp_path, split="validation")] == ["v"]
    with pytest.raises(DataError, match="no file .* is named after the split 'other'.*data.split=test"):
        read(tmp_path, split="other")


def test_a_folder_without_rows_and_a_cut_archive(tmp_path):
    with pytest.raises(DataError, match="holds no .jsonl"):
        read(tmp_path)
    whole = gzip.compress(json.dumps({"messages": MESSAGES}).encode() * 50)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot read .*a.jsonl.gz"):
        read(tmp_path / "a.jsonl.gz")


def test_one_row_per_line_under_the_name_json(tmp_path):
    assert read(write_jsonl(tmp_path / "a.json", [{"messages": MESSAGES}] * 2)) == [MESSAGES] * 2


def test_a_line_that_is_no_text_is_named_by_its_line(tmp_path):
    good = json.dumps({"messages": MESSAGES}).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b"\n\n\xff\xfe{}\n")
    with pytest.raises(DataError, match=r"row 2 \(a.jsonl:3\): line 3 is not"):
        read(tmp_path / "a.jsonl")


def test_a_hub_id_that_is_not_cached_says_that_the_hub_is_not_asked():
    with pytest.raises(DataError, match="'owner/chats' is not in the local cache.*HF_HUB_OFFLINE is set"):
        read("owner/chats")


def test_json_parquet_and_a_saved_folder_give_the_same_rows(tmp_path):
    import datasets

    rows = [{"messages": MESSAGES, "id": i} for i in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "dict"))
    (tmp_path / "folder").mkdir()
    table.to_parquet(str(tmp_path / "folder" / "train.parquet"))
    for name in ("a.json", "a.parquet", "saved", "dict", "folder"):
        assert read(tmp_path / name) == [MESSAGES] * 3, name


def test_nulls_of_parquet_are_absent_keys(tmp_path):
    turn = {"role": "assistant", "content": None, "tool_calls": None, "name": None}
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [turn]}])
    assert read(path) == [[{"role": "assistant", "content": ""}]]


def test_nulls_at_any_depth_of_parquet_are_absent_keys(tmp_path):
    import datasets

    def turn(name, **arguments):
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def tool(name, **properties):
        return {"name": name, "parameters": {"properties": properties}}

    rows = [
        {"messages": [turn("clock", x=1)], "tools": [tool("clock", x={"type": "integer"})]},
        {"messages": [turn("date", y="b")], "tools": [tool("date", y={"type": "string", "enum": ["a", "b"]})]},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    got = list(load_rows(str(tmp_path / "a.parquet"), where="data.train"))
    assert [list(row.messages) for row in got] == [row["messages"] for row in rows]
    assert [list(row.tools) for row in got] == [row["tools"] for row in rows]


def test_nulls_that_mean_something_stay(tmp_path):
    tools = [{"name": "clock", "parameters": {"zone": {"default": None, "enum": [None, "UTC"]}}}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": MESSAGES, "tools": json.dumps(tools)}])
    (row,) = load_rows(path, where="data.train")
    assert list(row.tools) == tools  # JSON text says what its author wrote; only Arrow pads with nulls


def test_the_column_can_be_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"chat": SHAREGPT, "messages": [{"role": "user", "content": "other"}]}])
    assert read(path, column="chat") == [MESSAGES]
    with pytest.raises(DataError, match="no field 'talk'.*chat, messages"):
        read(path, column="talk")


def test_max_rows_and_text_parts_and_tools(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": parts, "tools": '[{"name": "clock"}]'}, {"broken": 1}])
    (row,) = load_rows(path, where="data.train", max_rows=1)
    assert row.messages[0]["content"] == "Hi" and row.tools == ({"name": "clock"},)


def test_bad_rows_are_named_by_number(tmp_path):
    rows = [
        {"messages": MESSAGES}, {"text": "x"}, {"messages": MESSAGES},
        {"conversations": [{"from": "narrator", "value": ""}]}, {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {"messages": []},
    ]  # fmt: skip
    with pytest.raises(DataError) as caught:
        read(write_jsonl(tmp_path / "a.jsonl", rows))
    text = str(caught.value)
    assert caught.value.where == "data.train"
    assert "row 2 (a.jsonl:2): no field" in text and "row 4 (a.jsonl:4): turn 0 is from 'narrator'" in text
    assert "row 5 (a.jsonl:5): turn 0 has neither" in text and "row 6 (a.jsonl:6): the content" in text
    assert "row 7 (a.jsonl:7)" in text


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n{half a row\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        read(path)


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "data/missing.jsonl", "/no/such/folder", "./here", "../up", "a/b/c", "a--b/c", "a/..b"]
)
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(name):
    with pytest.raises(DataError, match="no file or folder at"):
        read(name)


def test_a_name_below_a_folder_of_the_user_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "corpora").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no file or folder at"):
        read("corpora/chats")
    assert is_path_like("corpora/chats") and not is_path_like("corpora/chats", tmp_path / "corpora")


def test_no_path_is_not_the_working_directory_and_a_split_that_is_not_there(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"messages": MESSAGES}])
    monkeypatch.chdir(tmp_path)
    for nothing in ("", "x" * 5000, "~nobody-of-this-name/a.jsonl"):
        with pytest.raises(DataError, match="no file or folder at"):
            read(nothing)
    assert read(".") == [MESSAGES]
    rows = Dataset.from_list([{"messages": MESSAGES}])
    DatasetDict({"a": rows, "b": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="split 'train': it has a, b"):
        read(tmp_path / "saved")


def test_an_unknown_file_kind_and_a_broken_parquet(tmp_path):
    for name in ("a.csv", "a.parquet"):
        (tmp_path / name).write_text("no parquet")
        with pytest.raises(DataError, match="cannot read"):
            read(tmp_path / name)


def test_an_answer_of_a_tool_that_is_no_text_becomes_json_text(tmp_path):
    answers = [{"t": 3, "unit": "é"}, [1, 2], 4.5, [{"type": "text", "text": "x"}], None, "y"]
    rows = [{"messages": [*MESSAGES, {"role": "tool", "content": answer}]} for answer in answers]
    found = [row[2]["content"] for row in read(write_jsonl(tmp_path / "a.jsonl", rows))]
    assert found == ['{"t": 3, "unit": "é"}', "[1, 2]", "4.5", "x", "", "y"]
    pictured = {"messages": [*MESSAGES, {"role": "tool", "content": [{"type": "image_url", "image_url": "x"}]}]}
    with pytest.raises(DataError, match="the content of turn 2 is not text"):
        read(write_jsonl(tmp_path / "b.jsonl", [pictured]))
    with pytest.raises(DataError, match="the content of turn 0 is not text"):  # a person says no objects
        read(write_jsonl(tmp_path / "c.jsonl", [{"messages": [{"role": "user", "content": {"a": 1}}]}]))


def test_white_space_around_a_role_is_no_part_of_it(tmp_path):
    turns = [{"role": " User", "content": "Hi"}, {"role": "ASSISTANT\n", "content": "Hello"}]
    assert read(write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}])) == [MESSAGES]


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, "9" * 5000, '{"messages": [{"role": "user", "content": "a", "x": ' + "[" * 900 + "]" * 900 + "}]}"],
    ids=["never closed", "a number of 5,000 digits", "nested too deep for templates"],
)
def test_json_that_python_gives_up_on_is_a_bad_row(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used: row 2 \(a.jsonl:2\)"):
        read(path)
    (tmp_path / "list.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot read .*list.json"):
        read(tmp_path / "list.json")


def test_files_not_named_after_a_split_are_for_training(tmp_path):
    for name in ("part-1.jsonl", "part-2.jsonl", "dev.jsonl"):
        write_jsonl(tmp_path / name, [{"messages": [*MESSAGES, {"role": "user", "content": name}]}])
    assert [row[2]["content"] for row in read(tmp_path)] == ["part-1.jsonl", "part-2.jsonl"]
    assert [row[2]["content"] for row in read(tmp_path, split="validation")] == ["dev.jsonl"]
    with pytest.raises(DataError, match="no file .*'test'"):
        read(tmp_path, split="test")
