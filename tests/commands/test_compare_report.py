"""The tables that `dtgpt compare` prints."""

from dtgpt.train.compare import Difference, Record, report


def test_the_tables_fit_80_columns_whatever_the_plans(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["single", "dp2", "zero3", "dp2_tp2_sp_pp2_zero1", "tp2_pp2_zbv", "dp4_tp2_interleaved2"]
    records = {n: Record("torch.float32", [5.9, 5.8], [1.0, 1.0], [123.4], 120.1, "", 1.0, {}) for n in names}
    found = Difference(0.5, 0.5, "blocks.11.mlp.fc.weight", 0.5, "blocks.11.attn.proj.weight", False)
    lines = report(records, dict.fromkeys(names, found), (1e-5, 1e-4)).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("loss ") for line in lines) == 2  # the losses in two parts
    assert sum("DIFFER" in line for line in lines) == sum("MORE THAN" in line for line in lines) == len(names)
    assert all(any(line.startswith(name) for line in lines) for name in names)
