"""One attention, several back ends: what is chosen, and that they agree, masks included."""

from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import pytest
import torch

from dtgpt.config.plan import ResolvedPlan
from dtgpt.data.documents.masks import document_bounds
from dtgpt.models.llama import LlamaConfig
from dtgpt.models.shared.attention_backend import backend_for
from dtgpt.ops.attention.core import Backend, Case, causal_attention, check_backend, split_qkv
from dtgpt.ops.kernels.attention import flash, flash_launch
from dtgpt.ops.random.philox import fold, root_key
from dtgpt.planning.activations import core_bytes
from dtgpt.util.errors import UserError
from tests.support.pairwise import each_pair
from tests.support.runs import change, constant, training

DROPPING = ["explicit", "fused_softmax", "flash", "auto"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # ||a - b|| / ||b||


def packed(attention):
    """An attention of a packed tensor and more arguments."""
    return lambda qkv, *args, **options: attention(*split_qkv(qkv), *args, **options)


attend, reference = packed(causal_attention), packed(flash.reference)


def make_input(dtype=torch.float32, shape=(3, 37, 4, 3, 8)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys = fold(root_key(3), torch.arange(shape[0]))
    return torch.randn(shape, generator=generator).to(dtype), keys


def value_and_gradient(attention, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = qkv.detach().clone().requires_grad_()
    y = attention(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    (y * weights).sum().backward()
    return y.detach(), x.grad


def check(found, expected, tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


@each_pair(backend=DROPPING, dtype=TOLERANCE, p=[0.1, 0.5])
def test_back_ends_drop_the_same_with_the_same_key(backend, p, dtype):
    """Held against float64, whose mask comes from the same key."""
    qkv, keys = make_input(dtype)
    exact = value_and_gradient(lambda x: reference(x, keys, p), qkv.double())
    found = value_and_gradient(lambda x: attend(x, keys, p, backend=backend), qkv)
    check(found, exact, TOLERANCE[dtype])
    others = value_and_gradient(lambda x: attend(x, keys + 1, p, backend=backend), qkv)
    assert (others[0] - found[0]).norm() > 0.1 * found[0].norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", get_args(Backend))
def test_back_ends_agree_where_nothing_drops(backend, dtype):
    """Also where a key comes with the probability 0."""
    qkv, keys = make_input(dtype)
    exact = value_and_gradient(lambda x: reference(x, None, 0.0), qkv.double())
    for key in (None, keys):
        found = value_and_gradient(lambda x, key=key: attend(x, key, 0.0, backend=backend), qkv)
        check(found, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", DROPPING)
def test_a_shard_of_the_heads_has_the_values_of_the_whole(backend):
    qkv, keys = make_input()
    whole = value_and_gradient(lambda x: attend(x, keys, 0.3, backend=backend), qkv)
    y = attend(qkv[:, :, 2:], keys, 0.3, (2, 0, 0), backend=backend)
    torch.testing.assert_close(y, whole[0][:, :, 2:], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(attend(qkv[:, :, 2:], keys, 0.3, backend=backend), y)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("backend", get_args(Backend))
def test_groups_of_heads_share_keys_and_values(backend, p):
    """As if k and v were repeated for each head of q."""
    (q, k, v), keys = make_input(torch.float64)[0].unbind(3), make_input()[1]
    k, v = k[:, :, :2], v[:, :, :2]
    options = {"key": keys, "p": p, "backend": backend}
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    found = causal_attention(*inputs, **options)
    repeated = [x.detach().clone().requires_grad_() for x in (q, *(x.repeat_interleave(2, dim=2) for x in (k, v)))]
    expected = causal_attention(*repeated, **options)
    torch.testing.assert_close(found, expected)
    (dq, dk, dv), (eq, *grouped) = (torch.autograd.grad(y, x, q) for y, x in ((found, inputs), (expected, repeated)))
    torch.testing.assert_close([dq, dk, dv], [eq, *(g.unflatten(2, (2, 2)).sum(3) for g in grouped)])


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("backend", get_args(Backend))
def test_the_last_queries_have_the_values_of_the_whole(backend, p):
    """With fewer queries than columns, masks of dropout included; views of a packed tensor are not changed."""
    qkv, keys = make_input(torch.float64)
    before, (q, k, v) = qkv.clone(), split_qkv(qkv)
    options = {"key": keys, "p": p, "backend": backend}
    whole = causal_attention(q, k, v, **options)
    for queries in (1, 5, 36):
        torch.testing.assert_close(causal_attention(q[:, -queries:], k, v, **options), whole[:, -queries:])
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("backend", get_args(Backend))
def test_shapes_that_do_not_fit_are_refused(backend):
    q = torch.zeros(2, 5, 4, 8)
    for k in (q[:, :4], q[:, :, :3], q[:1], q[..., :4]):
        with pytest.raises(ValueError, match="N_kv divides N"):
            causal_attention(q, k, k, backend=backend)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("dropping", [False, True])
def test_the_fastest_back_end_with_the_same_bits_in_every_run_is_chosen(dropping, kernels):
    """PyTorch's own never where something drops: it draws masks from a generator."""
    without = "explicit" if dropping else "sdpa"
    case = Case(torch.device("cuda"), torch.bfloat16 if kernels else torch.float32, 64, dropping)
    assert backend_for(case) == ("flash" if kernels else without)


@pytest.mark.parametrize("memory, largest", [(232448, 256), (166912, 128), (101376, 128)])  # of H200, A100, RTX 4090
def test_kernels_take_the_heads_for_which_a_gpu_has_memory(memory, largest, monkeypatch):
    monkeypatch.setattr(flash_launch, "shared_memory", lambda device: memory)
    cuda = torch.device("cuda")
    for size in (64, 80, 128, 160, 256, 320):
        taken = {backend_for(Case(cuda, dtype, size)) for dtype in (torch.bfloat16, torch.float16)}
        assert taken == {"flash" if size <= largest else "sdpa"}
        for device, dtype in ((cuda, torch.float32), (torch.device("cpu"), torch.bfloat16)):
            assert backend_for(Case(device, dtype, size)) == "sdpa"


def test_pytorchs_own_never_draws_a_mask():
    """A model that was trained without dropout may be evaluated with keys at hand."""
    qkv, keys = make_input()
    expected = attend(qkv, keys, 0.3, backend="explicit")
    assert torch.equal(attend(qkv, keys, 0.3, backend="sdpa"), expected)


def test_pytorchs_own_is_refused_under_dropout():
    for backend in get_args(Backend):
        check_backend(backend, 0.0, 128)
        if backend != "sdpa":
            check_backend(backend, 0.1, 128)
    with pytest.raises(UserError) as error:
        check_backend("sdpa", 0.1, 64)
    rule, _, remedy = str(error.value).partition("; ")
    assert "attention=sdpa" in rule and "model.dropout=0.1" in rule and "\n" not in str(error.value)
    assert remedy == "use --attention auto, flash or fused_softmax, or --model.dropout 0"


def test_training_has_the_same_curve_on_every_back_end(recipe):
    curves = {}
    for backend in DROPPING:
        run = training(change(recipe, attention=backend, optimizer=constant(1e-3)))
        curves[backend] = [run.train_step().loss.item() for _ in range(3)]
    assert curves["auto"] == curves["explicit"]
    for curve in curves.values():
        assert curve == pytest.approx(curves["explicit"], rel=1e-6)


def test_heads_that_the_kernel_cannot_hold_are_refused():
    with pytest.raises(
        UserError, match="heads of up to 256, but those of this model have the size 320; use --attention"
    ):
        check_backend("flash", 0.1, 320)
    check_backend("auto", 0.1, 320)


@pytest.mark.parametrize("backend", ["explicit", "fused_softmax", "sdpa"])
def test_documents_and_groups_of_heads_together(backend):
    q, k, v = make_input(torch.float64)[0].unbind(3)
    k, v = k[:, :, :2], v[:, :, :2]
    spans = document_bounds(torch.rand(q.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.2)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    found = causal_attention(*inputs, spans=spans, backend=backend)
    expected = flash.reference(*inputs, None, 0.0, spans=spans)
    gradients = [torch.autograd.grad(y, inputs, q) for y in (found, expected)]
    check([found, *gradients[0]], [expected, *gradients[1]], TOLERANCE[torch.float32])


@contextmanager
def kept_storages():
    """Note the bytes of each storage that autograd keeps, by its address."""
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["explicit", "sdpa", "flash"])
def test_the_plan_knows_what_a_back_end_keeps_for_groups_of_heads(recipe, backend, masked):
    """Beside its input and its output, measured."""
    batch, length, heads, groups, size = 2, 128, 8, 2, 16
    config = LlamaConfig(
        num_layers=1, hidden_size=64, num_heads=heads, num_kv_heads=groups, head_dim=size, ffn_hidden_size=96,
        seq_length=length, vocab_size=257,
    )  # fmt: skip
    recipe = change(replace(recipe, model=config, micro_batch_size=batch), attention=backend, precision="bf16")
    settings = change(recipe, data={"reset_attention_mask": masked}).settings(ResolvedPlan(dp=1), torch.device("cpu"))
    inputs = [torch.randn(batch, length, n, size).bfloat16().requires_grad_() for n in (heads, groups, groups)]
    spans = document_bounds(torch.zeros(batch, length, dtype=torch.bool)) if masked else None
    with kept_storages() as kept:
        if backend == "flash":
            out = flash._forward(*inputs, None, 0.0, 0, spans)[0]
        else:
            out = causal_attention(*inputs, spans=spans, backend=backend)
    for shared in (out, *([] if spans is None else [spans])):  # kept by others too
        kept.pop(shared.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) - sum(t.nbytes for t in inputs) == pytest.approx(core_bytes(settings, 0), rel=0.02)


@pytest.mark.parametrize("masked", [False, True])
def test_pytorchs_own_compiles_as_one_graph(masked):
    q, k, v = make_input()[0].unbind(3)
    spans = document_bounds(torch.zeros(q.shape[:2], dtype=torch.bool)) if masked else None

    def attend(q, k, v):
        return causal_attention(q, k[:, :, :2], v[:, :, :2], spans=spans, backend="sdpa")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


@pytest.mark.cuda
@each_pair(
    lambda case: case["backend"] != "flash" or case["size"] <= 128,
    backend=get_args(Backend), size=[64, 128, 160], dtype=[torch.float32, torch.bfloat16], masked=[False, True],
    corners={"saves no wide keys": {"backend": "sdpa", "size": 64, "dtype": torch.bfloat16, "masked": False}},
)  # fmt: skip
def test_back_ends_on_a_gpu_take_groups_of_heads_and_documents(backend, dtype, size, masked):
    """PyTorch's own saves no keys and values for each head of q where it need not."""
    inputs = [torch.randn(2, 320, n, size, device="cuda").to(dtype).requires_grad_() for n in (8, 2, 2)]
    grad = torch.randn_like(inputs[0])
    spans = document_bounds(torch.rand(2, 320, device="cuda") < 0.02) if masked else None
    with kept_storages() as kept:
        out = causal_attention(*inputs, spans=spans, backend=backend)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = flash.reference(*wide, None, 0.0, spans=spans)
    tolerance = 2e-5 if dtype == torch.float32 else 1.2e-2
    check(
        [out, *torch.autograd.grad(out, inputs, grad)],
        [exact, *torch.autograd.grad(exact, wide, grad.double())],
        tolerance,
    )
    if backend == "sdpa" and not masked and dtype == torch.bfloat16:
        assert sum(kept.values()) < 1.1 * sum(t.nbytes for t in (*inputs, out)) + 4 * out.numel() / size
