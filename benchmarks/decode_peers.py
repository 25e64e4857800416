"""Ways to generate tokens, each behind the same two calls: dtgpt's engine, transformers, gpt-fast, and a naive CUDA
graph."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from timing import capture
from torch import Tensor
from transformers_model import transformers_model

from dtgpt.inference.base_options import MOST_SEQUENCES
from dtgpt.inference.engine import Engine
from dtgpt.inference.options import Options
from dtgpt.inference.request import PromptJob
from dtgpt.models.binding import bind
from dtgpt.models.config import ModelConfig
from dtgpt.models.layers import AttentionCore
from dtgpt.ops.random.philox import root_key
from dtgpt.parallel.cache_sizes import core_sizes
from tests.support.whole_model import build_model

LEAD = 24  # tokens before those that are timed: caches warm, and all rows of the engine under way


class Peer(ABC):
    """One way to generate greedily. `step_time` may be called again and again after `prepare`."""

    def prepare(self, prompt: list[int], batch: int, tokens: int) -> None:
        """Get ready for `batch` sequences that begin with `prompt`, of which `tokens` steps will be timed."""
        self.prompt, self.batch, self.tokens = prompt, batch, tokens

    @abstractmethod
    def step_time(self) -> float:
        """Return the seconds of one step, which adds a token to each sequence: the mean over `tokens` steps."""

    @abstractmethod
    def close(self) -> None:
        """Free what `prepare` allocated."""


class EnginePeer(Peer):
    """dtgpt's engine, as a server drives it: scheduler, rounds, and results read on the host."""

    def __init__(self, engine: Engine, temperature: float = 0.0, apart: bool = False):
        """apart: each sequence has a prompt of its own, of random tokens, as long as the others'."""
        self.engine, self.temperature, self.apart = engine, temperature, apart

    def _submit(self, sampling: Options) -> None:
        if self.apart:
            tokens = torch.randint(0, self.engine.config.vocab_size, (self.batch, len(self.prompt)))
            for ids in tokens.tolist():
                self.engine.submit(PromptJob(ids, sampling))
            return
        # Choices of prompts that arrive together begin together, so that all rows are at the same position.
        for begin in range(0, self.batch, MOST_SEQUENCES):
            choices = min(MOST_SEQUENCES, self.batch - begin)
            self.engine.submit(PromptJob(self.prompt, replace(sampling, num_return_sequences=choices)))

    def step_time(self) -> float:
        sampling = Options(temperature=self.temperature, max_new_tokens=LEAD + self.tokens, ends=False)
        self._submit(sampling)
        count, started, counted = 0, 0.0, 0
        while self.engine.busy:
            count += sum(len(event.ids) for event in self.engine.step())
            if not started and count >= LEAD // 2 * self.batch:  # the rest of LEAD is the rounds that are under way
                started, counted = time.perf_counter(), count
        return (time.perf_counter() - started) * self.batch / (count - counted)

    def close(self) -> None:
        pass  # the engine keeps its cache


class TransformersPeer(Peer):
    """`generate` of transformers, with the cache that it makes by default or a static one that makes it compile."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, static: bool, temperature: float):
        from transformers import CompileConfig

        self.device = device
        with device:
            self.model = transformers_model(config).to(dtype).eval()  # random weights, distributed as dtgpt's
        self.options: dict = {"do_sample": temperature > 0, "pad_token_id": 0}
        if static:
            self.options["cache_implementation"] = "static"
            if device.type == "cuda":
                self.options["compile_config"] = CompileConfig(mode="reduce-overhead", fullgraph=True, dynamic=False)

    def prepare(self, prompt: list[int], batch: int, tokens: int) -> None:
        super().prepare(prompt, batch, tokens)
        self.ids = torch.tensor([prompt] * batch, device=self.device)
        self.step_time()  # compiles

    def step_time(self) -> float:
        watch = StopWatch()
        new = LEAD + self.tokens
        mask = torch.ones_like(self.ids)
        self.model.generate(
            self.ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, streamer=watch, **self.options
        )
        times = watch.times[-self.tokens - 1 :]
        return (times[-1] - times[0]) / self.tokens

    def close(self) -> None:
        self.model._cache = None  # where transformers keeps a static cache
        torch.compiler.reset()


class StopWatch:
    """A streamer for `generate`: notes when each token arrives on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class GptFastPeer(Peer):
    """gpt-fast's model and its decoding of one token, compiled as its generate.py does it. It draws each token from the
    softmax of its logits; dtgpt's is greedy."""

    def __init__(self, folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        sys.path.insert(0, str(folder))
        tokenizer = ModuleType("tokenizer")  # theirs needs libraries, and no text is encoded
        sys.modules["tokenizer"] = tokenizer
        tokenizer.get_tokenizer = None  # type: ignore[attr-defined]
        import generate as theirs
        from model import ModelArgs, Transformer

        self.theirs, self.device = theirs, device
        sizes = ModelArgs(
            block_size=config.seq_length, vocab_size=config.vocab_size, n_layer=config.num_layers,
            n_head=config.num_heads, dim=config.hidden_size, intermediate_size=config.ffn_hidden_size,
            n_local_heads=config.num_kv_heads, rope_base=config.rope_theta, norm_eps=config.norm_eps,
        )  # fmt: skip
        with device:
            self.model = Transformer(sizes).to(dtype).eval()
        self.decode: Callable[..., Any] = theirs.decode_one_token
        if device.type == "cuda":
            self.decode = torch.compile(theirs.decode_one_token, mode="reduce-overhead", fullgraph=True)

    @torch.no_grad()
    def prepare(self, prompt: list[int], batch: int, tokens: int) -> None:
        super().prepare(prompt, batch, tokens)
        self.first = len(prompt)
        with self.device:
            self.model.setup_caches(max_batch_size=batch, max_seq_length=self.first + LEAD + tokens)
        length = self.model.max_seq_length
        self.mask = self.theirs.create_block_mask(self.theirs.causal_mask, 1, 1, length, length, device=self.device)
        self.step_time()  # compiles

    @torch.no_grad()
    def step_time(self) -> float:
        token = torch.ones(self.batch, 1, dtype=torch.int64, device=self.device)
        position = torch.tensor([self.first], device=self.device, dtype=torch.int)
        begin = 0.0
        for count in range(LEAD + self.tokens):
            if count == LEAD:
                drain(self.device)
                begin = time.perf_counter()
            token = self.decode(self.model, token, position, self.mask)[0].clone()
            position += 1
        drain(self.device)
        return (time.perf_counter() - begin) / self.tokens

    def close(self) -> None:
        pass  # one size of its cache is asked for


class NaiveGraphPeer(Peer):
    """The plain modules in one CUDA graph (on a CPU, called one by one): a static cache, scaled_dot_product_attention
    over all of its positions, argmax."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype):
        self.config, self.device, self.dtype = config, device, dtype
        self.model = build_model(config, device, dtype, root_key(1)).to(dtype).eval()
        self.cores = [module for module in self.model.modules() if isinstance(module, AttentionCore)]

    @torch.no_grad()
    def prepare(self, prompt: list[int], batch: int, tokens: int) -> None:
        super().prepare(prompt, batch, tokens)
        length, self.first = len(prompt) + LEAD + tokens, len(prompt) - 1
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        for core in self.cores:
            bind(core, cache=StaticCache(batch, length, self.config, self.dtype, self.position))
        self.replay: Callable[[], object] = self._step
        if self.device.type == "cuda":
            self.replay = capture(self._step).replay

    def _step(self) -> None:
        logits = self.model(self.token, positions=self.position.expand(self.batch, 1))
        self.token.copy_(logits[:, -1, : self.config.vocab_size].argmax(-1, keepdim=True))
        self.position += 1

    @torch.no_grad()
    def step_time(self) -> float:
        self.position.fill_(self.first)  # what the cache holds before does not change the time
        for _ in range(LEAD):
            self.replay()
        drain(self.device)
        begin = time.perf_counter()
        for _ in range(self.tokens):
            self.replay()
        drain(self.device)
        return (time.perf_counter() - begin) / self.tokens

    def close(self) -> None:
        self.replay = self._step
        for core in self.cores:
            bind(core, cache=None)


class StaticCache:
    """Keys and values `[B, N_kv, P, D]` of one layer; `position`, int64 `[1]`, is that of the next token of every
    row."""

    def __init__(self, batch: int, length: int, config: ModelConfig, dtype: torch.dtype, position: Tensor):
        ((heads, dim, _),) = core_sizes(config, 0, 1)
        shape = batch, heads, length, dim
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=position.device) for _ in range(2))
        self.position, self.places = position, torch.arange(length, device=position.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rule: Any = None) -> Tensor:
        """Keep k and v `[B, 1, N_kv, D]`, and return the attention `[B, 1, N, D]` of q."""
        self.keys.index_copy_(2, self.position, k.transpose(1, 2))
        self.values.index_copy_(2, self.position, v.transpose(1, 2))
        mask = (self.places <= self.position)[None, None, None]
        grouped = q.shape[2] > self.keys.shape[1]
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), self.keys, self.values, mask, enable_gqa=grouped)
        return heads.transpose(1, 2)


def drain(device: torch.device) -> None:
    """Wait for all that was queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
