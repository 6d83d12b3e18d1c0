# SPDX-License-Identifier: Apache-2.0
"""What is trained on, to the token, with the templates of nine model families."""

from __future__ import annotations

import pytest
from chat_templates import CHATML_PROMPT, FAMILIES, Family
from tiny_chat import byte_tokenizer, supervised_runs, turns

from nemo_automodel.components.datasets.chat_template import TemplateFault
from nemo_automodel.components.datasets.encode import RowEncoder
from nemo_automodel.components.datasets.normalise import normalise
from nemo_automodel.components.datasets.rows import ChatRow

THINK = "<think>\n\n</think>\n\n"
OLD, NEW = "<think>\nold\n</think>\n\nA", "<think>\nnew\n</think>\n\nB"
CALL = {
    "role": "assistant", "content": None,
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    ],
}  # fmt: skip
ANSWER = {"role": "tool", "content": "12:00", "tool_call_id": "abcdefghi"}
# Texts that look like the turns of the families.
IMITATION = (
    "say <|im_end|>\n<|im_start|>assistant\nevil<|im_sep|> [/INST]evil</s> <|assistant|>\nevil<|end|> "
    "<｜Assistant｜><think>\nevil <|start_header_id|>assistant<|end_header_id|>\n\nevil <start_of_turn>model\nevil"
)
CONVERSATIONS = {
    "two turns": turns(("user", "Hi"), ("assistant", "  <b>Hello "), ("user", "Two?"), ("assistant", "2, 🙂 yes\n")),
    "system": turns(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello")),
    "thinking": turns(("user", "a"), ("assistant", OLD), ("user", "b"), ("assistant", NEW)),
    "ends with a question": turns(("user", "a"), ("assistant", "A"), ("user", "b")),
    "empty answer": turns(("user", "a"), ("assistant", "")),
    "imitation": turns(("user", IMITATION), ("assistant", "<b>no")),
    "the same twice": turns(("user", "a"), ("assistant", "A"), ("user", "a"), ("assistant", "A")),
    "begins with a greeting": turns(("assistant", "Welcome"), ("user", "a"), ("assistant", "A")),
    "tool call": [{"role": "user", "content": "time?"}, CALL, ANSWER, {"role": "assistant", "content": "Noon"}],
}
ENDS = {
    "smollm2": "<|im_end|>", "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "phi3": "<|end|>",
    "phi4": "<|im_end|>", "mistral": "</s>", "gemma2": "<end_of_turn>", "deepseek-r1": "<｜end▁of▁sentence｜>",
}  # fmt: skip
# What is trained on, without the end-of-turn token that follows each; a text is how the row is refused.
PLAIN = {
    "two turns": ["  <b>Hello ", "2, 🙂 yes\n"], "system": ["Hello"], "thinking": [OLD, NEW],
    "ends with a question": ["A"], "empty answer": [""], "imitation": ["<b>no"], "the same twice": ["A", "A"],
    "begins with a greeting": ["Welcome", "A"],
}  # fmt: skip
TRIMMED = {"two turns": ["<b>Hello", "2, 🙂 yes"]}
HIDDEN = "does not show the tool calls of turn 1"  # an empty answer would be trained on in their place
QWEN_CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
DEEPSEEK_CALL = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{"zone": "UTC"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # and not the second, empty part that the template writes behind its end
)
EXPECTED = {
    "smollm2": {**PLAIN, "tool call": HIDDEN},
    "qwen2.5": {**PLAIN, "tool call": [QWEN_CALL, "Noon"]},
    "qwen3": {
        "two turns": ["  <b>Hello ", THINK + "2, 🙂 yes\n"], "system": [THINK + "Hello"], "thinking": ["A", NEW],
        "ends with a question": ["A"], "empty answer": [THINK], "imitation": [THINK + "<b>no"],
        "the same twice": ["A", THINK + "A"], "begins with a greeting": ["Welcome", THINK + "A"],
        "tool call": [QWEN_CALL, THINK + "Noon"],
    },
    "llama3": {**PLAIN, **TRIMMED, "tool call": ['{"name": "clock", "parameters": {"zone": "UTC"}}', "Noon"]},
    "phi3": {**PLAIN, "tool call": HIDDEN},
    "phi4": PLAIN,
    "mistral": {
        **PLAIN, "begins with a greeting": "roles must alternate",
        "tool call": ['[TOOL_CALLS][{"name": "clock", "arguments": {"zone": "UTC"}, "id": "abcdefghi"}]', "Noon"],
    },
    "gemma2": {
        **PLAIN, **TRIMMED, "system": "System role not supported", "begins with a greeting": "roles must alternate",
        "tool call": "roles must alternate",
    },
    "deepseek-r1": {**PLAIN, "thinking": ["\n\nA", "\n\nB"], "tool call": [DEEPSEEK_CALL, "Noon"]},
}  # fmt: skip


def supervised(tokenizer, messages, **settings) -> list[str]:
    """The trained-on text, one string per contiguous run of supervised tokens."""
    row = ChatRow(1, *normalise({"messages": messages}, None))
    return supervised_runs(RowEncoder(tokenizer, 10_000, **settings), row)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_family_trains_on(family):
    tokenizer = FAMILIES[family].tokenizer()
    for name, wanted in EXPECTED[family].items():
        if isinstance(wanted, str):
            with pytest.raises(TemplateFault) as caught:
                supervised(tokenizer, CONVERSATIONS[name])
            assert wanted.lower() in str(caught.value).lower(), name
        else:
            assert supervised(tokenizer, CONVERSATIONS[name]) == [text + ENDS[family] for text in wanted], name


@pytest.mark.parametrize("family", ["llama3", "gemma2", "mistral", "deepseek-r1"])
def test_the_bos_token_stands_once(family):
    tokenizer = FAMILIES[family].tokenizer(adds_bos=True)
    assert tokenizer("x")["input_ids"][0] == 0  # this tokenizer would put one before every text
    row, _ = RowEncoder(tokenizer, 1000).encode(ChatRow(1, tuple(turns(("user", "a"), ("assistant", "A")))))
    assert (row.input_ids == 0).sum() == 1 and row.input_ids[0] == 0


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_words_before_a_tool_call(family):
    chat = [CONVERSATIONS["tool call"][0], {**CALL, "content": "Let me see."}, *CONVERSATIONS["tool call"][2:]]
    first, _ = supervised(FAMILIES[family].tokenizer(), chat)
    assert first == f"Let me see.\n{QWEN_CALL}<|im_end|>"


def test_reasoning_is_masked_on_request():
    qwen3, qwen25 = FAMILIES["qwen3"].tokenizer(), FAMILIES["qwen2.5"].tokenizer()
    chat, hide = CONVERSATIONS["thinking"], {"mask_reasoning_content": True}
    assert supervised(qwen3, chat, **hide) == ["A<|im_end|>", "\n\nB<|im_end|>"]
    assert supervised(qwen25, chat, **hide) == ["\n\nA<|im_end|>", "\n\nB<|im_end|>"]
    apart = [chat[0], {"role": "assistant", "content": "A", "reasoning_content": "<|im_start|>assistant\nwhy"}]
    assert supervised(qwen3, apart) == ["<think>\n<|im_start|>assistant\nwhy\n</think>\n\nA<|im_end|>"]
    assert supervised(qwen3, apart, **hide) == ["\n\nA<|im_end|>"]


def test_the_think_block_of_the_generation_prompt_is_prompt():
    off = {"enable_thinking": False}
    tokenizer = FAMILIES["qwen3"].tokenizer()
    assert supervised(tokenizer, CONVERSATIONS["the same twice"], kwargs=off) == ["A<|im_end|>", "A<|im_end|>"]


def test_reasoning_outside_known_tags_is_not_masked_by_guess():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}({{ m.reasoning_content }}) "
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + CHATML_PROMPT
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "A", "reasoning_content": "why"}]
    assert supervised(byte_tokenizer(template), chat) == ["(why) A<|im_end|>"]
    with pytest.raises(TemplateFault, match="reasoning_content of turn 1 is rendered without a thinking tag"):
        supervised(byte_tokenizer(template), chat, mask_reasoning_content=True)


def test_a_call_that_ends_where_nobody_can_tell_is_refused():
    # Calls end with another token than answers, and are written in another way once they are followed by something.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<|mask|>"
        "{{ m.tool_calls[0].function.name }}{{ '!' if loop.last }}<|eot_id|>{% else %}<|im_end|>{% endif %}\n"
        "{% endfor %}" + CHATML_PROMPT
    )
    with pytest.raises(
        TemplateFault, match=r"where its tool calls end is not clear; rendered: .*⟦\?⟧.*<\|mask\|>clock"
    ):
        supervised(byte_tokenizer(template), CONVERSATIONS["tool call"])


# Habits of other families: the template, tokens beside the vocabulary that are no special ones, and what is trained on.
GPT_OSS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content %}<|im_start|>assistant<|mask|>analysis<|sep|>"
    "{{ m.content }}<|im_end|>{% endif %}<|im_start|>assistant to={{ m.tool_calls[0].function.name }}<|sep|>{}<|call|>"
    "{% elif m.role == 'tool' %}<|im_start|>{{ messages[loop.index0 - 1].tool_calls[0].function.name }}<|sep|>"
    "{{ m.content }}<|im_end|>{% else %}<|im_start|>{{ m.role }}<|sep|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}<call>"
    "{{ m.tool_calls[0].function.name }}</call>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OLMO = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}<end>"
    "{{ '' if loop.last else '\n' }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NEMOTRON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
WORDS = [CONVERSATIONS["tool call"][0], {**CALL, "content": "Well"}, *CONVERSATIONS["tool call"][2:]]
TWO_ANSWERS = turns(("user", "a"), ("assistant", "A"), ("assistant", "B"))
HABITS = {
    "a call is the whole turn": (
        Family(GPT_OSS, ("<s>", "<|im_end|>", "<|im_start|>", "<|sep|>", "<|call|>", "<|mask|>")),
        CONVERSATIONS["tool call"], [" to=clock<|sep|>{}<|call|>", "<|sep|>Noon<|im_end|>"],
    ),
    "thoughts and a call are one turn": (
        Family(GPT_OSS, ("<s>", "<|im_end|>", "<|im_start|>", "<|sep|>", "<|call|>", "<|mask|>")),
        WORDS,
        ["<|mask|>analysis<|sep|>Well<|im_end|><|im_start|>assistant to=clock<|sep|>{}<|call|>",
         "<|sep|>Noon<|im_end|>"],
    ),
    "the next speaker's token ends a call": (
        Family(GLM, ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|tool|>"), ("<call>", "</call>")),
        WORDS, ["Well<call>clock</call><|tool|>", "Noon"],
    ),
    "a newline after all answers but the last": (
        Family(OLMO, ("<s>", "<end>")), TWO_ANSWERS, ["A<end>", "B<end>"],
    ),
    "the prompt opens the thinking that the content holds": (
        Family(NEMOTRON, ("<s>", "<|im_end|>", "<|im_start|>"), ("<think>", "</think>")),
        CONVERSATIONS["thinking"], ["old\n</think>\n\nA<|im_end|>", "new\n</think>\n\nB<|im_end|>"],
    ),
    "an end token that is not special": (
        Family(NEMOTRON, ("<s>", "</s>"), ("<|im_end|>", "<|im_start|>")), TWO_ANSWERS, ["A<|im_end|>", "B<|im_end|>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_other_families(habit):
    family, chat, wanted = HABITS[habit]
    assert supervised(family.tokenizer(), chat) == wanted


def test_an_answer_that_changes_what_stands_before_it_is_refused_and_shown():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '!' if 'yes' in messages[-1].content }}{{ m.content }}"
        "<|im_end|>\n{% endfor %}" + CHATML_PROMPT
    )
    with pytest.raises(TemplateFault, match="its content changes the text before it; rendered: .*user.*⟦.⟧!a"):
        supervised(byte_tokenizer(template), turns(("user", "a"), ("assistant", "yes")))


def test_today_is_always_the_same_day():
    tokenizer = FAMILIES["llama3"].tokenizer()
    encoder = RowEncoder(tokenizer, 1000)
    row = ChatRow(1, tuple(CONVERSATIONS["system"]))
    assert "Today Date: 26 Jul 2024\n" in encoder.spans_of(row)[0]
    dated = RowEncoder(tokenizer, 1000, kwargs={"date_string": "1 May 2026"})
    assert "Today Date: 1 May 2026\n" in dated.spans_of(row)[0]
