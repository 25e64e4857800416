"""The command by which prompts are read and scored. Its results: test_engine.py, test_exact.py."""

from dtgpt.inference.commands import known_commands
from dtgpt.inference.scores.prompts import read_and_score
from tests.inference.test_commands import tell
from tests.support.ranks import pool


def test_the_command_is_known_to_all_ranks():
    index = known_commands().index(read_and_score)
    assert pool().run(2, tell, 2, index, [2, 0, [9, 8], 5]) == [None, (index, [2, 0, [9, 8], 5])]
