"""The adapter for lm-evaluation-harness: its answers are those of the harness's own `hf` back end on the same weights,
under every plan."""

import json
import math
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import dtgpt
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.evaluation.harness_command import command, split_words
from dtgpt.evaluation.harness_options import read_generation
from dtgpt.inference.request import NotFinite
from dtgpt.util.errors import UserError
from tests.support.harness_tasks import TASKS, write_model, write_tasks
from tests.support.ranks import pool
from tests.support.vocabularies import sentencepiece_model

pytestmark = pytest.mark.slow(10)

lm_eval = pytest.importorskip("lm_eval")
POSITIONS = 64
CONTEXTS = ("the river", "a winter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and tasks, and no network."""
    folder = tmp_path_factory.mktemp("harness")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        patch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks pip for all packages: 3 CPU s
        write_model(folder / "model", POSITIONS)
        write_tasks(folder / "tasks", samples=4)
        yield folder


@pytest.fixture
def few_tasks(monkeypatch):
    """The harness reads the tasks of --include_path alone: its own ones take seconds."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))


def evaluate(folder, model: str, arguments: dict, **options):
    from lm_eval.tasks import TaskManager

    import dtgpt.evaluation.harness  # noqa: F401  # which adds the model `dtgpt`

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **options
    )


@pytest.fixture(scope="module")
def theirs(folder):
    """Results of the harness's own back end."""
    pytest.importorskip("accelerate")
    return evaluate(folder, "hf", {"pretrained": str(folder / "model"), "dtype": "float32"}, device="cpu")


@pytest.fixture(scope="module")
def ours(folder):
    return evaluate(folder, "dtgpt", {"model": str(folder / "model"), "device": "cpu"}, batch_size="auto")


def answers(results) -> dict[str, list]:
    return {task: [sample["filtered_resps"] for sample in results["samples"][task]] for task in TASKS}


def assert_equal(found: dict[str, list], wanted: dict[str, list]) -> None:
    """Every log-probability to 1e-4, or the last bit of fp32, in which the `hf` back end adds those of a text; whether
    tokens are the likeliest, and texts, alike."""
    assert found.keys() == wanted.keys()
    for task in found:
        assert len(found[task]) == len(wanted[task]) > 0
        for own, other in zip(found[task], wanted[task], strict=True):
            for one, two in zip(own, other, strict=True):
                if isinstance(two, str):
                    assert one == two
                elif isinstance(two, float):
                    assert one == pytest.approx(two, abs=1e-4, rel=2**-23)
                else:
                    assert one[0] == pytest.approx(two[0], abs=1e-4) and one[1] == two[1]


def test_every_answer_is_that_of_the_hf_back_end(ours, theirs):
    assert_equal(answers(ours), answers(theirs))
    texts = [text for (text,) in answers(ours)["local_generation"]]
    assert any(texts) and not any(" harbour" in text for text in texts)


def test_texts_end_at_the_ids_of_the_folder_and_at_the_tokenizers_end(folder, tmp_path):
    """As those of the `hf` back end, whichever of the two the files name."""
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from dtgpt.evaluation.harness import HarnessModel

    def texts(model) -> list[str]:
        asked = [(context, {"until": ["STOP"], "max_gen_toks": 12}) for context in CONTEXTS]
        requests = [Instance(request_type="generate_until", doc={}, arguments=one, idx=0) for one in asked]
        return model.generate_until(requests)

    copy = shutil.copytree(folder / "model", tmp_path / "model")
    model = dtgpt.load(copy)
    free = model.generate(model.tokenizer.encode(CONTEXTS[0]), temperature=0, max_new_tokens=12)
    found = []
    for ends in (None, [6, 3], [2]):
        named = None if ends is None else [free[place] for place in ends]
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        hf = HFLM(pretrained=str(copy), dtype="float32", device="cpu", batch_size=1)
        own = HarnessModel.create_from_arg_obj({"model": str(copy), "device": "cpu"}, {"batch_size": 1})
        found.append(texts(own))
        assert found[-1] == texts(hf)
    assert len(found[0][0]) > len(found[1][0]) > len(found[2][0])


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '> ' + m.content | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' + word | default(' ') }}{% endif %}"
)


def test_chats_are_those_of_the_hf_back_end(folder, tmp_path):
    """Tasks in the tokenizer's template, with a variable of it; and an answer that the task begins."""
    pytest.importorskip("accelerate")
    copy = shutil.copytree(folder / "model", tmp_path / "model")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    options = {"apply_chat_template": True, "system_instruction": "the river", "limit": 2}
    hf = {"pretrained": str(copy), "dtype": "float32", "chat_template_args": {"word": " so"}}
    own = {"model": str(copy), "device": "cpu", "chat_template_kwargs": '{"word": " so"}'}
    theirs, ours = evaluate(folder, "hf", hf, device="cpu", **options), evaluate(folder, "dtgpt", own, **options)
    assert_equal(answers(ours), answers(theirs))
    asked = [sample["arguments"] for sample in ours["samples"][TASKS[3]]]
    assert asked == [sample["arguments"] for sample in theirs["samples"][TASKS[3]]] and "<assistant> so" in str(asked)

    from dtgpt.evaluation.harness import HarnessModel

    model = HarnessModel.create_from_arg_obj(own)
    assert model.chat_template(True) == TEMPLATE
    chat = [{"role": "user", "content": "a river"}, {"role": "assistant", "content": "an "}]
    assert model.apply_chat_template(chat, add_generation_prompt=False).endswith("<assistant> an")
    with pytest.raises(UserError, match="there is no chat template tools; give --apply_chat_template alone"):
        model.chat_template("tools")
    for wrong in ("{", "[1]"):
        with pytest.raises(UserError, match=r"--?chat_template_kwargs|chat_template_kwargs=\[1\] is not an object"):
            HarnessModel.create_from_arg_obj({**own, "chat_template_kwargs": wrong})


def test_every_metric_is_that_of_the_hf_back_end(ours, theirs):
    for task in TASKS:
        mine, other = ours["results"][task], theirs["results"][task]
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), (task, name)
    assert {"word_perplexity,none", "bits_per_byte,none"} <= ours["results"]["local_wikitext"].keys()
    assert ours["config"]["plan"] == "single" and ours["config"]["model_dtype"] == "float32"


def test_requests_of_ids_are_judged_alike(folder):
    """Contexts of one token and of too many, and continuations that are the likeliest ones."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    from dtgpt.evaluation.harness import HarnessModel

    hf = HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu", batch_size=4)
    own = HarnessModel.create_from_arg_obj({"model": str(folder / "model"), "device": "cpu"}, {"batch_size": 2})
    generator, requests = torch.Generator().manual_seed(0), []
    for context, target in ((1, 1), (5, 3), (1, POSITIONS), (POSITIONS, 1), (POSITIONS - 1, 2), (100, 30), (30, 34)):
        ids = torch.randint(own.texts.vocab_size, (context + target,), generator=generator).tolist()
        requests.append((("", ""), ids[:context], ids[context:]))
    for context in (3, 40):
        ids = torch.randint(own.texts.vocab_size, (1, context), generator=generator)
        greedy = hf.model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)[0, context:].tolist()
        requests += [(("", ""), ids[0].tolist(), greedy), (("", ""), ids[0].tolist(), [*greedy[:-1], greedy[-1] ^ 1])]
    wanted = hf._loglikelihood_tokens(requests, disable_tqdm=True)
    found = own._loglikelihood_tokens(requests, disable_tqdm=True)
    assert_equal({"ids": [found]}, {"ids": [wanted]})
    assert [greedy for _, greedy in found][-4:] == [True, False, True, False]
    for text in ("", "the river", "<|endoftext|>the<|endoftext|>", " Grüße \n\n"):
        assert own.tok_encode(text) == hf.tok_encode(text)
    assert (own.eot_token_id, own.prefix_token_id) == (hf.eot_token_id, hf.prefix_token_id)
    with pytest.raises(UserError, match="65 tokens is longer than the model's 64 positions"):
        own._loglikelihood_tokens([(("", ""), [1], [2] * 65)], disable_tqdm=True)
    with pytest.raises(UserError, match=r"the tokenizer .* has no chat template"):
        own.chat_template(True)
    assert own._loglikelihood_tokens([], disable_tqdm=True) == [] and own.generate_until([]) == []


def test_names_of_special_tokens_are_not_in_texts(folder, tmp_path):
    pytest.importorskip("accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from dtgpt.evaluation.harness import HarnessModel

    def texts(named: bool) -> list[list[str]]:
        path = shutil.copytree(folder / "model", tmp_path / str(named))
        if named:  # a third of all tokens, of which the model writes some
            read = json.loads((path / "tokenizer.json").read_text())
            some = sorted(read["model"]["vocab"].items(), key=lambda item: item[1])[::3]
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            known = {token["id"] for token in read["added_tokens"]}
            added = [{"id": i, "content": name, "special": True, **flags} for name, i in some if i not in known]
            read["added_tokens"] = sorted(read["added_tokens"] + added, key=lambda token: token["id"])
            (path / "tokenizer.json").write_text(json.dumps(read))
        hf = HFLM(pretrained=str(path), dtype="float32", device="cpu", batch_size=1)
        own = HarnessModel.create_from_arg_obj({"model": str(path), "device": "cpu"})
        return [model.generate_until(requests, disable_tqdm=True) for model in (own, hf)]

    stops: dict[str, list[str]] = {"the river": [], " garden": [" e"], "1984": ["zz"], "a river " * 40: []}
    asked = [(context, {"until": until, "max_gen_toks": 24}) for context, until in stops.items()]
    requests = [Instance("generate_until", {}, arguments, i) for i, arguments in enumerate(asked)]
    plain, stripped = texts(False), texts(True)
    assert plain[0] == plain[1] and stripped[0] == stripped[1]
    assert plain[0] != stripped[0] and all(stripped[0])


def test_the_command_answers_alike_under_a_plan(folder, tmp_path, theirs):
    """Of replicas, which divide the requests. Other plans: test_scoring.py, tests/inference/test_inference.py."""
    from tests.support.bodies_harness import lm_eval_command, saved_answers

    given = str(folder / "model"), str(folder / "tasks"), list(TASKS), str(tmp_path), ["--plan", "dp2"]
    assert pool().run(2, lm_eval_command, *given) == [0, 0]
    assert_equal(saved_answers(tmp_path), json.loads(json.dumps(answers(theirs))))
    (results,) = tmp_path.rglob("results_*.json")
    config = json.loads(results.read_text())["config"]
    assert config["plan"] == config["model_args"]["plan"] == "dp2"


def test_the_command_prints_the_harness_table_and_takes_its_options(folder, tmp_path, capsys):
    from tests.support.bodies_harness import lm_eval_command, saved_answers

    words = ["--limit", "2", "--device", "cpu", "--batch_size=1", "--gen_kwargs", "max_gen_toks=3"]
    before = list(sys.argv)
    assert (
        lm_eval_command(str(folder / "model"), str(folder / "tasks"), [TASKS[0], TASKS[3]], str(tmp_path), words) == 0
    )
    assert "|local_lambada" in capsys.readouterr().out and sys.argv == before
    assert {name: len(rows) for name, rows in saved_answers(tmp_path).items()} == {TASKS[0]: 2, TASKS[3]: 2}


def test_answers_in_the_cache_of_the_harness_are_not_asked_for_again(folder, tmp_path, monkeypatch, ours):
    given = {"model": str(folder / "model"), "device": "cpu"}
    options = {"use_cache": str(tmp_path / "answers"), "limit": 2}
    first = evaluate(folder, "dtgpt", given, **options)
    monkeypatch.setattr("dtgpt.evaluation.shared_model.SharedModel.score", lambda *_: pytest.fail("scored again"))
    monkeypatch.setattr("dtgpt.evaluation.shared_model.SharedModel.generate", lambda *_: pytest.fail("made again"))
    again = json.dumps(answers(evaluate(folder, "dtgpt", given, **options)))
    assert again == json.dumps(answers(first)) and answers(first)[TASKS[1]] == answers(ours)[TASKS[1]][:2]


def test_what_the_harness_refuses_it_says_before_the_model_is_read(few_tasks, monkeypatch, capsys):
    monkeypatch.setattr("dtgpt.evaluation.harness.open_shared", lambda **given: pytest.fail("the model was read"))
    with pytest.raises(ValueError, match="Tasks not found: nothing_of_this_name"):
        command(["model", "--tasks", "nothing_of_this_name"])
    with pytest.raises(SystemExit):
        command(["model", "--tasks", "local_lambada", "--nonsense", "3"])
    assert "unrecognized arguments: --nonsense 3" in capsys.readouterr().err


@pytest.mark.parametrize("words, sentence", [
    (["--batch_size", "many"], "--batch_size many is not a number of samples"), (["--batch_size", "-1"], "size -1 is"),
    (["--gen_kwargs", "max_gen_toks=1e999"], "max_gen_toks=inf is not a number; change it with --gen_kwargs"),
    (["--gen_kwargs", '{"max_gen_toks": [1]}'], r"max_gen_toks=\[1\] is not a number"),
    (["--gen_kwargs", "temperature=warm"], "temperature='warm' is not a number"),
], ids=str)  # fmt: skip
def test_options_that_dtgpt_reads_are_refused_in_one_sentence(folder, few_tasks, words, sentence):
    given = ["--include_path", str(folder / "tasks"), "--tasks", TASKS[3], "--device", "cpu", *words]
    with pytest.raises(UserError, match=sentence) as error:
        command([str(folder / "model"), *given])
    assert "\n" not in str(error.value)


def test_logits_that_are_not_finite_are_no_score(folder, tmp_path, few_tasks):
    from lm_eval.api.instance import Instance

    from dtgpt.evaluation.harness import HarnessModel

    broken = tmp_path / "broken"
    shutil.copytree(folder / "model", broken)
    weights = load_file(broken / "model.safetensors")
    weights[next(name for name in weights if "wpe" in name)][2] = math.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    words = ["--include_path", folder / "tasks", "--tasks", TASKS[0], "--output_path", tmp_path / "out"]
    with pytest.raises(NotFinite):
        command([str(broken), *map(str, words), "--device", "cpu"])
    assert not (tmp_path / "out").exists()
    own = HarnessModel.create_from_arg_obj({"model": str(broken), "device": "cpu"})
    for kind, asked in {
        "loglikelihood": ("the river", " garden"),
        "loglikelihood_rolling": ("the river garden house",),
        "generate_until": ("the river garden", {"until": [], "max_gen_toks": 3}),
    }.items():
        with pytest.raises(NotFinite):
            getattr(own, kind)([Instance(kind, {}, asked, 0)])


def test_errors_of_dtgpt_under_the_harness_stay_as_they_are(folder, few_tasks, monkeypatch):
    monkeypatch.setattr("dtgpt.evaluation.harness.fitted", lambda *_: {}["a fault"])
    words = ["--include_path", folder / "tasks", "--tasks", TASKS[0], "--device", "cpu"]
    with pytest.raises(KeyError, match="a fault"):
        command([str(folder / "model"), *map(str, words)])


def test_words_are_divided_between_the_two_programs():
    own, passed = split_words(
        [
            "runs/a", "--tasks", "x", "y-z", "--plan", "tp2", "--vocab-file=v.json", "--num-fewshot=3", "-L", "-1",
            "--device",
        ]
    )  # fmt: skip
    assert own == ["runs/a", "--plan", "tp2", "--vocab-file=v.json", "--device"]
    assert passed == ["--tasks", "x", "y-z", "--num_fewshot=3", "-L", "-1"]


@pytest.mark.parametrize("words, sentence", [
    ([], "needs MODEL"),
    (["--tasks", "x", "model"], "needs MODEL before --tasks"),
    (["model", "--model", "hf"], "takes the model from the first word"),
    (["model", "--model-args=pretrained=x"], "takes the model from options such as --plan"),
    (["model", "--tasks", "x", "--device", "tpu"], "device"),
    (["model", "--limit", "3"], "needs --tasks, such as dtgpt lm-eval runs/"),
    (["model", "--tasks", "x", "--plan"], "plan"),
])  # fmt: skip
def test_words_that_are_wrong_are_one_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        command(words)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr("dtgpt.evaluation.harness_command.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'dtgpt\[eval\]'"):
        command(["model", "--tasks", "x"])


@pytest.mark.parametrize("given, new, temperature, stops", [
    ({}, 32, 0.0, []),
    ({"until": "\n\n", "max_gen_toks": 5}, 5, 0.0, ["\n\n"]),
    ({"until": ["a", "", "b"], "max_new_tokens": 7, "max_tokens": 3}, 7, 0.0, ["a", "b"]),
    ({"temperature": 0.7}, 32, 0.7, []),
    ({"temperature": 0.7, "do_sample": False}, 32, 0.0, []),
    ({"do_sample": True, "temperature": 0.9, "top_p": 0.5, "repetition_penalty": 1.0}, 32, 0.9, []),
])  # fmt: skip
def test_generation_arguments_are_those_of_the_harness(given, new, temperature, stops):
    wanted = read_generation(given, positions=64)
    assert (wanted.new_tokens, wanted.options["temperature"], wanted.options["stop_strings"]) == (
        new,
        temperature,
        stops,
    )
    assert all(wanted.options.get(name) == given.get(name) for name in ("top_p", "repetition_penalty"))


@pytest.mark.parametrize("given, sentence", [
    ({"max_gen_toks": 64}, "leaves no context in the model's 64 positions; use 1 to 63"),
    ({"max_gen_toks": 0}, "max_gen_toks=0"),
    ({"until": 5}, "until=5"),
    ({"repeat_penalty": 1.2}, "repeat_penalty=1.2, which does not exist here; did you mean repetition_penalty"),
    ({"num_return_sequences": 2}, "num_return_sequences=2"),
])  # fmt: skip
def test_generation_arguments_that_cannot_be_followed_are_refused(given, sentence):
    with pytest.raises(UserError, match=sentence):
        read_generation(given, positions=64)


def test_a_text_ends_before_any_of_its_stop_strings():
    """Also of those that are too many, or too long, to be watched for while it is generated."""
    many = read_generation({"until": [*map(str, range(20)), "x" * 300]}, positions=64)
    assert len(many.options["stop_strings"]) == 16
    assert many.cut("a b 19 c 7") == "a b " and many.cut("a" + "x" * 300) == "a" and many.cut("abc") == "abc"
    assert "stop_strings" not in read_generation({"until": ["a"], "num_beams": 3}, positions=64).options


def test_a_tokenizer_that_opens_texts_does_so_once(tmp_path):
    from dtgpt.evaluation.harness import HarnessModel

    tokenizer = open_tokenizer(str(sentencepiece_model(tmp_path)), begin=True)
    config = SimpleNamespace(seq_length=8)
    own = HarnessModel(SimpleNamespace(model=SimpleNamespace(tokenizer=tokenizer, config=config)))
    ids = tokenizer.encode("the fox")
    assert own.tok_encode("the fox") == ids and own.tok_encode("the fox", add_special_tokens=False) == ids[1:]
    assert own.prefix_token_id == ids[0] == tokenizer.begin_of_text
