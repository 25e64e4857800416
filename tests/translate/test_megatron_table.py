"""Options of Megatron-LM's pretrain_gpt.py: each is explained, and the table in the docs is the one that explains."""

import re
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from dtgpt.cli import main
from dtgpt.config.overrides import leaves, read_words, take
from dtgpt.config.recipe import Recipe
from dtgpt.config.recipe_file import kinds
from dtgpt.models.config import architectures
from dtgpt.models.llama import LlamaConfig
from dtgpt.optim.muon import MuonConfig
from dtgpt.train.start import override
from dtgpt.translate import llmc, nanogpt
from dtgpt.translate.megatron_table import OPTIONS, entries_of
from dtgpt.translate.megatron_tools import PROGRAMS
from dtgpt.translate.options import Answer, GivenOption, explain, flat
from dtgpt.util.errors import UserError
from dtgpt.util.seams import load
from dtgpt.util.shared.option_words import value_text
from tests.support.other_architecture import OtherConfig

DOCS = Path(__file__).parents[2] / "docs" / "megatron.md"
# Of examples/pretrain_gpt.sh and examples/gpt3/train_gpt3_175b_distributed.sh, those of 2023 and of 2026.
SCRIPTS = """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 --seq-length 1024
--max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 --save DIR --load DIR --data-path PREFIX
--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1 --distributed-backend nccl
--lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
--checkpoint-activations --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
--sequence-parallel --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --adam-beta1 0.9 --adam-beta2 0.95
--init-method-std 0.006 --tensorboard-dir DIR --attention-backend auto --use-distributed-optimizer --bf16
--rampup-batch-size=16 --lr-warmup-iters 100 --lr-warmup-samples 100 --lr-decay-samples 100 --train-samples 1000
--no-query-key-layer-scaling --attention-softmax-in-fp32 --loss-scale 1024 --initial-loss-scale 65536
--recompute-activations --recompute-granularity full --num-layers-per-virtual-pipeline-stage 2 --use-flash-attn
--swiglu --normalization RMSNorm --context-parallel-size 2 --position-embedding-type rope
--untie-embeddings-and-output-weights --exit-duration-in-mins 230 --finetune --no-load-optim --ffn-hidden-size 4096
--transformer-impl transformer_engine
--tokenizer-type GPT2BPETokenizer --seed 1234 --num-experts 8 --moe-router-topk 2 --fp8-format hybrid --wandb-project x
"""

VALUE = r"(?:[A-Z]+|[\w.]+(?=[,;:]|$| --))"  # of an option in a sentence
SAME = ("--seq-length", "--micro-batch-size", "--global-batch-size", "--seed", "--rampup-batch-size", "--train-samples")


def same_name(keys: str, answer: Answer) -> str:
    """Return the option of dtgpt if it has the same name, but for its section; else an empty text."""
    name, _, word = keys.partition(" ")
    own = re.fullmatch(r"--([a-z_.0-9]+)( \S+)?", answer.sentence(word))
    return own[1] if own and own[1].rpartition(".")[2] == name.replace("-", "_") else ""


def table() -> str:
    """Return the table of docs/megatron.md: options of pretrain_gpt.py that have an equivalent."""
    lines, same = ["", "| Megatron-LM | dtgpt |", "|---|---|"], []
    for section, entries in OPTIONS.items():
        translated = {keys: answer for keys, answer in entries.items() if answer.kind == "translated"}
        same += [f"`--{name}`" for keys, answer in translated.items() if (name := same_name(keys, answer))]
        translated = {keys: answer for keys, answer in translated.items() if not same_name(keys, answer)}
        lines += [f"| **{section}** | |"] if translated else []
        for keys, answer in translated.items():
            word = keys.split(", ")[0].partition(" ")[2]
            text = answer.sentence(word).replace(" | ", " \\| ")
            here = re.sub(rf"(?<!\S)(--[a-z]\S*?(?: {VALUE})?)(?=[,;:]? |[,;:]?$)", r"`\1`", text)
            there = ", ".join(f"`--{key}`" for key in keys.split(", "))
            lines.append(f"| {there} | {here} |")
    text = "With the same name, up to the section: " + ", ".join(dict.fromkeys(same)) + "."
    return "\n".join(["", *textwrap.wrap(text, 120, break_on_hyphens=False), *lines]) + "\n"


def test_the_table_in_the_docs_is_the_one_that_explains():
    assert DOCS.read_text().partition("<!-- table -->\n")[2] == table(), (
        "run python -m tests.translate.test_megatron_table"
    )


@pytest.mark.parametrize("words", re.split(r"\s+(?=--)", SCRIPTS.strip()))
@pytest.mark.parametrize("dash", ["-", "_"])
def test_every_option_of_the_scripts_is_explained_or_taken(recipe, words, dash):
    option, _, value = words.partition(" ")
    typed = "--" + option[2:].replace("-", dash)
    if option.partition("=")[0] in SAME:
        override(recipe, [typed, *value.split()])
        return
    with pytest.raises(UserError, match=rf"^{typed}( \w+)? of Megatron-LM does not exist here: ") as error:
        override(recipe, [typed, *value.split()])
    assert "did you mean" not in str(error.value) and "{" not in str(error.value)


@pytest.mark.parametrize("words, told", [
    ("--num-layers 24", "use --model.num_layers 24"), ("--num_layers=24", "use --model.num_layers 24"),
    ("--load ckpt", "use --resume auto, which goes on with the newest run in --runs, or begins one; --resume ckpt"),
    ("--save-interval 10", "use --checkpoint.interval 10 --checkpoint.keep_last 0, which keeps all"),
    ("--attention-backend fused", "use --attention auto, which is cuDNN's"),
    ("--attention-backend local", "use --attention fused_softmax"),
    ("--log-num-zeros-in-grad", "zeros of gradients are not counted"),
    ("--DDP-impl local", "messages follow from the plan; leave it out"),
    ("--data-path 0.3 A 0.7 B", "use --data.path '0.3 A 0.7 B'"),
    ("--distributed-timeout-minutes 20", "use --timeout S, where S is 20 x 60"),
    ("--distributed-timeout-minutes", "where S is N x 60"), ("--lr-decay-style WSD", "use --optimizer.schedule wsd"),
    ("--lr-decay-style linear", "use --optimizer.schedule linear"),
    ("--normalization LayerNorm", "norms are always LayerNorm; leave it out"),
    ("--normalization RMSNorm", "belongs to LLaMA, Mistral and Qwen; begin with a recipe of one"),
    ("--position-embedding-type alibi", "not available"), ("--tensor-model-parallel-size 8", "use --plan tp8; parts"),
    ("--fp16", "use --precision fp16")
])  # fmt: skip
def test_values_are_translated(recipe, words, told):
    with pytest.raises(UserError) as error:
        override(recipe, words.split())
    assert told in str(error.value)


@pytest.fixture(params=["gpt2", "llama"])
def of_architecture(request, recipe):
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "seq_length": 16, "vocab_size": 257}
    llama = LlamaConfig(**shape, num_kv_heads=2, head_dim=16, ffn_hidden_size=64)
    return recipe if request.param == "gpt2" else replace(recipe, model=llama)


@pytest.mark.parametrize("words, told", [
    ("--swiglu", "always has LLaMA's architecture; leave it out"),
    ("--group-query-attention", "num_kv_heads groups; leave it out"),
    ("--num-query-groups 2", "use --model.num_kv_heads 2"), ("--kv-channels 64", "use --model.head_dim 64"),
    ("--rotary-base 500000", "use --model.rope_theta 500000"), ("--rotary-percent 0.5", "not available"),
    ("--use-rope-scaling", "use --model.rope_factor 8"), ("--norm-epsilon 1e-6", "use --model.norm_eps 1e-6"),
    ("--untie-embeddings-and-output-weights", "use --model.tied off"),
    ("--normalization LayerNorm", "belongs to GPT-2")
])  # fmt: skip
@pytest.mark.parametrize("of_architecture", ["llama"], indirect=True)
def test_a_recipe_of_a_llama_has_other_answers(of_architecture, words, told):
    with pytest.raises(UserError) as error:
        override(of_architecture, words.split())
    assert told in str(error.value)


def test_a_recipe_of_any_other_architecture_has_the_answers_for_all(recipe):
    other = OtherConfig(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=257)
    with pytest.raises(UserError, match=r"use --model\.num_layers 4"):
        override(replace(recipe, model=other), ["--num-layers", "4"])


def test_an_answer_names_options_that_exist_and_take_the_value(of_architecture):
    known = {name for name, *_ in leaves(of_architecture)} | {f"optimizer.{each.name}" for each in fields(MuonConfig)}
    for key, answer in entries_of(of_architecture.model.architecture).items():
        word = key.partition(" ")[2]
        for name in re.findall(r"(?<!\S)--([a-z_.0-9]+)", answer.text):
            if name not in ("nproc", "nnodes", "node", "master", "max"):  # of torchrun
                assert name in known, (key, name)
        if answer.kind == "translated" and not answer.together:
            example = {"STYLE": "linear", "KIND": "full"}.get(word, "1" if word.isupper() else word)
            settings = answer.settings(GivenOption(key, example, key))
            assert settings, key
            for name, value in settings.items() if "optimizer.kind" not in settings else ():
                take(of_architecture, read_words([f"--{name}={value_text(value)}"], of_architecture)[1])


def test_no_answer_is_hidden_by_an_earlier_one(of_architecture):
    entries = entries_of(of_architecture.model.architecture)
    for key, answer in entries.items():
        name, _, word = key.partition(" ")
        value = "7" if word.isupper() or not word else word
        told = explain(name.replace("*", "x"), value, entries)
        assert told.endswith(answer.sentence(word, value)), (key, told)


def test_all_unknown_options_are_told_at_once(recipe):
    words = "--num-layers 24 --data-path 0.3 A 0.7 B --hiden_size 8 --rampup_batch_size 16 16 100 --swiglu"
    with pytest.raises(UserError) as error:
        override(recipe, words.split())
    heading, *told = str(error.value).split("\n  ")
    assert heading == "5 options cannot be used:"
    for sentence, part in zip(
        told, ("--num-layers of", "'0.3 A 0.7 B'", "mean --model.hidden", "quotes", "--swiglu"), strict=True
    ):
        assert part in sentence


def test_a_whole_command_of_megatron_lm_is_sent_to_translate(capsys):
    recipe = str(DOCS.parents[1] / "recipes" / "gpt2_tiny.py")
    with pytest.raises(SystemExit):
        main(["train", recipe, "--num-layers", "24", "--hidden-size", "8"])
    assert capsys.readouterr().err.splitlines()[-1].startswith("  a recipe of a whole command: dtgpt translate -- ")


@pytest.mark.parametrize("words, told", [
    ("serve --load m --tensor-model-parallel-size 2 --num-layers 24", ["comes first", "--plan tp2", "leave it out"]),
    ("convert m t --loader core --saver hf --target-tensor-parallel-size 2", ["is detected", "can be written"]),
    ("eval m --load m --fp16 --micro-batch-size 4", ["comes first", "--precision fp16", "belongs to training"]),
    ("prepare x --partitions 2 --lang en --nothing 3", ["reads all files", "--split-sentences", "no option --nothing"])
])  # fmt: skip
def test_options_of_other_programs_are_explained_all_at_once(words, told, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    heading, *sentences = capsys.readouterr().err.strip().split("\n  ")
    assert heading == f"dtgpt: {len(told)} options cannot be used:"
    assert all(part in sentence for part, sentence in zip(told, sentences, strict=True))


TABLES = {
    **{command: flat({"": table}) for command, table in PROGRAMS.values()},
    **{f"pretrain_gpt.py, {architecture}": entries_of(architecture) for architecture in ("gpt2", "llama")},
    **{f"nanoGPT's {name}": flat({"": table}) for name, table in nanogpt.OPTIONS.items()},
    **{f"llm.c's {name}": flat({"": table}) for name, table in llmc.OPTIONS.items()},
}


@pytest.mark.parametrize("name", TABLES)
def test_no_answer_hides_another(name):
    """A value in capital letters would be a placeholder, which stands for every value."""
    seen: dict[str, str] = {}
    for key in TABLES[name]:
        option, _, value = key.partition(" ")
        assert option not in seen, f"{key} comes after {seen[option]}"
        if not value or value.isupper():
            seen[option] = key


# What a sentence says is not available -> names that no field, value or architecture here may have.
ABSENT = {
    "another width": ["mlp_width"], "other rotations": ["rotary_percent", "no_rope_freq", "mrope"],
    "no model here has it": ["alibi", "mtp", "qk_clip", "attention_output_gate", "off-by-one", "layernorm_1p"],
    "other kinds": ["kv_lora_rank", "q_lora_rank", "v_head_dim"], "experts": ["num_experts", "moe"],
    "others": ["step_batch_size_schedule"], "8-bit or 4-bit": ["fp4", "mxfp8"], "fill-in-the-middle": ["fim"],
    "BERT": ["bert", "t5", "retro"], "retrieval": ["retro"], "images": ["vision", "vit"], "Apple": ["mps"],
}  # fmt: skip


def names_here() -> set[str]:
    """Names of all fields and of their choices, of all architectures and optimizers."""
    configs = [load(part) for part in (*architectures().values(), *kinds().values())]
    hints = [hint for config in configs for hint in get_type_hints(config, include_extras=False).values()]
    named = {each.name for config in configs for each in fields(config)} | {*architectures(), *kinds()}
    named |= {part for name, *_ in leaves(Recipe) for part in name.split(".")}
    return named | {choice for hint in hints for choice in get_args(hint) if isinstance(choice, str)}


def test_nothing_that_is_here_is_called_not_available():
    here = names_here()
    assert {"window", "yarn", "relu2", "clamped_swiglu", "attention_bias", "muon", "skip_loss_z", "gpt_oss"} <= here
    tables = [*TABLES.values(), *(flat({"": table}) for _, table in PROGRAMS.values())]
    for answer in (answer for entries in tables for answer in entries.values()):
        if "not available" in answer.text:
            names = [name for said, absent in ABSENT.items() if said in answer.text for name in absent]
            assert names and not here & {*names}, answer.text


@pytest.mark.parametrize(("option", "text"), [
    ("squared-relu", "--model.activation relu2"), ("check-for-spiky-loss", "--optimizer.skip_loss_z"),
    ("check-for-large-grads", "--optimizer.skip_grad_norm_z"), ("skip-train", "dtgpt eval"),
    ("optimizer sgd", "adamw, muon or normuon")
])  # fmt: skip
def test_a_refusal_names_what_is_here(option, text):
    name, _, value = option.partition(" ")
    assert text in explain(name, value, entries_of("gpt2"))


if __name__ == "__main__":
    before, mark, _ = DOCS.read_text().partition("<!-- table -->\n")
    DOCS.write_text(before + mark + table())
