"""Words for the terminal."""

import pwd

import pytest

from dtgpt.cli import main
from dtgpt.data.dataset import default_cache
from dtgpt.util.console import counted, parameters, say, say_error
from dtgpt.util.errors import UserError


def test_counts_are_in_the_singular_or_the_plural():
    assert [counted(n, "step") for n in (0, 1, 2, 12345)] == ["0 steps", "1 step", "2 steps", "12,345 steps"]
    assert [counted(n, "process", "processes") for n in (1, 2)] == ["1 process", "2 processes"]
    told = [parameters(n) for n in (1, 13216, 999_999, 10**6, 124_439_808, 1_557_611_200, 175 * 10**9)]
    assert [t.removesuffix("parameters") for t in told[1:]] == [
        "13,216 ", "999,999 ", "1.0 M ", "124.4 M ", "1.56 B ", "175 B ",
    ]  # fmt: skip
    assert told[0] == "1 parameter"


def test_a_user_without_home_and_name_is_told_to_name_a_cache(monkeypatch, capsys, tmp_path):
    """As in a container whose user id is in no /etc/passwd."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "DTGPT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"no home folder is known.*HOME is not set.*set DTGPT_CACHE"):
        default_cache()
    monkeypatch.setenv("USER", "")  # which the command sets: undone after the test
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    import getpass

    assert end.value.code == 0 and getpass.getuser().startswith("uid")
    monkeypatch.setenv("DTGPT_CACHE", str(tmp_path))
    assert default_cache() == tmp_path


def test_a_name_in_a_message_does_not_command_the_terminal(capsys):
    name = "a\x1b]0;title\x07\x9b31m\r\u202etxt"
    shown = r"a\x1b]0;title\x07\x9b31m\r\u202etxt"
    say(f"{name}: read")
    say(f"{name}: odd", warning=True)
    say_error(f"\t{name}\nis wrong, caf\u00e9 \u200d")
    told = capsys.readouterr()
    assert told.out == f"{shown}: read\n"
    assert told.err == f"warning: {shown}: odd\n\t{shown}\nis wrong, caf\u00e9 \u200d\n"
