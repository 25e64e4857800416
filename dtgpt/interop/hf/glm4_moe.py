"""GLM-4.5 as transformers has it: names, layout and the fields of config.json.

Where some columns of a head rotate, these are the first ones there, by pairs (i, i + n); in dtgpt pairs are
(i, i + D / 2) in any head, and the first n rotate. Rows of queries and keys are in another order, therefore.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dtgpt.interop.foreign import checked
from dtgpt.interop.hf.architecture import joined, read_activation, separated, write_activation
from dtgpt.interop.hf.experts import NO_WINDOWS, LikeMixture, read_experts, write_experts
from dtgpt.interop.hf.llama import TIED, Family, read_shape, write_shape
from dtgpt.interop.hf.rope import PLACES, read_rope, write_rope
from dtgpt.interop.keys import FLAG, NUMBER, WHOLE, Key, Keys, check_aliases, check_keys, number, read_key, whole_number
from dtgpt.models.config import ModelConfig
from dtgpt.models.families.glm4_moe import Glm4MoeConfig
from dtgpt.models.shared.foreign import cut
from dtgpt.models.source import Ranges
from dtgpt.util.errors import UserError, shown
from dtgpt.util.rules import Is, Rule, Rules, check_rules

FAMILY = Family(8, None, 10944, 131072, 151552, eps=1e-5, layers=46, heads=96)
PARTIAL = "partial_rotary_factor"
SHARE = Key(number(0), ", which is not a fraction between 0 and 1; give the file as it was written")
KEYS: Keys = {
    "attention_bias": FLAG._replace(default=False),
    "use_qk_norm": FLAG._replace(default=False),
    "norm_topk_prob": FLAG._replace(default=True),
    "n_shared_experts": WHOLE._replace(default=1),
    "moe_intermediate_size": WHOLE._replace(default=1408),
    "tie_word_embeddings": TIED,
}
WRITTEN_RULES: Rules = (
    *NO_WINDOWS,
    Rule(
        "transformers' GLM-4.5 has no bias of attention's output, and this model model.attention_bias="
        "{attention_bias}; keep it as a checkpoint of dtgpt",
        Is("attention_bias", "==", "all"),
    ),
    Rule(
        "transformers' GLM-4.5 has shared experts of the size of others, {expert_size}, and this model "
        "model.shared_size={shared_size}; keep it as a checkpoint of dtgpt",
        Is("shared_experts", "==", None),
    ),
)
ROTATED = (".attn.qkv.", ".attn.q_norm.", ".attn.k_norm.")


class Glm4Moe(LikeMixture):
    in_fp32 = re.compile(r".*\.e_score_correction_bias")
    names: ClassVar[Mapping[str, str]] = {
        "mlp.router.correction.bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared.": "mlp.shared_experts.",
        "shared_experts.down": "shared_experts.down_proj",
        **LikeMixture.names,
    }
    packed: ClassVar[Mapping[str, Sequence[str]]] = {
        **LikeMixture.packed,
        "mlp.shared.gate_up": ("mlp.shared.gate_proj", "mlp.shared.up_proj"),
    }

    def ignored(self, config: ModelConfig) -> re.Pattern[str]:
        """Return the names of buffers, and of the block behind the last one, which predicts further tokens."""
        return re.compile(rf"{self.buffers.pattern}|layers\.{config.num_layers}\..*")

    def from_stored(self, stored: list[Tensor], name: str, config: Any, part: Ranges | None) -> Tensor:
        if not any(each in name for each in ROTATED):
            return super().from_stored(stored, name, config, part)
        order = columns_there(config)
        if len(stored) == 1:
            return cut(stored[0][order], part)
        q, k, v = stored
        return joined([*(of_heads(x, order) for x in (q, k)), v], self.rows_of_group(name, config), part)

    def to_stored(self, whole: Tensor, name: str, config: Any) -> list[Tensor]:
        if not any(each in name for each in ROTATED):
            return super().to_stored(whole, name, config)
        order = columns_there(config).argsort()
        parts = separated(whole, self.rows_of_group(name, config))
        if len(parts) == 1:
            return [whole[order]]
        q, k, v = parts
        return [*(of_heads(x, order) for x in (q, k)), v]

    def read_config(self, settings: dict[str, Any], path: Path) -> Glm4MoeConfig:
        check_keys(settings, KEYS, path)
        check_aliases(settings, {"n_routed_experts": "num_local_experts"}, path)
        shape = read_shape(settings, FAMILY, path)
        width = settings.get("moe_intermediate_size", 1408)
        count = whole_number(settings, ("n_routed_experts", "num_local_experts"), 128, path)
        rope, share = without_share(settings, path)
        config = Glm4MoeConfig(
            activation=read_activation(settings, "hidden_act", "silu", path),
            attention_bias="qkv" if settings.get("attention_bias", False) else "none",
            qk_norm=settings.get("use_qk_norm", False),
            normalise_weights=settings.get("norm_topk_prob", True),
            routed_factor=float(read_key(settings, ("routed_scaling_factor",), NUMBER, path, 1.0)),
            expert_size=width,
            shared_size=width * settings.get("n_shared_experts", 1),
            dense_blocks=whole_number(settings, ("first_k_dense_replace",), 1, path),
            expert_groups=whole_number(settings, ("n_group",), 1, path),
            open_groups=whole_number(settings, ("topk_group",), 1, path),
            rotated=share,
            **read_experts({**settings, "num_experts": count, "num_local_experts": count}, count, 8, path),
            **shape,
            **read_rope(rope, shape["seq_length"], path),
        )
        return checked(config, path)

    def write_config(self, config: Glm4MoeConfig) -> dict[str, Any]:
        check_rules(WRITTEN_RULES, config)
        made = write_rope(config)
        made["rope_parameters"][PARTIAL] = config.rotated
        return {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **write_shape(config),
            "moe_intermediate_size": config.expert_size,
            "n_shared_experts": config.shared_experts,
            **write_experts(config, "n_routed_experts"),
            "first_k_dense_replace": config.dense_blocks,
            "n_group": config.expert_groups,
            "topk_group": config.open_groups,
            "norm_topk_prob": config.normalise_weights,
            "routed_scaling_factor": config.routed_factor,
            "num_nextn_predict_layers": 0,
            "hidden_act": write_activation(config.activation),
            "attention_bias": config.attention_bias == "qkv",
            "use_qk_norm": config.qk_norm,
            PARTIAL: config.rotated,
            **made,
        }


def columns_there(config: Glm4MoeConfig) -> Tensor:
    """Return which column of a head there is each one here, int64 `[D]`."""
    size, half, turning = config.head_dim, config.head_dim // 2, config.rotated_columns // 2
    rest = range(2 * turning, size)
    first = [*range(turning), *rest[: half - turning]]
    return torch.tensor([*first, *range(turning, 2 * turning), *rest[half - turning :]], device="cpu")


def of_heads(rows: Tensor, order: Tensor) -> Tensor:
    """Return rows `[N D, ..]` of heads, in each of which they are in another order."""
    return rows.unflatten(0, (-1, len(order)))[:, order.to(rows.device)].flatten(0, 1)


def without_share(settings: dict[str, Any], path: Path) -> tuple[dict[str, Any], float]:
    """Return settings without the fraction of columns that rotate, and that fraction."""
    said = [settings, *(inner for place in PLACES if isinstance(inner := settings.get(place), dict))]
    shares = [each[PARTIAL] for each in said if each.get(PARTIAL) is not None] or [0.5]
    if any(share != shares[0] for share in shares):
        raise UserError(
            f"{path} has both {PARTIAL}={shown(shares[0])} and {PARTIAL}={shown(shares[-1])}; leave out the one that "
            "is not the model's"
        )
    rest = {key: _without_share(value) if key in PLACES else value for key, value in _without_share(settings).items()}
    return rest, float(read_key({}, (PARTIAL,), SHARE, path, shares[0]))


def _without_share(value: Any) -> Any:
    return {key: inner for key, inner in value.items() if key != PARTIAL} if isinstance(value, dict) else value
