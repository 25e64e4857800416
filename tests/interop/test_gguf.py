"""Exports become GGUF by llama.cpp's own converter, and the tensors that its package reads back are those of the model.

The converter is no package: DTGPT_LLAMA_CPP names a folder with convert_hf_to_gguf.py, as the source distribution of
llama-cpp-python has it in vendor/llama.cpp.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dtgpt.interop.convert import ConvertOptions, convert
from tests.support.huggingface_llamas import their_model
from tests.support.vocabularies import gpt2_files

FOLDER = os.environ.get("DTGPT_LLAMA_CPP")
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow(40), pytest.mark.skipif(FOLDER is None, reason="needs DTGPT_LLAMA_CPP, a folder of llama.cpp"),
]  # fmt: skip

SIZE = {"vocab_size": 50257}
NAMES = {  # of a matrix and a norm in both forms; llama.cpp transposes what GPT-2 stores as columns
    "gpt2": {"h.0.attn.c_attn.weight": "blk.0.attn_qkv.weight", "h.1.ln_2.weight": "blk.1.ffn_norm.weight",
             "h.1.mlp.c_fc.bias": "blk.1.ffn_up.bias", "wpe.weight": "position_embd.weight"},
    "llama": {"model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
              "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
              "model.norm.weight": "output_norm.weight"},
    "qwen3": {"model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
              "model.layers.1.self_attn.k_norm.weight": "blk.1.attn_k_norm.weight",
              "model.embed_tokens.weight": "token_embd.weight"},
}  # fmt: skip


def model_of(family: str):
    torch.manual_seed(0)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, **SIZE))
    return their_model({"llama": "llama 3.2"}.get(family, family), hidden_size=32, **SIZE)


@pytest.mark.parametrize("family", NAMES)
def test_an_export_becomes_gguf(tmp_path, family):
    model_of(family).save_pretrained(tmp_path / "theirs")
    vocab, merges = gpt2_files(tmp_path)
    files = {"vocab_file": str(vocab), "merge_file": str(merges)}
    convert(tmp_path / "theirs", tmp_path / "checkpoint", ConvertOptions(**files))
    convert(tmp_path / "checkpoint", tmp_path / "export", ConvertOptions(to="hf"))
    script, made = Path(FOLDER, "convert_hf_to_gguf.py"), tmp_path / "model.gguf"
    command = [sys.executable, str(script), str(tmp_path / "export"), "--outfile", str(made), "--outtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reader = gguf.GGUFReader(made)
    assert reader.fields["general.architecture"].contents() == family
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == SIZE["vocab_size"]
    found = {tensor.name: tensor.data.reshape(tensor.shape[::-1]) for tensor in reader.tensors}
    weights = {name.removeprefix("transformer."): value for name, value in load_file(
        tmp_path / "export" / "model.safetensors"
    ).items()}  # fmt: skip
    for ours, theirs in NAMES[family].items():
        wanted = weights[ours].numpy()
        turned = family == "gpt2" and wanted.ndim == 2 and "pe" not in ours.split(".")[0]
        np.testing.assert_array_equal(found[theirs], wanted.T if turned else wanted)
    total = sum(value.size for name, value in found.items() if name != "rope_freqs.weight")
    assert total == sum(value.numel() for value in weights.values())
