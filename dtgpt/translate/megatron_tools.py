"""Other programs of Megatron-LM as commands of dtgpt: tools/preprocess_data.py, tools/checkpoint/convert.py,
tools/run_text_generation_server.py and tasks/main.py."""

from collections.abc import Sequence

from dtgpt.translate.megatron_table import entries_of
from dtgpt.translate.options import Answer, GivenOption, Table, flat, no, read_options, skip, to, together
from dtgpt.translate.translation import Launch, Translation
from dtgpt.util.errors import UserError
from dtgpt.util.shared.option_words import value_text

BERT = no("it is for BERT; give its tokenizer.json with --tokenizer-type HuggingFaceTokenizer")
TIKTOKEN = no("name a tiktoken encoding, as in --tokenizer cl100k_base")
OF_SENTENCES = skip("it belongs to --split-sentences, which is for BERT and T5")
CORES = skip("the default is one process for each core")
TOKENIZERS: Table = {
    "vocab-file FILE": to("--vocab_file {FILE}"),
    "merge-file FILE": to("--merge_file {FILE}"),
    "tokenizer-model FILE": to("--tokenizer {FILE}"),
    "tokenizer-type TYPE": skip("the tokenizer is that of the model or of --tokenizer"),
}
PREPARE: Table = {
    "input FILE": to("--input {FILE}"),
    "json-keys NAMES": to("--json_keys {NAMES}"),
    "output-prefix FILE": to("--output_prefix {FILE}"),
    "append-eod": to("--append_eod on"),
    "workers N": to("--workers {N}"),
    "log-interval N": to("--log_interval {N}"),
    "partitions N": skip("one command reads all files, in --workers processes"),
    "keep-sequential-samples": skip("documents always keep the order of the inputs"),
    "split-sentences": skip("sentences are for BERT and T5; GPT takes whole documents"),
    "keep-newlines": OF_SENTENCES,
    "lang NAME": OF_SENTENCES,
    "vocab-size N": skip("the tokenizer defines the vocabulary size"),
    "vocab-extra-ids N": skip("extra tokens are for T5"),
    "make-vocab-size-divisible-by N": skip("the model pads its vocabulary, the data do not change"),
    "dataset-impl KIND": skip("files always have Megatron-LM's indexed format (mmap)"),
    "max-documents N": no("cut the input instead, as in head -n 1000 FILE.jsonl | dtgpt prepare - ..."),
    "find-optimal-num-workers": CORES,
    "workers-to-check N": CORES,
    "tiktoken-pattern NAME": TIKTOKEN,
    "tiktoken-num-special-tokens N": TIKTOKEN,
    "trust-remote-code": no("code from a tokenizer is never run; give its tokenizer.json as --tokenizer-model"),
    "tokenizer-hf-no-use-fast": no("slow tokenizers are not supported; give the tokenizer.json as --tokenizer-model"),
    "tokenizer-hf-use-fast": skip("fast tokenizers are always used"),
    "tokenizer-type BertWordPieceLowerCase": BERT,
    "tokenizer-type BertWordPieceCase": BERT,
    "tokenizer-type NullTokenizer": no("it does not encode text; give a tokenizer, such as --tokenizer bytes"),
    "tokenizer-type TikTokenizer": no(
        "name a tiktoken encoding, as in --tokenizer cl100k_base, without --tokenizer-type"
    ),
    "tokenizer-type NAME": to("--tokenizer_type {NAME}"),
    **{key: answer for key, answer in TOKENIZERS.items() if not key.startswith("tokenizer-type")},
    "vocab FILE": to("--vocab_file {FILE}"),  # its name until 2020, and in tutorials
}
CONVERT: Table = {
    "model-type gpt": skip("the architecture is that of the source"),
    "model-type TYPE": no("BERT and T5 are not available"),
    "load-dir MODEL": together("the first path: dtgpt convert MODEL TARGET"),
    "save-dir TARGET": together("the second path: dtgpt convert MODEL TARGET"),
    "loader NAME": skip("the format of MODEL is detected"),
    "saver core, saver mcore, saver megatron, saver legacy": to("--to megatron"),
    "saver NAME": no("--to hf, megatron or dtgpt are the formats that can be written"),
    "target-tensor-parallel-size N": to("--target_tensor_parallel_size {N}"),
    "target-pipeline-parallel-size N": to("--target_pipeline_parallel_size {N}"),
    "target-expert-parallel-size N": to("--target_expert_parallel_size {N}"),
    "saver-transformer-impl NAME": to("--transformer_impl {NAME}"),
    "true-vocab-size N": to("--true_vocab_size {N}"),
    "bf16": to("--dtype bf16"),
    "fp16": to("--dtype fp16"),
    "vocab-file FILE, tokenizer-model FILE, merge-file FILE": skip("the tree of Megatron-LM holds no tokenizer"),
    "max-queue-size N, no-checking, megatron-path DIR, loader-transformer-impl NAME, position-embedding-type TYPE, "
    "checkpoint-type TYPE, model-size NAME, make-vocab-size-divisible-by N": skip("it follows from the model"),
}
OF_A_MODEL: Table = {
    "load MODEL": together("the path of the model comes first, without an option"),
    "pretrained-checkpoint MODEL": together("the path of the model comes first, without an option"),
    "tensor-model-parallel-size N": together("--plan tp{N}, in as many processes that torchrun starts"),
    "pipeline-model-parallel-size N": together("--plan pp{N}, in as many processes that torchrun starts"),
    "fp16": to("--precision fp16"),
    "bf16": to("--precision bf16"),
    **TOKENIZERS,
}
SERVE: Table = {
    **OF_A_MODEL,
    "port N": to("--port {N}"),
    "inference-max-requests N": to("--slots {N}"),
    "inference-dynamic-batching-max-requests N": to("--slots {N}"),
    "inference-max-seq-length N": to("--max_length {N}"),
    "temperature X, top-k N, top-p X, out-seq-length N, seed N, num-samples N, genfile F, return-log-probs, "
    "recompute": skip("each request has its own"),
}
EVAL: Table = {
    **OF_A_MODEL,
    "task lambada": to("--task lambada"),
    "task wikitext103": to("--task wikitext103"),
    "task NAME": no("the tasks are lambada, wikitext103 and hellaswag; dtgpt lm-eval has more"),
    "valid-data FILE": to("--data {FILE}"),
    "strict-lambada": to("--strict on"),
    "overlapping-eval N": to("--overlapping_eval {N}"),
    "epochs N, train-data FILES, keep-last": no("tasks are measured; dtgpt train --init_from MODEL trains one further"),
}
REST = skip("it is saved with the model, or belongs to training")
PROGRAMS: dict[str, tuple[str, Table]] = {  # by the end of the path: a command of dtgpt, and its options
    "preprocess_data.py": ("prepare", PREPARE),
    "checkpoint/convert.py": ("convert", CONVERT),
    "checkpoint/util.py": ("convert", CONVERT),
    "checkpoint_util.py": ("convert", CONVERT),
    "run_text_generation_server.py": ("serve", SERVE),
    "tasks/main.py": ("eval", EVAL),
}
PATHS = {"convert": ("load-dir", "save-dir"), "serve": ("load",), "eval": ("load",), "prepare": ()}


def entries_of_command(command: str) -> dict[str, Answer]:
    """Return the answers to the options of the program of Megatron-LM that `dtgpt COMMAND` stands for. Those that the
    program has from pretrain_gpt.py are not needed."""
    own = flat({"": next(table for name, table in PROGRAMS.values() if name == command)})
    if command == "prepare":
        return own
    return own | {key: REST for key in {**entries_of("gpt2"), **entries_of("llama")} if key not in own}


def _fill_saver(result: Translation, given: dict[str, GivenOption]) -> None:
    """Say what Megatron-LM's saver does without an option."""
    given.setdefault("saver", GivenOption("saver", "megatron", "default --saver megatron"))
    impl = "saver-transformer-impl"
    if given["saver"].value in ("core", "mcore"):
        given.setdefault(impl, GivenOption(impl, "transformer_engine", f"default --{impl} transformer_engine"))
    for name in ("target-tensor-parallel-size", "target-pipeline-parallel-size"):
        if name not in given:
            result.refuse(f"no --{name}", "it is 1, not that of the source")


def translate_tool(program: str, words: Sequence[str], launch: Launch) -> Translation:
    """Return the command that does what a program of PROGRAMS does. Raises UserError where the command lacks a path, or
    values are not known."""
    command, _ = PROGRAMS[program]
    free, given = read_options(words)
    result = Translation(f"Megatron-LM's {program}", launch=launch)
    if "pretrained-checkpoint" in given and "load" not in given:
        given["load"] = given.pop("pretrained-checkpoint")
    missing = [name for name in PATHS[command] if name not in given]
    if missing:
        raise UserError(f"the command has no --{missing[0]}; add it after --")
    for word in free:
        result.refuse(word, "it belongs to no option")
    table = entries_of_command(command)
    sizes = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size"}
    sized = {part: given[name] for part, name in sizes.items() if name in given and command in ("serve", "eval")}
    if command == "convert":
        _fill_saver(result, given)
    result.apply(given.values(), table)
    paths = [given[name].value for name in PATHS[command]]
    for name, path in zip(PATHS[command], paths, strict=True):
        result.note(given[name].source, path)
    parts = [f"{part}{option.value}" for part, option in sized.items() if option.value != "1"]
    source = " ".join(option.source for option in sized.values())
    if parts:
        result.set(source, plan="_".join(parts))
    elif sized:
        result.skip(source, "one process is the default")
    starts = result.launch.command("-m dtgpt") if parts else "dtgpt"
    result.words = [*starts.split(), command, *paths]
    for name, (value, _) in result.settings.items():
        values = value.split() if name in ("json_keys", "input") else [value_text(value)]
        result.words += [f"--{name.replace('_', '-')}", *values]
    return result
