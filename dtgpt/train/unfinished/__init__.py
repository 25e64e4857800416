"""What a signal or a kill cut short after the newest step of a run is done when the run goes on."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(unfinished=("dtgpt.train.unfinished.left:Left",))
