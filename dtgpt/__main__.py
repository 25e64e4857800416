"""`python -m dtgpt`, and `torchrun -m dtgpt`: the `dtgpt` command."""

from dtgpt.cli import main

if __name__ == "__main__":
    main()
