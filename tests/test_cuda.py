"""What only a CUDA device can show."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.model import GPTConfig, build_model, dropout_keys
from dtgpt.ops.cross_entropy import cross_entropy
from dtgpt.ops.dropout import dropout, keep_mask
from dtgpt.ops.random import bits, fold, root_key
from dtgpt.parallel.mesh import Mesh
from dtgpt.parallel.plan import Plan
from dtgpt.signals import StopRequest
from dtgpt.train import Training, read_dataset

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
RECIPES = Path(__file__).parent.parent / "recipes"
CONFIG = GPTConfig(num_layers=2, hidden_size=128, num_heads=4, seq_length=64, vocab_size=300, dropout=0.1)


def test_bits_and_masks_are_those_of_the_cpu_eager_and_compiled():
    keys = fold(root_key(1), torch.arange(5))
    part, ranges = (7, range(3, 100)), [range(2, 9), range(5, 300)]
    for draw in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, dynamic=False)):
        assert torch.equal(draw(bits)(keys.to(CUDA), part).cpu(), bits(keys, part))
        assert torch.equal(draw(keep_mask)(keys.to(CUDA), ranges, 0.3).cpu(), keep_mask(keys, ranges, 0.3))


def test_initial_weights_are_those_of_the_cpu():
    models = [build_model(CONFIG, device, torch.float32, root_key(1)) for device in (CUDA, torch.device("cpu"))]
    for (name, there), here in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(there.cpu(), here), name


def test_gradients_with_dropout_are_those_of_the_cpu():
    tokens, gradients = torch.randint(300, (4, 65), generator=torch.Generator().manual_seed(0)), []
    for device in (CUDA, torch.device("cpu")):
        model, t = build_model(CONFIG, device, torch.float32, root_key(1)), tokens.to(device)
        keys = dropout_keys(root_key(2, device), torch.arange(4, device=device), CONFIG.num_sites)
        cross_entropy(model(t[:, :-1], keys), t[:, 1:], 300).backward()
        gradients.append({name: p.grad.cpu() for name, p in model.named_parameters()})
    for name, g in gradients[1].items():
        assert (gradients[0][name] - g).norm() <= 1e-5 * max(g.norm().item(), 1e-3), name


def test_a_cuda_graph_replays_with_new_keys():
    x = torch.randn(4, 64, 128, device=CUDA)
    static, others = (fold(root_key(seed), torch.arange(4)).to(CUDA) for seed in (1, 2))
    dropout(x, static, 0.5)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = dropout(x, static, 0.5)
    for keys in (static.clone(), others):
        static.copy_(keys)
        graph.replay()
        assert torch.equal(y, dropout(x, keys, 0.5))


def cuda_training(recipe, **changes) -> Training:
    model = replace(recipe.model, hidden_size=128, seq_length=64)
    recipe = replace(recipe, device="cuda", model=model, **changes)
    return Training(recipe, Mesh(Plan(dp=1), CUDA), read_dataset(recipe), None, StopRequest())


def test_bf16_compiled_training_follows_fp32(recipe):
    curves = []
    for changes in ({"precision": "fp32", "compile": "off"}, {"precision": "fp32"}, {"precision": "bf16"}):
        run = cuda_training(recipe, **changes)
        curves.append([run.train_step(lr=1e-3)[0].item() for _ in range(10)])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=2e-2)
    assert curves[2][-1] < curves[2][0]


def test_a_step_never_waits_for_the_device(recipe):
    run = cuda_training(recipe)
    run.train_step(lr=1e-3)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run.train_step(lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_generated_text_needs_no_new_compilation_per_token(recipe):
    run = cuda_training(recipe)
    run.train_step(lr=1e-3)
    with torch.compiler.set_stance("default"):
        assert run.sample() is not None
    with torch.compiler.set_stance("fail_on_recompile"):
        assert run.sample() is not None


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plans_on_gpus_follow_one_gpu(precision):
    model = ["--model.num_layers", "4", "--model.dropout", "0.1", "--micro_batch_size", "8", "--precision", precision]
    plans = ["dp2", "dp2_zero3", "tp2_sp", "pp2", "pp2_zbv"]
    with pytest.raises(SystemExit) as done:
        main(["compare", str(RECIPES / "gpt2_tiny.py"), "--plans", *plans, "--steps", "3", *model])
    assert done.value.code == 0
