"""`python -m dtgpt`, and `torchrun -m dtgpt`: the `dtgpt` command.

torchrun starts a script or a module, so that the command has to be a module, too.
"""

from dtgpt.cli import main

if __name__ == "__main__":
    main()
