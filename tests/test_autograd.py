"""The tape of the installed MindSpore has every property that the package relies on."""

from mindspeed_ms.testing import autograd as self_test


def test_the_tape_passes_its_self_test(world):
    (outcomes,) = world(1)(self_test.run_checks)
    assert len(outcomes) > 15 and not any(outcomes.values()), outcomes
