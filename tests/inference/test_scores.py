"""The command by which prompts are read and scored. Its results: test_engine.py, test_exact.py."""

from dtgpt.inference.commands import known_commands
from dtgpt.inference.scores.prompts import read_and_score
from tests.inference.test_commands import sent_and_received


def test_the_command_comes_back_from_its_numbers_and_is_known_to_all_ranks():
    assert sent_and_received(read_and_score, 2, 0, [9, 8], 5) == [2, 0, [9, 8], 5]
    assert known_commands()[-1] is read_and_score
