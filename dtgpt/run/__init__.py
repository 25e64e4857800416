"""The run folder and what goes into it: reports, metrics, plots; signals that end a run."""
