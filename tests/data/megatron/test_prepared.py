"""Training on token files: the samples are Megatron-LM's, whatever the plan."""

import gzip
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dtgpt.config.sections import DEFAULT_SPLIT, DataConfig
from dtgpt.data.dataset import load_dataset
from dtgpt.data.megatron.indexed import IndexedDataset, IndexedWriter
from dtgpt.data.megatron.samples import SampleRequest, load_samples
from dtgpt.data.tokenizers.open import open_tokenizer
from dtgpt.models.batch import Batch
from dtgpt.run.records import read_records
from dtgpt.train.loop import train
from dtgpt.train.setup import read_dataset
from dtgpt.train.trainer import Trainer
from dtgpt.util.errors import UserError
from tests.support.ranks import pool
from tests.support.runs import change, losses, newest_run, training

pytestmark = pytest.mark.slow(6)


def write(prefix, documents, dtype=np.uint16) -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()
    return str(prefix)


@pytest.fixture
def recipe(recipe, tmp_path):
    """Numbers that count up in each document, then the end of text."""
    documents = [[*(np.arange(10 + i % 37) % 256), 256] for i in range(300)]
    path = write(tmp_path / "numbers", documents)
    data = {"path": path, "tokenizer": "bytes", "split": "90,10,0"}
    return change(recipe, data=data, log={"sample_tokens": 3})


def test_sample_i_of_a_run_is_sample_i_of_megatrons_order(recipe):
    run = training(recipe)
    expected = load_samples(IndexedDataset(recipe.data.path), SampleRequest("90,10,0", "train", 16, 80, recipe.seed))
    windows, ids, _ = run.objective.batches.take(0)
    assert torch.equal(windows, expected.windows(ids)) and ids.tolist() == list(range(8))


def test_every_plan_has_the_samples_of_one_process(recipe):
    train(replace(recipe, plan="single"))
    whole = losses(newest_run(recipe))
    for plan, world in (("dp2", 2), ("pp2", 2)):
        parted = replace(recipe, plan=plan, micro_batch_size=2, runs=f"{recipe.runs}-{plan}")
        assert pool().run(world, train, parted) == [0] * world
        assert losses(newest_run(parted)) == pytest.approx(whole, rel=1e-5)


def test_each_held_out_window_is_evaluated_once(recipe):
    """Of a validation part that has fewer than are asked for; the loss is their mean under every plan."""
    whole = training(change(recipe, log={"eval_samples": 512}))
    index = load_samples(
        IndexedDataset(recipe.data.path), SampleRequest(recipe.data.split, "valid", 16, None, recipe.seed)
    )
    windows = torch.cat(list(whole.dataset.held_out("valid", 16, 4, 512)))
    assert 22 < len(windows) == len(index) < 512 and torch.equal(windows, index.windows(range(len(index))))
    losses = [whole.engine.evaluate(Batch(w[None, :-1], targets=w[None, 1:])).item() for w in windows]
    assert whole.held_out_loss()[0] == pytest.approx(np.mean(losses), rel=1e-5)
    few = torch.cat(list(whole.dataset.held_out("valid", 16, 4, 7)))
    assert torch.equal(few, windows[:7])


def test_every_plan_evaluates_each_window_once(recipe):
    recipe = change(recipe, steps=1, log={"eval_samples": 512})
    found = {}
    for plan, world in (("dp2", 2), ("pp2", 2)):
        parted = replace(recipe, plan=plan, micro_batch_size=4, runs=f"{recipe.runs}-{plan}")
        assert pool().run(world, train, parted) == [0] * world
        found[plan] = read_records(newest_run(parted) / "metrics.jsonl")[-1]["validation_loss"]
    train(recipe)
    alone = read_records(newest_run(recipe) / "metrics.jsonl")[-1]["validation_loss"]
    assert list(found.values()) == pytest.approx([alone] * 2, rel=1e-5)


def test_a_resume_under_another_batch_goes_on_with_the_next_sample(recipe):
    """The order is that for `train_samples`, however many steps there are."""
    recipe = change(recipe, data={"train_samples": 400})
    train(change(recipe, steps=4))
    run = newest_run(recipe)
    seen = []
    resumed = change(recipe, steps=6, global_batch_size=4, resume=str(run))
    order = read_dataset(recipe).train

    def look(self, sample_ids, seq_length, key):
        seen.extend(sample_ids.tolist())
        return order.windows(sample_ids.numpy())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtgpt.data.megatron.prepared.PreparedDataset.windows", look)
        train(resumed)
    assert [i for i in seen if i >= 32][:8] == list(range(32, 40))


def test_another_order_is_told_at_a_resume(recipe, capsys):
    train(change(recipe, steps=4))
    many = change(recipe, steps=6, data={"train_samples": 20_000}, resume=str(newest_run(recipe)))
    train(many)
    assert "the order of its samples, is not the one" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_data_that_shrink_while_a_run_trains_on_them_end_it_with_a_sentence(recipe, suffix, monkeypatch):
    """Not with a signal: exit code 2, and the file is named."""
    path, step = Path(recipe.data.path + suffix), Trainer.train_step

    def cut(self):
        if self.step == 3:
            os.truncate(path, 100)
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", cut)
    with pytest.raises(UserError, match=rf"numbers{suffix} had \d+ bytes when it was opened, and ends at byte 100 now"):
        train(recipe)


def test_a_blend_and_parts_of_their_own(recipe, tmp_path):
    other = write(tmp_path / "others", [[7, 8, 9, 256]] * 200)
    blend = read_dataset(change(recipe, data={"path": f"0.25 {recipe.data.path} 0.75 {other}"}))
    sevens = (blend.windows(torch.arange(80), 16, torch.zeros(2)) == 7).any(1)
    assert 0.6 < sevens.float().mean() < 0.9
    parted = read_dataset(change(recipe, data={"valid_path": other}))
    assert set(torch.cat(list(parted.held_out("valid", 16, 4, 8))).unique().tolist()) == {7, 8, 9, 256}
    assert parted.num_train_tokens == IndexedDataset(recipe.data.path).num_tokens and parted.test is None
    samples = [parted.num_samples(part, 16) for part in ("train", "valid", "test")]
    assert samples == [(parted.num_train_tokens - 1) // 16, (200 * 4 - 1) // 16, 0]
    tested = read_dataset(change(recipe, data={"test_path": other}))
    assert set(torch.cat(list(tested.held_out("test", 16, 4, 8))).unique().tolist()) == {7, 8, 9, 256}
    assert tested.valid is None and tested.digest != parted.digest


def test_other_tokens_in_the_same_lengths_are_other_data(recipe, tmp_path):
    """Which nodes compare, and a resume."""
    found = [
        read_dataset(change(recipe, data={"path": path})).digest
        for path in (write(tmp_path / name, [[token, 2, 256]] * 400) for name, token in (("a", 1), ("b", 1), ("c", 3)))
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_prefix_may_have_the_ending_of_its_files(recipe, ending):
    ended = change(recipe, data={"path": recipe.data.path + ending})
    ended.validate()
    key = torch.zeros(2)
    expected, found = (read_dataset(r).windows(torch.arange(9), 16, key) for r in (recipe, ended))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("path", ["{0}/s[0].bin", "{0}/?[[]0].bin"])
def test_shards_may_have_blanks_and_brackets_in_their_names(recipe, tmp_path, path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(f"{recipe.data.path}.bin", folder / "s[0].bin")
    data = {"path": path.format(folder), "split": "1", "tokenizer": "bytes"}
    assert read_dataset(change(recipe, data=data)).num_train_tokens == IndexedDataset(recipe.data.path).num_tokens


@pytest.mark.parametrize("option", [{}, {"train_samples": 80}])
def test_the_prefix_given_to_prepare_is_told_from_that_of_the_files(recipe, tmp_path, option):
    write(tmp_path / "own_text_document", [[1, 256]] * 40)
    with pytest.raises(UserError, match=r"there is no dataset .*own \(no .*own.idx\); did you mean .*text_document\?"):
        train(change(recipe, data={"path": str(tmp_path / "own"), **option}))
    with pytest.raises(UserError, match=r"there is no dataset .*typo \(no .*typo.idx\); give the prefix"):
        train(change(recipe, data={"path": str(tmp_path / "typo"), "train_samples": 80}))


def test_a_run_longer_than_its_order_begins_it_again(recipe):
    data = read_dataset(change(recipe, data={"train_samples": 16}))
    count, key = len(data.train), torch.zeros(2)
    again = data.windows(torch.arange(count, count + 4), 16, key)
    assert torch.equal(again, data.windows(torch.arange(4), 16, key))


def test_a_run_ends_with_the_loss_of_the_test_part(recipe):
    assert train(change(recipe, steps=4, data={"split": "90,5,5"}, log={"eval_interval": 2})) == 0
    records = read_records(newest_run(recipe) / "metrics.jsonl")
    assert [r["step"] for r in records if "validation_loss" in r] == [2, 4]
    assert [r["step"] for r in records if "test_loss" in r] == [4]
    run = training(change(recipe, data={"split": "90,5,5"}, log={"eval_samples": 8}))
    test, valid = (torch.cat(list(run.dataset.held_out(part, 16, 8, 8))) for part in ("test", "valid"))
    assert len(test) == 8 and not torch.equal(test, valid)
    loss = run.engine.evaluate(Batch(test[:, :-1].contiguous(), targets=test[:, 1:].contiguous()))
    assert run.held_out_loss("test")[0] == pytest.approx(loss.item(), rel=1e-5)


def test_a_test_part_without_data_is_left_out(recipe, tmp_path):
    few = write(tmp_path / "few", [[7, 8, 9, 256] * 8] * 40)
    data = read_dataset(change(recipe, data={"path": few, "split": "969,30,1"}))
    assert data.test is None and data.num_valid_tokens > 0
    short = write(tmp_path / "short", [[7, 8, 9, 256]] * 100)
    blend = read_dataset(change(recipe, data={"path": f"{short} {recipe.data.path}", "split": "80,17,3"}))
    assert blend.test is None and len(blend.valid.datasets) == 2


@pytest.mark.parametrize("part", ["path", "valid_path", "test_path"])
def test_tokens_that_the_tokenizer_does_not_know_are_refused_before_a_run_begins(recipe, tmp_path, part):
    foreign = write(tmp_path / "foreign", [[7, 8, 30_000, 256]] * 100)
    with pytest.raises(UserError, match=r"foreign holds token 30000, but the tokenizer bytes has 257 tokens"):
        train(change(recipe, data={"split": "969,30,1", part: foreign}))
    assert not Path(recipe.runs).exists()


def test_a_run_is_saved_before_its_test_loss_is_looked_at(recipe, monkeypatch):
    def no_number(*given):
        return (float("nan"), float("nan")) if given[-1] == "test" else (1.0, 1.0)

    monkeypatch.setattr("dtgpt.train.objective.held_out_loss", no_number)
    with pytest.raises(UserError, match="test loss and bits/byte at step 2"):
        train(change(recipe, steps=2, data={"split": "90,5,5"}))
    assert (newest_run(recipe) / "checkpoints" / "step_00000002").is_dir()


def test_without_a_validation_part_there_is_no_held_out_loss(recipe):
    assert train(change(recipe, steps=2, data={"split": "1"})) == 0
    assert "validation_loss" not in (newest_run(recipe) / "metrics.jsonl").read_text()


@pytest.mark.parametrize("data, words", [
    ({"tokenizer": "auto"}, ["tokens of an unknown tokenizer", "--data.tokenizer_file"]),
    ({"split": "1,x"}, ["the split '1,x'", "949,50,1"]),
    ({"train_samples": 0}, ["data.train_samples=0 is out of range; use 1 or more"]),
    ({"vocab_file": "vocab.json"}, ["belong together"]),
    ({"vocab_file": "vocab.json", "merge_file": "merges.txt"}, ["belongs to the tokenizer gpt2"]),
    ({"path": "0.3 {0} 0.7"}, ["there is no dataset 0.3"]), ({"path": "0.3 {0} x {0}"}, ["'x' is not a weight"]),
    ({"path": "1.0 {0} 1.0 {0}-none"}, ["there is no dataset", "-none"]),
    ({"path": None, "valid_path": "{0}"}, ["data.valid_path needs prepared data"]),
    ({"path": None, "train_samples": 5}, ["data.train_samples needs prepared data"]),
    ({"tokenizer_file": "t.json"}, ["data.tokenizer=bytes", "both name a tokenizer"]),
    ({"split": "90,5,5", "test_path": "{0}"}, ["data.split=90,5,5", "leave data.split out"])
])  # fmt: skip
def test_data_that_cannot_be_are_refused_before_a_run_begins(recipe, data, words):
    data = {k: v.format(recipe.data.path) if isinstance(v, str) else v for k, v in data.items()}
    with pytest.raises(UserError) as error:
        train(change(recipe, data=data))
    assert all(word in str(error.value) for word in words), str(error.value)


TEXT = "some.txt"


@pytest.mark.parametrize(
    "data, unused",
    [
        (
            {"held_out": 0.3, "json_key": "body", "bpe_vocab_size": 300},
            ["data.json_key=body", "data.bpe_vocab_size=300", "data.held_out=0.3"],
        ),
        (
            {"path": TEXT, "json_key": "body", "bpe_vocab_size": 300, "split": DEFAULT_SPLIT},
            ["data.json_key=body", "data.bpe_vocab_size=300"],
        ),
        ({"path": None, "json_key": "body", "split": "8,1,1"}, ["data.split=8,1,1", "data.json_key=body"]),
        ({"path": None, "split": DEFAULT_SPLIT, "held_out": 0.3}, []), ({"split": "8,1,1"}, []),
    ],
)  # fmt: skip
def test_options_that_the_data_do_not_use_are_a_warning(recipe, capsys, tmp_path, data, unused):
    if data.get("path") == TEXT:
        data = data | {"path": str(tmp_path / TEXT)}
        (tmp_path / TEXT).write_text("A text of some words. " * 99)
    read_dataset(change(recipe, data=data))
    said = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert [line.split()[1] for line in said] == unused


def test_tokens_beyond_the_vocabulary_are_named(recipe, tmp_path):
    path = write(tmp_path / "large", [[1, 2, 300, 4] * 5] * 40)
    with pytest.raises(UserError, match="holds token 300, but the tokenizer bytes has 257 tokens"):
        train(change(recipe, data={"path": path}))
    path = write(tmp_path / "negative", [[1, 2, -3, 4] * 5] * 40, np.int32)
    with pytest.raises(UserError, match=r"negative holds -3, which is no token; .* build it again"):
        train(change(recipe, data={"path": path, "tokenizer": "ids"}))


GPT2 = Path(__file__).parents[2] / "fixtures" / "gpt2"


def test_gpt2s_vocabulary_may_come_from_its_files(tmp_path):
    """As tiktoken carries it, wherever that is at hand."""
    files = []
    for name in ("vocab.json", "merges.txt"):
        files.append(tmp_path / name)
        files[-1].write_bytes(gzip.decompress((GPT2 / f"{name}.gz").read_bytes()))
    tokenizer = open_tokenizer("gpt2", *map(str, files))
    assert tokenizer.vocab_size == 50257 and tokenizer.end_of_text == 50256
    assert tokenizer.encode("Hello world, it's 2026!") == [15496, 995, 11, 340, 338, 1160, 2075, 0]
    text = tmp_path / "text.txt"
    text.write_text("Hello world! " * 50)
    dataset = load_dataset(
        DataConfig(path=str(text), tokenizer="gpt2", held_out=0.1, vocab_file=str(files[0]), merge_file=str(files[1])),
        tmp_path / "cache",
    )
    assert dataset.train[:3].tolist() == [15496, 995, 0]
