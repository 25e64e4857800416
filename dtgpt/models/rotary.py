"""What models with rotary positions, grouped queries and a gated MLP have in their configuration: LLaMA, and most
families since.

They differ in numbers more than in modules. So one class has the fields, the rules between them and what follows from
them, and a family gives other defaults. Windows stand apart: a model with learned positions may have them, too."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dtgpt.models.config import LARGEST_SIZE, SIZE, ModelConfig
from dtgpt.ops.activations import GatedName
from dtgpt.ops.rotary_positions import Rotation, Scaling, amplitude_of_yarn
from dtgpt.util.console import listed
from dtgpt.util.field_types import Bounds, Pattern
from dtgpt.util.rules import Is, Other, Rule, Rules

LOCAL, GLOBAL = "L", "G"  # of `window_pattern`
MOST_KINDS = 1000  # letters of it
Window = Annotated[
    int,
    "tokens, its own included, to which a token attends in a block with a window; 0: all",
    Bounds(0, LARGEST_SIZE),
]
WindowPattern = Annotated[
    str,
    "successive blocks with a window (L) and without (G), repeated",
    Pattern(f"[LG]{{1,{MOST_KINDS}}}", "is not a pattern; use a text of L and G, such as LLLLLG"),
]


@dataclass(frozen=True, kw_only=True)
class WindowConfig(ModelConfig):
    """Fields of architectures in which the attention of some blocks has a window. Blocks of both kinds have the same
    modules."""

    window: Window = 0
    window_pattern: WindowPattern = LOCAL

    def is_local(self, index: int) -> bool:
        """Return whether block `index` has a window."""
        return self.window > 0 and self.window_pattern[index % len(self.window_pattern)] == LOCAL

    def window_of(self, index: int) -> int | None:
        """Return the window of block `index`; None: it has none."""
        return self.window if self.is_local(index) else None

    def block_kind(self, index: int) -> Hashable:
        return self.window_of(index)


def numbers_of_kv_heads(config: "RotaryConfig") -> str:
    """Return the numbers of heads of keys and values that fit a model's heads, in words."""
    return listed([n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0])


def even_sizes(config: "RotaryConfig") -> str:
    """Return the even sizes of heads next to that of a model, in words."""
    return f"{config.head_dim - 1 or 2} or {config.head_dim + 1}"


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(WindowConfig):
    """Fields of these architectures. Their fused matrices are called `attn.qkv` and `mlp.gate_up`."""

    continued: ClassVar[frozenset[str]] = frozenset(
        f"rope_{name}"
        for name in (
            "scaling",
            "factor",
            "low_frequency",
            "high_frequency",
            "original_length",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
        )
    )

    rules: ClassVar[Rules] = (
        Rule(
            "model.num_kv_heads={num_kv_heads} does not divide model.num_heads={num_heads}; use "
            "model.num_kv_heads={remedy}",
            Is("num_heads", "is no multiple of", Other("num_kv_heads")),
            remedy=numbers_of_kv_heads,
        ),
        Rule(
            "model.head_dim={head_dim} is odd, but rotary positions rotate pairs of columns; use {remedy}",
            Is("head_dim", "is no multiple of", 2),
            remedy=even_sizes,
        ),
        Rule(
            f"model.num_heads={{num_heads}} times model.head_dim={{head_dim}} is more than {LARGEST_SIZE}; use fewer "
            "or smaller heads",
            Is("width_of_heads", ">", LARGEST_SIZE),
        ),
        Rule(
            "model.rope_low_frequency={rope_low_frequency} is not below "
            "model.rope_high_frequency={rope_high_frequency}; use 1 and 4, Llama 3.1's values",
            Is("rope_low_frequency", ">=", Other("rope_high_frequency")),
        ),
        Rule(
            "model.rope_beta_slow={rope_beta_slow} is not below model.rope_beta_fast={rope_beta_fast}; use 1 and 32, "
            "YaRN's values",
            Is("rope_beta_slow", ">=", Other("rope_beta_fast")),
        ),
        Rule(
            "model.rope_theta=1.0 has one frequency, and YaRN scales them by their index; use 10000",
            Is("rope_theta", "==", 1),
            Is("rope_scaling", "==", "yarn"),
        ),
    )

    num_kv_heads: Annotated[int, "number of heads of keys and values; divides num_heads", SIZE]
    head_dim: Annotated[int, "size of a head, an even number", SIZE] = 128  # type: ignore[assignment]
    ffn_hidden_size: Annotated[int, "width of the MLP", SIZE]
    seq_length: Annotated[int, "positions; also tokens of a training sample, unless --seq_length is less", SIZE] = 4096
    tied: Annotated[bool, "use the token embedding as output projection"] = False  # type: ignore[assignment]
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", Bounds(above=0, below=1)] = 1e-5
    activation: Annotated[GatedName, "function of the gate in the MLP; silu: SwiGLU, gelu_tanh: GeGLU"] = "silu"
    rope_theta: Annotated[float, "base of the frequencies of rotary positions", Bounds(1)] = 10000.0
    rope_scaling: Annotated[
        Scaling, "rule by which rope_factor divides frequencies: Llama 3.1's, that of all alike, YaRN's"
    ] = "llama3"
    rope_factor: Annotated[
        float, "scaling of rotary positions: low frequencies, or all, are divided by this; 1: none", Bounds(1)
    ] = 1.0
    rope_low_frequency: Annotated[
        float, "llama3: frequencies with fewer waves than this in rope_original_length are divided", Bounds(above=0)
    ] = 1.0
    rope_high_frequency: Annotated[
        float, "llama3: frequencies with more waves than this in rope_original_length are kept", Bounds(above=0)
    ] = 4.0
    rope_original_length: Annotated[int, "number of positions that the model had before rope_factor", SIZE] = 8192
    rope_beta_fast: Annotated[
        float, "yarn: frequencies with more waves than this in rope_original_length are kept", Bounds(above=0)
    ] = 32.0
    rope_beta_slow: Annotated[
        float, "yarn: frequencies with fewer waves than this in rope_original_length are divided", Bounds(above=0)
    ] = 1.0
    rope_truncate: Annotated[bool, "yarn: round the indices of the frequencies that are blended outwards"] = True
    rope_attention_factor: Annotated[
        float, "yarn: factor of cosines and sines; 0: 0.1 ln(rope_factor) + 1", Bounds(0)
    ] = 0.0

    @property
    def width_of_heads(self) -> int:
        """The width of the queries of all heads, which is not that of the residual stream."""
        return self.num_heads * self.head_dim

    @property
    def cut_by_tp(self) -> dict[str, int]:
        return {"num_kv_heads": self.num_kv_heads, "ffn_hidden_size": self.ffn_hidden_size}

    @property
    def rotation(self) -> Rotation:
        """What the angles of rotary positions follow from."""
        yarn = self.rope_scaling == "yarn"
        return Rotation(
            self.rope_theta,
            self.rope_factor,
            self.rope_low_frequency,
            self.rope_high_frequency,
            self.rope_original_length,
            scaling=self.rope_scaling,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            truncate=self.rope_truncate,
            amplitude=(self.rope_attention_factor or amplitude_of_yarn(self.rope_factor)) if yarn else 1.0,
        )
