"""What only a CUDA device can show."""

from pathlib import Path

import pytest
import torch

from dtgpt.cli import main
from dtgpt.compare.verdict import difference, limits_of, problems
from dtgpt.models.gpt2 import GPT2Config
from dtgpt.ops.loss.cross_entropy import cross_entropy
from dtgpt.ops.random.dropout import attention_mask, dropout, dropout_keys, keep_mask
from dtgpt.ops.random.philox import bits, fold, root_key
from dtgpt.parallel.graphs.captured import WARM_UP
from dtgpt.train.texts.generate import generate_text
from tests.support.plans_on_gpus import records
from tests.support.runs import on_cuda, training
from tests.support.whole_model import build_model

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
RECIPES = Path(__file__).parents[2] / "recipes"
CONFIG = GPT2Config(num_layers=2, hidden_size=128, num_heads=4, seq_length=64, vocab_size=300, dropout=0.1)


def test_bits_and_masks_are_those_of_the_cpu_eager_and_compiled():
    keys = fold(root_key(1), torch.arange(5))
    part, ranges = (7, range(3, 100)), [range(2, 9), range(5, 300)]
    for draw in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, dynamic=False)):
        assert torch.equal(draw(bits)(keys.to(CUDA), part).cpu(), bits(keys, part))
        for mask in (keep_mask, attention_mask):
            assert torch.equal(draw(mask)(keys.to(CUDA), ranges, 0.3).cpu(), mask(keys, ranges, 0.3))


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


CURVES = {
    "eager": {"compile": "off", "graph": "off"},
    "compiled": {"compile": "on", "graph": "off"},
    "both": {"compile": "on", "graph": "on"},
}


@pytest.mark.parametrize("precision, bound", [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_compiled_and_narrow_training_follow_fp32(recipe, precision, bound):
    def curve(**changes) -> list[float]:
        run = training(on_cuda(recipe, loss_scale={"initial": 2.0**14}, **changes))
        return [run.train_step().loss.item() for _ in range(10)]

    exact = curve(precision="fp32", **CURVES["eager"])
    for options in CURVES.values():
        with torch.cuda.stream(torch.cuda.Stream()):  # which graphs would leave the default one for
            found = curve(precision=precision, **options)
        assert found == pytest.approx(exact, rel=bound), options
    assert exact[-1] < exact[0]


def test_generated_text_needs_no_new_compilation_per_token(recipe):
    run = training(on_cuda(recipe, **CURVES["compiled"]))
    run.train_step()
    with torch.compiler.set_stance("default"):
        assert generate_text(run) is not None
    with torch.compiler.set_stance("fail_on_recompile"):
        assert generate_text(run) is not None


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@TWO
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plans_on_gpus_follow_one_gpu(precision):
    """Without graphs; `test_graphs.py` has them with graphs."""
    model = ["--model.num_layers", "4", "--model.dropout", "0.1", "--micro_batch_size", "8", "--precision", precision]
    model += ["--graph", "off"]
    plans = ["dp2", "dp2_zero3", "tp2_sp", "pp2", "pp2_zbv"]
    with pytest.raises(SystemExit) as done:
        main(["compare", str(RECIPES / "gpt2_tiny.py"), "--plans", *plans, "--steps", "3", *model])
    assert done.value.code == 0


@TWO
@pytest.mark.parametrize("precision, bound", [("fp32", 1e-5), ("bf16", 2e-3)])
def test_captured_plans_train_by_the_fused_softmax_as_one_gpu_does(tmp_path, precision, bound):
    """And one GPU as by attention without the kernel, whose dropout is the same."""
    options = ["--model.num_layers", "4", "--model.dropout", "0.1", "--micro_batch_size", "8", "--graph", "on"]
    made = {"recipe": str(RECIPES / "gpt2_tiny.py"), "steps": WARM_UP + 4}

    def job(name: str, plan: str, attention: str = "fused_softmax") -> dict:
        chosen = ["--precision", precision, "--attention", attention, "--plan", plan]
        return {"name": name, "options": [*options, *chosen], **made}

    jobs = [job("one", "single"), {**job("moved", "single"), "moved": True}, job("explicit", "single", "explicit")]
    alone = records(jobs, tmp_path, 1)
    assert alone["one"].losses == pytest.approx(alone["explicit"].losses, rel=bound)
    rounded = difference(alone["moved"], alone["one"])
    plans = [job(plan, plan) for plan in ("dp2_zero3", "tp2_sp", "pp2")]
    for plan, found in records(plans, tmp_path, 2).items():
        assert problems(difference(found, alone["one"]), limits_of(found), [rounded]) == [], plan
