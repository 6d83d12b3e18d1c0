# SPDX-License-Identifier: Apache-2.0
"""Chat templates that render what the real ones render, written anew and short, each with its model's special tokens.

Seven of them (not SmolLM2's and Phi-4's) were compared, without tools, with the published texts, some of which were
excerpts: 66 renderings, no difference (2026-12-02; those texts are not part of this repository).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _chatml(default_system: str, turn: str = CHATML_TURN) -> str:
    first = "{% if messages[0].role != 'system' %}<|im_start|>system\n" + default_system + "<|im_end|>\n{% endif %}"
    return first + "{% for m in messages %}" + turn + "{% endfor %}" + CHATML_PROMPT


_QWEN_RESULTS = (
    "{% if m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_QWEN_CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
SMOLLM2 = _chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face")
QWEN25 = _chatml(
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    _QWEN_RESULTS + "{% elif m.tool_calls %}<|im_start|>assistant{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{{ '\\n' }}"
    + _QWEN_CALL
    + "{% endfor %}<|im_end|>\n{% else %}"
    + CHATML_TURN
    + "{% endif %}",
)
# Thinking of earlier turns is dropped, the last turn gets an (empty) think block; enable_thinking=false: in the prompt.
QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1, seen=false) %}"
    "{%- for m in messages[::-1] %}{%- if not ns.seen and m.role == 'user' %}{%- set ns.seen = true %}"
    "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set said = m.content %}{%- set thought = m.reasoning_content or '' %}"
    "{%- if not thought and '</think>' in said %}"
    "{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}{%- else %}"
    "{{- said }}{%- endif %}"
    "{%- for c in m.tool_calls or [] %}{%- if not loop.first or said %}{{- '\\n' }}{%- endif %}"
    + _QWEN_CALL.replace("\n", "{{ '\\n' }}")
    + "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- else %}" + _QWEN_RESULTS + "{% endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
_LLAMA_HEAD = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
# A system turn with the date is always there, contents are trimmed, a call takes the place of the content.
LLAMA3 = (
    "{{- bos_token }}{%- set day = date_string if date_string is defined else strftime_now('%d %b %Y') %}"
    "{%- set rules = '' %}{%- if messages[0].role == 'system' %}{%- set rules = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- endif %}"
    + _LLAMA_HEAD.replace("ROLE", "system")
    + "{% if tools %}Environment: ipython\n{% endif %}Cutting Knowledge Date: December 2023\nToday Date: {{ day }}\n\n"
    "{{ rules }}<|eot_id|>{% for m in messages %}{% if m.role == 'tool' %}"
    + _LLAMA_HEAD.replace("ROLE", "ipython")
    + "{{ m.content | tojson }}{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    + _LLAMA_HEAD.replace("ROLE", "assistant")
    + '{% set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}"
    + _LLAMA_HEAD.replace("ROLE", "{{ m.role }}")
    + "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    + _LLAMA_HEAD.replace("ROLE", "assistant")
    + "{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>\n"
    "{{ m.content }}<|end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)
# No generation prompt; the system message stands in the last question, and only while that is the last turn.
MISTRAL = (
    "{%- set rules = none %}{%- if messages[0].role == 'system' %}{%- set rules = messages[0].content %}"
    "{%- set messages = messages[1:] %}{%- endif %}{%- set ns = namespace(i=0) %}"
    "{%- for m in messages %}{%- if m.role != 'tool' and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.i = ns.i + 1 %}{%- endif %}{%- endfor %}"
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '[INST]' + (rules + '\\n\\n' if rules and loop.last else '') + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}"
    "{{- (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}"
    "{{- ']' + eos_token if loop.last else ', ' }}{%- endfor %}"
    "{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}{%- else %}"
    "{{- '[TOOL_RESULTS]{\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- endif %}{%- endfor %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Thinking is dropped from every answer, yet the generation prompt opens it; arguments of calls must be text.
DEEPSEEK_R1 = (
    "{%- set ns = namespace(tool=false, first=true) %}{{- bos_token }}"
    "{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'tool' %}{%- set ns.tool = true %}"
    "{{- ('<｜tool▁outputs▁begin｜>' if ns.first else '\\n') + '<｜tool▁output▁begin｜>' + m.content }}"
    "{{- '<｜tool▁output▁end｜>' }}"
    "{%- set ns.first = false %}"
    "{%- elif m.role == 'assistant' %}{%- if m.tool_calls %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}"
    "{%- for c in m.tool_calls %}{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name }}"
    "{{- '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}"
    "{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}"
    "{{- ('<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>') + m.content.split('</think>')[-1] }}"
    "{{- '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}{%- endif %}{%- endfor %}"
    "{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- elif add_generation_prompt %}"
    "{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template with its tokens: beginning and end of text first, then other special ones; `added`: not special."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()

    def tokenizer(self, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
        """One token per byte beside the added ones. `adds_bos`: plain tokenising puts the BOS before every text."""
        vocab = {token: i for i, token in enumerate((*self.special, *self.added))}
        for token in sorted(pre_tokenizers.ByteLevel.alphabet()):
            vocab[token] = len(vocab)
        core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([AddedToken(token, special=True) for token in self.special])
        core.add_tokens([AddedToken(token, special=False) for token in self.added])
        bos, eos = self.special[:2]
        if adds_bos:
            core.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
        made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)
        made.chat_template = self.template
        return made


_CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
_TOOLS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_DEEPSEEK = ("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep",
             "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end")  # fmt: skip
FAMILIES = {
    "smollm2": Family(SMOLLM2, _CHATML),
    "qwen2.5": Family(QWEN25, _CHATML, _TOOLS[:2]),
    "qwen3": Family(QWEN3, _CHATML, _TOOLS),
    "llama3": Family(
        LLAMA3, ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")
    ),
    "phi3": Family(PHI3, ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")),
    "phi4": Family(PHI4, ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_sep|>")),
    "mistral": Family(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    ),
    "gemma2": Family(GEMMA2, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "deepseek-r1": Family(
        DEEPSEEK_R1,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (*(f"<｜{name}｜>" for name in _DEEPSEEK), *_TOOLS[2:]),
    ),
}
