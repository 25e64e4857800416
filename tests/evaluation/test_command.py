"""`dtgpt eval`: figures equal an independent script in float64, under every plan; files and sentences."""

import bz2
import gzip
import hashlib
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from dtgpt.checkpoint.open import open_source
from dtgpt.cli import main
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.evaluation.wikitext import detokenize
from dtgpt.inference.request import LOGITS
from dtgpt.interop.inspect import model_digest
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from tests.interop.test_interop_huggingface import InMemory
from tests.support import bodies_evaluation as bodies
from tests.support.families import twin_of
from tests.support.ranks import pool, several
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(3)

CONFIG = GPT2Config(num_layers=4, hidden_size=32, num_heads=4, seq_length=48, vocab_size=257, init_std=0.4)
BYTES = make_tokenizer("bytes", [], 0)
PASSAGES = [f"{number} and {number * 7 % 10} make a sum of the word{number % 3}" for number in range(20)]
WIKI = "".join(f" \n = Title {number} = \n \n It 's the {number} @.@ 5 th , or not . \n" for number in range(12))
ITEMS = [
    {
        "activity_label": f"Label {number}", "ctx_a": f"A man [title] {number}.", "ctx_b": "he", "label": number % 4,
        "ctx": f"A man [title] {number}. he",
        "endings": [f"goes {'on ' * (number * ending % 5)}." for ending in range(4)],
    }
    for number in range(9)
]  # fmt: skip
PLANS = {2: ("pp2", "dp2"), 4: ("tp2_pp2",)}


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "weights"
    save_weights(InMemory(model), path, "here", BYTES)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    (path / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    (path / "wiki.txt").write_text(WIKI)
    (path / "hellaswag.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    return path


@pytest.fixture
def evaluate(folder, tmp_path, monkeypatch, capsys):
    """Run the command in a folder of its own; return the results in its file, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(["eval", str(folder), *map(str, words)])
        out, err = capsys.readouterr()
        assert stop.value.code == 0, err
        return json.loads((tmp_path / "eval.json").read_text()), out, err

    return call


@pytest.fixture
def refused(folder, tmp_path, monkeypatch, capsys):
    """Run a command that ends with a sentence; return it."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(["eval", *map(str, words)])
        out, err = capsys.readouterr()
        command = 2 * ("is a table" in err)  # lines after the sentence
        assert stop.value.code == 2 and err.count("\n") == 1 + command and not out, err
        assert not list(tmp_path.glob("eval.json"))
        return err

    return call


def three(data):
    files = [data / name for name in ("lambada.jsonl", "wiki.txt", "hellaswag.jsonl")]
    return ["--task", "lambada", "wikitext103", "hellaswag", "--data", *files]


class Oracle:
    """Log-probabilities by transformers in float64, one sample at a time."""

    def __init__(self, model):
        self.twin = twin_of(model).double()

    @torch.no_grad()
    def score(self, ids: list[int], context: int):
        logits = self.twin(torch.tensor([ids[:-1]])).logits[0, context - 1 :]
        targets = torch.tensor(ids[context:])
        found = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        return found.numpy(), bool((logits.argmax(-1) == targets).all())

    def lambada(self) -> tuple[float, float]:
        right, sums = 0, []
        for text in PASSAGES:
            word = text.split()[-1]
            context = BYTES.encode(text[: text.rfind(word)].strip())
            ids = [*context, *BYTES.encode(f" {word}")]
            logprobs, greedy = self.score(ids[-49:], len(context) - max(0, len(ids) - 49))
            right += greedy
            sums.append(logprobs.sum())
        return right / len(PASSAGES), math.exp(-np.mean(sums))

    def wikitext(self, step: int) -> tuple[float, float]:
        ids, length = BYTES.encode(detokenize(WIKI)), CONFIG.seq_length
        nats = -self.score(ids[: length + 1], 1)[0].sum()
        done = length + 1
        while done < len(ids):  # windows end `step` tokens further each
            end = done + step
            window = ids[end - length - 1 : end]
            nats -= self.score(window, length + 1 - step)[0].sum()
            done = min(end, len(ids))
        loss = nats / (len(ids) - 1)
        return loss, math.exp(loss * (len(ids) - 1) / (len(WIKI.strip().split(" ")) - 1))

    def hellaswag(self) -> tuple[float, float]:
        right = []
        for item in ITEMS:
            context = BYTES.encode(item["ctx"])
            found = [self.score([*context, *BYTES.encode(f" {e}")][-49:], len(context))[0] for e in item["endings"]]
            best = np.argmax([f.sum() for f in found]), np.argmax([f.mean() for f in found])
            right.append([place == item["label"] for place in best])
        return tuple(np.mean(right, axis=0))


def metrics(results):
    return {one["task"]: one["metrics"] for one in results["results"]}


def test_figures_are_those_of_an_independent_script(model, data, evaluate):
    oracle = Oracle(model)
    found = metrics(evaluate(*three(data), "--strict", "--overlapping_eval", 5)[0])
    assert (found["lambada"]["acc"], found["lambada"]["ppl"]) == pytest.approx(oracle.lambada(), rel=1e-5)
    loss, adjusted = oracle.wikitext(5)
    assert found["wikitext103"]["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["wikitext103"]["adjusted_ppl"] == pytest.approx(min(adjusted, math.exp(20)), rel=1e-5)
    assert (found["hellaswag"]["acc"], found["hellaswag"]["acc_norm"]) == oracle.hellaswag()


@pytest.mark.parametrize("world", PLANS)
def test_every_plan_has_the_same_figures(folder, data, tmp_path, world):
    words = [str(folder), *map(str, three(data)), "--strict", "--overlapping_eval", "5", "--device", "cpu", "--output"]
    bodies.evaluate([*words, f"{tmp_path}/single.json"])
    calls = [(bodies.evaluate, [*words, f"{tmp_path}/{plan}.json", "--plan", plan]) for plan in PLANS[world]]
    assert pool().run(world, several, calls) == [[0] * len(calls)] * world
    expected, *rest = (json.loads((tmp_path / f"{plan}.json").read_text()) for plan in ("single", *PLANS[world]))
    for plan, found in zip(PLANS[world], rest, strict=True):
        assert found["plan"] == plan and found["processes"] == world
        for task, figures in metrics(expected).items():
            assert metrics(found)[task] == pytest.approx(figures, rel=1e-6)


def test_without_a_plan_processes_are_replicas(folder, data, tmp_path):
    words = [str(folder), "--task", "lambada", "--data", str(data / "lambada.jsonl"), "--output", f"{tmp_path}/x.json"]
    pool().run(2, bodies.evaluate, words)
    assert json.loads((tmp_path / "x.json").read_text())["plan"] == "dp2"


def test_a_file_that_is_missing_is_one_sentence_on_every_rank(folder, tmp_path):
    words = [str(folder), "--task", "lambada", "--data", "none.jsonl", "--output", f"{tmp_path}/x.json"]
    for said in pool().run(2, bodies.refused_evaluation, words):
        assert "none.jsonl cannot be read (No such file" in said and "github.com/cybertronai/bflm" in said


def test_what_is_printed_and_written(folder, data, evaluate):
    results, out, err = evaluate(*three(data), "--strict", "on")
    lines = out.splitlines()
    first, second = (one["line"] for one in results["results"][:2])
    assert lines[:3] == ["-" * (len(first) + 1), first, "-" * (len(first) + 1)] and lines[4] == second
    assert results["results"][2]["line"] is None
    assert results["results"][1]["overlapping_eval"] == 32  # the default
    assert "32 tokens from one to the next" in results["results"][1]["procedure"]
    assert first.startswith(" validation results on LAMBADA | number correct: ")
    figure = results["results"][2]["metrics"]["acc_norm"]
    assert any(line.split()[:3] == ["hellaswag", "acc_norm", f"{figure:.4f}"] for line in lines)
    assert [one["samples"] for one in results["results"]] == [20, len(BYTES.encode(detokenize(WIKI))) - 1, 9]
    assert "lambada: 20/20 samples" in err
    content = (data / "hellaswag.jsonl").read_bytes()
    assert results["results"][2]["data"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert results["model"]["sha256"] == model_digest(open_source(folder))
    assert results["model"]["parameters"] == CONFIG.num_parameters and results["precision"] == "float32"
    assert results["results"][0]["strict"] is True and "strict" in results["results"][0]["procedure"]


def test_packed_files_have_the_same_digest(data, evaluate, tmp_path):
    content = (data / "lambada.jsonl").read_bytes()
    digests, packings = set(), {"x.jsonl.gz": gzip.compress, "x.jsonl.bz2": bz2.compress, "y": bytes}
    for name, pack in packings.items():
        (tmp_path / name).write_bytes(pack(content))
        results, _, _ = evaluate("--task", "lambada", "--data", name, "--limit", 3, "--batch-tokens", 1)
        digests.add(results["results"][0]["data"]["sha256"])
        assert results["results"][0]["samples"] == 3 and results["results"][0]["limit"] == 3
    assert digests == {hashlib.sha256(content).hexdigest()}


def test_options_of_megatron(data, evaluate):
    results, _, _ = evaluate("--task", "LAMBADA", "--valid-data", data / "lambada.jsonl", "--strict-lambada")
    assert results["results"][0]["strict"] is True


@pytest.mark.parametrize("task, file", [("lambada", "lambada.jsonl"), ("wikitext103", "wiki.txt"),
                                        ("hellaswag", "hellaswag.jsonl")])  # fmt: skip
def test_logits_that_are_not_finite_are_no_score(folder, data, refused, monkeypatch, task, file):
    """HellaSwag's likeliest ending was the first one: right where the label is 0."""
    monkeypatch.setattr("dtgpt.evaluation.scoring.token_scores", _nan)
    assert LOGITS in refused(folder, "--task", task, "--data", data / file)


def _nan(logits, targets, vocab_size):
    from dtgpt.inference.scores.tokens import token_scores

    return token_scores(logits * math.nan, targets, vocab_size)


@pytest.mark.parametrize("words, expected", [
    (["--task", "lambda", "--data", "x"], "did you mean lambada?"),
    (["--task", "piqa", "--data", "x"], "lm-eval knows others"),
    (["--data", "x"], "no task is given"), (["--task", "lambada"], "needs --data FILE; LAMBADA's 5,153"),
    (["--task", "lambada", "hellaswag", "--data", "x"], "2 names and --data 1"),
    (["--task", "hellaswag", "--data", "none"], "none cannot be read (No such file or directory); HellaSwag's 10,042"),
    (["--task", "wikitext103", "--data", "none"], "wiki.test.tokens"),
    (["--task", "hellaswag", "--data", "x", "--strict"], "--strict belongs to the task lambada"),
    (["--task", "lambada", "--data", "x", "--overlapping_eval", "3"], "--overlapping-eval belongs to"),
    (["--task", "lambada", "--data", "x", "--overlapping_eval", "0"], "use 1 or more"),
    (["--task", "lambada", "--data", "x", "--limit", "0"], "use 1 or more"),
    (["--task", "lambada", "--data", "x", "--output", "no/where.json"], "is not a folder"),
    (["--task", "lambada", "--data", "x", "--output", "."], "is a folder"),
    (["--task", "lambada", "--data", "x", "--output", "/dev/null"], "/dev/null is not a regular file"),
    (["--task", "lambada", "--data", __file__, "--output", __file__], "is the data, which it would replace"),
    (["--task", "lambada", "--data", "."], "not a regular file"),
])  # fmt: skip
def test_what_cannot_be_asked_for_is_one_sentence(refused, folder, words, expected):
    assert expected in refused(folder, *words)


@pytest.mark.parametrize("task, name, content, expected", [
    ("lambada", "x.jsonl", b'{"text": "a b"}\n{"text": 5}\n', 'line 2 has "text": 5'),
    ("lambada", "x.jsonl", b'{"text": "a b"}\n{"txt": "c"}\n', 'line 2 has no "text", only txt'),
    ("lambada", "x.jsonl", b'{"text": "a b"}\n\n{"text": \n', "line 3 is not JSON"),
    ("lambada", "x.jsonl", b'{"text": " "}\n', "has no word to predict"),
    ("lambada", "x.jsonl", b"7\n", "is 7, not a JSON object"), ("lambada", "x.json", b"[]", "nothing to measure"),
    ("lambada", "x.json", b'["a"', "is not JSON"), ("lambada", "x.json", b"[" * 99999, "not JSON"),
    ("lambada", "x.txt", b" \n\n", "is empty"), ("lambada", "x.txt", b"a b\n\xff c", "line 2 is not UTF-8"),
    ("lambada", "x.gz", b"\x1f\x8b\x08damaged", "is damaged"), ("lambada", "x.txt", b"PAR1\x00", "a Parquet file"),
    ("hellaswag", "x.jsonl", b'{"ctx": "a", "label": 1, "endings": ["b"]}', "no list of 4 texts"),
    ("hellaswag", "x.jsonl", b'{"ctx": "a", "endings": ["b", "c", "d", "e"]}', "has the label None"),
    ("hellaswag", "x.jsonl", b'{"ctx": "a", "label": 4, "endings": ["b", "c", "d", "e"]}', "has the label 4"),
    ("hellaswag", "x.jsonl", b'{"label": 3, "endings": ["b", "c", "d", "e"]}', 'no "ctx_a"'),
    ("hellaswag", "x.txt", b"a\n1\nb\nc\nd\n", "5 lines of text, not items of 6"),
    ("hellaswag", "x.txt", b"a\nb\nc\nd\ne\nf\n", "line 2 has the label 'b'"),
    ("lambada", "x.txt", b"a " + b"b" * 50, "51 tokens is longer than the model's 48 positions"),
    ("wikitext103", "x.txt", b"word", "1 word, too few"), ("wikitext103", "x.txt", b'""\n" = One', "as CSV does"),
    ("lambada", "x.jsonl", b"{}", 'no "text"; give'),
    ("wikitext103", "x.jsonl", b'{"words": "a"}', 'no "text"'),
])  # fmt: skip
def test_files_with_other_content_are_one_sentence(refused, folder, tmp_path, task, name, content, expected):
    (tmp_path / name).write_bytes(content)
    strict = ["--strict"] if task == "lambada" else []
    assert expected in refused(folder, "--task", task, "--data", name, *strict)


def test_a_table_comes_with_the_lines_that_make_json_lines_of_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("text\nc d\n")
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(folder), "--task", "lambada", "--data", "x.csv", "--device", "cpu"])
    sentence, *lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "x.csv is a table, which is not read; make JSON lines of it" in sentence
    command = "\n".join(lines)
    subprocess.run(command.replace("python ", f"{sys.executable} ", 1), shell=True, check=True)
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"text": "c d"}


def test_windows_that_leave_tokens_out_are_refused(refused, folder, tmp_path):
    (tmp_path / "x.txt").write_text("some text of a few words")
    words = ["--task", "wikitext103", "--data", "x.txt", "--overlapping_eval", "49"]
    assert "use 1 to 48" in refused(folder, *words)


def test_results_on_a_full_disk_leave_no_half_a_file(refused, folder, data, tmp_path, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dtgpt.tools.results.write_json", full)
    monkeypatch.chdir(tmp_path)
    said = bodies.refused_evaluation([str(folder), "--task", "lambada", "--data", str(data / "lambada.jsonl")])
    assert "free space there" in said and not list(tmp_path.iterdir())
