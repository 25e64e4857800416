"""Models of the Hugging Face Hub, `hf:ORG/NAME[@REVISION]` in the place of a path, its data sets,
`hf:ORG/NAME[@REVISION][:SPLIT]`, and `dtgpt convert --push`. Nothing is fetched or sent unless such a name is given."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(
    places=("dtgpt.hub.names:place",),
    datasets=("dtgpt.hub.data:DATA",),
    tokenizers=("dtgpt.hub.tokenizers:TOKENIZERS",),
)
