"""The command by which prompts are read and scored. Its results: test_engine.py, test_exact.py."""

from dtgpt.inference.commands import known_commands
from dtgpt.inference.scores.prompts import read_and_score
from tests.inference.test_commands import tell
from tests.support.ranks import pool


def test_the_command_arrives_as_it_was_sent_and_is_known_to_all_ranks():
    index, given = known_commands().index(read_and_score), [2, 0, [9, 8], 5]
    _, *found = pool().run(3, tell, 3, index, given)
    assert found == [(index, given)] * 2
    assert known_commands()[-1] is read_and_score
