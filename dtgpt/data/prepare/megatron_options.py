"""Options of Megatron-LM's preprocess_data.py that do not exist here, each with what to do instead, in the format of
`dtgpt.config.megatron_options`."""

BERT = "it is for BERT; give its tokenizer.json with --tokenizer-type HuggingFaceTokenizer"
TIKTOKEN = "name a tiktoken encoding, as in --tokenizer cl100k_base"
OPTIONS = {
    "partitions": "one command reads all files, in --workers processes; leave it out",
    "keep-sequential-samples": "documents always keep the order of the inputs; leave it out",
    "split-sentences": "sentences are for BERT and T5; GPT takes whole documents: leave it out",
    "keep-newlines": "it belongs to --split-sentences; newlines of a text are always kept: leave it out",
    "lang": "it belongs to --split-sentences; leave it out",
    "vocab-size": "the tokenizer defines the vocabulary size; leave it out",
    "vocab-extra-ids": "extra tokens are for T5; leave it out",
    "make-vocab-size-divisible-by": "the model pads its vocabulary, the data do not change; leave it out",
    "dataset-impl": "files always have Megatron-LM's indexed format (mmap); leave it out",
    "max-documents": "cut the input instead, as in head -n 1000 FILE.jsonl | dtgpt prepare - ...",
    "find-optimal-num-workers": "the default is one process for each core; leave it out",
    "workers-to-check": "the default is one process for each core; leave it out",
    "tiktoken-pattern": TIKTOKEN,
    "tiktoken-num-special-tokens": TIKTOKEN,
    "trust-remote-code": "code from a tokenizer is never run; give its tokenizer.json as --tokenizer-model",
    "tokenizer-hf-no-use-fast": "slow tokenizers are not supported; give the tokenizer.json as --tokenizer-model",
    "tokenizer-hf-use-fast": "fast tokenizers are always used; leave it out",
    "tokenizer-type BertWordPieceLowerCase": BERT,
    "tokenizer-type BertWordPieceCase": BERT,
    "tokenizer-type NullTokenizer": "it does not encode text; give a tokenizer, such as --tokenizer bytes",
    "tokenizer-type TikTokenizer": f"{TIKTOKEN}, without --tokenizer-type",
}
