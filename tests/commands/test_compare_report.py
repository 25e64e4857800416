"""The tables that `dtgpt compare` prints."""

from dtgpt.compare.compare import report
from dtgpt.compare.record import Record
from dtgpt.compare.verdict import Difference


def test_the_tables_fit_80_columns_whatever_the_plans(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["single", "dp2", "zero3", "dp2_tp2_sp_pp2_zero1", "tp2_pp2_zbv", "dp4_tp2_interleaved2"]
    steps = {"losses": [5.9, 5.8], "norms": [1.0, 1.0], "rates": [0.1, 0.1], "scales": []}
    made = Record("torch.float32", "order", **steps, memory=[123.4], planned=120.1, initial="", tensors={})
    tensors = dict.fromkeys(["first gradient/a", "last gradient/a", "weight/a"], 0.5)
    found = Difference([0.5], [0.5], [], [], ([], []), tensors, False)
    wrong = ["initial weights differ", "first gradient of blocks.11.mlp.fc.weight differs by 5.0e-01"]
    lines = report(dict.fromkeys(names, made), dict.fromkeys(names, found), dict.fromkeys(names, wrong)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("loss ") for line in lines) == 2  # the losses in two parts
    assert sum("WRONG: initial weights differ" in line for line in lines) == len(names)
    assert sum("5.0e-01  5.0e-01   5.0e-01  5.0e-01  123.40   120.10" in line for line in lines) == len(names)
    assert all(any(line.startswith(name) for line in lines) for name in names)
