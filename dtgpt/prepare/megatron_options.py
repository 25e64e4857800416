"""Options of Megatron-LM's preprocess_data.py that do not exist here, each with what to do instead."""

from dtgpt.errors import UserError

KNOWN = {
    "partitions": "one command reads all files, in --workers processes; leave it out",
    "keep-sequential-samples": "documents always keep the order of the inputs; leave it out",
    "split-sentences": "sentences are for BERT and T5; GPT takes whole documents: leave it out",
    "keep-newlines": "it belongs to --split-sentences; newlines of a text are always kept: leave it out",
    "lang": "it belongs to --split-sentences; leave it out",
    "vocab-size": "the tokenizer says how many tokens it has; leave it out",
    "vocab-extra-ids": "extra tokens are for T5; leave it out",
    "make-vocab-size-divisible-by": "the model's table is padded in training, the data are not; leave it out",
    "dataset-impl": "files are always Megatron-LM's indexed ones (mmap); leave it out",
    "max-documents": "cut the input instead, as in head -n 1000 FILE.jsonl | dtgpt prepare - ...",
    "find-optimal-num-workers": "--workers 0 takes one process for each core; leave it out",
    "workers-to-check": "--workers 0 takes one process for each core; leave it out",
    "tiktoken-pattern": "name an encoding that tiktoken knows, as in --tokenizer cl100k_base",
    "tiktoken-num-special-tokens": "name an encoding that tiktoken knows, as in --tokenizer cl100k_base",
    "trust-remote-code": "no code of a tokenizer is run; give its tokenizer.json as --tokenizer-model",
    "tokenizer-hf-no-use-fast": "slow tokenizers are not read; give the tokenizer.json as --tokenizer-model",
    "tokenizer-hf-use-fast": "a tokenizer.json is always read in this way; leave it out",
}
TYPES = {
    "BertWordPieceLowerCase": "it is for BERT; give its tokenizer.json with --tokenizer-type HuggingFaceTokenizer",
    "BertWordPieceCase": "it is for BERT; give its tokenizer.json with --tokenizer-type HuggingFaceTokenizer",
    "NullTokenizer": "it makes no tokens of text; give a tokenizer, as --tokenizer bytes",
    "TikTokenizer": "name an encoding that tiktoken knows, as in --tokenizer cl100k_base, without --tokenizer-type",
}


def refuse(words: list[str]) -> None:
    """Raise UserError at the first word that is an option, or a type of tokenizer, of Megatron-LM's tool alone."""
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").replace("_", "-")
        if word.startswith("--") and name in KNOWN:
            raise UserError(f"{option} of Megatron-LM does not exist here: {KNOWN[name]}")
        if option.startswith("--") and name == "tokenizer-type":
            value = value if equals else "".join(words[position + 1 : position + 2])
            if value in TYPES:
                raise UserError(f"{option} {value} of Megatron-LM does not exist here: {TYPES[value]}")
