"""Checkpoints as Megatron-LM writes them, by a few lines of their own that share nothing with the export. Used by tests
only."""

from argparse import Namespace

import torch

from dtgpt.models.gpt2 import TABLE, GPT2Config
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Source, parameter_shapes

CONFIG = GPT2Config(num_layers=4, hidden_size=32, num_heads=4, seq_length=16, vocab_size=131)
H, N, D, LAYERS = 32, 4, 8, 4
PLANS = [(t, p) for t in (1, 2, 4) for p in (1, 2, 4)]

# Megatron's name in a layer, mcore's, shape in units of H, the dimension that tensor parallelism cuts, dtgpt's name.
LAYER = [
    ("input_layernorm.weight", "input_layernorm.weight", (1,), None, "ln_1.weight"),
    ("input_layernorm.bias", "input_layernorm.bias", (1,), None, "ln_1.bias"),
    ("self_attention.query_key_value.weight", "self_attention.linear_qkv.weight", (3, 1), 0, "attn.qkv.weight"),
    ("self_attention.query_key_value.bias", "self_attention.linear_qkv.bias", (3,), 0, "attn.qkv.bias"),
    ("self_attention.dense.weight", "self_attention.linear_proj.weight", (1, 1), 1, "attn.proj.weight"),
    ("self_attention.dense.bias", "self_attention.linear_proj.bias", (1,), None, "attn.proj.bias"),
    ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", (1,), None, "ln_2.weight"),
    ("post_attention_layernorm.bias", "pre_mlp_layernorm.bias", (1,), None, "ln_2.bias"),
    ("mlp.dense_h_to_4h.weight", "mlp.linear_fc1.weight", (4, 1), 0, "mlp.fc.weight"),
    ("mlp.dense_h_to_4h.bias", "mlp.linear_fc1.bias", (4,), 0, "mlp.fc.bias"),
    ("mlp.dense_4h_to_h.weight", "mlp.linear_fc2.weight", (1, 4), 1, "mlp.proj.weight"),
    ("mlp.dense_4h_to_h.bias", "mlp.linear_fc2.bias", (1,), None, "mlp.proj.bias"),
]
TRANSFORMER_ENGINE = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class InMemory(Source):
    def __init__(self, config, tensors):
        self.config, self.tensors = config, tensors

    def read(self, name, part=None):
        return cut(self.tensors[name], part)


def make_weights():
    """Every parameter of CONFIG, random and all different; rows of padding are zero, as `read` gives them."""
    generator = torch.Generator().manual_seed(7)
    tensors = {n: 0.3 * torch.randn(s, generator=generator) for n, s in parameter_shapes(CONFIG).items()}
    tensors[TABLE] = pad_rows(tensors[TABLE], CONFIG)
    return tensors


def pad_rows(table, config):
    """A token table with the rows of the model: the true vocabulary of `table`, then zeros."""
    rows = torch.zeros(config.padded_vocab_size, table.shape[1])
    rows[: config.vocab_size] = table[: config.vocab_size]
    return rows


def assert_same(ours, theirs):
    """Two trees of dictionaries have the same keys and tensors, bit by bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    else:
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def padded(vocab, tp):
    return (vocab + 128 * tp - 1) // (128 * tp) * (128 * tp)


def old_qkv(piece, version):
    """[np, 3, hn] -> the order of `version`, element by element."""
    heads = piece.shape[0] // (3 * D)
    rows = [(n, k, d) for n in range(heads) for k in range(3) for d in range(D)]
    places = {
        0: lambda n, k, d: (k * heads + n) * D + d,
        1: lambda n, k, d: (n * D + d) * 3 + k,
    }
    if version not in places:
        return piece
    out = torch.empty_like(piece)
    for row, (n, k, d) in enumerate(rows):
        out[places[version](n, k, d)] = piece[row]
    return out


def args_of(tp, pp, vocab_rows, version=3.0, **changes):
    args = {
        "num_layers": LAYERS, "hidden_size": H, "num_attention_heads": N, "max_position_embeddings": 16,
        "seq_length": 16, "ffn_hidden_size": 4 * H, "layernorm_epsilon": 1e-5, "padded_vocab_size": vocab_rows,
        "pipeline_model_parallel_size": pp, "consumed_train_samples": 4321, "params_dtype": torch.float32,
    }  # fmt: skip
    args["tensor_model_parallel_size" if version >= 3 else "model_parallel_size"] = tp
    return Namespace(**{**args, **changes})


def stage(weights, tp, t, layers, first, last, version, family, dtype, table_rows):
    """The `model` of one rank. family: local, mcore or te."""
    column = 0 if family == "local" else 1

    def piece(tensor, dim):
        tensor = tensor if dim is None else tensor.chunk(tp, dim)[t]
        return tensor.to(dtype).clone()

    flat = {}
    table = torch.cat([weights[TABLE][:131], weights[TABLE][130:131].expand(table_rows - 131, H)])
    if first:
        flat["embedding.word_embeddings.weight"] = piece(table, 0)
        flat["embedding.position_embeddings.weight"] = piece(weights["embedding.wpe.weight"], None)
    for local, layer in enumerate(layers):
        for entry in LAYER:
            *_, dim, ours = entry
            tensor = piece(weights[f"blocks.{layer}.{ours}"], dim)
            if "qkv" in ours and family == "local":
                tensor = old_qkv(tensor, version)
            name = entry[column]
            if family == "te":
                for plain, folded in TRANSFORMER_ENGINE.items():
                    name = name.replace(plain, folded)
            flat[f"{'encoder' if family == 'local' else 'decoder'}.layers.{local}.{name}"] = tensor
        if family != "local":
            flat[f"decoder.layers.{local}.mlp.linear_fc1._extra_state"] = None
    if last:
        for kind in ("weight", "bias"):
            top = "encoder" if family == "local" else "decoder"
            flat[f"{top}.final_layernorm.{kind}"] = piece(weights[f"head.ln_f.{kind}"], None)
    if family != "local":
        return flat | ({"output_layer.weight": piece(table, 0)} if last and not first else {})
    nested = {"encoder": {k.removeprefix("encoder."): v for k, v in flat.items() if k.startswith("encoder.")}}
    if first:
        nested["embedding"] = {
            kind: {"weight": flat[f"embedding.{kind}.weight"]} for kind in ("word_embeddings", "position_embeddings")
        }
    model = {"language_model": nested}
    if last and not first:
        model["word_embeddings_for_head"] = {"weight": piece(table, 0)}
    return model


def write_tree(
    root, weights, tp=1, pp=1, version=3.0, family="local", dtype=torch.float32, chunks=1, args=True, save=None, **extra
):
    """A checkpoint at iteration 30, as Megatron-LM writes it. extra: changes of args."""
    rows = padded(131, tp)
    per_chunk = LAYERS // pp // chunks
    for t in range(tp):
        for p in range(pp):
            parts = []
            for v in range(chunks):
                begin = v * (LAYERS // chunks) + p * per_chunk
                ends = (p == 0 and v == 0), (p == pp - 1 and v == chunks - 1)
                layers = range(begin, begin + per_chunk)
                parts.append(stage(weights, tp, t, layers, *ends, version, family, dtype, rows))
            content = {"iteration": 30}
            content |= {"model": parts[0]} if chunks == 1 else {f"model{v}": part for v, part in enumerate(parts)}
            if version is not None:
                content["checkpoint_version"] = version
            if args:
                untie = {} if family == "local" else {"untie_embeddings_and_output_weights": False}
                content["args"] = args_of(tp, pp, rows, version or 0, **{**untie, **extra})
            folder = root / "iter_0000030" / (f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}")
            folder.mkdir(parents=True)
            (save or torch.save)(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    return root


def check(source, weights, config=CONFIG):
    assert source.config == config
    for name, shape in parameter_shapes(config).items():
        tensor = source.read(name)
        assert tensor.dtype == torch.float32 and tensor.shape == shape
        assert torch.equal(tensor, weights[name]), name
