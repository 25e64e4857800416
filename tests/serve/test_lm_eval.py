"""lm_eval's `local-completions` and `local-chat-completions` against a live server, offline on local tasks: numbers are
those of transformers for the same random weights, answers of chats those that another client gets."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtgpt.data.tokenizers.open import open_tokenizer
from tests.support.chats import write_tokenizer
from tests.support.hugging_face import hugging_face_twin
from tests.support.server import http_client, live_server, served, tiny_model

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.long  # a minute; what lm_eval asks for is tested in test_openai_answers.py
POSITIONS = 128
END = 256  # of text, in the tokenizer of bytes
TEXTS = ["A short one.", "Somebody wrote this line, and nobody read it. " * 7, "été"]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "last": """
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: perplexity, aggregation: perplexity, higher_is_better: false}]""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]""",
    "write": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "x"
generation_kwargs: {until: ["STOP"], max_gen_toks: 20, temperature: 0}
metric_list: [{metric: exact_match}]""",
}


def make_model():
    """A model whose likeliest tokens are ASCII."""
    model = tiny_model(seq_length=POSITIONS, init_std=0.3)
    with torch.no_grad():
        model.embedding.wte.weight[128:] *= 0.1
    return model


@pytest.fixture(scope="module")
def twin():
    return hugging_face_twin(make_model()).eval()


def logits_of(twin, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(twin(torch.tensor([ids])).logits[0].float(), -1)


def greedy(twin, prompt: str, count: int) -> str:
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(int(logits_of(twin, ids)[-1].argmax()))
    return bytes(ids[len(prompt.encode()) :]).decode(errors="replace")


def score(twin, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-probability of a continuation, and whether each of its tokens is the likeliest."""
    ids = (context + continuation)[-POSITIONS:]
    rows = logits_of(twin, ids[:-1])[-len(continuation) :]
    own = rows.gather(1, torch.tensor(continuation)[:, None]).sum().item()
    return own, rows.argmax(-1).tolist() == continuation


def rolling(twin, text: str) -> float:
    """The log-probability of a text, in windows that lm_eval makes for as many positions: two are for its own use."""
    ids, size, total, done = list(text.encode()), POSITIONS - 2, 0.0, 0
    while done < len(ids):
        end = min(done + size, len(ids))
        first = max(0, end - size - 1) if done else 0
        before = [END] if done == 0 else ids[first:done]
        total += score(twin, before, ids[done:end])[0]
        done = end
    return total


def run_lm_eval(folder: Path, options: list[str]) -> None:
    """Run lm_eval's command on the tasks in a folder; its samples are in out/."""
    command = [sys.executable, "-m", "lm_eval", "run", *options, "--include_path", str(folder)]
    command += ["--log_samples", "--output_path", str(folder / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder), "NO_PROXY": "*"}
    ended = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture(scope="module")
def samples(twin, tmp_path_factory):
    """What lm_eval logged of each task, by its own command in a process of its own."""
    folder = tmp_path_factory.mktemp("tasks")
    likeliest = greedy(twin, "The cat sat on", 4)
    documents = {
        "choice": [
            {"query": "The cat sat on", "choices": [" the mat", " a dog, which barked", likeliest], "gold": 2},
            {"query": "Two and two are", "choices": [" four", " five"], "gold": 0},
        ],
        "last": [{"context": "Once upon a", "target": greedy(twin, "Once upon a", 3)},
                 {"context": "Once upon a", "target": " time"}],
        "rolling": [{"text": text} for text in TEXTS],
        "write": [{"text": "Hello"}, {"text": "Another one"}],
    }  # fmt: skip
    for name, rows in documents.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(f"{head}test_split: test{TASKS[name]}\n")
    with served(make_model()) as service, live_server(service) as address:
        arguments = f"model=tiny,base_url={address}/v1/completions,max_length={POSITIONS},num_concurrent=4"
        run_lm_eval(folder, ["--model", "local-completions", "--model_args", arguments, "--tasks", *TASKS])
    files = {name: next((folder / "out").rglob(f"samples_{name}_*.jsonl")) for name in TASKS}
    read = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]
    return read, results


def asked(sample) -> list[list[str]]:
    """The arguments of the requests of a sample, in the order of their responses."""
    return [list(arguments.values()) for arguments in sample["arguments"].values()]


@pytest.mark.parametrize("task", ["choice", "last"])
def test_log_likelihoods_and_greedy_answers(samples, twin, task):
    flags = []
    for sample in samples[0][task]:
        for (context, continuation), ((logprob, is_greedy),) in zip(asked(sample), sample["resps"], strict=True):
            expected, likeliest = score(twin, list(context.encode()), list(continuation.encode()))
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
            assert (is_greedy in (True, "True")) == likeliest
            flags.append(likeliest)
    assert set(flags) == {True, False}
    if task == "last":
        assert samples[1]["last"]["acc,none"] == 0.5


def test_rolling_log_likelihoods(samples, twin):
    totals = []
    for sample, text in zip(sorted(samples[0]["rolling"], key=lambda s: s["doc_id"]), TEXTS, strict=True):
        totals.append(rolling(twin, text))
        assert float(sample["resps"][0][0]) == pytest.approx(totals[-1], abs=1e-3)
    size = sum(len(text.encode()) for text in TEXTS)
    bits = -sum(totals) / size / math.log(2)
    assert samples[1]["rolling"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-5)


def test_generated_texts(samples, twin):
    for sample in samples[0]["write"]:
        ((prompt, options),) = asked(sample)
        assert sample["resps"] == [[greedy(twin, prompt, 20).split("STOP")[0]]] and options["max_gen_toks"] == 20


def test_a_chat_model_answers_what_a_client_gets(tmp_path):
    """`local-chat-completions`, by lm_eval's own command."""
    tokenizer = open_tokenizer(str(write_tokenizer(tmp_path)))
    model = tiny_model(seq_length=256, vocab_size=320, init_std=0.3)
    questions = ["Hello", "Who wrote été?"]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps({"text": question}) + "\n" for question in questions))
    head = f"task: talk\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/talk.jsonl}}}}\n"
    (tmp_path / "talk.yaml").write_text(f"{head}test_split: test{TASKS['write']}\n")
    with served(model, tokenizer) as service, live_server(service) as address:
        arguments = f"model=tiny,base_url={address}/v1/chat/completions,max_length=256"
        command = ["--model", "local-chat-completions", "--model_args", arguments, "--apply_chat_template"]
        run_lm_eval(tmp_path, [*command, "--tasks", "talk"])
        with http_client(address) as client:
            asked = {"max_tokens": 20, "temperature": 0, "stop": ["STOP"], "model": "tiny"}
            chats = [[{"role": "user", "content": question}] for question in questions]
            answers = [client.post("/v1/chat/completions", json={"messages": chat, **asked}).json() for chat in chats]
    samples = [json.loads(line) for line in next((tmp_path / "out").rglob("samples_talk_*.jsonl")).open()]
    found = [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
    assert found == [[[answer["choices"][0]["message"]["content"]]] for answer in answers]
