"""Lines that fit a terminal."""

from dtgpt.util.shared.words import hanging


def test_a_long_line_of_a_header_hangs_and_a_path_stays_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = "/data/" + "long-name/" * 9
    lines = hanging(
        f"data    {path}: 252,066 tokens to train on, 12,088 for validation, {'words ' * 20}", 8
    ).splitlines()
    assert path in "".join(lines) and all(line.startswith(" " * 8) for line in lines[1:])
    assert all(len(line) <= 80 for line in lines if path not in line)
