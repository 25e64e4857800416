"""Models of Hugging Face, Megatron-LM, nanoGPT and llm.c, read tensor by tensor and written."""

from dtgpt.util.seams import Capability, CommandEntry, When

CAPABILITY = Capability(
    commands={
        "convert": CommandEntry(
            "dtgpt.interop.convert:command",
            "dtgpt convert MODEL TARGET --to hf|megatron|dtgpt\n"
            "    convert from and to Hugging Face and Megatron-LM; from nanoGPT and llm.c",
            place=110,
        ),
        "inspect": CommandEntry(
            "dtgpt.interop.inspect_command:command",
            "dtgpt inspect MODEL | PREFIX\n    verify and describe a checkpoint or model; describe token files",
            place=130,
        ),
    },
    sections={"export": "dtgpt.interop.last:ExportConfig"},
    observers=(When("dtgpt.interop.last.observer:LastFolder", ("export.hf=last",)),),
    beginnings=("dtgpt.interop.resume:begin",),
    sources=tuple(f"dtgpt.interop.formats:{name}" for name in ("HUGGING_FACE", "MEGATRON", "NANOGPT", "LLMC")),
)
