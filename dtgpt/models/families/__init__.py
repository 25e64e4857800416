"""The architectures beside GPT-2 and LLaMA, by the name in a checkpoint."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    architectures={
        "gpt_neo": "dtgpt.models.families.gpt_neo:GPTNeoConfig",
        "olmoe": "dtgpt.models.families.olmoe:OlmoeConfig",
        "granitemoe": "dtgpt.models.families.granitemoe:GraniteMoeConfig",
        "glm4_moe": "dtgpt.models.families.glm4_moe:Glm4MoeConfig",
        "mixtral": "dtgpt.models.families.mixtral:MixtralConfig",
        "qwen2_moe": "dtgpt.models.families.qwen2_moe:Qwen2MoeConfig",
        "qwen3_moe": "dtgpt.models.families.qwen3_moe:Qwen3MoeConfig",
        "olmo3": "dtgpt.models.families.olmo3:Olmo3Config",
        "gemma3_text": "dtgpt.models.families.gemma3:Gemma3Config",
        "gpt_oss": "dtgpt.models.families.gpt_oss:GptOssConfig",
        "track3": "dtgpt.models.families.track3:Track3Config",
    },
    activations=("dtgpt.models.families.activations:activation_of",),
    rotary_scalings=("dtgpt.models.families.rotary_scalings:scaled",),
)
