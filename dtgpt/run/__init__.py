"""The run folder and what goes into it: reports and records; signals that end a run."""
