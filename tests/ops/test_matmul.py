"""Searched algorithms of matrix products: which products they compute, where they are kept, and their bits."""

import json
import os

import pytest
import torch
import torch.nn.functional as F

from dtgpt.ops.loss.head import head_loss
from dtgpt.ops.matmul import cublaslt
from dtgpt.ops.matmul import search as search_module
from dtgpt.ops.matmul.choices import WORKSPACE, file_for, key_of, read_choices, write_choices
from dtgpt.ops.matmul.cublaslt import Algorithm, CublasLtError, Operand, Operands, Problem, Product
from dtgpt.ops.matmul.search import by_torch, search, verify
from dtgpt.ops.matmul.searched import SearchedProducts
from tests.support.bodies_matmul import fake_cublaslt

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FIRST = Algorithm((1, 2, 3, 4, 5, 6, 7, 1 << 63), 1 << 20)


def problem(m: int, n: int, k: int, dtype=torch.float32, bias=False) -> Problem:
    return Problem(Operand(m, k, k, False, dtype), Operand(k, n, k, True, dtype), n, dtype, bias)


def losses_and_gradients(x, weights, targets):
    first, bias, second, table = weights
    h = F.linear(F.linear(x, first, bias).relu(), second)
    loss = head_loss(h, table, targets, len(table))
    return loss, *torch.autograd.grad(loss, weights)


def arguments():
    sizes = (48, 16), (48,), (16, 48), (40, 16)
    weights = [torch.randn(size, requires_grad=True) for size in sizes]
    return torch.randn(2, 8, 16), weights, torch.randint(40, (2, 8))


def test_every_product_of_forward_and_backward_runs_by_the_algorithm_that_was_named():
    given = arguments()
    expected = losses_and_gradients(*given)
    with fake_cublaslt([]) as calls:
        products = SearchedProducts(CPU)
        with products:
            first = losses_and_gradients(*given)
        assert not calls and len(products.unknown) == 8  # the input needs no gradient
        products.use(dict.fromkeys(products.unknown, FIRST))
        with products:
            second = losses_and_gradients(*given)
        after = F.linear(given[0], given[1][0])
        assert calls.total() == 8 and not products.unknown
    for found in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(after, F.linear(given[0], given[1][0]))


def test_a_product_that_is_left_to_torch_is_not_asked_for_again():
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    with fake_cublaslt([]) as calls, SearchedProducts(CPU) as products:
        y = x @ weight.t()
        products.use(dict.fromkeys(set(products.unknown), None))
        assert torch.equal(x @ weight.t(), y) and not products.unknown and not calls


@pytest.mark.parametrize(
    "product",
    [
        lambda a: a.double() @ a.double(),
        lambda a: a[:, ::2] @ a[::2],  # gaps in both directions
        lambda a: a.as_strided((8, 8), (8, 1), 1) @ a,  # an address that is not a multiple of 16
        lambda a: torch.addmm(a[0], a, a, beta=2),
        lambda a: torch.addmm(a, a, a),  # the addend is a matrix
        lambda a: torch.mm(a, a, out=torch.empty(8, 8).t()),
        lambda a: torch.bmm(a[None], a[None]),
        lambda a: a * a,
    ],
)
def test_other_operations_remain_those_of_torch(product):
    a = torch.randn(9, 8)[:8]
    expected = product(a)
    with fake_cublaslt([]), SearchedProducts(CPU) as products:
        assert torch.equal(product(a), expected) and not products.unknown


def test_small_products_and_those_of_a_cpu_are_not_searched():
    x = torch.randn(8, 8, dtype=torch.bfloat16)
    with SearchedProducts(CPU) as products:
        x @ x
    assert not products.unknown


@pytest.mark.parametrize(
    ("x", "operand"),
    [
        (torch.empty(6, 4), (6, 4, 4, False)),
        (torch.empty(6, 8)[:, :4], (6, 4, 8, False)),
        (torch.empty(4, 6).t(), (6, 4, 6, True)),
        (torch.empty(4, 9)[:, :6].t(), (6, 4, 9, True)),
        (torch.empty(6, 1), (6, 1, 1, False)),
        (torch.empty(6, 8)[:, ::2], None),
        (torch.empty(4).expand(6, 4), None),
    ],
)
def test_operands(x, operand):
    found = Operand.of(x)
    assert (None if found is None else tuple(found)[:4]) == operand


def test_keys_tell_problems_apart():
    some = [problem(2, 3, 4), problem(2, 3, 4, bias=True), problem(3, 2, 4), problem(2, 3, 4, torch.bfloat16)]
    some += [some[0]._replace(stride=8), some[0]._replace(scaled=True), some[0]._replace(scaled=True, fast=True)]
    some.append(some[0]._replace(b=Operand(4, 3, 3, False, torch.float32)))
    assert len({key_of(one) for one in some}) == len(some)
    assert key_of(some[1]) == "float32 2x4/4 float32 4x3t/4 3 float32 bias"


def test_choices_are_kept_and_added_to(tmp_path):
    file = file_for(tmp_path / "new", "GPU a")
    assert file != file_for(tmp_path / "new", "GPU b") and read_choices(file, "GPU a") == {}
    write_choices(file, "GPU a", {"one": FIRST})
    write_choices(file, "GPU a", {"two": None})
    assert read_choices(file, "GPU a") == {"one": FIRST, "two": None}
    assert read_choices(file, "GPU b") == {}
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b'{"identity": "GPU"}', b'{"identity": "GPU", "products": 3}', b"\xff\xfe", b"[" * 100_000,
        b'{"identity": "GPU", "products": {"one": 5}}',
        json.dumps({"identity": "GPU", "products": {"one": [[1] * 7, 0]}}).encode(),
        json.dumps({"identity": "GPU", "products": {"one": [[1] * 7 + [-1], 0]}}).encode(),
        json.dumps({"identity": "GPU", "products": {"one": [[1] * 7 + [True], 0]}}).encode(),
        json.dumps({"identity": "GPU", "products": {"one": [[1] * 8, WORKSPACE + 1]}}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_counts_as_empty_and_is_replaced(tmp_path, damage):
    file = file_for(tmp_path, "GPU")
    file.write_bytes(damage)
    assert read_choices(file, "GPU") == {}
    write_choices(file, "GPU", {"one": FIRST})
    assert read_choices(file, "GPU") == {"one": FIRST}


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        write_choices(file_for(folder, "GPU"), "GPU", {"one": FIRST})
        assert read_choices(file_for(folder, "GPU"), "GPU") == {}
    assert os.listdir(tmp_path) == ["file"]


def test_without_cuda_there_is_no_library(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    cublaslt.library.cache_clear()
    assert cublaslt.library() is None and cublaslt.version() == 0
    cublaslt.library.cache_clear()


class Timed:
    """A product of which each algorithm is as fast as its first word says, and right where its second word is 0."""

    named = ((5, 0), (2, 1), (1, 3), (6, 0), (7, 0), (9, 0))

    def __init__(self, problem, device):
        pass

    def algorithms(self, count, workspace):
        return [Algorithm((*pair, 0, 0, 0, 0, 0, 0), 0) for pair in self.named]

    def variants(self, algorithm):
        """Each is faster than what it is a variant of; one is wrong, one needs too much memory."""
        speed = algorithm.words[0]
        given = ((speed - 1, 0, 0), (speed - 2, 1, 0), (speed - 3, 0, WORKSPACE + 1), (speed - 1, 2, 0))
        return [Algorithm((words, wrong, *range(6)), size) for words, wrong, size in given]

    def accepts(self, algorithm):
        return algorithm.words[0] < 100

    def prepare(self, algorithm):
        speed, wrong = algorithm.words[:2]

        def run(operands):
            if wrong == 2:
                raise CublasLtError("does not run")
            return operands.out if wrong == 3 else by_torch(operands).add_(wrong)

        run.speed = speed
        return run


@pytest.fixture
def timed(monkeypatch):
    def times(runs, operands, **options):
        return {name: getattr(run, "speed", 8.0) for name, run in runs.items()}

    monkeypatch.setattr(search_module, "Product", Timed)
    monkeypatch.setattr(search_module, "_medians", times)
    monkeypatch.setattr(search_module, "_under_load", times)


@pytest.mark.parametrize("bias", [False, True])
def test_a_search_takes_the_fastest_of_those_with_the_bits_of_torch(timed, monkeypatch, bias):
    wanted = problem(6, 5, 4, bias=bias)
    assert search(wanted, CPU) == Algorithm((4, 0, *range(6)), 0)
    monkeypatch.setattr(Timed, "named", ((9, 0),))
    assert search(wanted, CPU) is None  # its variant takes 8.0, as PyTorch's choice does
    monkeypatch.setattr(Timed, "named", ((2, 1),))
    assert search(wanted, CPU) is None


def test_a_kept_algorithm_is_verified(timed):
    wanted = problem(6, 5, 4)
    verdicts = {(3, 0): True, (3, 1): False, (3, 2): False, (3, 3): False, (100, 0): False}
    for words, verdict in verdicts.items():
        assert verify(wanted, Algorithm((*words, *range(6)), 0), CPU) is verdict
    assert verify(wanted, None, CPU)


LAYOUTS = {
    "forward": lambda m, n, k: (torch.randn(m, k), torch.randn(n, k).t()),
    "dx": lambda m, n, k: (torch.randn(m, n), torch.randn(n, k)),
    "dw": lambda m, n, k: (torch.randn(m, n).t(), torch.randn(m, k)),
}


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_algorithms_compute_the_product(layout, dtype, bias):
    with CUDA:
        a, b = (x.to(dtype) for x in LAYOUTS[layout](512, 768, 256))  # which keeps transposed layouts
    addend = torch.randn(b.shape[1], device=CUDA, dtype=dtype) if bias else None
    out = torch.empty(len(a), b.shape[1], device=CUDA, dtype=dtype)
    left, right = Operand.of(a), Operand.of(b)
    assert left is not None and right is not None
    product = Product(Problem(left, right, out.stride(0), dtype, bias), CUDA)
    expected = a.double() @ b.double() + (0 if addend is None else addend)
    algorithms = product.algorithms(8, WORKSPACE)
    assert algorithms
    for algorithm in algorithms:
        assert product.accepts(algorithm)
        product.prepare(algorithm)(Operands(a, b, out.fill_(torch.nan), addend))
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=0.2)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="has no fp8")
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_fp8_are_searched_too(bias):
    half, third = torch.tensor([0.5], device=CUDA), torch.tensor(1 / 3, device=CUDA)
    x, w = (torch.randn(n, 2048, device=CUDA).to(torch.float8_e4m3fn) for n in (4096, 2048))
    b = torch.randn(2048, device=CUDA, dtype=torch.bfloat16) if bias else None

    def product():
        return torch._scaled_mm(x, w.t(), half, third, bias=b, out_dtype=torch.bfloat16, use_fast_accum=True)

    expected = product()
    with SearchedProducts(CUDA) as products:
        assert torch.equal(product(), expected)
        (wanted,) = products.unknown
        for algorithm in Product(wanted, CUDA).algorithms(4, WORKSPACE):
            products.use({wanted: algorithm})
            torch.testing.assert_close(product(), expected)
    products.use({wanted: search(wanted, CUDA)})
    with products:
        assert torch.equal(product(), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [False, True])
def test_what_a_search_finds_has_the_bits_of_torch(bias):
    wanted = problem(4096, 2048, 1024, torch.bfloat16, bias)
    found = search(wanted, CUDA)
    assert verify(wanted, found, CUDA)
    assert not verify(wanted, Algorithm((0,) * 8, 0), CUDA)
    products = SearchedProducts(CUDA)
    products.use({wanted: found})
    for seed in range(3):
        torch.manual_seed(seed)
        x, w = (torch.randn(n, 1024, device=CUDA, dtype=torch.bfloat16) for n in (4096, 2048))
        b = torch.randn(2048, device=CUDA, dtype=torch.bfloat16) if bias else None
        with products:
            y = F.linear(x, w, b)
        assert torch.equal(y, F.linear(x, w, b)) and not products.unknown
    assert by_torch(Operands(x, w.t(), torch.empty_like(y), b)).equal(y)
