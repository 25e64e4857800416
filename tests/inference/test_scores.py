"""The command by which prompts are read and scored. Its results: test_engine.py, test_exact.py."""

from dtgpt.inference.commands import decode, encode, known_commands
from dtgpt.inference.scores.prompts import ReadAndScore


def test_the_command_comes_back_from_its_numbers_and_is_known_to_all_ranks():
    command = ReadAndScore(2, 0, [9, 8], 5)
    numbers = iter(encode(command))
    assert decode(ReadAndScore, numbers) == command and next(numbers, None) is None
    assert known_commands()[-1] is ReadAndScore
