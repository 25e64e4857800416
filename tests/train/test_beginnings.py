"""What a run begins with: the core alone has new weights."""

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.train.start import Beginning, beginning
from dtgpt.util import seams
from dtgpt.util.errors import UserError


@pytest.fixture
def alone():
    seams.use(())
    yield
    seams.use([module for module, _ in CAPABILITIES])


def test_a_run_of_the_core_alone_begins_with_new_weights(alone, recipe):
    for resume in (None, "auto", "runs/tiny-001"):
        begin = beginning(None, resume, 300)
        assert type(begin) is Beginning and begin.path is None and begin.settle(recipe, {"seed"}) is recipe
    with pytest.raises(UserError, match=r"^init_from=model needs a capability that begins with other models; leave"):
        beginning("model", None, 300)


def test_what_is_needed_beside_a_checkpoint_is_nothing_in_the_core(alone):
    begin = Beginning()
    assert begin.beside(None, freezes=False) is begin and begin.model_of_ends(None, None) is None
