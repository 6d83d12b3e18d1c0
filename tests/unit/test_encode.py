# SPDX-License-Identifier: Apache-2.0
"""What is trained on, to the character, for templates of four kinds."""

from __future__ import annotations

import pytest
from chat_templates import FAMILIES
from tiny_chat import CHATML, CHATML_MARKED, byte_tokenizer, supervised_runs, turns

from nemo_automodel.components.datasets.bad_rows import BadRows
from nemo_automodel.components.datasets.encode import RowEncoder, encode_rows
from nemo_automodel.components.datasets.rows import BadRow, ChatRow, normalise_row
from nemo_automodel.components.datasets.tokenizer import load_tokenizer
from nemo_automodel.errors import ConfigError, DataError

THREE = turns(
    ("system", "Be kind."), ("user", "Hi"), ("assistant", "<b>Hello"), ("user", "Two?"), ("assistant", "2, 🙂 yes")
)


def supervised(template: str, messages, *, merges=()) -> list[str]:
    """The trained-on text, one string per contiguous run of supervised tokens."""
    return supervised_runs(RowEncoder(byte_tokenizer(template, merges=merges), 10_000), ChatRow(1, tuple(messages)))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_multi_turn_with_system_prompt(template):
    assert supervised(template, THREE) == ["<b>Hello<|im_end|>", "2, 🙂 yes<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_a_turn_of_weight_0_is_context_only(template):
    """OpenAI's fine-tuning form."""
    row = {"messages": [*THREE[:2], {**THREE[2], "weight": 0}, *THREE[3:]]}
    assert supervised(template, normalise_row(row, 1, None).messages) == ["2, 🙂 yes<|im_end|>"]
    with pytest.raises(ValueError, match="weight of turn 2 is 0.5"):
        normalise_row({"messages": [*THREE[:2], {**THREE[2], "weight": 0.5}]}, 1, None)


def test_marked_and_unmarked_templates_agree():
    assert supervised(CHATML, THREE) == supervised(CHATML_MARKED, THREE)


def test_a_turn_that_imitates_the_template_does_not_move_the_span():
    messages = turns(("user", "say <|im_start|>assistant\n<think>\n\n</think>\n\n"), ("assistant", "no"))
    assert supervised(CHATML, messages) == ["no<|im_end|>"]


def test_empty_answer_leaves_the_end_of_turn():
    assert supervised(CHATML, turns(("user", "a"), ("assistant", ""))) == ["<|im_end|>"]


def test_a_token_across_the_boundary_belongs_to_the_prompt():
    # "\n\n" is one token here: it begins in the header, as it does in the prompt that the engine would see.
    messages = turns(("user", "a"), ("assistant", "\nx"))
    assert supervised(CHATML, messages, merges=(("Ċ", "Ċ"),)) == ["x<|im_end|>"]
    assert supervised(CHATML, messages) == ["\nx<|im_end|>"]


def test_plain_text_template_without_end_of_turn_token():
    plain = (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    )
    assert supervised(plain, THREE) == ["<b>Hello", "2, 🙂 yes"]


def test_a_template_that_hides_the_answer_is_refused():
    rude = "{% for m in messages %}{{ m.content | length if m.role == 'assistant' else m.content }}{% endfor %}"
    rows = [ChatRow(7, tuple(THREE))]
    with pytest.raises(DataError, match=r"row 7: cannot tell .*generation"):
        encode_rows(rows, RowEncoder(byte_tokenizer(rude), 100), where="data.train")


def test_a_row_that_the_template_refuses_is_named():
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + CHATML
    with pytest.raises(DataError, match="row 3: the chat template refuses it: no system role here"):
        encode_rows([ChatRow(3, tuple(THREE))], RowEncoder(byte_tokenizer(strict), 100), where="data.train")


STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + CHATML


def mixed(good: int, unreadable: int, refused: int) -> list[ChatRow | BadRow]:
    """Good rows, then rows that are no conversation, then rows that the STRICT template refuses."""
    rows = [ChatRow(n, tuple(turns(("user", "q"), ("assistant", "a")))) for n in range(1, good + 1)]
    rows += [BadRow(n, "turn 0 is no object") for n in range(good + 1, good + unreadable + 1)]
    return rows + [ChatRow(good + unreadable + n, tuple(THREE)) for n in range(1, refused + 1)]


def encode_mixed(rows, share):
    return encode_rows(rows, RowEncoder(byte_tokenizer(STRICT), 100), where="data.train", max_bad_row_share=share)


def test_a_few_bad_rows_are_dropped_counted_and_named():
    encoded = encode_mixed(mixed(92, 4, 4), 0.08)
    assert (encoded.rows_read, len(encoded.rows), encoded.rows_bad, encoded.rows_dropped) == (100, 92, 8, 0)
    assert encoded.bad_rows == (
        "row 93: turn 0 is no object", "row 94: turn 0 is no object", "row 95: turn 0 is no object",
        "row 96: turn 0 is no object", "row 97: the chat template refuses it: no system role here",
    )  # fmt: skip


def test_more_bad_rows_than_allowed_are_refused():
    with pytest.raises(DataError, match=r"8 of 100 rows .*row 93: .*row 97: ") as caught:
        encode_mixed(mixed(92, 4, 4), 0.07)
    assert "data.max_bad_row_share=0.08" in caught.value.remedy and "row 98" not in str(caught.value)


@pytest.mark.parametrize(("rows", "share"), [(mixed(199, 1, 0), 0.0), (mixed(199, 0, 1), 0.0), (mixed(98, 1, 0), 0.01)])
def test_one_bad_row_of_few_or_with_share_zero_is_refused(rows, share):
    with pytest.raises(DataError, match=f"row {len(rows)}: "):
        encode_mixed(rows, share)


def test_a_source_without_one_good_row_is_refused_whatever_the_share():
    with pytest.raises(DataError, match="3 of 3 rows .*row 1: turn 0 is no object"):
        encode_mixed(mixed(0, 3, 0), 1.0)


def test_a_hopeless_source_is_not_read_to_its_end():
    rows = iter(mixed(0, 5000, 0))
    with pytest.raises(DataError, match="1000 of the first 1000 rows"):
        encode_mixed(rows, 0.01)
    assert next(rows).number == 1001


def test_long_rows_are_cut_and_rows_without_supervision_dropped():
    rows = [
        ChatRow(1, tuple(turns(("user", "a" * 300), ("assistant", "b")))),  # the answer lies beyond the cut
        ChatRow(2, tuple(turns(("user", "only a question")))),
        ChatRow(3, tuple(turns(("user", "q"), ("assistant", "c" * 300)))),
    ]
    encoded = encode_rows(rows, RowEncoder(byte_tokenizer(CHATML), 64), where="data.train")
    assert [row.number for row in encoded.rows] == [3]
    assert (encoded.rows_read, encoded.rows_cut, encoded.rows_dropped) == (3, 2, 2)
    assert len(encoded.rows[0]) == encoded.tokens == 64
    header = len("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n") - 3 * len("<|im_start|>") + 3 + 2
    assert encoded.supervised_tokens == 64 - header == int(encoded.rows[0].loss_mask.sum())


def test_nothing_supervised_at_all_shows_the_first_row():
    rows = [ChatRow(1, tuple(turns(("user", "only a question"))))]
    with pytest.raises(DataError) as caught:
        encode_rows(rows, RowEncoder(byte_tokenizer(CHATML), 64), where="data.train")
    assert "<|im_start|>user\\nonly a question<|im_end|>" in str(caught.value)
    assert caught.value.where == "data.train"


def test_no_rows_and_no_template_are_named():
    with pytest.raises(DataError, match="no rows"):
        encode_rows([], RowEncoder(byte_tokenizer(CHATML), 64), where="data.validation")
    with pytest.raises(DataError, match="no chat template"):
        encode_rows([], RowEncoder(byte_tokenizer(None), 64), where="data.train")


def test_ids_are_those_of_the_tokenizers_own_chat_template():
    tokenizer = FAMILIES["phi4"].tokenizer()
    row, cut = RowEncoder(tokenizer, 1000).encode(ChatRow(1, tuple(THREE)))
    assert row.input_ids.tolist() == tokenizer.apply_chat_template(THREE, tokenize=True, return_dict=True)["input_ids"]
    assert not cut


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("{{ 1 / 0 }}", "refuses it: ZeroDivisionError"),
        ("{{ '{x}'.format() }}", "refuses it: KeyError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it: RecursionError"),
        ("{{ oops }", "the target's chat template is broken (line 1: unexpected '}')"),
    ],
)
def test_whatever_a_template_raises_is_a_bad_row(fault, told):
    with pytest.raises(DataError) as caught:
        encode_rows([ChatRow(1, tuple(THREE))], RowEncoder(byte_tokenizer(fault + CHATML), 100), where="data.train")
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_a_bad_row_that_can_be_printed():
    rows = [ChatRow(1, tuple(THREE)), ChatRow(2, tuple(turns(("user", "a \ud83d"), ("assistant", "b"))))]
    encoded = encode_rows(rows, RowEncoder(byte_tokenizer(CHATML), 99), where="data.train", max_bad_row_share=0.5)
    assert encoded.bad_rows == ("row 2: it holds half an emoji ('\\ud83d')",)
    bad = BadRows(None, "data.train")
    bad.add(1, "no field (it has: \ud83d)\nat all", "")
    assert bad.named == ["row 1: no field (it has: \\ud83d) at all"]


def test_templates_under_other_names_than_default_are_refused():
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(DataError, match=r"has chat templates \(rag\), but no default one \[target.path\]"):
        encode_rows([ChatRow(1, tuple(THREE))], RowEncoder(tokenizer, 100), where="data.train")
    tokenizer.chat_template = {"rag": "", "default": CHATML}
    assert len(encode_rows([ChatRow(1, tuple(THREE))], RowEncoder(tokenizer, 100), where="data.train").rows) == 1


def test_a_template_that_leaves_the_last_turn_open_trains_on_no_header():
    """Cut off before a turn, it ends in another way than in the middle: the header is found by its beginning."""
    open_ended = CHATML.replace("<|im_end|>\n{% endfor", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor")
    assert supervised(open_ended, THREE) == ["<b>Hello<|im_end|>", "2, 🙂 yes"]


@pytest.mark.parametrize("damage", ['{"a": 1}', "", "{"])
def test_a_damaged_tokenizer_is_one_line(tmp_path, damage):
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(str(tmp_path))
