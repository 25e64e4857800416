"""Folders that become models of the Hub."""

from pathlib import Path

from dtgpt.hub.names import REPOSITORY, need_library
from dtgpt.util.console import say
from dtgpt.util.errors import UserError, shown


def check_push(repository: str) -> None:
    """Raise UserError where nothing can be sent to the `repository`, as far as this machine knows."""
    if not REPOSITORY.fullmatch(repository) or "/" not in repository:
        raise UserError(f"push={shown(repository)} names no model of the Hub; write --push ORG/NAME")
    need_library("--push")
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        raise UserError(f"push={repository} sends a model, and HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if huggingface_hub.get_token() is None:
        raise UserError(f"push={repository} needs a login; run hf auth login, or set HF_TOKEN")


def push(folder: Path, repository: str) -> None:
    """Send a folder to the `repository`, a private one if it is new. Raises UserError where it does not get there."""
    import huggingface_hub

    api = huggingface_hub.HfApi(library_name="dtgpt")
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        sent = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model of dtgpt")
    except Exception as error:  # the ways through the network raise what they like
        raise UserError(
            f"{folder} is written, but could not be sent to {repository} ({str(error).partition(chr(10))[0]}); send it "
            f"later: hf upload {repository} {folder}"
        ) from None
    say(f"sent to {sent.repo_url}")
