"""Tasks of lm-evaluation-harness on local texts, without a network, and a small model that answers them."""

import json
import random
from pathlib import Path

import torch
import yaml

from dtgpt.data.library_tokenizers.export import transformers_files
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.interop.hf.model import save_huggingface
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from tests.interop.test_interop_huggingface import InMemory
from tests.support.whole_model import build_model

TEXT = (
    "the a an of to in and that was her his it with for as on she he they but had at from this not by which or were "
    "winter river garden stone lantern morning captain village window letter silver bridge mountain kitchen harbour "
    "forest quiet broken golden narrow ancient gentle sudden distant walked opened carried watched remembered answered "
    "followed believed waited turned house water light table children Grüße café 1984 3,000 don't it's"
)
WORDS = TEXT.split()
TASKS = ("local_lambada", "local_wikitext", "local_hellaswag", "local_generation")


def sentence(draws: random.Random, words: int) -> str:
    return " ".join(draws.choice(WORDS) for _ in range(words))


def articles(draws: random.Random, count: int) -> list[str]:
    """Pages as WikiText has them before its marks are undone; the last one is longer than the model's positions."""
    pages = []
    for index in range(count):
        lines = [f" \n = {sentence(draws, 2)} = \n \n"]
        for _ in range(2 + 8 * (index == count - 1)):
            lines.append(f' {sentence(draws, 9)} , " {sentence(draws, 4)} " ( {sentence(draws, 2)} ) @-@ like . \n')
        lines.append(f" = = {sentence(draws, 1)} = = \n \n {sentence(draws, 7)} 's 1 @,@ 200 <unk> ; end . \n")
        pages.append("".join(lines))
    return pages


def write_tasks(folder: Path, samples: int = 6, seed: int = 0) -> Path:
    """Write the tasks of TASKS, for `--include_path`, with their data. Three of them are the harness's own definitions
    on other data."""
    import lm_eval

    draws, own = random.Random(seed), Path(lm_eval.__file__).parent / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "lambada": [{"text": sentence(draws, 8 + 5 * i)} for i in range(samples)],
        "wikitext": [{"page": page} for page in articles(draws, max(2, samples // 2))],
        "hellaswag": [
            {
                "activity_label": sentence(draws, 2), "ctx_a": f"{sentence(draws, 6)}. [header] [title] On {i}.",
                "ctx_b": sentence(draws, 2), "label": str(i % 4), "ind": i,
                "endings": [f"{sentence(draws, 2 + i % 3 + k)} [substeps]  and more." for k in range(4)],
            }
            for i in range(samples)
        ],
        "generation": [{"text": sentence(draws, 3 + 2 * i), "target": sentence(draws, 1)} for i in range(samples)],
    }  # fmt: skip
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    greedy = {"until": ["\n", " harbour"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    tasks = {
        "lambada": {"include": str(own / "lambada" / "lambada_openai.yaml")},
        "wikitext": {"include": str(own / "wikitext" / "wikitext.yaml")},
        "hellaswag": {"include": str(own / "hellaswag" / "hellaswag.yaml")},
        "generation": {
            "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{target}}",
            "metric_list": [{"metric": "exact_match"}], "generation_kwargs": greedy,
        },
    }  # fmt: skip
    for name, task in tasks.items():
        split = "validation" if name == "hellaswag" else "test"
        splits = {"training_split": None, "validation_split": None, "test_split": None, f"{split}_split": split}
        data = {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(folder / f"{name}.jsonl")}},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**task, "task": f"local_{name}", **splits, **data}))
    return folder


def write_model(folder: Path, positions: int = 64, seed: int = 0) -> Path:
    """Write a model of random weights, with a BPE trained on the words of the tasks, as transformers reads it."""
    tokenizer = make_tokenizer("bpe", [sentence(random.Random(seed), 3000)], 400)
    config = GPT2Config(
        num_layers=2, hidden_size=48, num_heads=4, seq_length=positions, vocab_size=tokenizer.vocab_size, init_std=0.2
    )
    model = build_model(config, torch.device("cpu"), torch.float32, root_key(seed))
    files = transformers_files(tokenizer, positions)
    save_huggingface(InMemory(model), folder, tokenizer=tokenizer, tokenizer_files=files)
    return folder
