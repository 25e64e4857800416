"""Counters of a server, and their text for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ROUND_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)


class Counter:
    """A number that only grows, for each set of label values."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()):
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, *labels: str) -> None:
        """Add to the number of these label values, in the order of the labels' names."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def lines(self) -> Iterator[str]:
        """Yield the lines of Prometheus' text format."""
        yield from _head(self._name, self._text, "counter")
        for labels, value in sorted(self._values.items()):
            yield f"{self._name}{_labels(zip(self._labels, labels, strict=True))} {value}"


class Histogram:
    """How many values were at most each of some bounds."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]):
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterator[str]:
        """Yield the lines of Prometheus' text format."""
        yield from _head(self._name, self._text, "histogram")
        below = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            below += count
            yield f'{self._name}_bucket{{le="{bound}"}} {below}'
        yield f"{self._name}_sum {self._sum}"
        yield f"{self._name}_count {below}"


class Metrics:
    """All that a server counts."""

    def __init__(self) -> None:
        self.requests = Counter("dtgpt_requests_total", "Requests by path and status.", ("path", "code"))
        self.prompt_tokens = Counter("dtgpt_prompt_tokens_total", "Tokens of accepted prompts.")
        self.new_tokens = Counter("dtgpt_new_tokens_total", "Tokens generated, counted when a request ends.")
        self.first_token = Histogram("dtgpt_first_token_seconds", "Seconds from request to first token.", SECONDS)
        self.request_seconds = Histogram("dtgpt_request_seconds", "Seconds from request to end of answer.", SECONDS)
        self.round_seconds = Histogram("dtgpt_round_seconds", "Seconds of a round of the engine.", ROUND_SECONDS)

    def text(self, gauges: Mapping[str, tuple[str, float | Mapping[str, float]]]) -> str:
        """Return all counters and the `gauges` (description and value, or values by client, by name) in Prometheus'
        text format."""
        lines = [line for metric in vars(self).values() for line in metric.lines()]
        for name, (description, value) in gauges.items():
            lines += _head(name, description, "gauge")
            if isinstance(value, Mapping):
                lines += [f"{name}{_labels(iter([('client', key)]))} {number}" for key, number in value.items()]
            else:
                lines.append(f"{name} {value}")
        return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(pairs: Iterator[tuple[str, str]] | zip) -> str:
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{{{inner}}}" if inner else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
