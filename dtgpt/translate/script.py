"""The commands that a shell script would run, with their words expanded. No command is run: its output, and variables
of the environment, are unknown, and stand as marks in the words."""

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dtgpt.translate.literals import evaluate
from dtgpt.translate.shell import MARK, PLACEHOLDER, Lexer, Token
from dtgpt.util.errors import UserError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
FROM_ENVIRONMENT = ("HOME", "USER")
NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
IN_BRACES = re.compile(r"(#|!)?([A-Za-z_]\w*|\d+|[@*#?])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
# What stands for one word of a script: greedy, and matched from the beginning alone, since to try all ways to read
# "<a><a>..." takes time that doubles with each.
FIELD = re.compile(rf"(?:{PLACEHOLDER.pattern}|{MARK.pattern}|\S)+")
WHOLE = re.compile(r"-?\d{1,18}")  # a number that is compared
LARGEST = 1 << 20  # characters of a value
STEPS = 1 << 22  # characters that are looked at or made, in all
TEXT = 1000  # steps of a text beside its characters
SHELLS = ("sh", "bash", "zsh", "dash")
RESERVED = {  # words that open, branch or close a compound command: of which kind, and whether they close it
    "if": ("if", False),
    "then": ("if", False),
    "elif": ("if", False),
    "else": ("if", False),
    "fi": ("if", True),
    "while": ("loop", False),
    "until": ("loop", False),
    "for": ("loop", False),
    "do": ("loop", False),
    "done": ("loop", True),
    "case": ("case", False),
    "in": ("case", False),
    "esac": ("case", True),
    "{": ("group", False),
    "}": ("group", True),
}
COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
Value = str | list[str]


def unknown(name: str) -> str:
    """Return the mark of an unknown value."""
    return f"\ue000{name}\ue001"


def unknown_names(text: str) -> list[str]:
    """Return the names of the unknown values in a word."""
    return MARK.findall(text)


def readable(text: str) -> str:
    """Return a word with its marks as they would stand in a script: $NAME or $(command)."""
    return MARK.sub(lambda match: f"${match[1]}", text)


@dataclass(frozen=True)
class Found:
    """A command of a script."""

    words: list[str]
    line: int


@dataclass
class Frame:
    """A compound command that is open: `if`, `loop`, `case` or `group`."""

    kind: str
    line: int
    active: bool = True  # whether what stands here is followed
    taken: bool = False  # whether a branch was
    value: str = ""  # of a case
    patterns: list[str] | None = None  # of a case, while they are read


class Script:
    """Follows a script: assignments, and conditions that are known. Loops are followed once, functions where they are
    defined, and `exit` is not.

    arguments: $1, $2 ...; given: variables whose value the user gives, in place of the script's own.
    """

    def __init__(self, arguments: Sequence[str], given: Mapping[str, str]):
        self.arguments, self.given = list(arguments), given
        self.variables: dict[str, Value] = {"PWD": "."}
        self.variables |= {name: os.environ[name] for name in FROM_ENVIRONMENT if name in os.environ} | dict(given)
        self.found: list[Found] = []
        self.inner = ""  # the text of `sh -c` that is followed
        self.left = STEPS

    def run(self, text: str, line: int = 1, prefix: Sequence[str] = ()) -> None:
        """Follow a text. prefix: words before those of each command, as of srun. Raises UserError with the line that
        cannot be read."""
        self.spend(len(text) + TEXT)
        frames: list[Frame] = []
        words: list[Token] = []
        succeeded, joined_by = True, ";"
        for token in [*Lexer(text, line).run(), Token(";", line, operator=True)]:
            case = frames[-1] if frames and frames[-1].patterns is not None else None
            if case is not None and token.text != "esac":
                self._pattern(case, token)
            elif not token.operator and (not words or words[0].text in ("case", "function")) and token.text in RESERVED:
                self._reserved(frames, token, words, succeeded)
                joined_by = ";"
            elif not token.operator:
                words.append(token)
            elif token.text == "(":
                if not words:  # else that of `name() {`
                    frames.append(Frame("group", token.line))
                words = []
            else:
                left_out = (joined_by == "&&" and not succeeded) or (joined_by == "||" and succeeded)
                if words and not left_out and all(frame.active for frame in frames):
                    succeeded = self._simple(words, prefix)
                words, joined_by = [], token.text
                if token.text == ")" and frames and frames[-1].kind == "group":
                    frames.pop()
                if token.text.startswith(";;") and frames and frames[-1].kind == "case":
                    frames[-1].patterns = []

    def spend(self, steps: int) -> None:
        """Take steps from those that are left. Raises UserError where there are none: variables that double, and texts
        that call others, soon take all time and memory."""
        self.left -= steps + 1
        if self.left < 0:
            raise UserError("following the script takes too many steps; give the command itself after --")

    def _reserved(self, frames: list[Frame], token: Token, words: list[Token], succeeded: bool) -> None:
        """Open, branch or close a compound command. succeeded: its condition, or the command before it."""
        kind, ending = RESERVED[token.text]
        if token.text in ("for", "case") or (words and words[0].text == "case" and token.text != "in"):
            words.append(token)
        if token.text in ("if", "while", "until", "for", "case", "{"):
            frames.append(Frame(kind, token.line))
            if token.text == "{":
                words.clear()
            return
        if not frames or frames[-1].kind != kind:
            raise UserError(
                f"line {token.line}: {token.text!r} stands where no {kind} is open; give the command after --"
            )
        frame = frames[-1]
        if ending:
            frames.pop()
        elif token.text == "in":
            frame.value = self.one(words[1].text) if words[1:] else ""
            frame.patterns, frame.active = [], False
            words.clear()
        elif token.text == "then":
            frame.active = frame.active and succeeded
            frame.taken = frame.taken or frame.active
        elif token.text in ("elif", "else"):
            frame.active = not frame.taken

    def _pattern(self, case: Frame, token: Token) -> None:
        """Read a word of the patterns before the commands of a case; the parenthesis ends them."""
        if not token.operator:
            case.patterns = [*(case.patterns or []), token.text]
        elif token.text == ")":
            matches = any(fnmatchcase(case.value, self.one(pattern)) for pattern in case.patterns or [])
            case.active, case.taken = matches and not case.taken, case.taken or matches
            case.patterns = None

    def _simple(self, tokens: list[Token], prefix: Sequence[str]) -> bool:
        """Follow a simple command; return whether it succeeds, as far as that is known: a program does."""
        if tokens[0].text == "!":
            return not self._simple(tokens[1:], prefix) if tokens[1:] else False
        while tokens and (match := ASSIGNMENT.fullmatch(tokens[0].text)):
            self._assign_token(tokens.pop(0), match)
        if not tokens:
            return True
        name = self.one(tokens[0].text)
        if name in ("[", "[[", "test"):
            words = [self.one(token.text) for token in tokens[1:]]
            return holds([word for word in words if word not in ("]", "]]")], patterns=name == "[[")
        if name in DECLARATIONS:
            for token in tokens[1:]:
                if match := ASSIGNMENT.fullmatch(token.text):
                    self._assign_token(token, match)
            return True
        words = [word for token in tokens for word in self.expand(token.text)]
        if name == "for" and len(words) > 3:
            self._assign(words[1], words[3])
        elif name == "shift":
            del self.arguments[: int(words[1]) if words[1:] and is_count(words[1]) else 1]
        elif name not in ("true", "false", ":", "for"):
            self._command([*prefix, *words], tokens[0].line)
        return name != "false"

    def _command(self, words: list[str], line: int) -> None:
        """Note a command, or those of `sh -c TEXT` and `eval TEXT` in its place."""
        if words and words[0] == "eval":
            self._text(" ".join(words[1:]), line, "eval", ())
            return
        for at, word in enumerate(words[:-2]):
            if os.path.basename(word) in SHELLS and re.fullmatch(r"-[a-z]*c", words[at + 1]):
                self._text(words[at + 2], line, f"{word} -c", words[:at])
                return
        if words:
            self.found.append(Found(words, line))

    def _text(self, text: str, line: int, by: str, prefix: Sequence[str]) -> None:
        """Follow a text that a command runs."""
        if len(text) >= len(self.inner) > 0:  # it calls itself
            raise UserError(f"line {line}: {by} has no end; give the command itself after --")
        outer, self.inner = self.inner, text
        self.run(text, line, prefix)
        self.inner = outer

    def _assign_token(self, token: Token, match: re.Match) -> None:
        value: Value
        if token.array is not None:
            value = [one for word in token.array for one in self.expand(word)]
        else:
            (value,) = self.expand(match[3], split=False)
            found = FIELD.match(value)
            one = found is not None and found.end() == len(value)  # else several words, of which others are known
            if one and ("\ue000(" in value or PLACEHOLDER.match(value)):
                value = unknown(match[1])  # by whose name the user can give it
        self._assign(match[1], value, append=bool(match[2]))

    def _assign(self, name: str, value: Value, append: bool = False) -> None:
        if name in self.given:
            return
        self.spend(len(value))
        if sum(map(len, value)) > LARGEST:
            raise UserError(f"the value of {name} is too large; give the command itself after --")
        if append:
            former = self.variables.get(name, [] if isinstance(value, list) else "")
            self.spend(len(former))
            if isinstance(former, list):
                value = [*former, *([value] if isinstance(value, str) else value)]
            else:
                value = f"{former}{value}" if isinstance(value, str) else [former, *value]
        self.variables[name] = value

    def one(self, raw: str) -> str:
        """Return a word expanded to one field."""
        return self.expand(raw, split=False)[0]

    def expand(self, raw: str, split: bool = True) -> list[str]:
        """Return the fields that a word of the script becomes. split: whether values outside quotes are split."""
        fields = WordFields(split, self.spend)
        self._expand_into(fields, raw, quoted=False)
        return fields.done()

    def _expand_into(self, fields: "WordFields", raw: str, quoted: bool) -> None:
        at = 0
        while at < len(raw):
            here = raw[at]
            if mark := MARK.match(raw, at):
                fields.add(mark[0])
                at = mark.end()
            elif here == "\\":
                special = not quoted or raw[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n")
                fields.add((raw[at + 1 : at + 2] if special else raw[at : at + 2]).replace("\n", ""))
                at += 2
            elif here == "`" or (here in "\"'" and not quoted):
                end = _end_of(raw, at)
                inner = raw[at + 1 : end]
                fields.add({"'": inner, "`": self._substituted(inner)}.get(here, ""))
                if here == '"':
                    self._expand_into(fields, inner, quoted=True)
                at = end + 1
            elif here == "$":
                at = self._dollar(fields, raw, at + 1, quoted)
            else:
                fields.add(here)
                at += 1

    def _dollar(self, fields: "WordFields", raw: str, at: int, quoted: bool) -> int:
        """Expand what follows a $; return where it ends."""
        if raw.startswith("(", at):
            end = _end_of(raw, at)
            arithmetic = raw.startswith("((", at)
            fields.add(self._arithmetic(raw[at + 2 : end - 1]) if arithmetic else self._substituted(raw[at + 1 : end]))
            return end + 1
        if raw.startswith("{", at):
            end = _end_of(raw, at)
            self._add(fields, self._braces(raw[at + 1 : end]), quoted, "[@]" in raw[at:end] or raw[at:end] == "{@")
            return end + 1
        if match := NAME.match(raw, at):
            name = match[0][0] if match[0].isdecimal() else match[0]
            value = self._value(name)
            if isinstance(value, list) and name not in ("@", "*"):
                value = value[0] if value else ""
            self._add(fields, value, quoted, name == "@")
            return at + len(name)
        fields.add("$")
        return at

    def _add(self, fields: "WordFields", value: Value, quoted: bool, apart: bool) -> None:
        """Add a value. apart: whether the elements of an array stay words of their own within quotes."""
        if isinstance(value, str):
            fields.add(value) if quoted else fields.add_split(value)
        elif quoted and apart:
            for number, element in enumerate(value):
                if number:
                    fields.end()
                fields.add(element)
        else:
            fields.add(" ".join(value)) if quoted else fields.add_split(" ".join(value))

    def _value(self, name: str) -> Value:
        if name in ("@", "*"):
            return self.arguments
        if name == "#":
            return str(len(self.arguments))
        if name == "0":
            return "script"
        if name.isdecimal():
            known = is_count(name) and int(name) <= len(self.arguments)
            return self.arguments[int(name) - 1] if known else unknown(name)
        if name in "?$!-":
            return "0"
        return self.variables.get(name, unknown(name))

    def _braces(self, text: str) -> Value:
        """Return the value of ${TEXT}."""
        match = IN_BRACES.fullmatch(text)
        if match is None or match[1] == "!":  # ${!NAME}
            return unknown(f"{{{text}}}")
        length, name, index, rest = match.groups()
        value = self._value(name)
        if index is not None and index not in ("@", "*"):
            elements = [value] if isinstance(value, str) else value
            number = self._arithmetic(index)
            value = elements[int(number)] if is_count(number) and int(number) < len(elements) else unknown(name)
        elif index is None and isinstance(value, list) and name not in ("@", "*"):
            value = value[0] if value else ""
        if length:
            return str(len(value))
        return self._modified(name, value, rest) if rest else value

    def _modified(self, name: str, value: Value, rest: str) -> Value:
        """Return a value after an operator of ${NAME...}: a default, or what is cut from it."""
        missing = value == unknown(name)
        if match := re.match(r":?([-=+?])", rest):
            empty = missing or (rest[0] == ":" and not value)
            if match[1] == "+":
                return "" if empty else self.one(rest[match.end() :])
            if match[1] == "?" or not empty:
                return value
            return self.one(f'"{rest[match.end() :]}"' if '"' not in rest else rest[match.end() :])
        match = re.match(r"(%%?|##?)", rest)
        if match and isinstance(value, str) and not missing:
            pattern, places = self.one(rest[match.end() :]), range(len(value) + 1)
            self.spend(len(value) ** 2)
            if match[1][0] == "%":
                found = [at for at in places if fnmatchcase(value[at:], pattern)]
                return value[: (max(found) if match[1] == "%" else min(found))] if found else value
            found = [at for at in places if fnmatchcase(value[:at], pattern)]
            return value[(min(found) if match[1] == "#" else max(found)) :] if found else value
        return unknown(name)

    def _substituted(self, command: str) -> str:
        """Return what $(command) is: nothing is run, and only `pwd` and sums by `expr` are known."""
        name, _, rest = command.strip().partition(" ")
        if name == "expr" and not unknown_names(known := self._arithmetic(re.sub(r"[\\\"']", "", rest))):
            return known
        return "." if command.strip() == "pwd" else unknown(f"({command.strip()})")

    def _arithmetic(self, text: str) -> str:
        known = re.sub(r"\$\{[^}]*\}|\$?[A-Za-z_]\w*|\$\d", lambda match: self._number(match[0]), text)
        if names := unknown_names(known):
            return unknown(names[0])
        try:
            return str(int(evaluate(ast.parse(known.strip().replace("/", "//"), mode="eval"), {})))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return unknown(f"(({text.strip()}))")

    def _number(self, word: str) -> str:
        value = self.one(word if word.startswith("$") else f"${word}")
        return value.strip() or "0"


class WordFields:
    """The words that a word with variables becomes."""

    def __init__(self, split: bool, spend: Callable[[int], None]):
        """spend: called with the number of characters that are added."""
        self.split, self.spend = split, spend
        self.finished: list[str] = []
        self.current: list[str] | None = None

    def add(self, text: str) -> None:
        self.spend(len(text))
        if self.current is None:
            self.current = []
        self.current.append(text)

    def add_split(self, text: str) -> None:
        """Add a value that stands outside quotes: its spaces part words."""
        if not self.split:
            self.add(text)
            return
        pieces = [match[0] for match in FIELD.finditer(text)]
        if pieces and text[:1].isspace():
            self.end()
        for number, piece in enumerate(pieces):
            if number:
                self.end()
            self.add(piece)
        if text[-1:].isspace():
            self.end()

    def end(self) -> None:
        if self.current is not None:
            self.finished.append("".join(self.current))
        self.current = None

    def done(self) -> list[str]:
        self.end()
        return self.finished if self.split else ["".join(self.finished)]


def is_count(text: str) -> bool:
    """Return whether a text is a number that counts something."""
    return text.isdecimal() and len(text) < 19


def holds(words: list[str], patterns: bool) -> bool:
    """Return whether the condition of [ ... ] holds, or of [[ ... ]], where the right side of == is a pattern. What is
    unknown is a text that is not empty and equals no other; nothing is asked of files, which do not exist."""
    for separators, combine in ((("||", "-o"), any), (("&&", "-a"), all)):
        parts = list(_parted(words, separators))
        if len(parts) > 1:
            return combine(holds(part, patterns) for part in parts)
    match words:
        case ["!", *rest]:
            return not holds(rest, patterns)
        case ["(", *rest, ")"]:
            return holds(rest, patterns)
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, "=" | "==" | "!=" as sign, right]:
            return (fnmatchcase(left, right) if patterns else left == right) == (sign != "!=")
        case [left, sign, right] if sign in COMPARED and all(map(WHOLE.fullmatch, (left, right))):
            return COMPARED[sign](int(left), int(right))
    return False


def _parted(words: list[str], separators: tuple[str, ...]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in separators:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _end_of(raw: str, begin: int) -> int:
    """Return where the quotation or parenthesis that begins there ends."""
    lexer = Lexer(raw)
    lexer.at = begin
    lexer.balanced() if raw[begin] in "({" else lexer.quoted(raw[begin])
    return lexer.at - 1


def commands_of(text: str, arguments: Sequence[str], given: Mapping[str, str]) -> list[Found]:
    """Return the commands of a script in their order. Raises UserError with the line that cannot be read."""
    script = Script(arguments, given)
    try:
        script.run(text.replace("\r\n", "\n"))
    except RecursionError:
        raise UserError("the script is nested too deeply; give the command itself after --") from None
    return script.found
