"""The words and operators of shell scripts. Nothing is expanded here; `dtgpt.translate.script` does that."""

import re
from dataclasses import dataclass

from dtgpt.util.errors import UserError

SPACE = " \t\r"
ENDS_WORD = f"{SPACE}\n;&|()<>"
PLACEHOLDER = re.compile(r"<[A-Za-z](?:[^<>|;&\n$]*[^<>|;&\n$\s])?>")  # <Specify path>, which a shell cannot read
MARK = re.compile("\ue000([^\ue001]*)\ue001")  # around the name of what is unknown, in a text that was expanded
ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=$")
OPERATOR = re.compile(r";;&?|&&|\|\||\|&|[;&|()\n]")
REDIRECTION = re.compile(r"&?(?:<<<|<<-?|>>|<>|[<>])[&|]?")
OPENING = {"if", "then", "elif", "else", "while", "until", "for", "do", "case", "{", "!"}  # a command may follow
PAIRS = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Token:
    """A word as it stands in the script, with its quotes; an operator; or an array assignment, with its words."""

    text: str
    line: int
    operator: bool = False
    array: tuple[str, ...] | None = None  # words of NAME=(...)


class Lexer:
    """Splits a text into tokens. Comments, redirections and here-documents are left out."""

    def __init__(self, text: str, first_line: int = 1):
        self.text, self.at, self.line = text, 0, first_line
        self.tokens: list[Token] = []
        self.documents: list[str] = []  # ends of here-documents that begin on the next line
        self.tests = False  # within [[ ]], where && and < are words

    def run(self) -> list[Token]:
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in SPACE or self.text.startswith("\\\n", self.at):
                self.line += here == "\\"
                self.at += 2 if here == "\\" else 1
            elif here == "#":
                self._skip_line()
            elif match := self._redirection():
                self._skip_redirection(match[0])
            elif self.text.startswith("((", self.at) and self._begins_command():
                self.tokens.append(Token(self.balanced(), self.line))
            elif match := OPERATOR.match(self.text, self.at):
                self._take_operator(match[0])
            else:
                self._take_word()
        return self.tokens

    def _redirection(self) -> re.Match | None:
        return None if self.tests or PLACEHOLDER.match(self.text, self.at) else REDIRECTION.match(self.text, self.at)

    def _begins_command(self) -> bool:
        return not self.tokens or self.tokens[-1].operator or self.tokens[-1].text in OPENING

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _skip_redirection(self, operator: str) -> None:
        touches = self.at > 0 and self.text[self.at - 1].isdigit()
        if touches and self.tokens and self.tokens[-1].text.isdecimal():  # the 2 of 2>&1
            self.tokens.pop()
        self.at += len(operator)
        while self.at < len(self.text) and self.text[self.at] in SPACE:
            self.at += 1
        if self.text.startswith("(", self.at):  # <(command)
            self.balanced()
            return
        word = self._word()
        if operator in ("<<", "<<-"):
            self.documents.append(re.sub(r"[\"'\\]", "", word))

    def _take_operator(self, operator: str) -> None:
        last = self.tokens[-1] if self.tokens else None
        match = ARRAY.fullmatch(last.text) if last and operator == "(" and not last.operator else None
        if match and self.text[self.at - 1] == "=":
            name = self.tokens.pop()
            self.at += 1
            self.tokens.append(Token(name.text, name.line, array=self._array()))
            return
        self.at += len(operator)
        self.tokens.append(Token(operator.replace("\n", ";"), self.line, operator=not self.tests))
        if operator == "\n":
            self.line += 1
            for end in self.documents:
                self._skip_document(end)
            self.documents.clear()

    def _array(self) -> tuple[str, ...]:
        """Return the words up to the closing parenthesis, among which comments and lines may stand."""
        words: list[str] = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == ")":
                self.at += 1
                return tuple(words)
            if here == "#":
                self._skip_line()
            elif here in SPACE + "\n\\":
                self.line += here == "\n"
                self.at += 1
            elif here in "<>;&|(" and not PLACEHOLDER.match(self.text, self.at):
                break
            else:
                words.append(self._word())
        raise self._cannot("the parenthesis of an array does not close")

    def _skip_document(self, end: str) -> None:
        while self.at < len(self.text):
            stop = self.text.find("\n", self.at)
            line = self.text[self.at : stop if stop >= 0 else None]
            self.at += len(line) + 1
            self.line += 1
            if line.lstrip("\t").rstrip("\r") == end:
                return

    def _take_word(self) -> None:
        line, word = self.line, self._word()
        if word in ("[[", "]]"):
            self.tests = word == "[["
        self.tokens.append(Token(word, line))

    def _word(self) -> str:
        """Return the word that begins here, with its quotes."""
        found = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if match := MARK.match(self.text, self.at):
                self.at = match.end()
                found.append(match[0])
            elif here == "\\":
                piece = self.text[self.at : self.at + 2]
                self.at += 2
                self.line += piece == "\\\n"
                found.append("" if piece == "\\\n" else piece)
            elif here in "\"'`":
                found.append(self.quoted(here))
            elif here == "$" and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
                self.at += 1
                found.append(f"${self.balanced()}")
            elif match := PLACEHOLDER.match(self.text, self.at):
                self.at = match.end()
                found.append(match[0])
            elif here in ENDS_WORD and not (self.tests and here in "<>&|()"):
                break
            else:
                self.at += 1
                found.append(here)
        return "".join(found)

    def quoted(self, quote: str) -> str:
        """Return the text from a quotation mark to the one that closes it."""
        begin, line = self.at, self.line
        self.at += 1
        while self.at < len(self.text):
            here = self.text[self.at]
            self.line += here == "\n"
            if match := MARK.match(self.text, self.at):
                self.at = match.end()
                continue
            if here == quote:
                self.at += 1
                return self.text[begin : self.at]
            if here == "\\" and quote != "'":
                self.line += self.text[self.at + 1 : self.at + 2] == "\n"
                self.at += 1
            if here == "$" and quote == '"' and self.text[self.at + 1 : self.at + 2] in ("(", "{"):
                self.at += 1
                self.balanced()
            else:
                self.at += 1
        self.line = line
        raise self._cannot(f"a quotation mark {quote} does not close")

    def balanced(self) -> str:
        """Return the text from an opening to its closing parenthesis or brace."""
        begin, line, opening = self.at, self.line, self.text[self.at]
        depth = 0
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in "\"'`":
                self.quoted(here)
                continue
            self.line += here == "\n"
            self.at += 2 if here == "\\" else 1
            depth += (here == opening) - (here == PAIRS[opening])
            if not depth:
                return self.text[begin : self.at]
        self.line = line
        raise self._cannot(f"{opening} does not close")

    def _cannot(self, what: str) -> UserError:
        return UserError(f"line {self.line}: {what}; correct the script, or give the command itself after --")
