"""`dtgpt generate`: prompts from the command line, from files and from the keyboard; texts to terminals and files."""

import errno
import io
import json
import os
import re
import shlex
import signal
from pathlib import Path

import httpx
import pytest
import torch

import dtgpt
from dtgpt.cli import main
from dtgpt.commands.generate import GenerateOptions
from dtgpt.data.tokenizers.open import make_tokenizer
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import NAMES
from dtgpt.inference.prompt_sources.files import NOT_OPTIONS, read_prompts_file
from dtgpt.interop.weights_alone import save_weights
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.random.philox import root_key
from dtgpt.serve.explanations import EXPLANATIONS
from dtgpt.util.errors import UserError
from tests.interop.test_interop_huggingface import InMemory
from tests.support.disks import files_of_at_most
from tests.support.programs import TORCHRUN, run_program
from tests.support.server import live_server, served, tiny_model
from tests.support.whole_model import build_model

pytestmark = pytest.mark.slow(13)

CONFIG = GPT2Config(num_layers=2, hidden_size=16, num_heads=2, seq_length=64, vocab_size=257, init_std=0.5)
ROOT = Path(__file__).parents[2]
DTGPT = [*TORCHRUN, "--nproc-per-node", "2", "-m", "dtgpt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))
    path = tmp_path_factory.mktemp("model") / "weights"
    save_weights(InMemory(model), path, "here", make_tokenizer("bytes", [], 0))
    return path


@pytest.fixture
def generate(folder, capsys):
    """Run the command; return the exit code, stdout and stderr."""

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(["generate", str(folder), *map(str, words)])
        return stop.value.code, *capsys.readouterr()

    return call


def test_every_option_of_sampling_is_on_the_command_line():
    known = set(vars(GenerateOptions())) | {"num_return_sequences"}  # --num_samples
    assert set(NAMES) - set(NOT_OPTIONS) - known == {"do_sample"}  # --temperature 0


def test_a_text_is_that_of_the_library_and_memory_is_told_first(folder, generate):
    options = {"max_new_tokens": 9, "temperature": 0.8, "top_k": 50, "seed": 3}
    expected = dtgpt.load(folder).generate("The ünicode", return_full_text=True, **options)
    for tokens in ("--tokens", "--max-new-tokens"):
        code, out, err = generate("--prompt", "The ünicode", tokens, 9, "--seed", 3)
        assert (code, out) == (0, expected + "\n")
        assert "weights and 1 slot of" in err and "float32, single" in err and err.count("\n") == 1
    code, out, _ = generate("--prompt", "The", "--temperature", 0, "--tokens", 5, "--stop-token-ids", 7, 8)
    ids = dtgpt.load(folder).generate("The", do_sample=False, max_new_tokens=5, stop_token_ids=[7, 8])
    assert out == f"The{ids}\n"
    biased = generate("--tokens", 4, "--logit-bias", "65:100", "66:-100")[1]
    assert biased == "AAAA\n"


def test_without_a_number_of_tokens_the_positions_are_filled(generate):
    out = generate("--prompt", "x", "--logit_bias", "65:100")[1]
    assert out == "x" + "A" * 63 + "\n"
    code, _, err = generate("--prompt", "x" * 65)
    assert code == 2 and "a prompt of 65 tokens" in err and "the model has 64" in err


def test_several_texts_of_a_prompt_are_told_apart(folder, generate):
    texts = dtgpt.load(folder).generate("ab", num_return_sequences=3, max_new_tokens=4, temperature=0.8, top_k=50)
    expected = "".join(f"--- {i} of 3\nab{text}\n" for i, text in enumerate(texts, 1))
    assert generate("--prompt", "ab", "--num-samples", 3, "--tokens", 4)[1] == expected


def test_beams_come_with_their_scores_the_best_first(folder, generate, tmp_path):
    words = ["--prompt", "ab", "--num-beams", 4, "--num-samples", 2, "--tokens", 5]
    found = dtgpt.load(folder).generate("ab", num_beams=4, num_return_sequences=2, max_new_tokens=5, details=True)
    expected = [f"--- {i} of 2, score {one.score:.4f}\nab{one.text}\n" for i, one in enumerate(found, 1)]
    assert found[0].score > found[1].score and generate(*words)[1] == "".join(expected)
    code, _, err = generate(*words, "--output", tmp_path / "out.jsonl")
    assert code == 0 and "4 slots" in err
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["score"] for r in results] == [one.score for one in found]


LINES = [
    {"prompt": "one", "temperature": 0}, {"prompt": "zwei ü🎈\u2028", "num_return_sequences": 2, "id": ["a", 1]},
    {"prompt": "", "max_new_tokens": 2, "logit_bias": {"65": 100}, "stop_strings": ["Z"], "top_k": None},
]  # fmt: skip


def test_results_of_a_file_are_json_lines_in_its_order(folder, generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in LINES)
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n\n").encode())
    code, out, err = generate("--prompts-file", path, "--tokens", 5, "--output", tmp_path / "out.jsonl")
    assert (code, out) == (0, "") and "3/3 prompts, 17 tokens" in err and str(tmp_path / "out.jsonl") in err
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]]
    assert [(r["line"], r["choice"], r["prompt"]) for r in found] == [
        (1, 0, "one"), (3, 0, LINES[1]["prompt"]), (3, 1, LINES[1]["prompt"]), (5, 0, "")
    ]  # fmt: skip
    assert [r.get("id") for r in found] == [None, ["a", 1], ["a", 1], None] and found[3]["text"] == "AA"
    assert found[0]["text"] == dtgpt.load(folder).generate("one", do_sample=False, max_new_tokens=5)
    assert [r["tokens"] for r in found] == [5, 5, 5, 2] and {r["finish_reason"] for r in found} == {"length"}
    code, again, _ = generate("--prompts-file", path, "--tokens", 5, "--slots", 2)
    assert [json.loads(line) for line in again.split("\n")[:-1]] == found


def test_lines_of_plain_text_are_prompts_of_their_own(generate, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('\n  a b \n\n{"prompt": 1}\n', encoding="utf-8")
    found = [json.loads(line) for line in generate("--prompts-file", path, "--tokens", 2)[1].split("\n")[:-1]]
    assert [(r["line"], r["prompt"]) for r in found] == [(2, "  a b "), (4, '{"prompt": 1}')]


@pytest.mark.parametrize("content, words", [
    (b"", ["has no prompt"]), (b"\n\n", ["has no prompt"]), (b'{"prompt": "a"}\n{"prompt": }', ["line 2 is not JSON"]),
    (b'{"prompt": "a"}\n\n["a"]', ["line 3", "['a']", 'under "prompt"']), (b'{"prompt": 5}', ["line 1", "'prompt': 5"]),
    (b'{"prompt": "a", "max_tokens": 5}', ["line 1 has the key max_tokens", "did you mean max_new_tokens?"]),
    (b'{"prompt": "a", "num_samples": 5}', ["line 1 has the key num_samples", "mean num_return_sequences?"]),
    (b'{"prompt": "a", "q": 5}', ["line 1 has the key q; use one of prompt, id, max_new_tokens"]),
    (b'{"prompt": "a", "prompt": "b"}', ["line 1 has the key prompt twice; leave one out"]),
    (b'{"prompt": "a", "id": NaN}', ["line 1 has the id nan", "use a text or a number"]),
    (b'{"prompt": "a", "top_p": 5}', ["line 1: top_p=5"]), (b'{"prompt": "a", "seed": 1.5}', ["line 1: seed=1.5"]),
    (b'{"prompt": "a"}\n{"prompt": "\xff"}', ["line 2 is not UTF-8"]), (b"[" * 100_000, ["line 1", "nested"]),
    (b'{"prompt": "' + b"x" * 70 + b'"}', ["line 1: a prompt of 70 tokens", "the model has 64"]),
    (b'{"prompt": "a", "stop_strings": [""]}', ["line 1: the stop string ''"]),
])  # fmt: skip
def test_a_wrong_line_is_named_before_anything_is_generated(generate, tmp_path, monkeypatch, content, words):
    monkeypatch.setattr(Engine, "step", None)
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    code, out, err = generate("--prompts-file", path, "--output", tmp_path / "out")
    assert code == 2 and out == "" and err.count("\n") == 1 and str(path) in err, err
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists()


def test_halves_of_surrogate_pairs_are_replaced(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\ud83c b\\ud83c\\udf88"}')
    assert read_prompts_file(tmp_path / "p.jsonl")[0].prompt == "a\ufffd b🎈"


@pytest.mark.parametrize("options, words", [
    (["--prompts-file", "nowhere"], ["nowhere cannot be read", "No such file"]),
    (["--prompts-file", "."], [". cannot be read"]),
    (["--prompt", "a", "--prompts-file", "b"], ["--prompt and --prompts-file", "leave one out"]),
    (["--prompt", "a", "--interactive"], ["--prompt and --interactive"]),
    (["--interactive", "--output", "x"], ["--interactive writes to the terminal"]),
    (["--output", "taken"], ["taken exists already"]), (["--output", "no/x"], ["no is not a folder"]),
    (["--logit-bias", "65:1", "66:1", "65:2"], ["logit_bias has the token 65 twice"]),
    (["--logit-bias", "65"], ["--logit-bias", "50256:-100"]), (["--stop-token-ids", "x"], ["--stop-token-ids", "'x'"]),
    (["--slots", "0"], ["--slots=0"]), (["--num-samples", "300"], ["--num-samples=300", "at most 128"]),
    (["--num-beams", "300"], ["--num-beams=300", "at most 128"]),
    (["--interactive", "--temperature", "500"], ["temperature=500"]), (["--plan", "tq2"], ["did you mean"]),
    (["--num-samples", "3", "--slots", "2"], ["3 sequences of a prompt", "has 2"]),
])  # fmt: skip
def test_options_that_cannot_be_met_are_one_sentence(generate, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("kept")
    code, out, err = generate(*options)
    assert code == 2 and out == "" and err.count("\n") == 1 and all(word in err for word in words), err
    assert (tmp_path / "taken").read_text() == "kept"


def test_an_interrupted_file_keeps_what_is_done(generate, tmp_path, monkeypatch):
    path, out, done = tmp_path / "prompts.txt", tmp_path / "out.jsonl", Engine.step
    path.write_text("a\nb\nc\nd\n")

    def step(engine):
        if out.exists() and out.read_text().count("\n") == 2:
            raise KeyboardInterrupt
        return done(engine)

    monkeypatch.setattr(Engine, "step", step)
    code, _, err = generate("--prompts-file", path, "--output", out, "--slots", 1, "--tokens", 3)
    assert code == 130 and "interrupted" in err
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["a", "b"]


def test_a_full_disk_is_told_and_leaves_whole_lines(generate, tmp_path):
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("one\ntwo\nthree\n")
    with files_of_at_most(150):  # more than a line
        code, _, err = generate("--prompts-file", path, "--output", out, "--tokens", 3)
    assert code == 2 and f"{out} cannot be written (File too large)" in err and "Traceback" not in err
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["one"]


@pytest.mark.parametrize("error, code", [(BrokenPipeError(), 0), (OSError(errno.ENOSPC, "No space"), 2)])
def test_results_that_stdout_does_not_take_are_not_made(folder, tmp_path, monkeypatch, capsys, error, code):
    (tmp_path / "p.txt").write_text("a\n" * 9)

    class Closed(io.StringIO):
        def write(self, text):
            made.append(text)
            raise error

    made: list[str] = []
    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(folder), "--prompts-file", str(tmp_path / "p.txt"), "--tokens", "3", "--slots", "1"])
    err = capsys.readouterr().err
    assert stop.value.code == code and len(made) == 1
    assert ("stdout cannot be written (No space); free space there" in err) == (code == 2)


def test_a_file_that_cannot_be_made_is_one_sentence(generate, tmp_path):
    code, _, err = generate("--prompt", "a", "--output", tmp_path / ("x" * 300), "--tokens", 3)
    assert code == 2 and "cannot be written (File name too long); use a shorter path" in err


def test_an_id_comes_back_as_it_was(generate, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "id": "\\ud800"}')
    (line,) = generate("--prompts-file", path, "--tokens", 3)[1].splitlines()
    assert json.loads(line)["id"] == "\ud800"


def test_prompts_are_read_from_the_keyboard_until_its_end(folder, generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n" + "x" * 99 + "\nyou\n"))
    code, out, err = generate("--interactive", "--tokens", 6)
    texts = dtgpt.load(folder).generate(["hello", "", "you"], max_new_tokens=6, temperature=0.8, top_k=50)
    assert code == 0 and "a prompt of 99 tokens" in err
    assert out == f"hello{texts[0]}\nyou{texts[2]}\n"


def test_ctrl_c_ends_the_text_and_not_the_program(generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nyou\n"))
    done, steps = Engine.step, []

    def step(engine):
        steps.append(engine)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return done(engine)

    monkeypatch.setattr(Engine, "step", step)
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = generate("--interactive", "--tokens", 40, "--logit_bias", "65:100")
    assert code == 0 and signal.getsignal(signal.SIGINT) is before
    first, second = out.splitlines()
    assert first.startswith("hello") and len(first) < 30 and second == "you" + "A" * 40


def test_two_processes_under_a_plan_write_one_text(folder, generate, tmp_path):
    words = ["--prompt", "shared", "--tokens", "12", "--seed", "5"]
    alone = generate(*words)[1]
    done = run_program([*DTGPT, "generate", folder, *words, "--plan", "pp2", "--device", "cpu"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone and "pp2" in done.stderr
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": 5}\n')
    done = run_program([*DTGPT, "generate", folder, "--prompts-file", "p.jsonl", "--device", "cpu"], tmp_path)
    assert done.returncode != 0 and done.stdout == "" and "dtgpt: p.jsonl, line 2" in done.stderr
    assert str(ROOT / "dtgpt") not in done.stderr  # no line of a traceback through dtgpt


def test_what_a_user_writes_wrong_in_python_is_one_sentence(folder):
    with pytest.raises(UserError, match=r"there is no option length_penality; did you mean length_penalty\?"):
        dtgpt.load(folder).generate("a", length_penality=1.0)


@pytest.mark.parametrize("word, key", [("http://{}", None), ("http://{}/", "secret"), ("{}", "secret")])
def test_the_address_of_a_server_is_answered_with_a_command_that_asks_it(capsys, monkeypatch, word, key):
    if key:
        monkeypatch.setenv("DTGPT_API_KEY", key)
    with served(tiny_model(), api_key=key, log_requests=False) as service, live_server(service) as address:
        with pytest.raises(SystemExit) as stop:
            main(["generate", word.format(address.removeprefix("http://")), "--prompt", "it's $5"])
        err = capsys.readouterr().err
        sentence, _, command = err.partition(" or with: ")
        assert stop.value.code == 2 and err.count("\n") == 1 and "secret" not in err
        assert sentence.startswith(f"dtgpt: {address} is a server, and dtgpt generate takes a model")
        assert f"base_url={address}/v1" in sentence
        name, url, *rest = shlex.split(command.replace("$DTGPT_API_KEY", key or ""))
        headers = dict(re.split(": ", rest[i + 1]) for i in (0, 2) if rest[i] == "-H")
        body = json.loads(rest[rest.index("-d") + 1])
        assert name == "curl" and body == {"prompt": "it's $5", "temperature": 0.8, "top_k": 50}
        answer = httpx.post(url, headers=headers, content=rest[-1])
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]


def test_a_folder_named_as_an_address_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:5000").mkdir()
    assert EXPLANATIONS.of_model(Path("run:5000"), GenerateOptions()) is None
    assert EXPLANATIONS.of_model(Path("runs/gpt2"), GenerateOptions()) is None
    assert EXPLANATIONS.of_model(Path("run:5001"), GenerateOptions())


def test_the_key_of_a_server_is_not_an_option_any_more(generate):
    assert "--api-key belongs to dtgpt serve" in generate("--api-key", "x")[2]


@pytest.mark.parametrize("more", [[], ["--num-samples", "2"], ["--num-beams", "2"]], ids=str)
def test_a_text_that_ends_because_no_token_is_left_is_told(tmp_path, capsys, more):
    model = build_model(CONFIG, torch.device("cpu"), torch.float32, root_key(1))
    save_weights(InMemory(model), tmp_path / "model", "here", make_tokenizer("char", ["abcd"], 0))
    words = ["--prompt", "a", "--max-new-tokens", "9", "--no-repeat-ngram-size", "1"]
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(tmp_path / "model"), *words, *more])
    out, err = capsys.readouterr()
    assert not stop.value.code and sorted(out.splitlines()[-1]) == ["a", "b", "c", "d"]
    assert err.count("left no token to draw") == 1
