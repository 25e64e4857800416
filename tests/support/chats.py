"""A tokenizer with special tokens, chat templates in the forms of five families, and random conversations."""

import json
import random
from functools import cache
from pathlib import Path

NAMES = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>",
    "</s>", "[INST]", "[/INST]", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>",
)  # fmt: skip
GENERATE = "{% if add_generation_prompt %}"
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    + GENERATE + "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)  # fmt: skip
QWEN3 = """{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.strip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content.strip('\\n') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set start = messages[0].content + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set start = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (start if loop.first else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}" + GENERATE
    + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}" + GENERATE
    + "{{ '<start_of_turn>model\\n' }}{% endif %}"
)  # fmt: skip
# In the manner of Hermes and Qwen: tools in the system's message, calls in tags, results in the user's.
HERMES = """{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\nCall by <tool_call></tool_call>.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
FAMILIES = {  # template, begin and end of text
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "qwen3": (QWEN3, None, "<|im_end|>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "chatml": (CHATML, None, "<|im_end|>"),
    "gemma": (GEMMA, "<bos>", "<eos>"),
}
PIECES = (
    "Hello",
    " world",
    "\n",
    "  ",
    "é",
    "日本語",
    "🎈",
    "e\u0301",
    "<b>&\"'",
    "{{ x }}",
    "\t",
    "42",
    "שלום",
    "ﬁ",
    ".",
)


@cache
def tokenizer_json() -> str:
    """Return a byte-level BPE of a few merges, which opens each text with `<s>`, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=list(NAMES), show_progress=False
    )
    made.train_from_iterator(["Hello world, user and assistant"] * 9, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", NAMES.index("<s>"))])
    return made.to_str()


def write_tokenizer(folder: Path, family: str = "chatml", template: str | None = None) -> Path:
    """Write a tokenizer's files, with the template of a family or another one."""
    own, begin, end = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    names = {"bos_token": begin, "eos_token": end}
    settings = {name: token for name, token in names.items() if token}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": own if template is None else template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def conversation(draw: random.Random, system: bool = True) -> list[dict[str, str]]:
    """Return one to four questions with their answers."""
    messages = []
    if system and draw.random() < 0.5:
        messages.append({"role": "system", "content": text(draw)})
    for _ in range(draw.randint(1, 4)):
        messages += [{"role": "user", "content": text(draw)}, {"role": "assistant", "content": text(draw)}]
    return messages


def text(draw: random.Random) -> str:
    return "a" + "".join(draw.choices(PIECES, k=draw.randint(0, 12)))
