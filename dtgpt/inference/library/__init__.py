"""Models in Python programs: `dtgpt.load`, and what one asks the model that it returns."""

from dtgpt.util.seams import Capability

CAPABILITY = Capability(public={"load": "dtgpt.inference.library.load:load"})
