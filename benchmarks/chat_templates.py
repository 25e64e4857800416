"""Rendered chats of five families beside transformers: 1,000 random conversations each, with Unicode.

    python benchmarks/chat_templates.py [--conversations 1000]

Texts must be the same bytes, ids the same, and masks those of `return_assistant_tokens_mask` where the template has
`{% generation %}` blocks. Then packs lengths like those of chats, and prints the filling. Runs on a CPU.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.posttrain.chats.encode import encode_chat, renderer_of
from dtgpt.posttrain.chats.messages import read_chat
from dtgpt.posttrain.chats.packed import pack
from tests.support.chats import FAMILIES, conversation, write_tokenizer


def compare(family: str, count: int, folder: Path) -> str:
    """Return a line about a family; its last word is ok or DIFFERS."""
    write_tokenizer(folder, family)
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), open_tokenizer(str(folder))
    renderer, draw = renderer_of(ours), random.Random(family)
    texts = ids = masks = 0
    seconds = 0.0
    for _ in range(count):
        messages = conversation(draw, system=family != "gemma")
        for prompt in (False, True):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            texts += renderer.render(messages, prompt).text != expected
        marked = renderer.marks_answers
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
        begun = time.perf_counter()
        found = encode_chat(read_chat({"messages": messages}), renderer, ours, "assistant")
        seconds += time.perf_counter() - begun
        ids += found.ids != expected["input_ids"]
        if marked:
            masks += found.counts.astype(int).tolist() != expected["assistant_masks"]
    renderer.close()
    verdict = "DIFFERS" if texts or ids or masks else "ok"
    masked = f"{masks:5}" if marked else "    -"
    return f"{family:8} {count:6} {texts:5} {ids:5} {masked} {seconds / count * 1e3:8.2f} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=1000)
    count = parser.parse_args().conversations
    print(f"{'family':8} {'chats':>6} {'texts':>5} {'ids':>5} {'masks':>5} {'ms/chat':>8}   (that differ)")
    differs = False
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            line = compare(family, count, Path(folder) / family)
            differs |= line.endswith("DIFFERS")
            print(line, flush=True)
    lengths = np.random.RandomState(0).lognormal(5.5, 0.8, 50_000).astype(np.int64).clip(8, 4097)
    begun = time.perf_counter()
    samples = pack(lengths, 4097, seed=1)
    filling = 1 - lengths.sum() / (4097 * len(samples))
    print(f"50,000 chats of {lengths.mean():.0f} tokens in samples of 4,097: {filling:.2%} filling, "
          f"{time.perf_counter() - begun:.1f} s")  # fmt: skip
    sys.exit(int(differs or filling > 0.02))


if __name__ == "__main__":
    main()
