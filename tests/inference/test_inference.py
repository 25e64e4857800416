"""`dtgpt.load`: under every plan each rank gets the logits and the samples of the whole model."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dtgpt
from dtgpt.checkpoint.open import open_source
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.data.tokenizers.byte_level import ByteLevel
from dtgpt.inference import load as loading
from dtgpt.inference.load import notes_on
from dtgpt.inference.prompts import tokenizer_of
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.parallel.mesh import Mesh
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.interop.test_interop_huggingface import scatter
from tests.support import bodies_inference as bodies
from tests.support.programs import TORCHRUN, run_program
from tests.support.ranks import pool
from tests.support.runs import change, newest_run
from tests.support.sources import TOLERANCE, load_model

pytestmark = pytest.mark.slow(31)

CPU = torch.device("cpu")
LENGTH, VOCABULARY, PROMPT = 16, 1030, [5, 900, 17]
WORLDS = {"single": 1, "tp2": 2, "tp4": 4, "tp4_sp": 4, "pp2": 2, "pp2_interleaved": 2, "pp2_zbv": 2, "tp2_pp2": 4}
WORLDS |= {"tp2_pp2_sp": 4, "dp2_zero3": 2, "dp2_tp2": 4, None: 2}
RARE = {"tp4", "tp4_sp"}  # as with two ranks


def inputs():
    """Batches of 1 and 3, shorter than the model and as long."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 1), (3, 1), (3, 10), (1, LENGTH), (3, LENGTH)]
    return [torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes]


def their_model(vocab_size, **shape):
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 4, "n_head": 4, "layer_norm_epsilon": 1e-4} | shape
    return scatter(GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, bos_token_id=None, eos_token_id=None, **sizes)))


@pytest.fixture(scope="module")
def theirs():
    return their_model(VOCABULARY)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "gpt2"
    theirs.save_pretrained(path)
    return path


@torch.no_grad()
def far(ours, theirs, tokens):
    """Largest difference from their logits, of the largest logit."""
    expected = theirs(tokens).logits
    assert ours.shape == expected.shape and expected.std() > 0.5
    return ((ours.float() - expected).abs().max() / expected.abs().max()).item()


ASKED = [
    {"prompts": PROMPT, "do_sample": False, "max_new_tokens": LENGTH - len(PROMPT)},
    {"prompts": PROMPT, "max_new_tokens": 5, "temperature": 2.0, "seed": 1},
    {"prompts": PROMPT, "max_new_tokens": 5, "temperature": 2.0, "seed": 2},
    {"prompts": PROMPT, "max_new_tokens": 5, "temperature": 2.0, "seed": 1, "top_k": 4},
    {"prompts": [PROMPT, [7], list(range(LENGTH - 2))], "num_return_sequences": 2, "top_p": 0.9, "seed": 1},
]


@pytest.mark.parametrize("plan", [pytest.param(p, marks=[pytest.mark.long] * (p in RARE)) for p in WORLDS])
def test_every_rank_has_the_logits_and_the_samples_of_transformers(theirs, folder, plan):
    greedy = theirs.generate(torch.tensor([PROMPT]), max_length=LENGTH, do_sample=False, pad_token_id=0)
    alone = dtgpt.load(folder, plan="single", device="cpu")
    samples = [alone.generate(**words) for words in ASKED]
    assert samples[0] == greedy[0, len(PROMPT) : LENGTH].tolist()
    assert len({tuple(s[:5]) for s in samples[:4]}) == 4 and [len(s) for s in samples[4][2]] == [2, 2]
    expected = theirs(inputs()[2]).logits.log_softmax(-1)
    for logits, ours, scores in pool().run(WORLDS[plan], bodies.logits_and_samples, folder, plan, inputs(), ASKED):
        assert [far(x, theirs, tokens) < TOLERANCE for x, tokens in zip(logits, inputs(), strict=True)] == [True] * 5
        assert {x.dtype for x in logits} == {torch.float32}
        assert ours == samples
        for score, ids, rows in zip(scores, inputs()[2], expected, strict=True):
            assert score.ids == ids.tolist()
            assert score.logprobs == pytest.approx(rows[:-1].gather(1, ids[1:, None])[:, 0].tolist(), abs=1e-4)
            assert score.greedy == (rows[:-1].argmax(-1) == ids[1:]).tolist()


def test_logits_of_a_vocabulary_that_tp_cuts_unevenly(tmp_path):
    model, tokens = their_model(131, n_embd=24, n_head=3), torch.arange(12).view(2, 6)
    model.save_pretrained(tmp_path)
    assert [far(x, model, tokens) < TOLERANCE for x in pool().run(3, bodies.logits, tmp_path, "tp3", tokens)] == [
        True
    ] * 3


@pytest.mark.parametrize("plan", ["single", "pp2"])
def test_a_stream_is_the_text_on_every_rank_and_may_be_left(folder, plan):
    options = {"max_new_tokens": 9, "seed": 3}
    expected = dtgpt.load(folder, plan="single", device="cpu").generate(PROMPT, **options)
    for rank, (whole, part) in enumerate(pool().run(WORLDS[plan], bodies.streamed, folder, plan, PROMPT, options, 2)):
        assert whole == expected
        assert part == (expected[:2] if rank == 0 else expected[: len(part)]) and 2 <= len(part) < 9


def test_processes_that_are_out_of_step_say_so(folder):
    (first, again), (other, *others) = pool().run(2, bodies.after_a_failure, folder, "pp2", PROMPT)
    assert first == "the disk is full" and "start all of them again" in other
    assert again.startswith("a process has failed in a call before this one; start all") and others == [again]


@pytest.mark.parametrize("plan, words", [
    ("dp2_zero3", ["ZeRO-3", "dp2_zero3"]), ("tp4_sp", ["sequence parallelism"]),
])  # fmt: skip
def test_what_of_a_plan_concerns_training_alone_is_ignored_with_a_note(plan, words):
    resolved = parse_plan(plan).for_world(WORLDS[plan])
    (note,), left = notes_on(resolved), resolved.for_inference()
    assert all(word in note for word in ["inference ignores", *words]) and notes_on(left) == []
    assert (left.zero, left.sequence_parallel, left.world) == (0, False, WORLDS[plan])


@pytest.mark.parametrize("plan", ["single", "tp2"])
def test_a_model_of_few_tokens_is_loaded(tmp_path, plan):
    small = their_model(131)
    small.save_pretrained(tmp_path / "gpt2")
    tokens = torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(1))
    for logits in pool().run(WORLDS[plan], bodies.logits, tmp_path / "gpt2", plan, tokens):
        assert far(logits, small, tokens) < TOLERANCE


@pytest.fixture
def recipe(recipe):
    """Of a run whose tokenizer has fewer tokens than the model."""
    quiet = {"sample_tokens": 0, "eval_samples": 1}
    shape = {"num_layers": 4, "num_heads": 4, "vocab_size": VOCABULARY}
    return change(recipe, model=shape, micro_batch_size=2, steps=2, checkpoint={"interval": 1}, log=quiet)


@pytest.mark.parametrize("written, plan", [("single", "tp4"), ("tp2", "pp2"), ("dp2_zero3", "tp2")])
def test_a_run_and_any_of_its_checkpoints_load_under_another_plan(recipe, written, plan):
    pool().run(WORLDS[written], train, change(recipe, plan=written))
    run, tokens = newest_run(recipe), torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    first = run / "checkpoints" / "step_00000001"
    expected = {}
    for path in (run, first):
        expected[path] = load_model(open_source(path), CPU)(tokens)[..., :VOCABULARY]
        for logits in pool().run(WORLDS[plan], bodies.logits, path, plan, tokens):
            assert logits.shape == (3, 9, VOCABULARY)
            assert (logits - expected[path]).abs().max() < TOLERANCE * expected[path].abs().max()
    assert (expected[run] - expected[first]).abs().max() > 100 * TOLERANCE * expected[run].abs().max()


@pytest.mark.parametrize("plan", ["single", "tp4_sp", "tp2_pp2", "dp2_zero3", "pp2_zbv"])
def test_in_bf16_logits_are_roughly_the_same_and_weights_have_no_masters(theirs, folder, plan):
    tokens = inputs()[2]
    for logits, dtypes, _ in pool().run(WORLDS[plan], bodies.held, folder, plan, "bf16", tokens):
        assert logits.dtype == torch.bfloat16 and 1e-4 < far(logits, theirs, tokens) < 0.05
        assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("plan, share", [("tp4", 0.3), ("tp2_pp2", 0.45), ("dp2_tp2", 0.6)])
def test_a_rank_holds_its_own_part_alone(folder, plan, share):
    whole = open_source(folder).config.num_parameters
    counts = [count for *_, count in pool().run(WORLDS[plan], bodies.held, folder, plan, "fp32", inputs()[0])]
    assert max(counts) < share * whole and sum(counts) >= whole


PROGRAM = """
import sys, torch, dtgpt
model = dtgpt.load(sys.argv[1], plan=dtgpt.Plan(tp=2), device="cpu")
torch.save(model(torch.arange(5)[None]), f"{model.mesh.rank}.pt")
"""


def test_a_program_that_torchrun_started_needs_no_process_group_of_its_own(theirs, folder, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_program([*TORCHRUN, "--nproc-per-node", "2", "program.py", folder], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert far(torch.load(tmp_path / f"{rank}.pt"), theirs, torch.arange(5)[None]) < TOLERANCE


def test_a_process_alone_loads_without_any_group(theirs, folder):
    model = dtgpt.load(str(folder), device="cpu", precision="fp32")
    assert far(model(inputs()[2]), theirs, inputs()[2]) < TOLERANCE and model.mesh.plan == ResolvedPlan()
    assert not torch.distributed.is_initialized()


def check_sentence(said, *words):
    assert "\n" not in said and all(word in said for word in words), said
    assert ";" in said or ": " in said, said  # a remedy


@pytest.mark.parametrize("plan", ["single", "tp2_pp2", "tp4_sp"])
def test_inputs_that_the_model_cannot_see_are_refused_on_every_rank(folder, plan):
    wrong = [torch.zeros(2, 0, dtype=torch.int64), torch.zeros(1, LENGTH + 1, dtype=torch.int64)]
    for empty, long in pool().run(WORLDS[plan], bodies.refused_inputs, folder, plan, wrong, []):
        check_sentence(empty, "0 tokens", f"1 to {LENGTH}")
        check_sentence(long, f"{LENGTH + 1} tokens", f"1 to {LENGTH}")


@pytest.mark.parametrize("plan", ["single", "tp2"])
def test_a_wrong_prompt_or_option_is_the_same_sentence_on_every_rank(folder, plan):
    long = list(range(LENGTH + 9))
    wrong = [
        ({"prompts": []}, ["prompt is empty"]), ({"prompts": [[5], []]}, ["prompt is empty"]),
        ({"prompts": [5, VOCABULARY]}, [f"ids 5 to {VOCABULARY}", f"0 to {VOCABULARY - 1}"]),
        ({"prompts": 7}, ["7", "a list of ids"]), ({"prompts": ["a", [5]]}, ["'a'", "a list of ids"]),
        ({"prompts": "text"}, [str(folder), f"{VOCABULARY} tokens"]),
        ({"prompts": long}, [f"{LENGTH + 9} tokens", f"the model has {LENGTH}"]),
        ({"prompts": PROMPT, "max_new_tokens": LENGTH - 2}, ["3 tokens", f"max_new_tokens={LENGTH - 3} or less"]),
        ({"prompts": PROMPT, "max_tokens": 5}, ["max_tokens", "did you mean max_new_tokens?"]),
        ({"prompts": PROMPT, "temprature": 5}, ["temprature", "did you mean temperature?"]),
        ({"prompts": PROMPT, "xyz": 5}, ["xyz", "num_return_sequences, num_beams"]),
        ({"prompts": PROMPT, "top_k": -1}, ["top_k=-1"]), ({"prompts": PROMPT, "temperature": "hot"}, ["'hot'"]),
        ({"prompts": PROMPT, "num_return_sequences": 0}, ["num_return_sequences=0", "1 to 128"]),
        ({"prompts": PROMPT, "do_sample": 1}, ["do_sample=1", "true or false"]),
        ({"prompts": PROMPT, "stop_strings": ""}, ["stop string ''"]),
        ({"prompts": PROMPT, "stop_strings": ["a"]}, ["no tokenizer is saved"]),
        ({"prompts": PROMPT, "prompt_logprobs": True}, ["prompt_logprobs is one of the details"]),
        ({"prompts": PROMPT, "num_beams": 2, "length_penalty": "long"}, ["length_penalty='long'"]),
        ({"prompts": PROMPT, "length_penalty": 2}, ["length_penalty=2 is for a beam search", "give num_beams"]),
        ({"prompts": PROMPT, "early_stopping": True}, ["early_stopping=True is for a beam search"]),
        ({"prompts": PROMPT, "logit_bias": {5: 1, "05": 2}}, ["logit_bias has the token 5 twice"]),
        ({"prompts": PROMPT, "details": "off"}, ["details='off' is not a switch; use true or false"]),
        ({"prompts": PROMPT, "stream": True, "details": True}, ["stream=True", "leave details"]),
        ({"prompts": [PROMPT], "stream": True}, ["stream=True", "one prompt"]),
    ]  # fmt: skip
    for found in pool().run(WORLDS[plan], bodies.refused_inputs, folder, plan, [], [options for options, _ in wrong]):
        for said, (_, words) in zip(found, wrong, strict=True):
            check_sentence(said, *words)


@pytest.mark.parametrize(
    "world, plan, words",
    [
        (1, "tp2", ["tp2", "1 was started"]),
        (2, "tp4", ["tp4", "2 were started"]),
        (2, "single", ["single", "2 were started"]),
        (4, "dp2_pp4", ["needs dp=2 x pp=4 = 8 processes", "4 were started"]),
        (3, "tp3", ["num_heads=4", "tp=3"]),
        (3, None, ["num_heads=4", "tp=3"]),
        (2, "pp2_interleaved4", ["num_layers=4", "8 stages"]),
        (2, "dp2_sp", ["sequence parallelism"]),
        (1, "tq2", ["'tq2'", "did you mean tp2?"]),
    ],
)
def test_a_plan_that_does_not_fit_is_one_sentence_on_every_rank(folder, world, plan, words):
    for said in pool().run(world, bodies.refusal, folder, plan):
        check_sentence(said, *words)


@pytest.mark.parametrize("plan", ["single", "tp2"])
def test_a_path_without_a_model_is_one_sentence_on_every_rank(tmp_path, plan):
    (tmp_path / "notes.txt").write_text("no model")
    for name, words in (("nothing", "does not exist"), ("", "holds no model"), ("notes.txt", "holds no model")):
        for said in pool().run(WORLDS[plan], bodies.refusal, tmp_path / name, plan):
            check_sentence(said, f"{tmp_path / name} {words}")


def test_a_damaged_checkpoint_is_named_on_every_rank(recipe):
    train(recipe)
    (file,) = (newest_run(recipe) / "checkpoints" / "step_00000002").glob("weights*")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    for said in pool().run(2, bodies.refusal, file.parent, "tp2"):
        check_sentence(said, f"{file} is damaged")


@pytest.mark.parametrize("setting", [{"device": "tpu"}, {"precision": "fp8"}, {"exact": "off"}])
def test_a_device_or_precision_that_there_is_not_is_refused(folder, setting):
    ((name, value),) = setting.items()
    check_sentence(bodies.sentence(lambda: bodies.load(folder, None, **setting)), name, value)


def test_a_run_and_its_checkpoints_have_the_tokenizer_of_the_run(recipe):
    train(recipe)
    run = newest_run(recipe)
    for path in (run, run / "checkpoints" / "step_00000002"):
        assert tokenizer_of(path, recipe.model).ranks == [bytes([b]) for b in range(256)]
    model = dtgpt.load(run)
    text = model.generate("7 and", max_new_tokens=3, return_full_text=True)
    assert text.startswith("7 and") and len(text) > 5
    many = model.generate([[5]] * 20, max_new_tokens=15, temperature=100.0, ends=False)
    assert max(map(max, many)) <= 256 < VOCABULARY - 1  # ids stay inside the vocabulary of the tokenizer


def test_a_model_of_another_library_with_gpt2s_vocabulary_has_gpt2s_tokenizer(folder, monkeypatch):
    gpt2, made = ByteLevel("gpt2", "x", [b"x"]), []
    monkeypatch.setattr("dtgpt.inference.prompts.make_tokenizer", lambda *words: made.append(words[0]) or gpt2)
    assert tokenizer_of(folder, GPT2_124M) is gpt2 and made == ["gpt2"]


def test_a_model_whose_tokenizer_nothing_tells_is_refused(folder):
    with pytest.raises(UserError) as error:
        dtgpt.load(folder).generate("7 and")
    check_sentence(str(error.value), str(folder), f"{VOCABULARY} tokens", "give a run folder")


def test_graphs_are_released_before_their_communicators_end(monkeypatch):
    """A communicator waits at its end for graphs that hold it, also at the exit of a program that keeps its model."""
    order, mesh = [], Mesh(ResolvedPlan(), torch.device("cpu"))
    mesh.before_end.append(lambda: order.append("graphs"))
    monkeypatch.setattr(loading, "_meshes", {mesh})
    monkeypatch.setattr(loading, "end_process_group", lambda: order.append("group"))
    loading._leave_group()
    assert order == ["graphs", "group"]
