"""Models of dtgpt in lm-evaluation-harness (extra `eval`): its tasks, prompts, few-shot examples and metrics.

What a model is asked for follows the harness's own `hf` back end: which tokens are context and which are scored, how
long documents are cut into windows, and where a generated text ends.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar
from unittest.mock import patch

import lm_eval.models  # noqa: F401  # the harness's own models, which are no longer found once another is registered
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from dtgpt.data.library_tokenizers.export import first_token
from dtgpt.evaluation.batches import fitted
from dtgpt.evaluation.harness_options import Wanted, read_generation
from dtgpt.evaluation.shared_model import SharedModel, open_shared
from dtgpt.inference.options import read_options
from dtgpt.inference.request import PromptJob
from dtgpt.posttrain.chats.messages import ARGUMENTS, arguments_of_words, read_messages
from dtgpt.posttrain.chats.prompts import ChatPrompts
from dtgpt.posttrain.chats.template import NONE
from dtgpt.util.console import counted, say
from dtgpt.util.errors import UserError, shown_name

NAME = "dtgpt"  # of the model in the harness


@register_model(NAME)
class HarnessModel(TemplateLM):
    """A model as the harness asks for it, on rank 0. The harness makes it of `--model dtgpt` and `--model_args`, which
    are the arguments of `open_shared`."""

    opened: ClassVar[list[SharedModel]] = []  # those that the harness has made, which must be ended

    def __init__(self, shared: SharedModel, tokens: int | None = None, arguments: Mapping[str, Any] = NONE):
        """tokens: of a batch that is scored, padding included; None: as many as keep the device busy. arguments:
        variables of the chat template beside the messages."""
        super().__init__()
        self._arguments = arguments
        self.shared, self.tokens_per_batch, model = shared, tokens, shared.model
        self.texts, self.positions = model.tokenizer, model.config.seq_length
        if not self.texts.spells:
            raise UserError(f"the tokenizer {self.texts.name} makes no tokens of texts; give --tokenizer")
        prefix = first_token(self.texts)
        if prefix is None:
            raise UserError(f"the tokenizer {self.texts.name} has no end of text, which texts without a context follow")
        self._prefix, end = prefix, self.texts.end_of_text
        self._end = None if end is None else self.texts.decode([end])

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "HarnessModel":
        more = additional_config or {}
        # --trust_remote_code is for data sets: a model of dtgpt executes nothing.
        given = {name: value for name, value in arg_dict.items() if name != "trust_remote_code"}
        arguments = arguments_of_words(given.pop(ARGUMENTS, ""))
        shared = open_shared(**given)
        cls.opened.append(shared)
        positions = shared.model.config.seq_length
        return cls(shared, tokens_of_batch(more.get("batch_size"), more.get("max_batch_size"), positions), arguments)

    @property
    def eot_token_id(self) -> int | None:
        return self.texts.end_of_text

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def max_length(self) -> int:
        return self.positions

    @property
    def tokenizer_name(self) -> str:
        return self.texts.name

    def get_model_info(self) -> dict[str, Any]:
        """Return what results say of the model."""
        model = self.shared.model
        return {
            "model_num_parameters": model.config.num_parameters,
            "model_dtype": str(model.dtype).removeprefix("torch."),
            "plan": model.mesh.plan.name,
        }

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the tokenizer's template, whose digest is in results. Raise UserError where there is
        none, and for the name of another one."""
        if not chat_template:
            return ""
        if isinstance(chat_template, str):
            raise UserError(f"there is no chat template {shown_name(chat_template)}; give --apply_chat_template alone")
        return self._chats.template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat that an answer follows; without `add_generation_prompt`, one whose last message is
        an answer that is begun. Raise UserError."""
        return self._chats.render(read_messages(chat_history), self._arguments, begun=not add_generation_prompt)

    @cached_property
    def _chats(self) -> ChatPrompts:
        return ChatPrompts(self.texts, self.shared.model.config, self.shared.model.special.ends)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        """Return the ids of a text as a prompt. A tokenizer that opens texts with a token does so unless
        `add_special_tokens` is False."""
        return self.texts.encode_bare(string) if add_special_tokens is False else self.texts.encode_prompt(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **more: Any
    ) -> list[tuple[float, bool]]:
        answers = self._score([(context, target) for _, context, target in requests], disable_tqdm)
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, whose first token follows the prefix token. Long texts are cut into
        windows, in each of which new tokens see as many before them as fit."""
        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.positions, 1)
            before = len(pairs)
            pairs += map(make_disjoint_window, windows)
            counts.append(len(pairs) - before)
        answers, totals = iter(self._score(pairs, disable_tqdm)), []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(answers)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a text for each request, up to the first of its stop strings."""
        wanted = [read_generation(request.args[1], self.positions, self._end) for request in requests]
        jobs = [
            self._job(request.args[0], one, index)
            for index, (request, one) in enumerate(zip(requests, wanted, strict=True))
        ]
        if not jobs:
            return []
        with tqdm(total=len(jobs), disable=disable_tqdm, desc="Generating") as bar:
            texts = self.shared.generate(jobs, bar.update)
        texts = [one.cut(text) for one, text in zip(wanted, texts, strict=True)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _job(self, context: str, wanted: Wanted, index: int) -> PromptJob:
        """Return the job of a request, whose context is cut on the left where the new tokens need its positions."""
        ids = self.tok_encode(context)[-(self.positions - wanted.new_tokens) :] or [self.prefix_token_id]
        given = {**wanted.options, "max_new_tokens": wanted.new_tokens}
        if self.eot_token_id is not None:  # the `hf` back end stops there, whatever the model's own ends are
            given["stop_token_ids"] = [*given.get("stop_token_ids", ()), self.eot_token_id]
        return PromptJob(ids, read_options(given, len(ids), self.shared.model.config), index)

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Return (log-probability, whether each token is the likeliest) of the second part of each pair, after the
        first. The beginning of a pair that is too long is left out."""
        samples, cut = [], 0
        for context, target in pairs:
            samples.append(fitted(context, target, self.positions))
            cut += samples[-1].context < len(context)
        if cut:
            say(f"{cut} of {counted(len(pairs), 'request')} lose the beginning of their context", warning=True)
        if not samples:
            return []
        with tqdm(total=len(samples), disable=disable_tqdm, desc="Scoring") as bar:
            scores = self.shared.score(samples, self.tokens_per_batch, lambda done: _advance(bar, done))
        return [(score.logprob, score.all_greedy) for score in scores]


def _advance(bar: tqdm, done: int) -> None:
    """Show that samples are done, of which replicas may have fewer than rank 0 knows."""
    bar.update(min(done, bar.total - bar.n))


def run_harness(words: Sequence[str], given: Mapping[str, Any]) -> None:
    """Run the harness's own command with the options `words` on the model that `open_shared` makes of `given`: on rank
    0, while the others make it, too, and follow. What the harness refuses, or fails at, it says itself."""
    arguments = ["--model", NAME, "--model_args", json.dumps(dict(given)), "--batch_size", "auto", *words]
    before = len(HarnessModel.opened)
    try:
        with patch.object(sys, "argv", ["lm-eval", *arguments]):
            cli_evaluate()
    finally:
        for shared in HarnessModel.opened[before:]:
            shared.end()
        del HarnessModel.opened[before:]


def tokens_of_batch(size: int | str | None, most: int | None, positions: int) -> int | None:
    """Return the tokens of a batch of as many whole samples as the options of the harness ask for; None: auto."""
    text = str(size)
    samples = most if size is None or text.partition(":")[0] == "auto" else int(text) if text.isdecimal() else 0
    if samples is None:
        return None
    if samples < 1:
        raise UserError(f"--batch_size {shown_name(size)} is not a number of samples; use 1 or more, or auto")
    return samples * positions
