"""Tokens that a run adds to the tokenizer and the weights of a model."""

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import dtgpt
from dtgpt.checkpoint.open import open_source
from dtgpt.config.plan_choice import parse_plan
from dtgpt.config.sections import DataConfig, OptimizerConfig
from dtgpt.data.library_tokenizers.characters import Char
from dtgpt.data.library_tokenizers.files import from_files
from dtgpt.data.prepare import PrepareConfig, prepare
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.interop.convert import ConvertOptions, convert
from dtgpt.ops.random.philox import root_key
from dtgpt.planning.memory import memory_of
from dtgpt.posttrain.add_tokens.config import AddTokensConfig
from dtgpt.posttrain.add_tokens.source import Drawn
from dtgpt.posttrain.add_tokens.tokens import NewToken, added_to, read_tokens, with_tokens
from dtgpt.posttrain.lora.config import LoraConfig
from dtgpt.train.init_from.shape import open_config
from dtgpt.train.loop import train
from dtgpt.train.setup import open_trainer
from dtgpt.train.start import override, settle
from dtgpt.util.errors import UserError
from tests.support.bodies_lora import assert_gradients_of_float64, steps_of_peft, train_and_save
from tests.support.ranks import pool
from tests.support.vocabularies import gpt2_files, sentencepiece_model, tokenizer_json

pytestmark = pytest.mark.slow(10)

STEPS = 3
NEW = ["quick brown", "<tool>", "Grüße", *(f"<word {i}>" for i in range(120))]  # more than the padding to 384 rows
SIZES = {
    "vocab_size": 280, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 0,
    "eos_token_id": 1, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def save_base(folder: Path, tied: bool) -> Path:
    """A model as transformers saves it, with its tokenizer."""
    folder.mkdir()
    tokenizer_json(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request):
    return request.param


@pytest.fixture
def grown(recipe, tied, tmp_path):
    """A run that goes on with a model and new tokens."""
    base = save_base(tmp_path / "base", tied)
    (tmp_path / "tokens.txt").write_text("\n".join(NEW) + "\n")
    (tmp_path / "text.txt").write_text("".join(f"the quick brown fox <tool> {i} <word {i}> Grüße\n" for i in range(99)))
    optimizer = OptimizerConfig(lr=1e-2, warmup=0, schedule="constant", weight_decay=0.1)
    asked = replace(
        recipe, model=replace(open_config(base), seq_length=16), init_from=str(base), optimizer=optimizer, steps=STEPS,
        add_tokens=AddTokensConfig(file=str(tmp_path / "tokens.txt")), data=DataConfig(path=str(tmp_path / "text.txt")),
    )  # fmt: skip
    return settle(asked, {})


@pytest.mark.parametrize("lora", [0, 4])
def test_every_plan_has_the_same_rows_and_goes_on_where_another_stopped(grown, lora, tied, tmp_path):
    grown = replace(grown, lora=LoraConfig(rank=lora))
    assert grown.model.vocab_size == 280 + len(NEW)
    _, begun = train_and_save(grown, tmp_path / "begun", 0)
    losses, weights = train_and_save(grown, tmp_path / "one", STEPS)
    assert losses[-1] < losses[0] - 0.1
    for plan in ("dp2_zero3", "tp2_sp", *(["pp2"] if not (lora and tied) else [])):
        world = parse_plan(plan).world
        found = pool().run(world, train_and_save, replace(grown, plan=plan), tmp_path / f"{plan} begun", 0)[0][1]
        assert begun.keys() == found.keys()
        assert all(torch.equal(begun[name], found[name]) for name in begun), plan
        run = tmp_path / plan
        steps = pool().run(world, train_and_save, replace(grown, plan=plan), run, 2)[0][0]
        steps += train_and_save(replace(grown, micro_batch_size=2), run, STEPS)[0]  # as one process
        assert steps == pytest.approx(losses, abs=2e-6), plan
    if lora:
        rows = {name: tensor for name, tensor in weights.items() if name.endswith("new_rows.weight")}
        assert {tuple(tensor.shape) for tensor in rows.values()} == {(len(NEW), 32)} and len(rows) == 2 - tied
        assert all((begun[name] != weights[name]).any() for name in rows)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


def test_a_run_keeps_its_tokens_and_transformers_opens_them(grown, tied, tmp_path, monkeypatch):
    """Trained whole: by the command, from data that were prepared with the tokens."""
    monkeypatch.chdir(tmp_path)
    prepare(PrepareConfig(input="text.txt", tokenizer="base + tokens.txt", output_prefix="mine", workers=1, txt="line"))
    file = replace(grown, model=replace(grown.model, vocab_size=256), add_tokens=AddTokensConfig(), init_from=None)
    words = ["--init_from", "base", "--model.add_tokens", "tokens.txt", "--data.path", "mine_text_document"]
    assert train(override(replace(file, name="made", runs="runs"), [*words, "--log.sample_tokens", "4"])) == 0
    model = dtgpt.load("runs/made-001", device="cpu")
    convert(Path("runs/made-001"), tmp_path / "hf", ConvertOptions(to="hf"))
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    assert theirs.eos_token == "<|endoftext|>" and len(theirs) == 280 + len(NEW)
    text = "a quick brown<tool>fox <word 7><word 77>"
    ids = model.tokenizer.encode(text)
    assert theirs.encode(text) == ids and [i for i in ids if i >= 280] == [280, 281, 290, 360]
    opened = transformers.AutoModelForCausalLM.from_pretrained("hf")
    assert opened.config.vocab_size == 280 + len(NEW) and opened.config.tie_word_embeddings is tied
    tokens = torch.tensor([ids])
    torch.testing.assert_close(model(tokens), logits_of(opened, tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match=r"tokens.txt has changed since runs/made-001 began, .* put it back"):
        Path("tokens.txt").write_text("other\n")
        train(override(file, ["--resume", "runs/made-001", "--steps", "4"]))
    Path("tokens.txt").unlink()  # the run carries its tokenizer
    assert train(override(file, ["--resume", "runs/made-001", "--steps", "4"])) == 0


def test_rows_beside_adapters_are_opened_by_peft_and_merged(grown, tied, tmp_path):
    grown = replace(grown, lora=LoraConfig(rank=4))
    train_and_save(grown, tmp_path / "run", STEPS)
    checkpoint = tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}"
    assert sum(file.stat().st_size for file in checkpoint.glob("weights*")) < 100_000  # of adapters and rows alone
    tokens = torch.tensor([[280, 5, 281, 402, 300, 7]])
    ours = dtgpt.load(checkpoint, device="cpu")(tokens)
    torch.testing.assert_close(dtgpt.load(grown.init_from, adapter=checkpoint, device="cpu")(tokens), ours)
    convert(checkpoint, tmp_path / "peft", ConvertOptions(to="peft"))
    base = transformers.AutoModelForCausalLM.from_pretrained(grown.init_from)
    base.resize_token_embeddings(grown.model.vocab_size)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    torch.testing.assert_close(ours, logits_of(theirs, tokens), rtol=1e-4, atol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(grown.init_from)
    base.resize_token_embeddings(grown.model.vocab_size)
    base.save_pretrained(tmp_path / "resized")
    torch.testing.assert_close(dtgpt.load(tmp_path / "resized", adapter=tmp_path / "peft", device="cpu")(tokens), ours)
    with pytest.raises(
        UserError, match=r"has a row for token \d+, and the model 280 tokens; .*resize_token_embeddings"
    ):
        dtgpt.load(grown.init_from, adapter=tmp_path / "peft", device="cpu")
    convert(checkpoint, tmp_path / "merged", ConvertOptions(to="hf"))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(ours, logits_of(opened, tokens), rtol=1e-4, atol=1e-5)


def test_rows_beside_adapters_follow_peft(grown, tied, tmp_path):
    """By torch's AdamW on transformers' model."""
    grown = replace(grown, lora=LoraConfig(rank=4), optimizer=replace(grown.optimizer, lr=2e-3, eps=1e-5))
    train_and_save(grown, tmp_path / "run", 0)
    convert(tmp_path / "run" / "checkpoints" / "step_00000000", tmp_path / "peft", ConvertOptions(to="peft"))
    base = transformers.AutoModelForCausalLM.from_pretrained(grown.init_from)
    base.resize_token_embeddings(grown.model.vocab_size)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"), is_trainable=True)
    with open_trainer(grown) as trainer:
        theirs = steps_of_peft(model, map(trainer.batch, range(STEPS)), 2e-3, 2 * 7 * 2 + 2 - tied)
        for _ in range(STEPS):
            loss = trainer.mean_loss(trainer.train_step())
            assert loss == pytest.approx(next(theirs), rel=1e-5), trainer.step
        held = sum(t.nbytes for s in trainer.shards for t in (s.local, *trainer.optimizer.rule.state(s.index).values()))
        planned = memory_of(trainer.settings, 0)
        assert planned.weights + planned.optimizer == held + sum(s.local.nbytes for s in trainer.shards.frozen)
    assert_gradients_of_float64(grown, tmp_path)


def test_rows_are_those_of_the_whole_and_like_the_others(grown):
    source = open_source(Path(grown.init_from))
    made, name = Drawn(source, 403, range(280, 403), root_key(1)), source.config.table_name
    table = made.read(name)
    assert table.shape == (512, 32) and not table[403:].any()
    assert torch.equal(table[:280], source.read(name)[:280])
    part = made.read(name, (range(270, 390), range(8, 24)))
    assert torch.equal(part, table[270:390, 8:24])
    assert (table[280:403].mean(0) - table[:280].mean(0)).abs().max() < 0.05
    assert table[280:403].std().item() == pytest.approx(table[:280].std().item(), rel=0.05)
    other = Drawn(source, 403, range(280, 403), root_key(2)).read(name)
    assert not torch.equal(other[280:403], table[280:403]) and torch.equal(other[:280], table[:280])


@pytest.mark.parametrize("kind", ["gpt2", "tokenizer.json", "sentencepiece", "bytes"])
def test_each_token_is_one_id_wherever_it_stands_and_the_others_stay(kind, tmp_path):
    made = {"gpt2": lambda: from_files(*gpt2_files(tmp_path)), "bytes": lambda: open_tokenizer("bytes"),
            "sentencepiece": lambda: open_tokenizer(str(sentencepiece_model(tmp_path))),
            "tokenizer.json": lambda: open_tokenizer(str(tokenizer_json(tmp_path, bos=True)))}  # fmt: skip
    base = made[kind]()
    (tmp_path / "new.json").write_text(
        json.dumps(["Grüße\n", {"content": "<|call|>", "special": True}, "[TOOL]", "🎈🎈"])
    )
    tokenizer = with_tokens(base, read_tokens(tmp_path / "new.json"), "new.json")
    n = base.vocab_size
    assert tokenizer.vocab_size == n + 4 and [token["id"] for token in added_to(tokenizer)] == [n, n + 1, n + 2, n + 3]
    text = "the fox[TOOL]<|call|>Grüße\n🎈🎈🎈 end"
    named, plain = tokenizer.encode_prompt(text), tokenizer.encode(text)
    assert [i for i in named if i >= n] == [n + 2, n + 1, n, n + 3]
    assert [i for i in plain if i >= n] == [n + 2, n, n + 3]  # a special one is text where it is not asked for
    assert tokenizer.decode([n, n + 1, n + 2, n + 3]) == "Grüße\n<|call|>[TOOL]🎈🎈"
    assert [tokenizer.bytes_of(i) for i in (n, n + 3)] in ([None, None], ["Grüße\n".encode(), "🎈🎈".encode()])
    for other in ("the quick brown fox", " two  blanks\n", "TOOL call Grüß", "日本"):
        assert tokenizer.encode(other) == base.encode(other), other
    assert not tokenizer.is_same(base) and tokenizer.end_of_text == base.end_of_text
    tokenizer.save(tmp_path / "saved.json")
    again = open_tokenizer(str(tmp_path / "saved.json"))
    assert again.is_same(tokenizer) and added_to(again) == added_to(tokenizer)
    more = with_tokens(again, [NewToken("<more>", False)], "more.txt")  # and once more
    assert more.encode("[TOOL]<more>")[-2:] == [n + 2, n + 4] and len(added_to(more)) == 5


@pytest.mark.parametrize(
    "content, message",
    [
        ("", r"has no token to add; give one token a line, or a JSON list"),
        ("[]", r"has no token to add"),
        ("a b\n\nc d\n", r"line 2 is empty; leave that out"),
        ("a b\n c d\n", r"line 2 begins or ends with a blank; .* write a JSON list"),
        ("a b\nc d\na b\n", r"has the token 'a b' twice; leave one out"),
        ('["a b", 3]', r"entry 2 is 3; give one token a line"),
        ('["a b", " "]', r"entry 2 is empty; leave it out"),
        ('[{"content": "a b", "special": 1}]', r"entry 1 is "),
        ('[{"content": "a b", "lstrip": true}]', r"entry 1 is "),
        ('["a b"', r"is not JSON \(.*\); give one token a line"),
        ('["a\\ud800b"]', r"entry 1 has half of a character"),
        ("x" * 1001, r"line 1 has 1,001 characters; use tokens of at most 1,000"),
        (b"\xff\xfe", r"is not UTF-8 \(byte 0\)"),
        ("the\n", r"has 'the', which the tokenizer .* has already, as the id \d+; leave it out"),
        ("<|endoftext|>\n", r"has already, as the id 1; leave it out"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_added_is_refused(content, message, tmp_path):
    path = tokenizer_json(tmp_path)
    (tmp_path / "new.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        open_tokenizer(f"{path} + {tmp_path / 'new.txt'}")


def test_what_takes_no_tokens_is_refused(grown, tmp_path):
    (tmp_path / "new.txt").write_text("a b\n")
    with pytest.raises(UserError, match=r"missing.txt, the tokens to add, cannot be read \(No such file"):
        open_tokenizer(f"bytes + {tmp_path / 'missing.txt'}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder, the tokens to add, cannot be read"):
        open_tokenizer(f"bytes + {tmp_path / 'folder'}")
    with pytest.raises(UserError, match="has characters alone, so that no token can be added to it; use a tokenizer"):
        with_tokens(Char(list("abc")), [NewToken("ab", False)], "new.txt")
    fresh = replace(
        grown, init_from=None, data=DataConfig(), add_tokens=AddTokensConfig(file=str(tmp_path / "new.txt"))
    )
    with pytest.raises(UserError, match=r"nothing names one \(data.tokenizer=bpe\); give --data.tokenizer_file"):
        settle(replace(fresh, data=DataConfig(path=str(tmp_path / "text.txt"))), {})
    with pytest.raises(UserError, match=r"adds to a tokenizer of one file, and data.vocab_file=v.json needs two"):
        replace(fresh, data=DataConfig(vocab_file="v.json", merge_file="m", tokenizer="gpt2")).validate()
    with pytest.raises(UserError, match=r"model.vocab_size=257 is smaller than the tokenizer's 258 tokens, with those"):
        settle(fresh, {"model.vocab_size": ["257"], "data.tokenizer": ["bytes"]})
    assert settle(fresh, {"model.seq_length": ["8"], "data.tokenizer": ["bytes"]}).model.vocab_size == 403
    if grown.model.tied:
        with pytest.raises(UserError, match="share, which adapters leave as it is; use a plan without pp, or --lora"):
            plan = replace(grown, plan="pp2").choose_plan(2).plan
            replace(grown, lora=LoraConfig(rank=4)).settings(plan, torch.device("cpu"))


def test_new_weights_have_rows_for_the_tokens(recipe, tmp_path):
    (tmp_path / "new.txt").write_text("the man\nsaid to him\n")
    (tmp_path / "other.txt").write_text("of the\n")
    named = DataConfig(path=recipe.data.path, tokenizer_file=f"bytes + {tmp_path / 'other.txt'}")  # which has one more
    asked = replace(recipe, add_tokens=AddTokensConfig(file=str(tmp_path / "new.txt")), steps=2, data=named)
    assert train(override(asked, ["--resume", "auto"])) == 0  # there is none
    model = dtgpt.load(Path(recipe.runs) / "test-001", device="cpu")
    assert model.config.vocab_size == 260 and model.tokenizer.encode("of the man the man")[-1:] == [258]
    assert train(override(asked, ["--resume", "auto", "--steps", "3"])) == 0
