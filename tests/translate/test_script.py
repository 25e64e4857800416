"""Shell scripts are followed without being run: each construct, in small scripts of our own."""

from contextlib import suppress

import pytest

from dtgpt.translate.script import commands_of, readable
from dtgpt.util.errors import UserError

SCRIPTS = {
    "variables": ('A=1; B="x $A"; C=\'$A\'\nrun $A "$B" $B "$C" ${A}2', "run 1|x 1|x|1|$A|12"),
    "array": ("A=(--a 1 # first\n  # whole line\n  --b 'x y'\n)\nA+=(--c)\nrun ${A[@]}", "run --a|1|--b|x|y|--c"),
    "array in quotes": ("A=('x y' z)\nrun \"${A[@]}\" \"${A[*]}\" ${A[1]} ${#A[@]} $A", "run x y|z|x y z|z|2|x|y"),
    "array of switches": ('A=("--split 9,1" "--x $1")\nrun ${A[@]}', "run --split|9,1|--x|first"),
    "options in one variable": ('O=" \\\n --a 1 \\\n --b 2"\nrun $O --c', "run --a|1|--b|2|--c"),
    "defaults": ('run ${X:-a} ${1:-b} ${X:="c d"} ${1:+e} ${2:-"f g"}', "run a|first|c|d|e|f|g"),
    "parts of a value": ("F=/d/a.b.txt\nrun ${F##*/} ${F%.*} ${F#/d/} ${F%%.*}", "run a.b.txt|/d/a.b|a.b.txt|/d/a"),
    "arithmetic": ("N=2\nG=$((8*$N + N/4))\nrun $G $(( (G-1) % 5 ))", "run 16|0"),
    "continued lines": ("run a \\\n  b \\\n  c", "run a|b|c"),
    "a comment ends a continued command": ("run a \\\n  # b \\\nc", "run a"),
    "hash within a word": ("run a#b '#c'", "run a#b|#c"),
    "redirections": ("run a 2>&1 > log.txt < in.txt &>>x 2>/dev/null b | tee y", "run a|b"),
    "here-document": ("cat <<'EOF' > f\nrun wrong $(x\nEOF\nrun a", "run a"),
    "here-document with tabs": ("cat <<-END\n\trun wrong\n\tEND\nrun a", "run a"),
    "export": ("export A=1 B=2\nrun $A $B", "run 1|2"),
    "environment before the command": ("A=1 CUDA_X=2 run $A", "run 1"),
    "known condition": ('if [ "$1" == "first" ]; then A=1; else A=2; fi\nrun $A', "run 1"),
    "second condition": ("A=3\nif [[ $A -lt 2 ]]; then\n B=1\nelif [[ $A == 3* && -n $1 ]]; then\n B=2\nfi\nrun $B",
                         "run 2"),
    "negated, of a file": ('if [ ! -f "$1" ]; then B=1; else B=2; fi\nrun $B', "run 1"),
    "unknown equals nothing": ('if [ "$X" = "8" ]; then B=1; else B=2; fi\nrun $B', "run 2"),
    "conditions in a line": ("[ -z \"$1\" ] && A=1\n[[ $1 == f* ]] && B=2 || B=3\nrun $B", "run 2"),
    "nested conditions": ("if false; then\n if true; then A=1; fi\n A=2\nelse A=3\nfi\nrun $A", "run 3"),
    "missing arguments": ("if [ $# -lt 9 ]; then\n echo usage; exit 1\nfi\nrun a", "run a"),
    "case": ("case $1 in\n second) A=1;;\n fir*|x) A=2 ;;\n *) A=3\nesac\nrun $A", "run 2"),
    "loop until success": ("while true; do\n if [ -f done ]; then break; fi\n run a\n sleep 1\ndone", "run a"),
    "loop over words": ("for X in 1 2; do A=$X; done\nrun ${A}", "run 1"),
    "function": ("setup() {\n  A=5\n}\nsetup\nrun $A", "run 5"),
    "group": ("(cd x && run a)", "run a"),
    "shell in the command": ("C='run a $B'\nsrun -l --label sh -c \"$C 'x y'\"", "srun -l|--label|run|a|$B|x y"),
    "nested quotes": ('srun bash -c "\n run \\\n -a \'x*\' -p \\$N -q "v" \\\n"', "srun run|-a|x*|-p|$N|-q|v"),
    "placeholders": ("A=<Specify path>/x\nrun $A <PATH TO y> \"<PATH TO z>\"", "run $A|<PATH TO y>|<PATH TO z>"),
    "output of commands": ("D=$(hostname)-1\nE=`date +'%y'`\nrun $D ${E}x $(pwd)/z", "run $D|$Ex|./z"),
    "quotes within commands": ('D="$(dirname "$0")/x"\nrun "$D" "a$(b "c d")e"', 'run $D|a$(b "c d")e'),
    "all arguments": ("shift\nrun \"$@\" $#", "run second|1"),
    "windows line ends": ("A=1\r\nrun $A \\\r\n b\r\n", "run 1|b"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_construct_is_followed(name):
    script, wanted = SCRIPTS[name]
    found = commands_of(script, ["first"] if "second" not in wanted else ["first", "second"], {})
    commands = [[readable(word) for word in one.words] for one in found if "run" in one.words]
    assert commands, found
    assert f"{commands[0][0]} {'|'.join(commands[0][1:])}" == wanted


def test_the_user_gives_variables_in_place_of_the_scripts_own():
    (found,) = commands_of("A=<Specify path>\nrun $A $B", [], {"A": "mine", "B": "too"})
    assert found.words == ["run", "mine", "too"] and found.line == 2


def test_nothing_is_executed(tmp_path):
    mark = tmp_path / "mark"
    commands_of(
        f'touch {mark}; X=$(touch {mark}); `touch {mark}`; eval "touch {mark}"\nrun $((`touch {mark}`))', [], {}
    )
    assert not mark.exists()


@pytest.mark.parametrize(
    "script, told",
    [
        ('run "a', 'line 1: a quotation mark " does not close'),
        ("\nA=(a b", "the parenthesis of an array does not close"),
        ("run $(a", r"line 1: \( does not close"),
        ("fi", "line 1: 'fi' stands where no if"),
    ],
)
def test_a_script_that_cannot_be_read_is_one_sentence(script, told):
    with pytest.raises(UserError, match=told):
        commands_of(script, [], {})


@pytest.mark.parametrize(
    "text",
    [
        "((",
        "$((1/0))",
        "${",
        "a=(",
        "[[ a",
        "case",
        "f() {",
        "<<E",
        "A='sh -c \"$A\"'; $A",
        "A=xx$A$A$A",
        "$((9**9**9))",
        "`",
        "for",
    ],
)
def test_any_text_ends_with_an_answer(text):
    with suppress(UserError):
        commands_of(f"x {text}\n{text} y\n{text * 50}", [], {})
