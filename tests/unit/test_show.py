# SPDX-License-Identifier: Apache-2.0
"""The command that shows what a row trains on."""

from __future__ import annotations

import json

import pytest
from chat_templates import FAMILIES
from tiny_chat import turns

from nemo_automodel.components.datasets.show import main

CHAT = turns(("user", "Hi"), ("assistant", "<think>\nwhy\n</think>\n\nHello 🙂"))


@pytest.fixture
def arguments(tmp_path):
    FAMILIES["qwen3"].tokenizer().save_pretrained(tmp_path / "target")
    lines = [json.dumps({"messages": CHAT}), "{}", json.dumps({"messages": CHAT[:1]})]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "chats.jsonl")]


def test_what_is_supervised_stands_in_brackets(arguments, capsys):
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert out == f"{asked}⟦<think>\nwhy\n</think>\n\nHello 🙂<|im_end|>⟧\n\n"
    assert "row 1 (chats.jsonl:1): 42 tokens, 20 of them supervised" in err


def test_options_of_the_configuration_change_it(arguments, capsys):
    main([*arguments, "--mask-reasoning-content"])
    assert "<think>\nwhy\n</think>⟦\n\nHello 🙂<|im_end|>⟧" in capsys.readouterr().out
    main([*arguments, "--seq-length", "30"])
    assert "--- cut here: 18 more characters" in capsys.readouterr().out
    main([*arguments, "--chat-template-kwargs", "enable_thinking=false", "--ids"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["0", "2", "'<|im_start|>'"] and len(lines) == 42
    assert [line.split()[2] for line in lines if "H" in line] == ["'H'", "*"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--row", "9"], "has fewer than 9 rows [--row]"),
        (["--row", "2"], "row 2 (chats.jsonl:2): no field 'messages' or 'conversations'"),
        (["--data", "/no/such.jsonl"], "no file or folder at /no/such.jsonl"),
        (["--target", "/no/model"], "no usable tokenizer at '/no/model'"),
        (["--chat-template-kwargs", "x"], "'x' is no KEY=VALUE"),
    ],
)
def test_a_mistake_is_one_line(arguments, capsys, more, message):
    assert main([*arguments, *more]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_row_without_an_answer_shows_nothing_supervised(arguments, capsys):
    assert main([*arguments, "--row", "3"]) == 0
    assert "⟦" not in capsys.readouterr().out
