"""`--changed` chooses the tests that a change concerns, by a record and by what a record cannot see."""

import subprocess
from pathlib import Path

import pytest

from tests.support.changed import choose
from tests.support.recorded_map import Record, load_record
from tests.support.source_tree import NoCommit

SUPPORT = Path(__file__).parents[1] / "support"
OWN = ("changed", "recorded_map", "call_log", "cpu_seconds", "budgets", "source_tree", "source_units", "__init__")
FILES = {
    "dtgpt/__init__.py": "",
    "dtgpt/sums.py": '''"""Sums."""
LIMIT = 3
TABLE = {"limit": LIMIT}


def add(a, b):
    """Return the sum."""
    return a + b


def limit(number=LIMIT):
    return number


class Counter:
    start = 0

    def count(self):
        return self.start + 1


def built():
    return 1


MADE = built()


def made():
    return MADE


def half():
    return 0.5


def quarter():
    return half() / 2


@cache
def kept():
    return quarter()


def asks():
    return kept()
''',
    "dtgpt/user.py": "from dtgpt.sums import TABLE as OTHER, add\n\n\ndef look():\n    return OTHER['limit']\n",
    "dtgpt/again.py": """from dtgpt.user import look


class Again:
    seen = look


def again():
    return Again
""",
    "dtgpt/fast/__init__.py": "",
    "dtgpt/fast/launch.py": "from dtgpt.fast.kernel import double\n\n\ndef launch():\n    return double\n",
    "dtgpt/fast/kernel.py": "import triton\n\n\n@triton.jit\ndef double(x):\n    return x * 2\n",
    "dtgpt/fast/sums.cu": "__global__ void sums() {}\n",
    "recipes/tiny.py": "STEPS = 3\n",
    "page.md": "Read me.\n",
    "tests/__init__.py": "",
    "tests/test_sums.py": """from dtgpt.sums import Counter, add

RIGHT = 2


def test_add():
    assert add(1, 1) == RIGHT
""",
    "tests/test_user.py": "import dtgpt.user\n",
    "tests/test_fast.py": "import dtgpt.fast.launch\nfrom tests.support import bodies\n",
    "tests/fast/test_near.py": "",
    "tests/support/bodies.py": "LIMIT = 1\n\n\ndef end():\n    return LIMIT\n",
    "tests/test_walk.py": "",
}
USED = {
    "dtgpt/sums.py:add": {"tests/test_sums.py::test_add"},
    "dtgpt/sums.py:limit": {"tests/test_sums.py::test_limit"},
    "dtgpt/sums.py:Counter.count": {"tests/test_sums.py::test_count"},
    "dtgpt/sums.py:built": {"import dtgpt/sums.py"},
    "dtgpt/sums.py:made": {"tests/test_sums.py::test_made"},
    # by the first of two tests in a process, since the result is kept
    **{f"dtgpt/sums.py:{name}": {"tests/test_sums.py::test_first"} for name in ("half", "quarter", "kept")},
    "dtgpt/sums.py:asks": {"tests/test_sums.py::test_first", "tests/test_sums.py::test_later"},
    "dtgpt/user.py:look": {"tests/test_user.py::test_look"},
    "dtgpt/again.py:again": {"tests/test_user.py::test_again"},
    "dtgpt/fast/launch.py:launch": {"tests/test_fast.py::test_launch"},
    "tests/fast/test_near.py:test_near": {"tests/fast/test_near.py::test_near"},
    "read recipes/tiny.py": {"tests/test_user.py::test_recipe"},
    "read page.md": {"import tests/test_sums.py"},
    "list recipes": {"tests/test_user.py::test_all_recipes"},
    "read dtgpt/sums.py": {"tests/test_walk.py::test_walk"},
    "unseen": {"tests/test_user.py::test_program"},
}
WALK = "test_walk"
ALL = {"test_add", "test_limit", "test_count", "test_made", "test_first", "test_later"}  # of tests/test_sums.py


def git(folder: Path, *words: str) -> str:
    options = ["-c", "user.name=-", "-c", "user.email=-", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *options, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm-")
    return tmp_path


@pytest.fixture
def record(tree):
    tests = {test for found in USED.values() for test in found if "::" in test}
    seconds = {test: 0.1 if "near" in test else 1.0 for test in sorted(tests)}
    return Record(git(tree, "rev-parse", "HEAD"), seconds, USED)


def chosen(tree: Path, record: Record) -> set[str]:
    """Return the names of the recorded tests that are chosen, but for the one that reads sources, which always is."""
    choice = choose(tree, "", record)
    found = {test.partition("::")[2] for test in record.seconds if choice.reason(test)}
    assert WALK in found
    return found - {WALK, "test_program"}


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "file, old, new, tests",
    [
        ("dtgpt/sums.py", "return a + b", "return a - b", {"test_add"}),
        ("dtgpt/sums.py", "    return a + b", "    # why\n    return a  +  b", set()),
        ("dtgpt/sums.py", '"""Return the sum."""', '"""Return what both are together."""', set()),
        ("dtgpt/sums.py", "def add(", "def plus(", {"test_add"}),
        # a constant, in a default, in a table that another file takes, and in the body of a class of a third one
        ("dtgpt/sums.py", "LIMIT = 3", "LIMIT = 4", {"test_limit", "test_look"}),
        ("dtgpt/sums.py", "number=LIMIT", "number=5", {"test_limit"}),
        ("dtgpt/user.py", "import TABLE as OTHER", "import LIMIT as OTHER", {"test_look"}),
        ("dtgpt/again.py", "seen = look", "seen = None", {"test_again"}),
        ("dtgpt/sums.py", "start = 0", "start = 1", {"test_count"}),
        ("dtgpt/sums.py", "    def count", "    def __len__(self):\n        return 1\n\n    def count", {"test_count"}),
        # a function that ran when the module was imported, whoever imported it first
        ("dtgpt/sums.py", "return 1\n\n\nMADE", "return 2\n\n\nMADE", {"test_made"}),
        # functions with a cache, and what these call
        ("dtgpt/sums.py", "return quarter()", "return 1", {"test_first", "test_later"}),
        ("dtgpt/sums.py", "return 0.5", "return 0.6", {"test_first", "test_later"}),
        ("dtgpt/fast/kernel.py", "x * 2", "x + x", {"test_launch"}),
        ("dtgpt/fast/sums.cu", "sums()", "sums(int n)", {"test_launch"}),
        # an attribute, which other files look up: also the quick tests of the folder
        ("dtgpt/fast/launch.py", "def launch", "class Way:\n    kind = 1\n\n\ndef launch", {"test_near"}),
        # a process of a test that left no record
        ("tests/support/bodies.py", "return LIMIT", "return LIMIT + 1", {"test_launch"}),
        ("tests/support/bodies.py", "LIMIT = 1", "LIMIT = 2", {"test_launch"}),
        # read when the file of tests was imported
        ("page.md", "me", "it", ALL),
        ("recipes/tiny.py", "STEPS = 3", "STEPS = 4", {"test_recipe"}),
        ("tests/test_sums.py", "RIGHT = 2", "RIGHT = 1 + 1", ALL),
    ],
)
def test_what_executed_a_changed_function_or_uses_a_changed_name_is_chosen(tree, record, file, old, new, tests):
    text = (tree / file).read_text()
    assert text.count(old) == 1
    (tree / file).write_text(text.replace(old, new))
    assert chosen(tree, record) == tests
    git(tree, "checkout", "-qb", "mine")
    git(tree, "commit", "-qam-")
    assert chosen(tree, record) == tests  # against the main branch


def test_new_files_concern_those_that_list_their_folder_and_tests_that_no_record_knows(tree, record):
    (tree / "recipes" / "large.py").write_text("STEPS = 9\n")
    (tree / "tests" / "test_new.py").write_text("def test_new(): pass\n")
    assert chosen(tree, record) == {"test_all_recipes"}
    choice = choose(tree, "", record)
    assert choice.reason("tests/test_new.py::test_new") == "imports"
    assert choice.reason("tests/test_user.py::test_unknown") is None  # its imports reach no change


def test_a_file_that_was_moved_after_the_record_is_known_by_its_former_name(tree, record):
    git(tree, "mv", "dtgpt/sums.py", "dtgpt/totals.py")
    for file in ("dtgpt/user.py", "tests/test_sums.py"):
        path = tree / file
        path.write_text(path.read_text().replace("dtgpt.sums", "dtgpt.totals"))
    git(tree, "commit", "-qam-")
    path = tree / "dtgpt" / "totals.py"
    path.write_text(path.read_text().replace("a + b", "a - b"))
    assert chosen(tree, record) == {"test_add"}


def test_a_function_that_began_to_be_called_after_the_record_concerns_who_calls_it(tree, record):
    path = tree / "dtgpt" / "again.py"
    path.write_text(path.read_text().replace("    return Again", "    return Again, help_again()"))
    git(tree, "commit", "-qam-")
    with path.open("a") as file:
        file.write("\n\ndef help_again():\n    return 1\n")
    assert chosen(tree, record) == {"test_again"}


@pytest.mark.parametrize("commit", ["", "0" * 40])
def test_without_a_record_of_an_ancestor_imports_choose_and_it_is_said(tree, record, commit):
    (tree / "dtgpt" / "again.py").write_text("")
    choice = choose(tree, "", Record(commit, record.seconds, record.used) if commit else None)
    assert "record" in choice.lines[1] and "imports reach" in choice.lines[1] and len(choice.lines) == 3
    assert choice.reached == set()
    (tree / "recipes" / "tiny.py").write_text("")
    with (tree / "tests" / "test_walk.py").open("a") as file:
        file.write("FOLDER = 'recipes/tiny.py'\n")
    git(tree, "add", "tests")
    git(tree, "commit", "-qm-")
    assert choose(tree, "", None).reached == {"tests/test_walk.py"}  # which names the recipe
    (tree / "dtgpt" / "user.py").write_text("")
    git(tree, "checkout", "-q", "recipes")
    assert choose(tree, "", None).reached == {"tests/test_user.py"}


def test_a_record_is_stale_when_much_of_the_package_has_changed_since(tree, record):
    for name in ("sums", "user"):
        with (tree / "dtgpt" / f"{name}.py").open("a") as file:
            file.write("\n\ndef more():\n    return 1\n")
    git(tree, "commit", "-qam-")
    (tree / "dtgpt" / "again.py").write_text("")
    assert "the record is stale: 2 of 7 files" in choose(tree, "", record).lines[1]


def test_what_names_no_commit_is_refused(tree, record):
    with pytest.raises(NoCommit, match="--changed=tests/data names no commit; write paths before --changed"):
        choose(tree, "tests/data", record)


def test_a_record_keeps_its_content_and_takes_in_a_run_of_some_tests(tmp_path):
    old = Record("a", {"t::1": 1.0, "t::2": 2.0}, {"f": {"t::1", "t::2", "import x"}, "g": {"t::2"}})
    new = Record("b", {"t::2": 3.0}, {"h": {"t::2"}})
    both = old.merge(new, is_whole=False)
    assert both == Record("b", {"t::1": 1.0, "t::2": 3.0}, {"f": {"t::1", "import x"}, "h": {"t::2"}})
    assert old.merge(new, is_whole=True) == new
    both.save(tmp_path / "record")
    assert load_record(tmp_path / "record") == both
    (tmp_path / "record").write_bytes(b"<<<<<<< ours")
    assert load_record(tmp_path / "record") is None
