"""Models of the Hub on this machine, in the cache of huggingface_hub, whose settings hold: HF_HOME, HF_HUB_OFFLINE,
HF_TOKEN."""

from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from dtgpt.util.errors import UserError

# Weights, settings and tokenizers, by the names that dtgpt reads: no pickles, no code, no copies in other formats.
WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors"]
TOKENIZERS = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", "spiece.model", "qwen.tiktoken"]  # and settings
WANTED = WEIGHTS + TOKENIZERS
IGNORED = ["*/*"]  # folders


@cache  # a run asks several times, and each would ask the Hub whether there is a newer one
def fetched(repository: str, revision: str | None, weights: bool = True) -> Path:
    """Return the folder of a model in the cache, without its weights where these are not wanted. Raises UserError where
    it is neither there nor at hand."""
    wanted = WANTED if weights else TOKENIZERS
    name = f"hf:{repository}" + (f"@{revision}" if revision else "")
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=wanted, ignore_patterns=IGNORED, library_name="dtgpt"
            )
        )
    except GatedRepoError:
        raise UserError(
            f"{name} needs an agreement on its page, and a login; run hf auth login, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"hf:{repository} has no revision {revision}; give a branch, a tag or a commit of it") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name} is not on the Hub, or needs a login; correct the name, run hf auth login, or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if huggingface_hub.is_offline_mode() else "the Hub cannot be reached"
        raise UserError(
            f"{name} is not in the cache {constants.HF_HUB_CACHE}, and {why}; fetch it where there is "
            f"a network: hf download {repository}, or give a folder"
        ) from None
    except Exception as error:  # its ways through the network raise what they like
        raise UserError(f"{name} could not be fetched ({str(error).partition(chr(10))[0]}); try again") from None
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(f"{name} has no weights in safetensors, and dtgpt reads no pickles; give a model that has them")
    return folder
