"""Models for use: `dtgpt.load` under any plan, generation of text."""
