"""nanoGPT's and llm.c's files, written here by a model that shares no code with dtgpt's."""

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dtgpt.interop.llmc import LLMC
from dtgpt.interop.nanogpt import NanoGPT
from dtgpt.models.gpt2 import TABLE, GPT2Config
from tests.support.sources import (
    HEADS,
    LAYERS,
    LENGTH,
    TOLERANCE,
    VOCABULARY,
    WIDTH,
    Reference,
    check_parts,
    distance,
    refused,
)

RAN = []  # what a hostile file would fill


def checkpoint(reference=None, **changes):
    """What nanoGPT's train.py saves."""
    reference = reference or Reference()
    args = {
        "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": LENGTH, "bias": True,
        "vocab_size": reference.lm_head.out_features, "dropout": 0.1,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(reference.parameters())
    return {
        "model": dict(reference.state_dict()), "optimizer": optimizer.state_dict(), "model_args": args | changes,
        "iter_num": 10, "best_val_loss": torch.tensor(2.5), "config": {"dtype": "float16", "compile": True},
    }  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ckpt.pt"


@pytest.mark.parametrize("zipped", [True, False])
def test_logits_of_nanogpts_model(path, zipped):
    reference = Reference()
    torch.save(checkpoint(reference), path, _use_new_zipfile_serialization=zipped)
    source = NanoGPT(path)
    assert source.config == GPT2Config(
        num_layers=LAYERS, hidden_size=WIDTH, num_heads=HEADS, seq_length=LENGTH, vocab_size=VOCABULARY,
        activation="gelu",
    )  # fmt: skip
    assert source.notes == ()
    assert distance(source, reference, "none") < TOLERANCE < distance(source, reference)  # the exact GELU, not tanh
    check_parts(source)


def test_nanogpt_without_biases(path):
    reference = Reference(bias=False)
    torch.save(checkpoint(reference, bias=False), path)
    source = NanoGPT(path)
    assert distance(source, reference, "none") < TOLERANCE
    assert not source.read("blocks.0.attn.qkv.bias").any() and not source.read("head.ln_f.bias").any()
    check_parts(source)
    refused(lambda: read_changed(path), "h.0.ln_1.bias")  # bias=True asks for them


def read_changed(path, model=lambda tensors: tensors, **args):
    saved = torch.load(path)
    args = saved["model_args"] | {"bias": True} | args
    torch.save(saved | {"model": model(saved["model"]), "model_args": args}, path)
    return NanoGPT(path)


def test_names_of_a_compiled_model_and_the_mask_of_old_ones(path):
    reference = Reference()
    saved = checkpoint(reference)
    saved["model"] = {f"_orig_mod.{name}": tensor for name, tensor in saved["model"].items()}
    saved["model"]["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH).tril()
    torch.save(saved, path)
    assert distance(NanoGPT(path), reference, "none") < TOLERANCE


def test_the_padded_vocabulary_of_nanogpt_is_gpt2s(path):
    reference = Reference(vocab_size=50304)
    torch.save(checkpoint(reference), path)
    source = NanoGPT(path)
    assert source.config.vocab_size == 50257 and any("50304" in note for note in source.notes)
    table = source.read(TABLE)
    assert torch.equal(table[:50257], reference.lm_head.weight[:50257]) and not table[50257:].any()
    assert distance(source, reference, "none") < TOLERANCE


def bomb():
    RAN.append("ran")


class Hostile:
    def __reduce__(self):
        return bomb, ()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code_runs_nothing(path, zipped):
    RAN.clear()
    reference = Reference()
    torch.save(checkpoint(reference) | {"config": Hostile()}, path, _use_new_zipfile_serialization=zipped)
    torch.load(path, weights_only=False)
    assert RAN == ["ran"]  # the bomb is a real one
    assert distance(NanoGPT(path), reference, "none") < TOLERANCE
    path.write_bytes(pickle.dumps(Hostile(), protocol=2))
    refused(lambda: NanoGPT(path), str(path), "cannot be read")
    assert RAN == ["ran"]


def test_broken_checkpoints_are_refused(path, tmp_path):
    for zipped in (True, False):
        torch.save(checkpoint(), path, _use_new_zipfile_serialization=zipped)
        whole = path.read_bytes()
        for content in (whole[:-1], whole[: len(whole) // 2], whole[:100], whole[:4], b"", b"\x80\x02" * 30):
            path.write_bytes(content)
            refused(lambda: NanoGPT(path), str(path))
    refused(lambda: NanoGPT(tmp_path), str(tmp_path), "cannot be read")
    refused(lambda: NanoGPT(tmp_path / "none.pt"), "none.pt", "is missing")
    for other in ([1, 2], {"model": {}}, {"model": {1: 2}, "model_args": {}}, {"model": 3, "model_args": {}}):
        torch.save(other, path)
        refused(lambda: NanoGPT(path), str(path), "checkpoint")


FC = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize(("model", "words"), [
    (lambda m: {n: t for n, t in m.items() if n != FC}, ["h.1.mlp.c_fc.weight", "[192, 48]"]),
    (lambda m: m | {FC: m[FC].T.contiguous()}, ["h.1.mlp.c_fc.weight", "[48, 192]", "[192, 48]"]),
    (lambda m: m | {FC: m[FC].int()}, [FC, "int32"]), (lambda m: m | {FC: m[FC].to_sparse()}, [FC, "plain tensor"]),
    (lambda m: m | {FC: m[FC].to("meta")}, [FC, "plain tensor"]), (lambda m: m | {FC: 3}, [FC, "plain tensor"]),
    (lambda m: m | {"_orig_mod." + FC: m[FC]}, ["h.1.mlp.c_fc.weight", "twice"]),
    (lambda m: m | {"transformer.h.0.lora": m[FC]}, ["h.0.lora"]),
    (lambda m: m | {"lm_head.weight": m["lm_head.weight"] + 1}, ["lm_head.weight", "tied"]),
    (lambda m: m | {"lm_head.weight": torch.ones(3)}, ["lm_head.weight", "tied"])
])  # fmt: skip
def test_tensors_of_nanogpt_that_do_not_fit_are_refused_by_name(path, model, words):
    torch.save(checkpoint(), path)
    refused(lambda: read_changed(path, model), str(path), *words)


@pytest.mark.parametrize(("args", "words"), [
    ({"n_layer": 1_000_000}, ["no tensor h.3.ln_1.weight"]), ({"n_layer": 0}, ["num_layers=0"]),
    ({"n_head": 5}, ["num_heads=5"]), ({"n_head": 4.0}, ["n_head=4.0"]), ({"vocab_size": None}, ["vocab_size"]),
    ({"block_size": 25}, ["wpe.weight", "[24, 48]", "[25, 48]"]), ({"bias": False}, ["bias"])
])  # fmt: skip
def test_model_args_that_do_not_fit_are_refused(path, args, words):
    torch.save(checkpoint(), path)
    refused(lambda: read_changed(path, **args), str(path), *words)


KINDS = [
    "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
    "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias",
]  # fmt: skip


def llmc_file(reference, version=3, rows=192, magic=20240326) -> bytes:
    """A model file as llm.c writes it, with a table padded by what must not be read."""
    saved = {name.removeprefix("transformer."): t for name, t in reference.state_dict().items()}
    table = torch.cat([saved["wte.weight"], torch.full((rows - VOCABULARY, WIDTH), 1e4)])
    tensors = [table, saved["wpe.weight"]]
    tensors += [saved[f"h.{i}.{kind}"] for kind in KINDS for i in range(LAYERS)]
    tensors += [saved["ln_f.weight"], saved["ln_f.bias"]]
    header = np.zeros(256, dtype="<i4")
    header[:8] = magic, version, LENGTH, VOCABULARY, LAYERS, HEADS, WIDTH, rows
    file = io.BytesIO(header.tobytes())
    file.seek(0, io.SEEK_END)
    for tensor in tensors:
        file.write(tensor.numpy().tobytes() if version == 3 else tensor.bfloat16().view(torch.int16).numpy().tobytes())
    return file.getvalue()


@pytest.mark.parametrize("version", [3, 5])
def test_logits_of_llmcs_model(path, version):
    reference = Reference()
    path.write_bytes(llmc_file(reference, version))
    before = path.read_bytes()
    source = LLMC(path)
    assert source.config.vocab_size == VOCABULARY and not source.read(TABLE)[VOCABULARY:].any()
    if version == 5:
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16().float()
    assert distance(source, reference) < TOLERANCE
    check_parts(pickle.loads(pickle.dumps(source)))
    assert path.read_bytes() == before


def test_other_files_than_models_of_llmc_are_refused(path, tmp_path):
    reference = Reference()
    whole = llmc_file(reference)
    for content, words in (
        (whole[:-1], [f"{len(whole) - 1} bytes", f"{len(whole)};"]),
        (whole + b"\0\0", [f"{len(whole) + 2} bytes", f"{len(whole)};"]),
        (llmc_file(reference, 5)[:8] + whole[8:], [f"{len(whole)} bytes"]),
        (llmc_file(reference, version=3, magic=20240327), ["magic 20240326"]),
        (whole[:1000], ["magic 20240326"]),
        (whole[:7], ["cannot be read"]),
        (b"", ["magic 20240326"]),
        (whole[:4] + b"\1" + whole[5:], ["version 1"]),
        (whole[:12] + b"\0" * 4 + whole[16:], ["vocab_size=0"]),
        (whole[:16] + b"\xff" * 4 + whole[20:], ["num_layers=-1"]),
        (whole[:20] + b"\5" + whole[21:], ["num_heads=5"]),
        (whole[:28] + b"\x80" + whole[29:], ["128 rows", "131 tokens"]),
    ):
        path.write_bytes(content)
        refused(lambda: LLMC(path), str(path), *words)
    refused(lambda: LLMC(tmp_path), str(tmp_path), "cannot be read")
    path.write_bytes(whole)
    source = LLMC(path)
    path.write_bytes(whole[:2000])
    refused(lambda: source.read(TABLE), str(path), "cannot be read")
    path.unlink()
    refused(lambda: source.read(TABLE), str(path), "cannot be read")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_one_tensor_leaves_the_rest_of_the_file_on_disk(path):
    reference = Reference(vocab_size=50304)
    torch.save(checkpoint(reference), path)
    source = NanoGPT(path)
    source.read("head.ln_f.bias")
    entries = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    assert entries and sum(int(e.split("Rss:")[1].split()[0]) for e in entries) < 1000  # kB, by the kernel, of 10 000
