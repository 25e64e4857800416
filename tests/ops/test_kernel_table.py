"""docs/kernels.md has the kernels of today."""

from tests.support.kernel_table import BEGIN, END, PAGE, table


def test_the_page_has_the_table_of_the_lists():
    found = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert found == table(), "run python -m tests.support.kernel_table"
