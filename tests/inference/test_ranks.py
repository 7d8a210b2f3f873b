"""Several ranks follow rank 0, step by step."""

from dataclasses import replace

from mindspeed_ms.core import comm
from mindspeed_ms.inference.engine import Engine, Request
from mindspeed_ms.inference.ranks import follow, lead
from mindspeed_ms.inference.sampling import SamplingParams
from mindspeed_ms.testing.inference import TableRunner

PARAMS = SamplingParams(max_new_tokens=8, n=2)


def drawn_without_seed(_=None):
    """What each rank fed to its runner; rank 0 adds, cancels, fails and goes on."""
    runner = TableRunner(slots=3)
    engine, logits, fails = Engine(runner), runner._logits, []
    runner._logits = lambda ids: [float("nan")] * 64 if ids[0] == 63 else logits(ids)
    if comm.get_rank() != 0:
        follow(engine)
    else:
        with lead(engine) as leader:
            leader.generate([[1, 2], [3]], PARAMS)
            number = leader.add(Request((4, 5), replace(PARAMS, n=1)))
            leader.step()
            leader.cancel(number)
            leader.step()
            try:
                leader.generate([[63]], PARAMS)
            except ValueError as error:
                fails.append(str(error))
            leader.generate([[6]], PARAMS)
        assert fails
    return [[(feed.slot, feed.start, tuple(feed.ids)) for feed in call] for call in runner.calls]


def test_all_ranks_compute_the_same(world):
    first, second = world(2)(drawn_without_seed)
    assert first == second
    assert len(first) > 20
