"""Scripts that would take all time or memory, or write to the terminal: each ends soon, in one sentence."""

import os
import time

import pytest

from dtgpt.cli import main
from dtgpt.translate.options import read_options
from dtgpt.translate.script import commands_of
from dtgpt.util.console import visible
from dtgpt.util.errors import UserError

pytestmark = pytest.mark.slow(12)

COMMAND = "torchrun pretrain_gpt.py --num-layers 2"
NONE = "no command of Megatron-LM, nanoGPT or llm.c was found"
STEPS, NESTED = "too many steps; give the command itself", "nested too deeply; give the command itself"
DOUBLE = 'A=("${A[@]}" "${A[@]}")\n'


def double_shells(depth):
    """Return a script whose last text calls the one before it twice, and so on."""
    texts = "".join(f'T{n}=\'sh -c "$T{n - 1}"; sh -c "$T{n - 1}"; {"x" * n}\'\n' for n in range(1, depth))
    return f'T0=ls\n{texts}sh -c "$T{depth - 1}"\n'


SCRIPTS = {
    "elements": ("A=(a)\n" + DOUBLE * 40, f"the value of A is too large|{STEPS}"),
    "empty elements": ("A=('' '')\n" + DOUBLE * 40, STEPS),
    "appended": ("A=('' '')\n" + 'A+=("${A[@]}")\n' * 40, STEPS),
    "one word": (f"X={'x' * 100_000}\nY={'$X' * 100_000}\n", STEPS),
    "text": ("X=xx\n" + "X=$X$X\n" * 40, "the value of X is too large|" + STEPS),
    "patterns": (f"X={'ab' * 20_000}\n" + "Y=${X%%*a*a*a*c}\n" * 1000, STEPS),
    "shells": (double_shells(60), STEPS),
    "defaults": ("X=" + "${a:-" * 5000 + "}" * 5000, NESTED),
    "quotes": ("X=" + '"$(' * 5000 + ')"' * 5000, NESTED),
    "parentheses": ("X=$((" + "(" * 5000 + "1" + ")" * 5000 + "))", "no command|" + NESTED),
    "signs": ("X=$((" + "-" * 50_000 + "1))", "no command|" + NESTED),
    "open": ("((" * 5000, "does not close"),
    "shifts": (
        f"shift {'9' * 4400}\nX=${{{'9' * 4400}}}\nY=${{A[{'9' * 4400}]}}\n[ {'9' * 4400} -gt 1 ]",
        "no command",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_in_one_sentence(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, words = SCRIPTS[name]
    (tmp_path / "a.sh").write_text(text)
    began = time.process_time()
    with pytest.raises(SystemExit) as ended:
        main(["translate", "a.sh"])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and any(each in told for each in words.split("|")), told
    assert len(told.splitlines()) == 1 and len(told) < 500
    assert time.process_time() - began < 30 and not os.path.exists("my_recipe.py")


def test_steps_suffice_for_a_long_script():
    lines = "".join(f'OPTIONS="$OPTIONS --option-{n} {n}"\n' for n in range(300))
    (found,) = commands_of(f"OPTIONS=\n{lines}python train.py $OPTIONS\n", [], {})
    assert len(found.words) == 602


def test_here_documents_and_options_take_time_as_their_number(tmp_path):
    began = time.process_time()
    assert commands_of("cat <<EOF\n" + "\n" * 900_000 + "EOF\nls\n", [], {})[-1].words == ["ls"]
    assert len(read_options(["--a", *["1"] * 300_000])[1]["a"].value) == 599_999
    assert time.process_time() - began < 20


@pytest.mark.parametrize(("words", "told"), [
    (["/dev/zero"], "/dev/zero cannot be read (not a regular file)"),
    (["pipe"], "pipe cannot be read (not a regular file)"), (["."], ". cannot be read (not a regular file)"),
    (["large.sh"], "large.sh cannot be read (it has more than 1048576 bytes)"),
    (["--", "python", "train.py", "/dev/zero"], "/dev/zero: not a regular file"),
    (["--", "python", "train.py", "pipe"], "pipe: not a regular file"), (["deep.py"], "nested too deeply"),
    (["signs.py"], "nested too deeply"),
    (["--", *COMMAND.split(), "--seed", "9" * 4400], "99999999999999999999... is a number of 4,400 digits"),
    (["--", "torchrun", f"--nnodes={'9' * 4400}", "pretrain_gpt.py"], "is a number of 4,400 digits"),
    (["digits.sh"], "is a number of 4,400 digits"),
    (["--", *COMMAND.split(), *["a"] * 30_000], "the command has 30,004 words, of which 20,000 are read")
])  # fmt: skip
def test_a_file_or_a_command_that_is_none_is_told(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    files = {
        "large.sh": " " * (1 << 20) + " ", "deep.py": "a = " + "1 + " * 30_000 + "1", "signs.py": "a = " + "-" * 90_000,
        "digits.sh": f"#SBATCH --nodes={'9' * 4400}\n{COMMAND} --seed ${{{'9' * 4400}}}\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["translate", *words])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and told in said and len(said.splitlines()) == 1, said


def test_no_escape_of_a_script_reaches_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    escape = "\x1b]0;title\x07\x1b[2J\u202e"
    (tmp_path / "a.sh").write_text(f"{COMMAND} --{escape} 1 --tensorboard-dir '{escape}' --data-path '{escape}'\n")
    for words in (["a.sh"], ["a.sh", "--nth", "7"], [f"{escape}.sh"], ["--", f"python{escape}", "x"]):
        with pytest.raises(SystemExit):
            main(["translate", *words])
    said = "".join(capsys.readouterr())
    assert "\\x1b[2J\\u202e" in said and not set("\x1b\x07\u202e") & set(said)


def test_visible_texts_keep_lines_tabs_and_letters():
    assert visible("a\tß\n日本 🎈\u00a0") == "a\tß\n日本 🎈\u00a0"
    assert visible("\x1b[0m\r\x9b\u202e") == "\\x1b[0m\\r\\x9b\\u202e"


def test_a_variable_that_calls_itself_is_told():
    with pytest.raises(UserError, match=r"has no end|too many steps"):
        commands_of('X=\'sh -c "$X"\'\nsh -c "$X"\n', [], {})
