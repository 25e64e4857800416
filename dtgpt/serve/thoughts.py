"""What an answer thinks, apart from what it says: text between <think> and </think>, as of Qwen3 and DeepSeek-R1."""

from dtgpt.inference.rules.stop_strings import overlap
from dtgpt.posttrain.chats.messages import THOUGHT_BEGIN, THOUGHT_END


def ends_within(text: str) -> bool:
    """Return whether the end of a text belongs to a thought."""
    return text.rfind(THOUGHT_BEGIN) > text.rfind(THOUGHT_END)


class Thoughts:
    """Splits the text of an answer as it arrives. `inside`: whether the prompt ends within a thought. Line ends around
    both tags belong to neither part, as in the templates of these models; a thought stands at the beginning alone."""

    def __init__(self, inside: bool):
        self._inside, self._decided = inside, inside
        self._strips = inside  # line ends at the beginning of the part
        self._held = ""  # what more text may change

    def take(self, text: str, last: bool) -> tuple[str, str]:
        """Return what new text adds to the thought, and to what is said. last: no more comes."""
        self._held += text
        if not self._decided:
            self._decide(last)
        thought = self._take_thought(last) if self._decided and self._inside else ""
        said = self._take_rest() if self._decided and not self._inside else ""
        return thought, said

    def _decide(self, last: bool) -> None:
        """See whether the answer begins with a thought."""
        begin = self._held.lstrip()
        if begin.startswith(THOUGHT_BEGIN):
            self._inside = self._decided = self._strips = True
            self._held = begin[len(THOUGHT_BEGIN) :]
        else:
            self._decided = last or not THOUGHT_BEGIN.startswith(begin)

    def _take_thought(self, last: bool) -> str:
        """Return the thought up to its end, or up to what may be the beginning of its end."""
        thought, end, rest = self._strip(self._held).partition(THOUGHT_END)
        if end:
            self._inside, self._held = False, rest
            found, self._strips = thought.rstrip("\n"), True
            return found
        whole = thought
        if not last:
            thought = whole[: len(whole) - overlap(whole, THOUGHT_END)]
        found = thought.rstrip("\n")
        self._held = "" if last else whole[len(found) :]
        self._strips = self._strips and not found
        return found

    def _take_rest(self) -> str:
        found, self._held = self._strip(self._held), ""
        self._strips = self._strips and not found
        return found

    def _strip(self, text: str) -> str:
        return text.lstrip("\n") if self._strips else text
