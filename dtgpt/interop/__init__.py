"""Models of Hugging Face, Megatron-LM, nanoGPT and llm.c, read tensor by tensor and written."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    sources=tuple(f"dtgpt.interop.formats:{name}" for name in ("HUGGING_FACE", "MEGATRON", "NANOGPT", "LLMC"))
)
