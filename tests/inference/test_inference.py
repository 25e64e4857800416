"""`dtgpt.load`: under every plan each rank gets the logits and the samples of the whole model."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dtgpt
from dtgpt.checkpoint.open import open_source
from dtgpt.config.plan import ResolvedPlan
from dtgpt.config.plan_choice import parse_plan
from dtgpt.data.library_tokenizers.byte_level import ByteLevel
from dtgpt.inference import open as loading
from dtgpt.inference.open import notes_on
from dtgpt.inference.prompts import tokenizer_of
from dtgpt.models.gpt2 import GPT2_124M
from dtgpt.parallel.mesh import Mesh
from dtgpt.train.loop import train
from dtgpt.util.errors import UserError
from tests.interop.test_interop_huggingface import scatter
from tests.support import bodies_inference as bodies
from tests.support.programs import TORCHRUN, run_program
from tests.support.ranks import pool, several
from tests.support.runs import change, newest_run
from tests.support.sources import TOLERANCE, load_model

pytestmark = pytest.mark.slow(16)

CPU = torch.device("cpu")
LENGTH, VOCABULARY, PROMPT = 16, 1030, [5, 900, 17]
# Settings of training that a plan of inference leaves out are in these: see the notes below. None: as many ranks of tp.
WORLDS = {None: 2, "pp2_interleaved": 2, "pp2_zbv": 2, "tp2_pp2_sp": 4, "dp2_zero3": 2, "dp2_tp2": 4, "tp4_sp": 4}
RARE = {"tp4_sp"}  # as with two ranks
SHARES = {"tp4_sp": 0.3, "tp2_pp2_sp": 0.45, "dp2_tp2": 0.6}  # of the elements, that a rank holds


def inputs():
    """Batches of 1 and 3, shorter than the model and as long."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 1), (3, 10), (3, LENGTH)]
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


STREAM = {"max_new_tokens": 9, "seed": 3}


@pytest.fixture(scope="module")
def alone(theirs, folder):
    """What one process generates, without any group."""
    model = dtgpt.load(str(folder), device="cpu", precision="fp32")
    assert far(model(inputs()[1]), theirs, inputs()[1]) < TOLERANCE and model.mesh.plan == ResolvedPlan()
    assert not torch.distributed.is_initialized()
    greedy = theirs.generate(torch.tensor([PROMPT]), max_length=LENGTH, do_sample=False, pad_token_id=0)
    samples, stream = [model.generate(**words) for words in ASKED], model.generate(PROMPT, **STREAM)
    assert samples[0] == greedy[0, len(PROMPT) : LENGTH].tolist()
    assert len({tuple(s[:5]) for s in samples[:4]}) == 4 and [len(s) for s in samples[4][2]] == [2, 2]
    whole, part = bodies.streamed(folder, None, PROMPT, STREAM, 2)
    assert (whole, part) == (stream, stream[:2])
    return samples, stream


@pytest.mark.parametrize("plan", [pytest.param(p, marks=[pytest.mark.long] * (p in RARE)) for p in WORLDS])
def test_every_rank_has_the_logits_and_the_samples_of_transformers(theirs, folder, alone, plan):
    """In fp32; in bf16 logits are roughly the same, and weights have no masters. A rank holds its own part alone."""
    expected, counts = theirs(inputs()[1]).logits.log_softmax(-1), []
    calls = [(bodies.logits_and_samples, folder, plan, inputs(), ASKED), (bodies.held, folder, plan, inputs()[1])]
    for (logits, ours, scores, count), (narrow, dtypes) in pool().run(WORLDS[plan], several, calls):
        assert all(far(x, theirs, tokens) < TOLERANCE for x, tokens in zip(logits, inputs(), strict=True))
        assert {x.dtype for x in logits} == {torch.float32}
        assert ours == alone[0]
        for score, ids, rows in zip(scores, inputs()[1], expected, strict=True):
            assert score.ids == ids.tolist()
            assert score.logprobs == pytest.approx(rows[:-1].gather(1, ids[1:, None])[:, 0].tolist(), abs=1e-4)
            assert score.greedy == (rows[:-1].argmax(-1) == ids[1:]).tolist()
        assert narrow.dtype == torch.bfloat16 and 1e-4 < far(narrow, theirs, inputs()[1]) < 0.05
        assert dtypes == {torch.bfloat16}
        counts.append(count)
    whole = open_source(folder).config.num_parameters
    assert max(counts) < SHARES.get(plan, 2) * whole and sum(counts) >= whole


def test_logits_of_few_tokens_which_tp_cuts_unevenly(tmp_path):
    model, tokens = their_model(131, n_embd=24, n_head=3), torch.arange(12).view(2, 6)
    model.save_pretrained(tmp_path)
    for logits in (bodies.logits([tmp_path], None, tokens), *pool().run(3, bodies.logits, [tmp_path], "tp3", tokens)):
        assert far(logits[0], model, tokens) < TOLERANCE


def test_a_stream_is_the_text_on_every_rank_and_may_be_left_and_processes_out_of_step_say_so(folder, alone):
    calls = [(bodies.streamed, folder, "pp2", PROMPT, STREAM, 2), (bodies.after_a_failure, folder, "pp2", PROMPT)]
    (mine, (first, again)), ((whole, part), (other, *others)) = pool().run(2, several, calls)
    assert mine == (alone[1], alone[1][:2])
    assert whole == alone[1] and part == whole[: len(part)] and 2 <= len(part) < 9
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


@pytest.fixture
def recipe(recipe):
    """Of a run whose tokenizer has fewer tokens than the model."""
    quiet = {"sample_tokens": 0, "eval_samples": 1}
    shape = {"num_layers": 4, "num_heads": 4, "vocab_size": VOCABULARY}
    return change(recipe, model=shape, micro_batch_size=2, steps=2, checkpoint={"interval": 1}, log=quiet)


def test_a_run_and_any_of_its_checkpoints_load_under_other_plans(recipe):
    pool().run(2, train, change(recipe, plan="dp2_zero3"))
    run, tokens = newest_run(recipe), torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    paths = [run, run / "checkpoints" / "step_00000001"]
    expected = [load_model(open_source(path), CPU)(tokens)[..., :VOCABULARY] for path in paths]
    for plans in pool().run(2, several, [(bodies.logits, paths, plan, tokens) for plan in ("tp2", "pp2")]):
        for logits, wanted in ((own, wanted) for found in plans for own, wanted in zip(found, expected, strict=True)):
            assert logits.shape == (3, 9, VOCABULARY)
            assert (logits - wanted).abs().max() < TOLERANCE * wanted.abs().max()
    assert (expected[0] - expected[1]).abs().max() > 100 * TOLERANCE * expected[0].abs().max()


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


def check_sentence(said, *words):
    assert "\n" not in said and all(word in said for word in words), said
    assert ";" in said or ": " in said, said  # a remedy


@pytest.mark.parametrize("plan, world", [("single", 1), ("tp2", 2), ("pp2", 2)])
def test_wrong_inputs_prompts_and_options_are_the_same_sentence_on_every_rank(folder, plan, world):
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
        ({"prompts": PROMPT, "xyz": 5}, ["xyz", "num_return_sequences, "]),
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
    inputs = [torch.zeros(1, length, dtype=torch.int64) for length in (0, LENGTH + 1)]
    given = folder, plan, inputs, [options for options, _ in wrong]
    ranks = pool().run(world, bodies.refused_inputs, *given) if world > 1 else [bodies.refused_inputs(*given)]
    for empty, long, *found in ranks:
        check_sentence(empty, "0 tokens", f"1 to {LENGTH}")
        check_sentence(long, f"{LENGTH + 1} tokens", f"1 to {LENGTH}")
        for said, (_, words) in zip(found, wrong, strict=True):
            check_sentence(said, *words)


PLANS_OF = {
    1: {"tp2": ["tp2", "1 was started"], "tq2": ["'tq2'", "did you mean tp2?"]},
    2: {"tp4": ["tp4", "2 were started"], "single": ["single", "2 were started"],
        "pp2_interleaved4": ["num_layers=4", "8 stages"], "dp2_sp": ["sequence parallelism"]},
    3: {"dp2_pp4": ["needs dp=2 x pp=4 = 8 processes", "3 were started"], "tp3": ["num_heads=4", "tp=3"],
        None: ["num_heads=4", "tp=3"]},
}  # fmt: skip


def sentences(calls, world):
    """What each of these loads says on each rank."""
    calls = [(bodies.refusal, *call) for call in calls]
    return pool().run(world, several, calls) if world > 1 else [several(calls)]


@pytest.mark.parametrize("world", PLANS_OF)
def test_a_plan_that_does_not_fit_is_one_sentence_on_every_rank(folder, world):
    for rank in sentences([(folder, plan) for plan in PLANS_OF[world]], world):
        for said, words in zip(rank, PLANS_OF[world].values(), strict=True):
            check_sentence(said, *words)


@pytest.mark.parametrize("plan, world", [(None, 1), ("tp2", 2)])
def test_a_path_without_a_model_or_a_damaged_one_is_one_sentence_on_every_rank(tmp_path, recipe, plan, world):
    train(recipe)
    (file,) = (newest_run(recipe) / "checkpoints" / "step_00000002").glob("weights*")
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    (tmp_path / "notes.txt").write_text("no model")
    wrong = {tmp_path / "nothing": "does not exist", tmp_path / "": "holds no model",
             tmp_path / "notes.txt": "holds no model", file.parent: f"{file} is damaged"}  # fmt: skip
    for rank in sentences([(path, plan) for path in wrong], world):
        for said, (path, words) in zip(rank, wrong.items(), strict=True):
            check_sentence(said, words if path == file.parent else f"{path} {words}")


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
