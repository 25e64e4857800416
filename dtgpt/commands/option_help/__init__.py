"""What `--help` says of options."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(option_help=("dtgpt.commands.option_help.text:describe",))
