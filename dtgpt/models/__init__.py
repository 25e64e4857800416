"""Architectures as plain modules, and the roles that tell the rest of dtgpt what each module is."""
